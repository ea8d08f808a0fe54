"""Gymnasium's spaces, which EnvPool speaks too, as ours, and the arrays that go with them.

What JAX has no type for is narrowed here, once: float64 to float32, int64 and uint64 to int32 and uint32.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as foreign

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.types import PyTree

_NARROWER = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}


class Observations(NamedTuple):
    """Our space, and `read`: what the suite gives, one element or a batch, as numpy of our space's types."""

    space: spaces.Space
    read: Callable[[Any], PyTree]


class Actions(NamedTuple):
    """Our space, and `write`: our actions, one or a batch, as numpy that the suite takes, in trees of one structure."""

    space: spaces.Space
    write: Callable[[Any], Any]


class ArrayActions(NamedTuple):
    """`Actions` of one array."""

    space: spaces.ArraySpace
    write: Callable[[Any], np.ndarray]


def observations(space: Any, where: str) -> Observations:
    """How to read the observations of the suite's `space`; `where` names the environment in errors.

    Raises:
      ConfigError: a space that ours cannot hold.
    """
    if isinstance(space, Mapping | foreign.Dict):
        children = {
            name: observations(child, f"{where}[{name!r}]")
            for name, child in sorted(getattr(space, "spaces", space).items())
        }
        readers = {name: child.read for name, child in children.items()}
        return Observations(
            spaces.Dict({name: child.space for name, child in children.items()}),
            lambda x: {name: read(x[name]) for name, read in readers.items()},
        )
    if isinstance(space, foreign.Discrete):
        start, last = int(space.start), int(space.n) - 1
        return Observations(spaces.Discrete(space.n), lambda x: _integers(x, np.int32, start, 0, last, where))
    if isinstance(space, foreign.MultiDiscrete):
        starts, last = _starts(space, where), np.asarray(space.nvec, np.int64) - 1
        return Observations(spaces.MultiDiscrete(space.nvec), lambda x: _integers(x, np.int32, starts, 0, last, where))
    if isinstance(space, foreign.MultiBinary):
        bits = spaces.Box(False, True, space.shape, np.bool_)
        return Observations(bits, lambda x: _integers(x, np.bool_, 0, 0, 1, where))
    if isinstance(space, foreign.Box):
        box = _box(space)
        if box.dtype.kind == "f":
            return Observations(box, lambda x: _floats(x, box.dtype, where))
        return Observations(box, lambda x: _integers(x, box.dtype, 0, box.low, box.high, where))
    raise _refused("observation", space, where, "Dict")


def actions(space: Any, where: str) -> Actions:
    """How to write actions of the suite's `space`, which may be a dictionary or a tuple; as `array_actions`."""
    if isinstance(space, foreign.Dict):
        named = {name: actions(child, f"{where}[{name!r}]") for name, child in sorted(space.spaces.items())}
        return Actions(
            spaces.Dict({name: child.space for name, child in named.items()}),
            lambda x: {name: child.write(x[name]) for name, child in named.items()},
        )
    if isinstance(space, foreign.Tuple):
        parts = [actions(child, f"{where}[{i}]") for i, child in enumerate(space.spaces)]
        return Actions(
            spaces.Tuple(tuple(child.space for child in parts)),
            lambda x: tuple(child.write(x[i]) for i, child in enumerate(parts)),
        )
    return Actions(*_array_actions(space, where, "Dict and Tuple"))


def array_actions(space: Any, where: str) -> ArrayActions:
    """How to write actions of the suite's `space`, one array; `where` names the environment in errors.

    Actions beyond finite bounds are clipped to them. Vectors of bounded integers become `MultiDiscrete`.

    Raises:
      ConfigError: a space that ours cannot hold, or one of several parts.
    """
    return _array_actions(space, where, "")


