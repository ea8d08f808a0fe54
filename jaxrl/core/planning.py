"""Planning in the environment itself: the model for planning, and the protocol of algorithms that plan."""

from typing import Protocol, runtime_checkable

import jax
from flax import struct

from jaxrl.core.types import ActorOutput, ActorState, Carry, Environment, EnvSpec, PyTree, TimeStep


class Model(struct.PyTreeNode):
    """The environments as their own model: their current states, and transitions for any action."""

    env: Environment  # one environment
    state: PyTree  # [B, ...]


@runtime_checkable
class Planner(Protocol):
    """Algorithm that acts by planning in the environment itself if its states are available.

    They are available in JAX environments, in training, evaluations, exports and renderings. Otherwise it uses `act`:
    for loaded policies, host environments, environments of several agents, and games against another policy.
    """

    def plan(
        self,
        actor: ActorState,
        timestep: TimeStep,
        carry: Carry,
        key: jax.Array,
        *,
        model: Model,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        """Return one action for each environment, as `act` does; `model` has their current states."""
        ...
