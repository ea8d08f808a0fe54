"""What every algorithm file starts from: fields with their allowed values, and the registry by name."""

import dataclasses
import math
from typing import Any, dataclass_transform

import jax
import jax.core
from flax import struct

from jaxrl.errors import ConfigError, unknown
from jaxrl.schedules import schedule_problems

ALGORITHMS: dict[str, type] = {}


def _field(default, traced, *, low=None, above=None, high=None, below=None, choices=None, help=""):
    limits = {"low": low, "above": above, "high": high, "below": below, "choices": choices}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    return struct.field(pytree_node=traced, default=default, metadata={"limits": limits, "help": help})


def number(default: Any, **limits) -> Any:
    """A traced field: a number or a schedule, so it can be swept, scheduled and vmapped.

    Args:
      default: a number, a schedule, or None.
      **limits: `low`, `high` (inclusive), `above`, `below` (exclusive), and `help`, one line.
    """
    return _field(default, True, **limits)


def static(default: Any, **limits) -> Any:
    """A static field: it changes shapes or control flow. Hashable. Limits as in `number`, and `choices`."""
    return _field(default, False, **limits)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(number, static))
def algorithm(cls: type) -> type:
    """Makes a class an algorithm: a frozen, keyword-only dataclass, a pytree, known by its lower-case name."""
    made: Any = struct.dataclass(cls, kw_only=True)
    ALGORITHMS[made.__name__.lower()] = made
    return made


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(number, static))
def family(cls: type) -> type:
    """Makes a class that algorithms derive from, with fields as theirs; it is none itself, and has no name."""
    return struct.dataclass(cls, kw_only=True)


def make_algorithm(name: str, **fields: Any) -> Any:
    """An algorithm by name, with some of its fields set.

    Raises:
      ConfigError: naming the unknown algorithm, or every unknown field, with the close names.
    """
    try:
        cls = ALGORITHMS[name.lower()]
    except KeyError:
        raise unknown("algorithm", name, ALGORITHMS, "jaxrl algos lists them") from None
    return replace(cls(), **fields)


def replace(algo: Any, **fields: Any) -> Any:
    """`algo` with some fields changed.

    Raises:
      ConfigError: naming every unknown field, with the close names.
    """
    known = [field.name for field in dataclasses.fields(algo)]
    wrong = [str(unknown(f"field of {type(algo).__name__}", name, known)) for name in fields if name not in known]
    if wrong:
        raise ConfigError(wrong)
    return algo.replace(**fields)


def field_problems(algo: Any) -> list[str]:
    """Every field whose value is of the wrong type or out of its limits; one line each."""
    problems = []
    for field in dataclasses.fields(algo):
        value, limits = getattr(algo, field.name), field.metadata.get("limits", {})
        label = f"{type(algo).__name__}.{field.name}"
        if "choices" in limits:
            if value not in limits["choices"]:
                allowed = ", ".join(repr(choice) for choice in limits["choices"])
                problems.append(f"{label}={value!r} is not one of {allowed}")
            continue
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                problems.append(f"{label}={value!r} must be True or False")
            continue
        wants_int = isinstance(field.default, int) and not field.metadata.get("pytree_node", True)
        if wants_int and (not isinstance(value, int) or isinstance(value, bool)):
            problems.append(f"{label}={value!r} must be a whole number")
            continue
        if limits:
            problems += _limit_problems(label, value, limits)
    return problems


def _limit_problems(label: str, value: Any, limits: dict[str, float]) -> list[str]:
    leaves = jax.tree.leaves(value)
    if problems := schedule_problems(label, value):
        return problems
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return []  # checked when the numbers were still numbers
    if any(isinstance(leaf, (bool, str)) for leaf in leaves):
        return [f"{label}={value!r} must be a number or a schedule"]
    allowed = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}
    wanted = " and ".join(f"{allowed[name]} {limit:g}" for name, limit in limits.items())
    named = jax.tree_util.tree_leaves_with_path(value)
    for path, leaf in named:
        part = jax.tree_util.keystr(path).lstrip(".")
        if part.startswith(("until", "boundaries")):  # of a schedule: a fraction of the run, not a value of the field
            continue
        ok = (
            math.isfinite(float(leaf))
            and float(leaf) >= limits.get("low", -math.inf)
            and float(leaf) <= limits.get("high", math.inf)
            and float(leaf) > limits.get("above", -math.inf)
            and float(leaf) < limits.get("below", math.inf)
        )
        # A schedule may end at a limit that the value itself may not have: a learning rate that decays to 0.
        if not ok and part and "above" in limits and float(leaf) == limits["above"]:
            continue
        if not ok:
            return [f"{label}={value!r} must be {wanted}"]
    return []
