"""Schedules: values that change during a run. They are frozen pytrees of numbers, which sweeps can vary.

A schedule is a function of progress, the completed fraction of a run's total steps. It replaces a number in an
algorithm's field, and `resolve_schedules` substitutes its current value before the algorithm is called.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from flax import struct

from jaxrl.core import limits, registry, schedule_text
from jaxrl.core.errors import ConfigError
from jaxrl.core.presentation import public_names

Number = float | jax.Array


# An algorithm's methods only receive numbers, because `resolve_schedules` is called first. Therefore, type checkers
# treat a schedule as a number.
_StandsForANumber = jax.Array if TYPE_CHECKING else object


class Schedule(_StandsForANumber):
    """Base class of schedules, which are frozen pytrees and functions of progress, a float32 scalar in [0, 1]."""

    def __call__(self, progress: Number) -> jax.Array:
        """Return the value at `progress`, a float32 scalar."""
        raise NotImplementedError


if TYPE_CHECKING:
    Scalar = float | jax.Array
else:  # types of a field's values, for reading files and flags
    Scalar = float | jax.Array | Schedule


@struct.dataclass
class Constant(Schedule):
    """Constant `value`, equivalent to the number itself."""

    value: Number

    def __call__(self, progress: Number) -> jax.Array:
        return _float32(self.value)


@struct.dataclass
class _Interpolation(Schedule):
    """Interpolation from `start` to `end`, which is reached at progress `until` and kept afterwards."""

    start: Number
    end: Number
    until: Number = 1.0


@struct.dataclass
class Linear(_Interpolation):
    """Linear interpolation from `start` to `end`, which is reached at progress `until` and kept afterwards."""

    def __call__(self, progress: Number) -> jax.Array:
        done = _fraction(progress, self.until)
        return _float32(self.start) * (1.0 - done) + _float32(self.end) * done


@struct.dataclass
class Cosine(_Interpolation):
    """Half-cosine decay from `start` to `end`, reached at progress `until` and kept afterwards (arXiv:1608.03983)."""

    def __call__(self, progress: Number) -> jax.Array:
        done = 0.5 - 0.5 * jnp.cos(jnp.float32(math.pi) * _fraction(progress, self.until))
        return _float32(self.start) * (1.0 - done) + _float32(self.end) * done


@struct.dataclass
class Exponential(_Interpolation):
    """Exponential decay or growth from `start` > 0 to `end` > 0, reached at progress `until` and kept afterwards."""

    def __call__(self, progress: Number) -> jax.Array:
        done = _fraction(progress, self.until)
        return _float32(self.start) ** (1.0 - done) * _float32(self.end) ** done


@struct.dataclass
class PiecewiseConstant(Schedule):
    """Piecewise constant: `values[0]` up to progress `boundaries[0]`, then `values[1]`, and so on.

    Args:
      values: values in order, one more than there are boundaries.
      boundaries: increasing numbers in (0, 1).
    """

    values: tuple[Number, ...]
    boundaries: tuple[Number, ...]

    def __call__(self, progress: Number) -> jax.Array:
        value = _float32(self.values[0])
        for boundary, after in zip(self.boundaries, self.values[1:], strict=True):
            value = jnp.where(_float32(progress) >= _float32(boundary), _float32(after), value)
        return value


SCHEDULES: dict[str, Any] = {  # all are dataclasses, which annotations cannot express
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "piecewise": PiecewiseConstant,
}
registry.add("schedule", **SCHEDULES)


def is_schedule(value: Any) -> bool:
    return isinstance(value, Schedule)


def resolve_schedules[T](algorithm: T, progress: Number) -> T:
    """Return the algorithm at `progress`, with every number and schedule resolved to a float32 scalar.

    Args:
      algorithm: a pytree whose leaves are numbers, some of which are replaced by schedules.
      progress: the completed fraction of the run, a scalar in [0, 1] that may be traced.

    Returns:
      A copy without schedules; arrays of numbers keep their shape.
    """

    def resolve(value):
        return value(progress) if is_schedule(value) else _float32(value)

    return jax.tree.map(resolve, algorithm, is_leaf=is_schedule)


def schedule_problems(label: str, value: Any) -> list[str]:
    """Return problems of the numbers in a schedule, one line each; empty for a plain number.

    Args:
      label: the field's name, for the message ("PPO.learning_rate").
      value: a schedule or a number; traced numbers are not checked.
    """
    if not is_schedule(value) or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return []
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(value)]
    allowed = {".until": {"above": 0, "high": 1}}
    checked = [(part, leaf, limits.problem(leaf, allowed.get(part))) for part, leaf in named]
    problems = [f"{label}{part}={leaf!r:.80} {what}" for part, leaf, what in checked if what]
    if not problems and isinstance(value, Exponential) and min(float(value.start), float(value.end)) <= 0.0:
        problems.append(
            f"{label} is exponential from {float(value.start):g} to {float(value.end):g}; both must be more than 0 "
            "(linear and cosine schedules can reach 0)"
        )
    if problems or not isinstance(value, PiecewiseConstant):
        return problems
    if len(value.values) != len(value.boundaries) + 1:
        problems.append(
            f"{label} has {len(value.values)} values and {len(value.boundaries)} boundaries; "
            "it needs one more value than boundaries"
        )
    edges = [0.0, *(float(boundary) for boundary in value.boundaries), 1.0]
    if any(after <= before for before, after in zip(edges, edges[1:], strict=False)):
        boundaries = ", ".join(f"{edge:g}" for edge in edges[1:-1])
        problems.append(f"{label}.boundaries={boundaries} must be increasing and between 0 and 1")
    return problems


def parse(text: str | float) -> float | Schedule:
    """Parse a number or schedule from the command line, such as `3e-4`, `linear:2.5e-4:0` or `cosine:1e-3:1e-5:0.5`.

    Args:
      text: a number, or the name of a schedule and its numbers, separated by colons; for `piecewise`, values alternate
        with boundaries (`piecewise:1e-3:0.5:1e-4`). A number instead of text is returned as a float.

    Raises:
      ConfigError: `text` is neither a number nor a valid schedule; the message explains what is allowed.
    """
    if not isinstance(text, str):
        return float(text)
    written = schedule_text.split(text)
    if not isinstance(written, tuple):
        return written
    name, numbers = written
    arguments = (numbers[::2], numbers[1::2]) if name == "piecewise" else numbers
    schedule = SCHEDULES[name](*arguments)
    problems = schedule_problems(text, schedule)
    if problems:
        raise ConfigError(problems)
    return schedule


def to_config(value: Scalar) -> float | str:
    """Return `value` as in `config.json`: a number, or a schedule as text; `parse` restores it exactly.

    Args:
      value: a number or a schedule of numbers; traced values are not supported.
    """
    if not is_schedule(value):
        return float(value)
    if isinstance(value, PiecewiseConstant):
        numbers = [value.values[0]]
        for boundary, after in zip(value.boundaries, value.values[1:], strict=True):
            numbers += [boundary, after]
    else:
        schedule: Any = value
        numbers = [getattr(schedule, field.name) for field in dataclasses.fields(schedule)]
    return ":".join(
        [str(registry.name_of(type(value))).partition(":")[2], *(repr(float(number)) for number in numbers)]
    )


def _float32(x):
    return jnp.asarray(x, jnp.float32)


def _fraction(progress, until):
    return jnp.clip(_float32(progress) / _float32(until), 0.0, 1.0)


def __dir__() -> list[str]:
    return public_names(globals())
