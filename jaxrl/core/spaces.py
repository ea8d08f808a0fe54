"""Spaces: what an observation or an action may be. Immutable and hashable, hence static under `jit`."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import public, registry
from jaxrl.core.errors import ConfigError

MOST_NUMBERS = 1 << 26  # of an element
_MOST_DIMENSIONS = 32


def is_bounded_shape(shape: Sequence[int]) -> bool:
    """Whether an array of this shape has at most 2^26 numbers, in at most 32 dimensions.

    Files ask for arrays, and the product of a long list of sizes alone may take days.
    """
    return len(shape) <= _MOST_DIMENSIONS and math.prod(shape) <= MOST_NUMBERS


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Arrays within bounds.

    Args:
      low, high: bounds, scalars or arrays that broadcast to `shape`; infinities are allowed.
      shape: shape of one element.
      dtype: its dtype.

    Raises:
      ConfigError: a dtype that is not of numbers, or more than 2^26 of them.
    """

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: Any = np.float32

    def __post_init__(self):
        dtype = _number_dtype(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if not is_bounded_shape(self.shape):
            shown = f"{self.shape!r:.80}"
            raise ConfigError(f"a Box of shape {shown} has more than {MOST_NUMBERS:,} numbers or 32 dimensions")
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, np.ndarray) and bound.size and not any(bound.strides):
                bound = bound.flat[0]  # one number everywhere, which a conversion would write out
            object.__setattr__(self, name, np.broadcast_to(np.asarray(bound, dtype), self.shape))

    def _key(self):
        return (self.shape, self.dtype.str, self.low.tobytes(), self.high.tobytes())

    def __eq__(self, other):
        return self is other or (isinstance(other, Box) and self._key() == other._key())

    def __hash__(self):
        # Of the first bounds alone: a compiled function that is told a space hashes it at every call.
        return hash((self.shape, self.dtype.str, self.low.flat[:1].tobytes(), self.high.flat[:1].tobytes()))

    def __repr__(self):
        def bound(array):
            if array.size == 0:
                return "[]"
            return str(array.flat[0]) if np.all(array == array.flat[0]) else np.array2string(array, threshold=6)

        return f"Box({bound(self.low)}, {bound(self.high)}, {self.shape}, {self.dtype.name})"

    @property
    def bounded(self) -> bool:
        """Whether every bound is finite (a bound at the dtype's largest float counts as infinite)."""
        if self.dtype.kind != "f":
            return True
        largest = float(np.finfo(self.dtype).max)
        return bool(np.all(np.abs(self.low) < largest) and np.all(np.abs(self.high) < largest))

    def sample(self, key: jax.Array) -> jax.Array:
        """One element: uniform where bounded on both sides, standard normal shifted to the bound elsewhere."""
        if self.dtype.kind in "iu":
            # In float32, because a bound may be the integer type's own last value, which `randint` excludes.
            span = self.high.astype(np.float64) - self.low.astype(np.float64) + 1.0
            offset = jnp.floor(jax.random.uniform(key, self.shape) * span.astype(np.float32))
            return (jnp.asarray(self.low) + offset.astype(self.dtype)).astype(self.dtype)
        if self.dtype.kind == "b":
            return jax.random.bernoulli(key, shape=self.shape)
        largest = float(np.finfo(self.dtype).max)
        below, above = self.low > -largest, self.high < largest
        low = np.where(below, self.low, 0).astype(self.dtype)
        high = np.where(above, self.high, 0).astype(self.dtype)
        uniform = low + (high - low) * jax.random.uniform(key, self.shape, self.dtype)
        normal = jax.random.normal(key, self.shape, self.dtype)
        one_sided = jnp.where(below, low + jnp.abs(normal), jnp.where(above, high - jnp.abs(normal), normal))
        return jnp.where(below & above, uniform, one_sided)

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` (shape `shape`) lies within the bounds; a scalar bool."""
        x = jnp.asarray(x)
        return jnp.all((x >= self.low) & (x <= self.high))


@dataclasses.dataclass(frozen=True)
class Discrete:
    """The integers 0 .. n-1."""

    n: int
    dtype: Any = np.int32

    def __post_init__(self):
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "dtype", _number_dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (), 0, self.n, self.dtype)

    def contains(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return (x >= 0) & (x < self.n)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """Several integers at once, the i-th of 0 .. nvec[i]-1."""

    nvec: tuple[int, ...]
    dtype: Any = np.int32

    def __post_init__(self):
        object.__setattr__(self, "nvec", tuple(int(n) for n in np.ravel(self.nvec)))
        object.__setattr__(self, "dtype", _number_dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, self.shape, 0, np.asarray(self.nvec), self.dtype)

    def contains(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return jnp.all((x >= 0) & (x < np.asarray(self.nvec, self.dtype)))


@dataclasses.dataclass(frozen=True, init=False)
class Dict:
    """Named spaces; an element is a dictionary with the same keys, in sorted order as JAX keeps them."""

    items: tuple[tuple[str, "Space"], ...]

    def __init__(self, spaces: Mapping[str, Any]):
        object.__setattr__(self, "items", tuple(sorted(dict(spaces).items())))

    @property
    def spaces(self) -> dict[str, Any]:
        return dict(self.items)

    def sample(self, key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, max(len(self.items), 1))
        return {name: space.sample(keys[i]) for i, (name, space) in enumerate(self.items)}

    def contains(self, x: Mapping[str, Any]) -> jax.Array:
        if set(x) != set(self.spaces):
            return jnp.asarray(False)
        return jnp.all(jnp.stack([space.contains(x[name]) for name, space in self.items]))


@dataclasses.dataclass(frozen=True)
class Tuple:
    """Spaces by position; an element is a tuple of their elements. Of actions."""

    spaces: tuple["Space", ...]

    def __post_init__(self):
        object.__setattr__(self, "spaces", tuple(self.spaces))

    @property
    def items(self) -> tuple[tuple[int, "Space"], ...]:
        """Position and space, as `Dict.items` has name and space."""
        return tuple(enumerate(self.spaces))

    def sample(self, key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, max(len(self.spaces), 1))
        return tuple(space.sample(keys[i]) for i, space in self.items)

    def contains(self, x: Sequence[Any]) -> jax.Array:
        if not isinstance(x, tuple | list) or len(x) != len(self.spaces):
            return jnp.asarray(False)
        return jnp.all(jnp.stack([space.contains(x[i]) for i, space in self.items]))


ArraySpace = Box | Discrete | MultiDiscrete  # an element is one array
Composite = Dict | Tuple  # an element is a tree of arrays
Space = ArraySpace | Composite

registry.add("space", Box, Discrete, MultiDiscrete, Dict, Tuple)


def _number_dtype(dtype: Any) -> np.dtype:
    found = np.dtype(dtype)
    if found.kind in "OSUMm" or found.itemsize > 8:
        raise ConfigError(f"a space has the dtype {found.name!r:.40}; numbers of at most 8 bytes are taken")
    return found


def expect[Kind: Space](space: Space, *kinds: type[Kind]) -> Kind:
    """`space`, where only these kinds will do.

    Raises:
      ConfigError: it is of another kind.
    """
    if not isinstance(space, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"a {wanted} space is needed here, not {space!r}; use another environment or a wrapper")
    return space


def leaves(space: Space) -> list[ArraySpace]:
    """The spaces of single arrays that a space is made of, in the order of an element's leaves."""
    if isinstance(space, Composite):
        return [leaf for _, child in space.items for leaf in leaves(child)]
    return [space]


def leaves_with_path(space: Space, *trees: Any, path: str = "") -> Iterator[tuple[Any, ...]]:
    """(path, array space, *parts) of every space of single arrays, in the order of an element's leaves.

    Args:
      space: gives the structure.
      trees: as of `tree_map`.
      path: what every path begins with; they are as `jax.tree_util.keystr` writes them: `['legs'][0]`.
    """
    if not isinstance(space, Composite):
        yield path, space, *trees
        return
    for key, child in space.items:
        yield from leaves_with_path(child, *(x[key] for x in trees), path=f"{path}[{key!r}]")


def is_continuous(space: Space) -> bool:
    """Whether any part of it is a `Box`."""
    return any(isinstance(leaf, Box) for leaf in leaves(space))


def optional_parts(space: Composite, tree: Any) -> dict[Any, Any]:
    """By key, what a tree has for each part of `space`: None where that is None, or is left out of a dictionary.

    Raises:
      ConfigError: it is no dictionary or tuple, or has parts that `space` has not.
    """
    keys = [key for key, _ in space.items]
    if tree is None:
        return dict.fromkeys(keys)
    if isinstance(tree, Mapping):
        if strange := [key for key in tree if key not in keys]:
            raise ConfigError(f"the parts {strange}, which the space has not; its parts are {keys}: use these names")
        return {key: tree.get(key) for key in keys}
    if not isinstance(tree, tuple | list):
        raise ConfigError(
            f"an array of shape {jnp.shape(tree)} where the space has the parts {keys}; give a dictionary or tuple "
            "like the action, with None for parts that have none"
        )
    if keys != list(range(len(tree))):
        raise ConfigError(f"a tuple of {len(tree)} where the space has the parts {keys}; give one like the action")
    return dict(enumerate(tree))


def tree_map(function: Callable[..., Any], space: Space, *trees: Any) -> Any:
    """`function(array_space, *parts)` of every space of single arrays, as a tree like the space's elements.

    Args:
      function: of a space and of what each of `trees` has at its place.
      space: gives the structure.
      trees: of this structure, down to where `function` takes over: a part may be a tree itself.
    """
    if isinstance(space, Dict):
        return {name: tree_map(function, child, *(x[name] for x in trees)) for name, child in space.items}
    if isinstance(space, Tuple):
        return tuple(tree_map(function, child, *(x[i] for x in trees)) for i, child in space.items)
    return function(space, *trees)


def form(space: Space) -> Any:
    """What two spaces share whose elements one network reads or one policy gives: all but the bounds of boxes."""
    return tree_map(lambda part: ("Box", part.shape, part.dtype) if isinstance(part, Box) else part, space)


def zeros(space: Space) -> Any:
    """An element-shaped tree of zeros, as JAX arrays of the space's shape and dtype (not always an element)."""
    return tree_map(lambda space: jnp.zeros(space.shape, space.dtype), space)


def clip(x: Any, space: Space) -> Any:
    """Elements `[..., *shape]` within the bounds of floating-point boxes; other spaces have nothing to clip."""
    return tree_map(_clipped, space, x)


def _clipped(space: ArraySpace, x: Any) -> Any:
    if not isinstance(space, Box) or space.dtype.kind != "f":
        return x
    bounds = (np.expand_dims(bound, tuple(range(jnp.ndim(x) - bound.ndim))) for bound in (space.low, space.high))
    return jnp.clip(x, *bounds)


def size(space: Space) -> int:
    """How many numbers one element holds."""
    return sum(math.prod(leaf.shape) for leaf in leaves(space))


def named(x: Any) -> Any:
    """Elements of a space with dictionaries in the place of tuples, as datasets have them; names are "0", "1", ..."""
    if isinstance(x, tuple):
        return {str(i): named(part) for i, part in enumerate(x)}
    return {name: named(part) for name, part in x.items()} if isinstance(x, Mapping) else x


def __dir__() -> list[str]:
    return public.names(globals())
