"""Observation and action spaces, which are immutable and hashable, and thus valid static arguments of `jax.jit`."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import whole
from jaxrl.core.presentation import public_names

MOST_NUMBERS = 1 << 26  # maximum count of numbers per element
_MOST_DIMENSIONS = 32


def is_bounded_shape(shape: Sequence[int]) -> bool:
    """Return whether an array of this shape has at most 2^26 numbers, in at most 32 dimensions.

    Shapes may come from files, and computing the product of a very long list of sizes may take days.
    """
    return len(shape) <= _MOST_DIMENSIONS and math.prod(shape) <= MOST_NUMBERS


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Space of arrays within bounds.

    Args:
      low, high: bounds, scalars or arrays that broadcast to `shape`; `-inf` and `inf` for unbounded floats.
      shape: shape of one element.
      dtype: dtype of the elements: bool, or integers or floats of at most 8 bytes.

    Raises:
      ConfigError: a dtype that is not numeric, more than 2^26 numbers, a bound that the dtype cannot represent, or a
        lower bound above the upper one.
    """

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: Any = np.float32

    def __post_init__(self):
        dtype, shape = _number_dtype(self.dtype), _checked_shape(self.shape)
        low, high = _bound("low", self.low, dtype), _bound("high", self.high, dtype)
        for name, value in (("dtype", dtype), ("shape", shape), ("low", low), ("high", high)):
            try:
                value = np.broadcast_to(value, shape) if value is low or value is high else value
            except ValueError:
                raise ConfigError(
                    f"a Box of shape {shape} has {name} of shape {value.shape}; use one number or that shape"
                ) from None
            object.__setattr__(self, name, value)
        if (empty := low > high).any():
            one, other = (np.broadcast_to(bound, empty.shape)[empty][0] for bound in (low, high))
            raise ConfigError(f"a Box has low={one} above high={other}; low must be at most high")

    def _key(self):
        return (self.shape, self.dtype.str, self.low.tobytes(), self.high.tobytes())

    def __eq__(self, other):
        return self is other or (isinstance(other, Box) and self._key() == other._key())

    def __hash__(self):
        # Only the first bounds are hashed, because every call of a compiled function hashes its static arguments.
        return hash((self.shape, self.dtype.str, self.low.flat[:1].tobytes(), self.high.flat[:1].tobytes()))

    def __repr__(self):
        def bound(array):
            if array.size == 0:
                return "[]"
            return str(array.flat[0]) if np.all(array == array.flat[0]) else np.array2string(array, threshold=6)

        return f"Box({bound(self.low)}, {bound(self.high)}, {self.shape}, {self.dtype.name})"

    @property
    def bounded(self) -> bool:
        """True if all bounds and their range are finite (the dtype's largest float counts as infinite)."""
        if self.dtype.kind != "f":
            return True
        largest, kind = float(np.finfo(self.dtype).max), np.promote_types(self.dtype, np.float32)
        if not (np.all(np.abs(self.low) < largest) and np.all(np.abs(self.high) < largest)):
            return False
        with np.errstate(over="ignore"):
            return bool(np.isfinite(self.high.astype(kind) - self.low.astype(kind)).all())

    def sample(self, key: jax.Array) -> jax.Array:
        """Sample one element: uniform where bounded on both sides, standard normal shifted to the bound elsewhere.

        The sample has the space's dtype; without `jax_enable_x64`, JAX replaces dtypes of more than 4 bytes per number.

        Raises:
          ConfigError: no number of that dtype is within the bounds.
        """
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(self.dtype))
        low, high = _bounds_in(dtype, self.low, self.high)
        if (low > high).any():
            raise ConfigError(
                f"{self} contains no number of type {dtype.name}, the type that JAX uses without jax_enable_x64"
            )
        if dtype.kind == "b":
            return jnp.where(low == high, low, jax.random.bernoulli(key, shape=self.shape))
        return _sample_integers(key, low, high) if dtype.kind in "iu" else _sample_floats(key, low, high)

    def contains(self, x: Any) -> jax.Array:
        """Return a scalar bool: whether `x`, of any dtype, has the space's shape and is within the bounds."""
        return _contains(x, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Space of the integers from 0 to n - 1.

    Raises:
      ConfigError: `n` is not from 1 to 2^31 - 1, or the dtype is not an integer type or cannot represent n - 1.
    """

    n: int
    dtype: Any = np.int32

    def __post_init__(self):
        object.__setattr__(self, "dtype", _number_dtype(self.dtype, "iu"))
        object.__setattr__(self, "n", _count("Discrete", "n", self.n, self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (), 0, self.n, self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """Return a scalar bool: whether `x`, a scalar of any dtype, is an element of this space."""
        return _contains(x, np.asarray(0, np.int64), np.asarray(self.n - 1, np.int64))


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """Space of vectors of integers, the i-th from 0 to nvec[i] - 1.

    Raises:
      ConfigError: `nvec` is not a vector, one of its numbers is not from 1 to 2^31 - 1, or the dtype is not an integer
        type or cannot represent them.
    """

    nvec: tuple[int, ...]
    dtype: Any = np.int32

    def __post_init__(self):
        object.__setattr__(self, "dtype", _number_dtype(self.dtype, "iu"))
        try:
            counts = np.atleast_1d(np.asarray(self.nvec))
        except ValueError:  # a ragged list
            counts = np.zeros((0, 0))
        if counts.ndim > 1:
            raise ConfigError(f"MultiDiscrete has nvec={self.nvec!r:.80}; use a vector")
        object.__setattr__(self, "nvec", tuple(_count("MultiDiscrete", "nvec", n, self.dtype) for n in counts.tolist()))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, self.shape, 0, np.asarray(self.nvec), self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """Return a scalar bool: whether `x`, a vector of any dtype, is an element of this space."""
        return _contains(x, np.zeros(self.shape, np.int64), np.asarray(self.nvec, np.int64) - 1)


@dataclasses.dataclass(frozen=True, init=False)
class Dict:
    """Dictionary of spaces; an element is a dictionary with the same keys, in sorted order as in JAX."""

    items: tuple[tuple[str, "Space"], ...]

    def __init__(self, spaces: Mapping[str, Any]):
        try:
            items = tuple(sorted(dict(spaces).items(), key=lambda item: item[0]))
        except (TypeError, ValueError):
            raise ConfigError(f"Dict({spaces!r:.80}): pass a mapping of names to spaces") from None
        _check_parts(self, items)
        object.__setattr__(self, "items", items)

    @property
    def spaces(self) -> dict[str, Any]:
        return dict(self.items)

    def sample(self, key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, max(len(self.items), 1))
        return {name: space.sample(keys[i]) for i, (name, space) in enumerate(self.items)}

    def contains(self, x: Any) -> jax.Array:
        """Return a scalar bool: whether `x` is a mapping with these names, with each part in its space."""
        return _contains_parts(self, x if isinstance(x, Mapping) and set(x) == set(self.spaces) else None)


@dataclasses.dataclass(frozen=True)
class Tuple:
    """Tuple of spaces, for actions; an element is a tuple with one element of each space."""

    spaces: tuple["Space", ...]

    def __post_init__(self):
        try:
            object.__setattr__(self, "spaces", tuple(self.spaces))
        except TypeError:
            raise ConfigError(f"Tuple({self.spaces!r:.80}): pass a sequence of spaces") from None
        _check_parts(self, self.items)

    @property
    def items(self) -> tuple[tuple[int, "Space"], ...]:
        """The pairs of index and space, like the pairs of name and space in `Dict.items`."""
        return tuple(enumerate(self.spaces))

    def sample(self, key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, max(len(self.spaces), 1))
        return tuple(space.sample(keys[i]) for i, space in self.items)

    def contains(self, x: Any) -> jax.Array:
        """Return a scalar bool: whether `x` is a tuple or list of this length, with each part in its space."""
        return _contains_parts(self, x if isinstance(x, tuple | list) and len(x) == len(self.spaces) else None)


ArraySpace = Box | Discrete | MultiDiscrete  # an element is one array
Composite = Dict | Tuple  # an element is a tree of arrays
Space = ArraySpace | Composite

registry.add("space", Box, Discrete, MultiDiscrete, Dict, Tuple)


def _number_dtype(dtype: Any, kinds: str = "biuf") -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ConfigError(f"a space has the dtype {dtype!r:.40}; use a NumPy dtype, such as 'float32'") from None
    if found.kind not in kinds or found.itemsize > 8:
        allowed = "bool, or an integer or float type of at most 8 bytes" if "f" in kinds else "an integer type"
        raise ConfigError(f"a space has the dtype {found.name!r:.40}; it must be {allowed}")
    return found.newbyteorder("=")


def _whole(value: Any) -> int | None:
    """Return a whole number as a Python int; return None for other values."""
    found = whole(value)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _checked_shape(shape: Any) -> tuple[int, ...]:
    sizes = [_whole(n) for n in (shape if np.ndim(shape) else (shape,))]
    found = tuple(n for n in sizes if n is not None and n >= 0)
    if len(found) < len(sizes):
        raise ConfigError(f"a Box has the shape {shape!r:.80}; sizes must be whole numbers of at least 0")
    if not is_bounded_shape(found):
        raise ConfigError(f"a Box of shape {found!r:.80} has more than {MOST_NUMBERS:,} numbers or 32 dimensions")
    return found


def _count(kind: str, name: str, n: Any, dtype: np.dtype) -> int:
    most = min(int(np.iinfo(dtype).max) + 1, 2**31 - 1)
    found = _whole(n)
    if found is None or not 1 <= found <= most:
        raise ConfigError(f"{kind} has {name}={n!r:.80}; with dtype {dtype.name}, it must be from 1 to {most:,}")
    return found


def _bound(name: str, bound: Any, dtype: np.dtype) -> np.ndarray:
    """Return a bound as a new array of `dtype`; a number that was broadcast to an array stays a single number."""
    if isinstance(bound, np.ndarray) and bound.size and not any(bound.strides):
        bound = bound.flat[0]  # a single broadcast number, which a conversion would expand
    found = np.asarray(bound)
    if dtype.kind == "f" and found.dtype.kind == "O" and all(isinstance(x, int) for x in found.flat):  # over 64 bits
        found = np.asarray(bound, np.float64)
    if found.dtype.kind not in "biuf":
        raise ConfigError(f"a Box has {name}={bound!r:.80}; bounds must be real numbers")
    with np.errstate(all="ignore"):
        cast = found.astype(dtype)
        if dtype.kind != "f":
            lost = cast != found
        else:
            least = np.finfo(dtype).tiny if dtype == np.float32 else 0.0  # XLA treats smaller numbers as 0
            lost = np.isnan(found) | (np.isinf(cast) & np.isfinite(found)) | ((found != 0) & (np.abs(cast) < least))
            lost |= (cast == 0) & (found != 0) | (cast == (np.inf if name == "low" else -np.inf))
    if lost.any():
        if dtype.kind == "f":
            limits = np.finfo(dtype)
            allowed = f"0, {limits.tiny:.3g} to {limits.max:.3g} of either sign, and {'-' * (name == 'low')}inf"
        else:
            allowed = "0 and 1" if dtype.kind == "b" else f"{np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
        raise ConfigError(f"a Box of {dtype.name} has {name}={found[lost][0]}; allowed values: {allowed}")
    return cast + 0 if dtype.kind == "f" else cast  # no -0.0, which equals 0 but has other bytes


def _bounds_in(dtype: np.dtype, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest numbers of `dtype` in [low, high]; if there are none, smallest > largest.

    Float32 numbers that XLA treats as 0 are excluded.
    """
    if low.dtype == dtype:
        return low, high
    if dtype.kind != "f":
        low, high = (x.astype(np.uint8) if x.dtype.kind == "b" else x for x in (low, high))
        limits, own = np.iinfo(np.uint8 if dtype.kind == "b" else dtype), np.iinfo(low.dtype)
        least, most = max(int(limits.min), int(own.min)), min(int(limits.max), int(own.max))
        empty = (low > most) | (high < least)
        one, zero = np.asarray(1, dtype), np.asarray(0, dtype)
        return (
            np.where(empty, one, np.clip(low, least, most).astype(dtype)),
            np.where(empty, zero, np.clip(high, least, most).astype(dtype)),
        )
    with np.errstate(over="ignore"):
        lower, upper = low.astype(dtype), high.astype(dtype)
    lower = np.where(lower < low, np.nextafter(lower, np.asarray(np.inf, dtype)), lower)
    upper = np.where(upper > high, np.nextafter(upper, np.asarray(-np.inf, dtype)), upper)
    if dtype == np.float32:
        tiny, zero = np.finfo(dtype).tiny, np.float32(0)
        lower = np.where(np.abs(lower) < tiny, np.where(lower > 0, tiny, zero), lower)
        upper = np.where(np.abs(upper) < tiny, np.where(upper < 0, -tiny, zero), upper)
    return lower, upper


def _contains(x: Any, low: np.ndarray, high: np.ndarray) -> jax.Array:
    """Return whether `x` has the shape of the bounds, is within them, and is whole if the bounds are integers."""
    whole = low.dtype.kind != "f"
    if not isinstance(x, jax.Array):
        try:
            x = np.asarray(x)
        except ValueError:  # a ragged list
            return jnp.asarray(False)
    real = jnp.issubdtype(x.dtype, jnp.floating)
    if x.shape != low.shape or not (real or jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
        return jnp.asarray(False)
    if isinstance(x, jax.Array):  # compare in the dtype of `x`; NumPy, unlike JAX, compares different dtypes exactly
        if x.dtype == bool:
            x = x.astype(jnp.uint8)
        if not (whole or real) or x.dtype == jnp.bfloat16:
            x = x.astype(jnp.float32)
        low, high = _bounds_in(np.dtype(x.dtype), low, high)
    within = (x >= low) & (x <= high)
    if whole and real:
        within &= x == (jnp.trunc(x) if isinstance(x, jax.Array) else np.trunc(x))
    return jnp.asarray(within.all())


def _sample_integers(key: jax.Array, low: np.ndarray, high: np.ndarray) -> jax.Array:
    """Sample whole numbers uniformly from `low` to `high`, both included, in the dtype of the bounds."""
    # Computed modulo 2^32, or 2^64, so that neither the number of values nor the sum can overflow.
    word = np.dtype(np.uint64 if low.dtype.itemsize == 8 else np.uint32)
    steps = high.astype(word) - low.astype(word)
    if steps.max(initial=0) < 1 << 23:  # exactly representable in float32
        span = steps.astype(np.float32) + np.float32(1)
        offset = jnp.floor(jax.random.uniform(key, low.shape) * span).astype(word)
    else:
        every = steps == np.iinfo(word).max  # ranges whose number of values overflows `word`
        counts = np.where(every, steps, steps + np.asarray(1, word))
        offset = jax.random.randint(key, low.shape, np.zeros(low.shape, word), counts, word)
        offset = jnp.where(every, jax.random.bits(key, low.shape, word), offset)
    return (jnp.asarray(low.astype(word)) + offset).astype(low.dtype)


def _sample_floats(key: jax.Array, low: np.ndarray, high: np.ndarray) -> jax.Array:
    """Sample numbers as in `Box.sample`, in the dtype of the bounds."""
    dtype, largest = low.dtype, np.finfo(low.dtype).max
    below, above = low > -largest, high < largest
    start, stop = np.where(below, low, np.zeros_like(low)), np.where(above, high, np.zeros_like(high))
    fraction = jax.random.uniform(key, low.shape, dtype)
    with np.errstate(over="ignore"):
        span = stop - start
    uniform = start + span * fraction
    if not (finite := np.isfinite(span)).all():
        uniform = jnp.where(finite, uniform, start * (1 - fraction) + stop * fraction)
    normal = jax.random.normal(key, low.shape, dtype)
    one_sided = jnp.where(below, start + jnp.abs(normal), jnp.where(above, stop - jnp.abs(normal), normal))
    found = jnp.where(below & above, uniform, one_sided)
    return jnp.clip(found, np.maximum(low, -largest), np.minimum(high, largest))  # rounding may exceed bounds


def _check_parts(space: "Composite", items: Sequence[tuple[Any, Any]]) -> None:
    """Raise a ConfigError that names the first part that is not a space."""
    for name, part in items:
        if not isinstance(part, Space):
            kind = type(space).__name__
            raise ConfigError(f"the part {name!r} of a {kind} is {part!r:.80}; use a space of jaxrl.spaces")


def _contains_parts(space: "Composite", x: Any) -> jax.Array:
    """Return whether every part of `x` is in the corresponding space; False if `x` is None."""
    if x is None:
        return jnp.asarray(False)
    return jnp.all(jnp.asarray([part.contains(x[name]) for name, part in space.items], bool))


def expect[Kind: Space](space: Space, *kinds: type[Kind]) -> Kind:
    """Return `space` if it is an instance of one of these kinds.

    Raises:
      ConfigError: `space` is of another kind.
    """
    if not isinstance(space, kinds):
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"a {allowed} space is needed here, not {space!r}; use another environment or a wrapper")
    return space


def leaves(space: Space) -> list[ArraySpace]:
    """Return the array spaces that a space consists of, in the order of an element's leaves."""
    if isinstance(space, Composite):
        return [leaf for _, child in space.items for leaf in leaves(child)]
    return [space]


def leaves_with_path(space: Space, *trees: Any, path: str = "") -> Iterator[tuple[Any, ...]]:
    """Yield `(path, array_space, *parts)` for every array space, in the order of an element's leaves.

    Args:
      space: space that defines the structure.
      trees: as in `tree_map`.
      path: prefix of every path; paths have the format of `jax.tree_util.keystr`, such as `['legs'][0]`.
    """
    if not isinstance(space, Composite):
        yield path, space, *trees
        return
    for key, child in space.items:
        yield from leaves_with_path(child, *(x[key] for x in trees), path=f"{path}[{key!r}]")


def is_continuous(space: Space) -> bool:
    """Return whether any part of a space is a `Box`."""
    return any(isinstance(leaf, Box) for leaf in leaves(space))


def optional_parts(space: Composite, tree: Any) -> dict[Any, Any]:
    """Return the part of `tree` for each key of `space`; None for each if `tree` is None, or for a missing key.

    Raises:
      ConfigError: `tree` is not a dictionary or tuple, or has parts that `space` lacks.
    """
    keys = [key for key, _ in space.items]
    if tree is None:
        return dict.fromkeys(keys)
    if isinstance(tree, Mapping):
        if strange := [key for key in tree if key not in keys]:
            raise ConfigError(f"the parts {strange}, which are not in the space; its parts are {keys}: use these names")
        return {key: tree.get(key) for key in keys}
    if not isinstance(tree, tuple | list):
        raise ConfigError(
            f"an array of shape {jnp.shape(tree)}, but the space has the parts {keys}; pass a dictionary or tuple "
            "like the action, with None for parts that have no array"
        )
    if keys != list(range(len(tree))):
        raise ConfigError(
            f"a tuple of length {len(tree)}, but the space has the parts {keys}; pass a tuple like the action"
        )
    return dict(enumerate(tree))


def tree_map(function: Callable[..., Any], space: Space, *trees: Any) -> Any:
    """Apply `function(array_space, *parts)` to every array space; return a tree like the space's elements.

    Args:
      function: function of an array space and the corresponding part of each of `trees`.
      space: space that defines the structure.
      trees: trees with this structure at the top; a part passed to `function` may be a tree itself.
    """
    if isinstance(space, Dict):
        return {name: tree_map(function, child, *(x[name] for x in trees)) for name, child in space.items}
    if isinstance(space, Tuple):
        return tuple(tree_map(function, child, *(x[i] for x in trees)) for i, child in space.items)
    return function(space, *trees)


def form(space: Space) -> Any:
    """Return a space without the bounds of boxes; results are equal for spaces that fit the same network or policy."""
    return tree_map(lambda part: ("Box", part.shape, part.dtype) if isinstance(part, Box) else part, space)


def zeros(space: Space) -> Any:
    """Return zeros as JAX arrays with the structure, shapes and dtypes of an element (not always a valid element)."""
    return tree_map(lambda space: jnp.zeros(space.shape, jax.dtypes.canonicalize_dtype(space.dtype)), space)


def clip(x: Any, space: Space) -> Any:
    """Clip elements `[..., *shape]` to the bounds of floating-point boxes; other spaces are unchanged."""
    return tree_map(_clipped, space, x)


def _clipped(space: ArraySpace, x: Any) -> Any:
    if not isinstance(space, Box) or space.dtype.kind != "f":
        return x
    dtype, low, high = np.dtype(jnp.result_type(x)), space.low, space.high
    if dtype.kind == "f":
        low, high = _bounds_in(dtype, low, high)
    bounds = (np.expand_dims(bound, tuple(range(jnp.ndim(x) - bound.ndim))) for bound in (low, high))
    return jnp.clip(x, *bounds)


def size(space: Space) -> int:
    """Return the number of scalars in one element."""
    return sum(math.prod(leaf.shape) for leaf in leaves(space))


def named(x: Any) -> Any:
    """Return elements with tuples converted to dictionaries with keys "0", "1", ..., as in datasets."""
    if isinstance(x, tuple):
        return {str(i): named(part) for i, part in enumerate(x)}
    return {name: named(part) for name, part in x.items()} if isinstance(x, Mapping) else x


def __dir__() -> list[str]:
    return public_names(globals())
