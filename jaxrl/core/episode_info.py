"""One number of an episode from what its environment reports at every step (`TimeStep.info`), as the name says.

"distance" is averaged over the episode's steps. "distance:last", "distance:max", "distance:min" and "distance:sum" are
the last, the largest, the smallest of them, and their sum: several of the same report are several names.
"""

from collections.abc import Iterable
from typing import Any

REDUCTIONS = ("mean", "sum", "max", "min", "last")


def parts(name: str) -> tuple[str, str]:
    """What is reported, and which of `REDUCTIONS` is made of it."""
    report, colon, reduction = name.rpartition(":")
    return (report, reduction) if colon and reduction in REDUCTIONS else (name, "mean")


def reports(names: Iterable[str]) -> tuple[str, ...]:
    """What is reported for each of these names."""
    return tuple(parts(name)[0] for name in names)


def fold(name: str, so_far: Any, value: Any, steps: Any, xp: Any) -> Any:
    """What is kept of an episode after a step.

    Args:
      name: with its reduction.
      so_far: what was kept after the step before; ignored at the first, whatever it is, where nothing is summed.
      value: of this step.
      steps: of the episode so far, with this one.
      xp: numpy or jax.numpy, of which these are arrays of one shape.
    """
    reduction = parts(name)[1]
    if reduction == "last":
        return value
    if reduction in ("max", "min"):
        further = xp.maximum(so_far, value) if reduction == "max" else xp.minimum(so_far, value)
        return xp.where(steps <= 1, value, further)
    return so_far + value


def of_episode(name: str, kept: Any, steps: Any, xp: Any) -> Any:
    """The episode's number, of what `fold` has kept at its end after so many steps."""
    return kept / xp.maximum(steps, 1.0) if parts(name)[1] == "mean" else kept