def _array_actions(space: Any, where: str, of_parts: str) -> ArrayActions:
    if isinstance(space, foreign.Discrete):
        start, dtype = int(space.start), space.dtype
        if start:
            return ArrayActions(spaces.Discrete(space.n), lambda x: (np.asarray(x) + start).astype(dtype))
        return ArrayActions(spaces.Discrete(space.n), lambda x: np.asarray(x, dtype))
    if isinstance(space, foreign.MultiDiscrete):
        starts = _starts(space, where)
        return ArrayActions(spaces.MultiDiscrete(space.nvec), lambda x: (np.asarray(x) + starts).astype(space.dtype))
    if isinstance(space, foreign.MultiBinary) and len(space.shape) == 1:
        return ArrayActions(spaces.MultiDiscrete((2,) * space.shape[0]), lambda x: np.asarray(x, space.dtype))
    if isinstance(space, foreign.Box) and space.dtype.kind == "f":
        box, low, high = _box(space), space.low, space.high
        if not box.bounded:
            return ArrayActions(box, lambda x: np.asarray(x, space.dtype))
        # Not np.clip, whose checks cost more than the work where batches are small.
        return ArrayActions(box, lambda x: np.minimum(np.maximum(np.asarray(x, space.dtype), low), high))
    if isinstance(space, foreign.Box) and space.dtype.kind in "iu" and len(space.shape) == 1:
        low = space.low.astype(np.int64)
        counts = space.high.astype(np.int64) - low + 1
        if counts.max(initial=0) <= np.iinfo(np.int32).max:
            return ArrayActions(spaces.MultiDiscrete(counts), lambda x: (np.asarray(x) + low).astype(space.dtype))
    raise _refused("action", space, where, of_parts)


def _box(space: foreign.Box) -> spaces.Box:
    given, low, high = np.dtype(space.dtype), space.low, space.high
    dtype = np.dtype(_NARROWER.get(given.name, given))
    if dtype.kind == "f" and dtype != given:
        largest = np.finfo(np.float32).max  # beyond it a float64 bound is none
        low, high = np.where(low < -largest, -np.inf, low), np.where(high > largest, np.inf, high)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype.name)
        low, high = np.clip(low, limits.min, limits.max), np.clip(high, limits.min, limits.max)
    return spaces.Box(low, high, space.shape, dtype)


def _floats(x: Any, dtype: np.dtype, where: str) -> np.ndarray:
    """Numbers as this floating-point type; what is not finite stays so, and the run tells of it."""
    x = np.asarray(x)
    if x.dtype == dtype:
        return x
    _check_kind(x, where)
    with np.errstate(over="ignore"):
        found = x.astype(dtype)
    if not np.isfinite(found).all() and (lost := np.isinf(found) & np.isfinite(x)).any():
        raise EnvironmentContractError(
            f"{where} gives an observation with {x[lost][0]}, which {dtype.name} cannot hold; rescale it"
        )
    return found


def _integers(x: Any, dtype: Any, start: Any, low: Any, high: Any, where: str) -> np.ndarray:
    """Whole numbers within bounds, counted from `start`."""
    x, dtype = np.asarray(x), np.dtype(dtype)
    shape = np.shape(high)
    if x.dtype == dtype == np.uint8 or (shape and x.shape[-len(shape) :] != shape):
        return x  # an image, whose bounds are the type's but for a few; or of a shape that others complain of
    _check_kind(x, where)
    counted = x - start if np.any(start) else x
    within = (counted >= low) & (counted <= high)  # NaN is not
    if not within.all() or (x.dtype.kind == "f" and (counted % 1).any()):
        raise EnvironmentContractError(
            f"{where} gives the observation {np.array2string(x, threshold=8)}, which is outside its space or not whole"
        )
    return counted.astype(dtype)


def _check_kind(x: np.ndarray, where: str) -> None:
    if x.dtype.kind not in "fiub":
        raise EnvironmentContractError(f"{where} gives an observation of {x.dtype}, and not of real numbers")


def _starts(space: foreign.MultiDiscrete, where: str) -> np.ndarray:
    if len(space.shape) != 1:
        raise ConfigError(f"{where} has the space {space}; of MultiDiscrete only vectors are taken, so flatten it")
    return np.asarray(space.start, np.int64)


def _refused(what: str, space: Any, where: str, of_parts: str) -> ConfigError:
    """What is taken; `of_parts` are the spaces of several parts among it, "" where it must be one array."""
    arrays = "Box, Discrete, MultiDiscrete"
    allowed = f"{arrays}, MultiBinary and {of_parts} of these" if of_parts else f"{arrays} and MultiBinary"
    wrapper = "gymnasium.wrappers.FlattenObservation" if what == "observation" else "a gymnasium.ActionWrapper"
    return ConfigError(f"{where} has the {what} space {space}; taken are {allowed}: convert it with {wrapper}")
