"""Conversion between jaxrl's spaces and arrays and those of Gymnasium, which EnvPool uses too.

Types that JAX does not have are narrowed here: float64 to float32, int64 and uint64 to int32 and uint32.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as foreign

from jaxrl.core import native, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.native import Integers, Native
from jaxrl.core.types import PyTree

_FLATTEN = "gymnasium.wrappers.FlattenObservation (--env-params wrappers=FlattenObservation)"
_NARROWER = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}


class Observations(NamedTuple):
    """Our space, the suite's own, and `read`: converts the suite's observations, one or a batch, to our space."""

    space: spaces.Space
    native: tuple[Native, ...]
    read: Callable[[Any], PyTree]


class Actions(NamedTuple):
    """Our space, the suite's own, and `write`: converts our actions, one or a batch, to the suite's space."""

    space: spaces.Space
    native: tuple[Native, ...]
    write: Callable[[Any], Any]


class ArrayActions(NamedTuple):
    """The `Actions` of one array."""

    space: spaces.ArraySpace
    native: tuple[Native, ...]
    write: Callable[[Any], np.ndarray]


def observations(space: Any, where: str) -> Observations:
    """Return the conversion of observations from the suite's `space`; `where` names the environment in errors.

    A tuple becomes a dictionary with the positions as keys, "0", "1".

    Raises:
      ConfigError: the space has no counterpart in jaxrl.
    """
    ours, theirs = _observations(space, where)
    return Observations(ours, theirs, native.reader(ours, theirs, where))


def actions(space: Any, where: str) -> Actions:
    """Return the conversion of actions to the suite's `space`, also a dictionary or a tuple; see `array_actions`."""
    ours, theirs = _actions(space, where)
    return Actions(ours, theirs, native.writer(ours, theirs))


def array_actions(space: Any, where: str) -> ArrayActions:
    """Return the conversion of actions to the suite's `space`, one array; `where` names the environment in errors.

    Actions outside the bounds are clipped to them, in the space's own dtype. A bounded integer becomes `Discrete`, a
    vector of them `MultiDiscrete`.

    Raises:
      ConfigError: the space has no counterpart in jaxrl, or has several parts.
    """
    ours, theirs = _array_actions(space, where, "")
    return ArrayActions(ours, (theirs,), native.writer(ours, (theirs,)))


def _observations(space: Any, where: str) -> tuple[spaces.Space, tuple[Native, ...]]:
    if isinstance(space, Mapping | foreign.Dict | foreign.Tuple):
        parts = getattr(space, "spaces", space)
        parts = parts if isinstance(parts, Mapping) else {str(i): child for i, child in enumerate(parts)}
        numeric = [name for name, child in parts.items() if _is_taken(child)]
        if numeric and len(numeric) < len(parts) and isinstance(space, foreign.Dict):
            name = next(name for name in parts if name not in numeric)
            raise ConfigError(
                f"{where} has the observation {name!r}, {parts[name]}, which is not of numbers of one size; leave it "
                f"out: --env-params \"wrappers={{'FilterObservation':{{'filter_keys':{numeric}}}}}\""
            )
        children = {name: _observations(child, f"{where}[{name!r}]") for name, child in sorted(parts.items())}
        return _together(spaces.Dict, children)
    with _refusing(where, "observation", space):
        if isinstance(space, foreign.Discrete):
            return spaces.Discrete(space.n), (_integers(space),)
        if isinstance(space, foreign.MultiDiscrete):
            own = _vector(space)
            return spaces.MultiDiscrete(space.nvec), (own,)
        if isinstance(space, foreign.MultiBinary):
            return spaces.Box(False, True, space.shape, np.bool_), (spaces.Box(0, 1, space.shape, space.dtype),)
        if isinstance(space, foreign.Box):
            return _box(space), (spaces.Box(space.low, space.high, space.shape, space.dtype),)
    raise _refused("observation", space, where, "Dict and Tuple")


def _is_taken(space: Any) -> bool:
    kinds = (foreign.Box, foreign.Dict, foreign.Discrete, foreign.MultiBinary, foreign.MultiDiscrete, foreign.Tuple)
    return isinstance(space, (Mapping, *kinds))


