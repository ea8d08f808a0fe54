"""How a run ends before its time: why, and what was not finite."""

from typing import NoReturn

import jax

from jaxrl.core.errors import CheckpointError
from jaxrl.core.report import Report, persistent_state
from jaxrl.core.run_state import RunState
from jaxrl.parallel.multihost import distributed

_LEAVES_NAMED, _NAMED_IN_SHORT = 8, 1  # of those that are not finite, in the result and in the warning


class Stop(Exception):
    """Ends the loop; `reason` is the result's `stopped`, `summary` the problem in a few words."""

    def __init__(self, reason: str, problem: str | None = None, summary: str | None = None):
        super().__init__(reason)
        self.reason, self.problem, self.summary = reason, problem, summary


def abort_without_saving(error: CheckpointError) -> NoReturn:
    """End a run that can no longer be saved: alone, with its result; among several processes, with the error.

    Raises:
      Stop, CheckpointError: always.
    """
    if distributed.is_several():
        raise error
    raise Stop("unsaved", str(error)) from error


def non_finite(report: Report, after: RunState, step: int, failed_step: int) -> Stop:
    """Return the stop of a chunk with values that are not finite: its first such metrics, and the leaves it left so.

    Args:
      report: of the chunk, as numpy.
      after: the state that the chunk left, without buffers.
      step: the environment steps there.
      failed_step: the environment steps after the first iteration with such a value.
    """
    named = jax.tree.leaves_with_path(jax.device_get(_all_finite(persistent_state(after))))
    unsound = [jax.tree_util.keystr(path, simple=True, separator=".") for path, fine in named if not fine]
    broken = [name for name, fine in sorted(report.finite.items()) if not fine]

    def text(broken, unsound, most_broken, most_unsound):
        line = f"not finite in the iteration that ended at step {failed_step}"
        line += f": {_first(broken, most_broken)}" if broken else ""
        return line + (f"; leaves at step {step}: {_first(unsound, most_unsound)}" if unsound else "")

    causes_first = (
        sorted(some, key=lambda name: not name.startswith(("reward", "timestep"))) for some in (broken, unsound)
    )
    problem = text(broken, unsound, len(broken), _LEAVES_NAMED)
    return Stop("non_finite", problem, text(*causes_first, _NAMED_IN_SHORT, _NAMED_IN_SHORT))


@jax.jit
def _all_finite(tree):
    """Leaf by leaf; a leaf of whole numbers is."""
    inexact = jax.numpy.inexact
    return jax.tree.map(lambda x: not jax.numpy.issubdtype(x.dtype, inexact) or jax.numpy.isfinite(x).all(), tree)


def _first(names, number):
    """The first of many names."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" if len(names) > number else "")
