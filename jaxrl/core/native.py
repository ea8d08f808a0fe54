"""Native spaces of environments outside JAX, and conversion between elements of native spaces and jaxrl's spaces.

The integers of such an environment may start at a number other than 0, and JAX may lack its dtypes. Native spaces are
stored as a flat sequence, one `Box` or `Integers` per array. The structure is defined by jaxrl's space, whose leaves
have the same order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError, EnvironmentContractError


@dataclasses.dataclass(frozen=True)
class Integers:
    """Space of single integers from `first` to `last`, both included, like `gymnasium.spaces.Discrete`."""

    first: int
    last: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


Native = spaces.Box | Integers


@dataclasses.dataclass(frozen=True)
class NativeSpaces:
    """Native spaces of an environment outside JAX, one per array.

    Attributes:
      observation: native spaces of the observation's leaves, in order.
      action: native spaces of the action's leaves, in order.
    """

    observation: tuple[Native, ...]
    action: tuple[Native, ...]


registry.add("space", Integers, native=NativeSpaces)


def check_fits(native: Sequence[Native], space: spaces.Space) -> None:
    """Raise a ConfigError unless there is a native space of the same shape for every leaf of `space`."""
    shapes = [leaf.shape for leaf in spaces.leaves(space)]
    if [one.shape for one in native] != shapes:
        raise ConfigError(f"native spaces have shapes {[one.shape for one in native]}; the space needs {shapes}")


def writer(space: spaces.Space, native: Sequence[Native]) -> Callable[[Any], Any]:
    """Return a function that converts jaxrl's actions, single or batched, to numpy actions in the native space.

    Actions of a `Box` are clipped to the native bounds, in the native dtype.

    Args:
      space: jaxrl's action space.
      native: the environment's native spaces, one per leaf.
    """
    return _over_parts(space, native, _leaf_writer)


def reader(space: spaces.Space, native: Sequence[Native], where: str) -> Callable[[Any], Any]:
    """Return a function that converts native observations, single or batched, to numpy arrays of jaxrl's dtypes.

    The function raises an EnvironmentContractError for values that do not fit jaxrl's space.

    Args:
      space: jaxrl's observation space.
      native: the environment's native spaces, one per leaf.
      where: the environment's name, for errors.
    """
    read = _over_parts(space, native, lambda leaf, own: _leaf_reader(leaf, own, where))
    return (lambda x: read(named_parts(space, x))) if isinstance(space, spaces.Composite) else read


def differs(space: spaces.Space, native: Sequence[Native]) -> bool:
    """Return whether native integers start at a number other than 0, or a bool in jaxrl has another native dtype."""
    return any(
        own.dtype != leaf.dtype if leaf.dtype == np.bool_ else not isinstance(leaf, spaces.Box) and np.any(_first(own))
        for leaf, own in zip(spaces.leaves(space), native, strict=True)
    )


def named_parts(space: spaces.Space, x: Any) -> Any:
    """Return the element `x` with tuples converted to dictionaries (keys "0", "1", ...) where the space is a `Dict`."""
    if not isinstance(space, spaces.Composite) or not isinstance(x, Mapping | tuple | list):
        return x
    if isinstance(space, spaces.Dict) and not isinstance(x, Mapping):
        x = {str(i): part for i, part in enumerate(x)}
    if isinstance(space, spaces.Dict):
        return {key: named_parts(space.spaces[key], part) if key in space.spaces else part for key, part in x.items()}
    return tuple(named_parts(child, part) for child, part in zip(space.spaces, x, strict=True))


def _over_parts(space, native, of_leaf):
    """Return a function that converts elements leaf by leaf, with the function that `of_leaf` returns for each leaf."""
    if not isinstance(space, spaces.Composite):
        return of_leaf(space, *native)
    own = iter(native)
    functions = spaces.tree_map(lambda leaf: of_leaf(leaf, next(own)), space)
    return lambda x: spaces.tree_map(lambda _, function, part: function(part), space, functions, x)


def _first(native: Native) -> Any:
    """Return the smallest element of a native space: an int, or an array of the box's dtype."""
    return native.first if isinstance(native, Integers) else native.low


def _leaf_writer(space, native):
    dtype = native.dtype
    if not isinstance(space, spaces.Box):
        first = np.asarray(_first(native)).astype(np.int64)  # modulo 2^64, like the sum
        if not first.any():
            return lambda x: np.asarray(x).astype(dtype)
        return lambda x: (np.asarray(x).astype(np.int64) + first).astype(dtype)
    low, high = native.low, native.high
    if dtype != np.float16 and np.isneginf(low).all() and np.isposinf(high).all():
        return lambda x: np.asarray(x, dtype)

    def clipped(x):
        with np.errstate(over="ignore"):
            # Not np.clip, whose checks cost more than the work if batches are small.
            return np.minimum(np.maximum(np.asarray(x, dtype), low), high)

    return clipped


def _leaf_reader(space, native, where):
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return lambda x: _floats(x, space.dtype, where)
    if isinstance(space, spaces.Box):
        return lambda x: _integers(x, space.dtype, 0, space.low, space.high, where)
    first = np.asarray(_first(native))
    last = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
    return lambda x: _integers(x, space.dtype, first, 0, last, where)


def _floats(x: Any, dtype: np.dtype, where: str) -> np.ndarray:
    """Convert to a floating-point dtype; non-finite numbers stay non-finite, and the run reports them."""
    x = np.asarray(x)
    if x.dtype == dtype:
        return x
    _check_kind(x, where)
    with np.errstate(over="ignore"):
        found = x.astype(dtype)
    if not np.isfinite(found).all() and (lost := np.isinf(found) & np.isfinite(x)).any():
        raise EnvironmentContractError(
            f"{where} returns an observation with {x[lost][0]}, which does not fit into {dtype.name}; rescale it"
        )
    return found


def _integers(x: Any, dtype: Any, start: Any, low: Any, high: Any, where: str) -> np.ndarray:
    """Subtract `start` from whole numbers, check that the results are from `low` to `high`, and convert to `dtype`."""
    x, dtype = np.asarray(x), np.dtype(dtype)
    shape = np.shape(high)
    if x.dtype == dtype == np.uint8 or (shape and x.shape[-len(shape) :] != shape):
        return x  # an image, bounded by its dtype in nearly all cases; or a wrong shape, which is reported elsewhere
    _check_kind(x, where)
    counted = x - start if np.any(start) else x
    within = (counted >= low) & (counted <= high)  # False for NaN
    if not within.all() or (x.dtype.kind == "f" and (counted % 1).any()):
        raise EnvironmentContractError(
            f"{where} returns observation {np.array2string(x, threshold=8)}, which is not an integer within its space"
        )
    return counted.astype(dtype)


def _check_kind(x: np.ndarray, where: str) -> None:
    if x.dtype.kind not in "fiub":
        raise EnvironmentContractError(
            f"{where} returns an observation of dtype {x.dtype}; it must consist of real numbers"
        )
