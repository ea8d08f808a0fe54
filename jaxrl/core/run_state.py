"""State of a run between two iterations."""

from typing import Any

import jax
from flax import struct

from jaxrl.core.pickled import dumped, loaded
from jaxrl.core.trees import tree_summary
from jaxrl.core.types import Counter, PyTree, TimeStep


class RunState(struct.PyTreeNode):
    """Complete state of a run, as saved in checkpoints."""

    # This field must be first: JAX reuses donated memory for the first results of the same shape, of any memory kind.
    buffers: dict[str, PyTree]
    learner: PyTree
    env_state: PyTree  # [B, ...]; () if environments are on the host
    timestep: TimeStep  # [B, ...] the current time step, for which no action was chosen yet
    carry: PyTree  # [B, ...]
    key: jax.Array  # the run's root key, constant
    steps_per_env: Counter  # steps of one environment so far
    empty_at: Counter  # the last tick at which the replays were empty: 0, unless a resume lost their contents

    def __repr__(self) -> str:
        return f"RunState({tree_summary(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        instead = "save the run (run_dir=, or result.save(path)), and use jaxrl.load(path) in the other process"
        return _unpickled, (dumped("the state of a run", vars(self), instead),)

    def __copy__(self) -> "RunState":
        return self


def _unpickled(data: bytes) -> RunState:
    return RunState(**loaded(data))
