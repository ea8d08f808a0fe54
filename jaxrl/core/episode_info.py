"""Per-episode reductions of the values that an environment reports at every step (`TimeStep.info`), selected by name.

"distance" is averaged over the episode's steps. "distance:last", "distance:max", "distance:min" and "distance:sum" are
the last value, maximum, minimum and sum. Several reductions of the same value may be selected.
"""

from collections.abc import Iterable
from typing import Any

REDUCTIONS = ("mean", "sum", "max", "min", "last")


def parts(name: str) -> tuple[str, str]:
    """Split a name into the name of the reported value and its reduction, one of `REDUCTIONS`."""
    report, colon, reduction = name.rpartition(":")
    return (report, reduction) if colon and reduction in REDUCTIONS else (name, "mean")


def reports(names: Iterable[str]) -> tuple[str, ...]:
    """Return these names without their reductions, as reported by the environment."""
    return tuple(parts(name)[0] for name in names)


def fold(name: str, so_far: Any, value: Any, steps: Any, xp: Any) -> Any:
    """Return the running value of an episode's reduction after a step.

    Args:
      name: name of the value, with or without a reduction, as for `parts`.
      so_far: the running value before this step; ignored at the first step, except by sums and means.
      value: the value at this step.
      steps: steps of the episode so far, including this one.
      xp: module of the arrays, numpy or jax.numpy. All arrays have the same shape.
    """
    reduction = parts(name)[1]
    if reduction == "last":
        return value
    if reduction in ("max", "min"):
        further = xp.maximum(so_far, value) if reduction == "max" else xp.minimum(so_far, value)
        return xp.where(steps <= 1, value, further)
    return so_far + value


def of_episode(name: str, total: Any, steps: Any, xp: Any) -> Any:
    """Return an episode's reduced value, given the result of `fold` for its last step."""
    return total / xp.maximum(steps, 1.0) if parts(name)[1] == "mean" else total
