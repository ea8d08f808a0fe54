"""Limits on numbers, and error messages about them; the command line uses this module before JAX is imported."""

import math
import operator
from collections.abc import Mapping
from typing import Any

from jaxrl.core.errors import ConfigError

_SMALLEST, _TOO_LARGE = (
    2.0**-126,
    2.0**128 - 2.0**103,
)  # magnitudes; XLA treats smaller ones as 0, larger ones as inf
_LEAST_STD = 1e-6  # as in brax's normalizer
_LEAST_RELATIVE_STD = 2.0**-19  # relative to the mean's magnitude: 16 to 32 steps between float32 numbers
WORDS = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}

# Minimum values of the counts that configure training, in Python and on the command line.
LEAST = {
    "total_steps": 1,
    "num_envs": 1,
    "evaluation_episodes": 1,
    "log_every": 1,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "callback_every": 1,
    "video_every": 1,
    "keep": 1,
}


def describe(limits: Mapping[str, float]) -> str:
    """Return limits in words, such as "at least 0 and at most 1"; entries that are not limits are skipped."""
    return " and ".join(f"{WORDS[name]} {limit:g}" for name, limit in limits.items() if name in WORDS)


def problem(number: Any, limits: Mapping[str, float] | None = None) -> str | None:
    """Return the problem of a number outside its limits or float32's range, such as "must be at least 0", or None.

    Args:
      number: any value; scalars of Python, NumPy and JAX are numbers.
      limits: as for `describe`.
    """
    limits = limits or {}
    if getattr(number, "ndim", 0):
        return f"must be one number, not an array of shape {number.shape}"
    try:
        number = math.nan if isinstance(number, str | bytes | bool) else float(number)
    except (OverflowError, TypeError, ValueError):  # OverflowError: an integer too large for a float
        number = math.nan
    if not (
        math.isfinite(number)
        and number >= limits.get("low", -math.inf)
        and number <= limits.get("high", math.inf)
        and number > limits.get("above", -math.inf)
        and number < limits.get("below", math.inf)
    ):
        return f"must be {describe(limits) or 'a finite number'}"
    if number and not _SMALLEST <= abs(number) < _TOO_LARGE:
        return f"must be 0, or from {_SMALLEST:.3g} to {_TOO_LARGE:.3g} in magnitude: programs compute in float32"
    return None


def odd_discounts(discount: Any) -> Any:
    """Return a mask of the discounts that are invalid if the task continues: 0, NaN, and values outside [-1, 1].

    Args:
      discount: an environment's discounts, a float32 array of NumPy or JAX.
    """
    return ~((discount != 0) & (abs(discount) <= 1))


def varies(mean: Any, std: Any, least: float = _LEAST_STD) -> Any:
    """Return elementwise whether values with this mean and standard deviation vary by more than rounding errors.

    Dividing nearly constant values by their standard deviation would amplify rounding differences, as between two
    simulators or between an environment and a dataset, to many standard deviations. A pressure of 101325 +- 3 Pa is not
    nearly constant: 3 Pa is about 400 times the spacing of float32 numbers.

    Args:
      mean, std: NumPy or JAX arrays of the same shape.
      least: standard deviation up to which values count as constant, for any mean.
    """
    return (std > least) & (std > _LEAST_RELATIVE_STD * abs(mean))


def whole(value: Any) -> Any:
    """Convert a whole number of any type, such as `1e6` or `np.int64(5)`, to an int; return anything else unchanged."""
    if isinstance(value, bool | int):
        return value
    try:
        if value.is_integer():  # for Python and NumPy floats
            return int(value)
    except (AttributeError, TypeError):
        pass
    try:
        return operator.index(value)
    except (TypeError, ValueError):  # ValueError: an array of several numbers
        return value


def multiples(value, step):
    """Return the nearest multiples of `step` below and above `value`, as text such as "8 or 16"."""
    below, above = value // step * step, -(-value // step) * step
    return f"{below} or {above}" if below else f"{above}"


def divisors(value, near):
    """Return the nearest divisors of `value` below and above `near`, as text such as "4 or 8"."""
    below = next(d for d in range(min(near, value), 0, -1) if value % d == 0)
    above = next((d for d in range(near, value + 1) if value % d == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


def count_problems(**counts: tuple[object, int]) -> list[str]:
    """Return one error line per `name=(value, minimum)` whose value is neither None nor a whole number >= minimum."""
    problems = []
    for name, (value, least) in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            problems.append(f"{name}={value!r:.80} must be a whole number")
        elif isinstance(value, int) and value < least:
            problems.append(f"{name}={value} must be at least {least}")
    return problems


def number_problems(name: str, value: Any, limits: Mapping[str, float] = {}) -> list[str]:
    """Return an error line if `value`, the argument `name`, is not a finite number within its limits; otherwise []."""
    what = problem(value, limits)
    return [] if what is None else [f"{name}={value!r:.80} {what}"]


def seed_problems(name: str, seed: object) -> list[str]:
    """Return an error line if `seed`, the argument `name`, is not a valid seed; otherwise []."""
    try:
        checked_seed(name, seed)
    except ConfigError as error:
        return list(error.problems)
    return []


def checked_seed(name: str, seed: Any) -> int:
    """Return a seed as a Python integer; every seed from 0 to 2^63 - 1 gives different random numbers.

    Args:
      name: the argument's name, for the message.
      seed: a Python, NumPy or JAX integer.

    Raises:
      ConfigError: the seed is not an integer, or is out of range.
    """
    if not isinstance(seed, bool):
        try:
            if 0 <= (found := operator.index(seed)) < 2**63:
                return found
        except TypeError:
            pass
    raise ConfigError(f"{name}={seed!r:.80} must be a whole number from 0 to 2^63 - 1")


def training_problems(**counts: object) -> list[str]:
    """Return an error line per count, such as `total_steps=0`, that is not a whole number >= its minimum in `LEAST`."""
    return count_problems(**{name: (value, LEAST[name]) for name, value in counts.items()})
