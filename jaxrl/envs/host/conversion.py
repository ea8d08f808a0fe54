"""Conversion between jaxrl's and Gymnasium's spaces, and of their elements; EnvPool uses Gymnasium's spaces, too.

64-bit types are narrowed: float64 to float32, int64 to int32, and uint64 to uint32.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as foreign

from jaxrl.core import native, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.native import Integers, Native
from jaxrl.core.types import PyTree

_FLATTEN = "gymnasium.wrappers.FlattenObservation (--env-params wrappers=FlattenObservation)"
_NARROWER = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}
_COMPOSITE = (Mapping, foreign.Dict, foreign.Tuple)
_NUMERIC = (*_COMPOSITE, foreign.Box, foreign.Discrete, foreign.MultiBinary, foreign.MultiDiscrete)


class Conversion(NamedTuple):
    """A pair of corresponding spaces, jaxrl's and the suite's, with a conversion of their elements.

    Attributes:
      space: jaxrl's space.
      native: the suite's space, as a tuple with one entry per array.
      convert: a function that converts the suite's observations to jaxrl's, or jaxrl's actions to the suite's; accepts
        one element or a batch.
    """

    space: spaces.Space
    native: tuple[Native, ...]
    convert: Callable[[Any], PyTree]


def observations(space: Any, where: str) -> Conversion:
    """Return the conversion of observations from the suite's `space`; `where` names the environment in errors.

    A tuple becomes a dictionary with the positions "0", "1", ... as keys.

    Raises:
      ConfigError: the space has no counterpart in jaxrl.
    """
    ours, theirs = _converted("observation", space, where)
    return Conversion(ours, theirs, native.reader(ours, theirs, where))


def actions(space: Any, where: str) -> Conversion:
    """Return the conversion of actions to the suite's `space`, which may be a dictionary or a tuple.

    Actions are clipped to the bounds of `space`, in its dtype. A bounded integer becomes `Discrete`, and a vector of
    bounded integers becomes `MultiDiscrete`.

    Raises:
      ConfigError: the space has no counterpart in jaxrl.
    """
    ours, theirs = _converted("action", space, where)
    return Conversion(ours, theirs, native.writer(ours, theirs))


def array_actions(space: Any, where: str) -> Conversion:
    """Return the conversion of actions to the suite's `space`, as `actions` does, but reject composite spaces.

    Raises:
      ConfigError: the space has no counterpart in jaxrl, or is a dictionary or tuple.
    """
    if isinstance(space, _COMPOSITE):
        raise _refused("action", space, where, "Box, Discrete, MultiDiscrete, MultiBinary")
    return actions(space, where)


def _converted(what: str, space: Any, where: str) -> tuple[spaces.Space, tuple[Native, ...]]:
    """Return the jaxrl space that corresponds to the suite's `space`, and the native space of each array."""
    if isinstance(space, _COMPOSITE):
        acting, is_tuple = what == "action", isinstance(space, foreign.Tuple)
        parts = getattr(space, "spaces", space)
        parts = {i if acting else str(i): child for i, child in enumerate(parts)} if is_tuple else dict(parts)
        numeric = [name for name, child in parts.items() if isinstance(child, _NUMERIC)]
        if not acting and not is_tuple and numeric and len(numeric) < len(parts):
            name = next(name for name in parts if name not in numeric)
            raise ConfigError(
                f"{where} has the observation {name!r}, {parts[name]}, which is not an array of fixed size; leave it "
                f"out: --env-params \"wrappers={{'FilterObservation':{{'filter_keys':{numeric}}}}}\""
            )
        children = {name: _converted(what, x, f"{where}[{name!r}]") for name, x in sorted(parts.items())}
        ours: dict[Any, spaces.Space] = {name: child for name, (child, _) in children.items()}
        own = tuple(part for _, theirs in children.values() for part in theirs)
        return (spaces.Tuple(tuple(ours.values())) if acting and is_tuple else spaces.Dict(ours)), own
    try:
        theirs = _native(space)
        array = None if theirs is None else _observed(space) if what == "observation" else _acted(space, theirs)
    except ConfigError as error:
        raise ConfigError(f"{where} has the {what} space {space}: {error}") from None
    if theirs is None or array is None:
        raise _refused(what, space, where, "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these")
    return array, (theirs,)


def _native(space: Any) -> Native | None:
    """Return the native space of a single array, or None if its elements are not numeric arrays of fixed size."""
    if isinstance(space, foreign.Discrete):
        return Integers(int(space.start), int(space.start) + int(space.n) - 1, np.dtype(space.dtype))
    if isinstance(space, foreign.MultiDiscrete):
        if len(space.shape) != 1:
            raise ConfigError(f"a MultiDiscrete must be a vector; convert it with {_FLATTEN}")
        start = np.asarray(space.start, np.int64)
        return spaces.Box(start, start + np.asarray(space.nvec, np.int64) - 1, space.shape, space.dtype)
    if isinstance(space, foreign.MultiBinary):
        return spaces.Box(0, 1, space.shape, space.dtype)
    return spaces.Box(space.low, space.high, space.shape, space.dtype) if isinstance(space, foreign.Box) else None


def _observed(space: Any) -> spaces.ArraySpace:
    if isinstance(space, foreign.Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, foreign.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec)
    return spaces.Box(False, True, space.shape, np.bool_) if isinstance(space, foreign.MultiBinary) else _box(space)


def _acted(space: Any, own: Native) -> spaces.ArraySpace | None:
    if isinstance(own, Integers) or isinstance(space, foreign.MultiDiscrete):
        return _observed(space)
    if own.dtype.kind == "f":
        box = _box(space)
        return spaces.Box(box.low, box.high, box.shape)  # not narrower: networks compute in float32
    if len(own.shape) > 1:
        return None
    # Python integers, because a count may exceed 64 bits.
    counts = [high - low + 1 for low, high in zip(own.low.ravel().tolist(), own.high.ravel().tolist(), strict=True)]
    return spaces.MultiDiscrete(tuple(counts)) if own.shape else spaces.Discrete(counts[0])


def _box(space: foreign.Box) -> spaces.Box:
    """Convert a Gymnasium box to jaxrl's, with a dtype that JAX supports."""
    own, low, high = np.dtype(space.dtype), space.low, space.high
    dtype = np.dtype(_NARROWER.get(own.name, own))
    if dtype.kind == "f" and dtype != own:
        largest, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
        # Float64 bounds beyond the range of float32 become infinite, and subnormal ones become 0.
        low, high = np.where(low < -largest, -np.inf, low), np.where(high > largest, np.inf, high)
        low, high = (np.where(np.abs(bound) < tiny, 0.0, bound) for bound in (low, high))
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype.name)
        if (low > limits.max).any() or (high < limits.min).any():
            raise ConfigError(f"the integers exceed {dtype.name}, {limits.min} to {limits.max}")
        low, high = np.clip(low, limits.min, limits.max), np.clip(high, limits.min, limits.max)
    return spaces.Box(low, high, space.shape, dtype)


def _refused(what: str, space: Any, where: str, allowed: str) -> ConfigError:
    flat = _FLATTEN if getattr(space, "is_np_flattenable", False) else "your own gymnasium.ObservationWrapper"
    wrapper = flat if what == "observation" else "a gymnasium.ActionWrapper"
    return ConfigError(
        f"{where} has the {what} space {space}, which is not supported; convert it with {wrapper} to one of these: "
        f"{allowed}"
    )