def _actions(space: Any, where: str) -> tuple[spaces.Space, tuple[Native, ...]]:
    if isinstance(space, foreign.Dict):
        named = {name: _actions(child, f"{where}[{name!r}]") for name, child in sorted(space.spaces.items())}
        return _together(spaces.Dict, named)
    if isinstance(space, foreign.Tuple):
        parts = {i: _actions(child, f"{where}[{i}]") for i, child in enumerate(space.spaces)}
        return _together(lambda found: spaces.Tuple(tuple(found.values())), parts)
    ours, theirs = _array_actions(space, where, "Dict and Tuple")
    return ours, (theirs,)


def _array_actions(space: Any, where: str, of_parts: str) -> tuple[spaces.ArraySpace, Native]:
    with _refusing(where, "action", space):
        if isinstance(space, foreign.Discrete):
            return spaces.Discrete(space.n), _integers(space)
        if isinstance(space, foreign.MultiDiscrete):
            own = _vector(space)
            return spaces.MultiDiscrete(space.nvec), own
        if isinstance(space, foreign.MultiBinary) and len(space.shape) == 1:
            return spaces.MultiDiscrete((2,) * space.shape[0]), spaces.Box(0, 1, space.shape, space.dtype)
        if isinstance(space, foreign.Box) and space.dtype.kind == "f":
            # Never less than float32, which networks and replays compute with.
            box, theirs = _box(space), spaces.Box(space.low, space.high, space.shape, space.dtype)
            return spaces.Box(box.low, box.high, box.shape), theirs
        if isinstance(space, foreign.Box) and len(space.shape) <= 1:
            theirs = spaces.Box(space.low, space.high, space.shape, space.dtype)
            # As Python integers: 64 bits may not hold a count.
            lows, highs = (x.ravel().tolist() for x in (theirs.low, theirs.high))
            counts = [high - low + 1 for low, high in zip(lows, highs, strict=True)]
            return spaces.MultiDiscrete(tuple(counts)) if space.shape else spaces.Discrete(counts[0]), theirs
    raise _refused("action", space, where, of_parts)


def _together(made, children):
    natives = [part for _, theirs in children.values() for part in theirs]
    return made({name: ours for name, (ours, _) in children.items()}), tuple(natives)


def _integers(space: foreign.Discrete) -> Integers:
    return Integers(int(space.start), int(space.start) + int(space.n) - 1, np.dtype(space.dtype))


def _vector(space: foreign.MultiDiscrete) -> spaces.Box:
    if len(space.shape) != 1:
        raise ConfigError(f"of MultiDiscrete only vectors are taken; convert it with {_FLATTEN}")
    start = np.asarray(space.start, np.int64)
    return spaces.Box(start, start + np.asarray(space.nvec, np.int64) - 1, space.shape, space.dtype)


def _box(space: foreign.Box) -> spaces.Box:
    """Convert the box to a dtype that JAX has."""
    own, low, high = np.dtype(space.dtype), space.low, space.high
    dtype = np.dtype(_NARROWER.get(own.name, own))
    if dtype.kind == "f" and dtype != own:
        largest, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
        # A float64 bound beyond it becomes infinite, and one that is smaller than any of float32 becomes 0.
        low, high = np.where(low < -largest, -np.inf, low), np.where(high > largest, np.inf, high)
        low, high = (np.where(np.abs(bound) < tiny, 0.0, bound) for bound in (low, high))
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype.name)
        if (low > limits.max).any() or (high < limits.min).any():
            raise ConfigError(f"its integers are beyond {dtype.name}, from {limits.min} to {limits.max}")
        low, high = np.clip(low, limits.min, limits.max), np.clip(high, limits.min, limits.max)
    return spaces.Box(low, high, space.shape, dtype)


@contextlib.contextmanager
def _refusing(where: str, what: str, space: Any) -> Generator[None]:
    """Add the environment and its space to the error if the space has no counterpart in jaxrl."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where} has the {what} space {space}: {error}") from None


def _refused(what: str, space: Any, where: str, of_parts: str) -> ConfigError:
    """Return an error that lists the supported spaces; `of_parts` names composite ones, "" if one array is needed."""
    arrays = "Box, Discrete, MultiDiscrete"
    allowed = f"{arrays}, MultiBinary and {of_parts} of these" if of_parts else f"{arrays} and MultiBinary"
    flat = _FLATTEN if getattr(space, "is_np_flattenable", False) else "a gymnasium.ObservationWrapper of yours"
    wrapper = flat if what == "observation" else "a gymnasium.ActionWrapper"
    return ConfigError(f"{where} has the {what} space {space}; taken are {allowed}: convert it with {wrapper}")
