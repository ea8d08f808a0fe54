"""Torsos: descriptions of what turns observations into features.

A torso is a frozen, hashable description. `build(space, rngs)` makes a `flax.nnx` module that maps observations with
any number of leading axes to features `[..., features]`, and says how many in its attribute `features`.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError
from jaxrl.networks.layers import DenseStack


class Torso(Protocol):
    """What turns observations into features; frozen and hashable."""

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> nnx.Module:
        """A module from observations `[..., *shape]` to `[..., features]`, with the int attribute `features`.

        Raises:
          ConfigError: if the torso does not fit the space.
        """
        ...


def to_float(x: jax.Array, space: spaces.Box) -> jax.Array:
    """float32; uint8 divided by the space's largest bound (255 for pixels), so that it lies in [0, 1]."""
    if x.dtype == jnp.uint8:
        return x.astype(jnp.float32) / jnp.float32(max(int(space.high.max(initial=1)), 1))
    return x.astype(jnp.float32)


def flat_size(space: spaces.Space) -> int:
    """How many numbers `flatten` gives for one element."""
    if isinstance(space, spaces.Discrete):
        return space.n
    if isinstance(space, spaces.MultiDiscrete):
        return sum(space.nvec)
    return math.prod(space.shape)


def flatten(x: jax.Array, space: spaces.Space) -> jax.Array:
    """Elements `[..., *shape]` as float32 vectors `[..., n]`: boxes flattened, integers that are names one-hot."""
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(x, space.n, dtype=jnp.float32)
    if isinstance(space, spaces.MultiDiscrete):
        parts = [jax.nn.one_hot(x[..., i], n, dtype=jnp.float32) for i, n in enumerate(space.nvec)]
        return jnp.concatenate(parts, axis=-1)
    leading = x.shape[: x.ndim - len(space.shape)]
    return to_float(x, space).reshape((*leading, math.prod(space.shape)))


class _FlatTorso(nnx.Module):
    def __init__(self, space: spaces.Space, stack: DenseStack):
        self.space = space
        self.stack = stack
        self.features = stack.features

    def __call__(self, observation: Any) -> jax.Array:
        return self.stack(flatten(observation, self.space))


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers; the observation is flattened first.

    Args:
      widths: of the layers; none makes the features the observation itself.
      activation: by name, after every layer.
      layer_norm: whether to normalise before every activation (Ba et al., 2016).
    """

    widths: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    layer_norm: bool = False

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> nnx.Module:
        if isinstance(space, spaces.Dict):
            raise ConfigError(f"MLP on a dictionary observation ({', '.join(space.spaces)}); use DictEncoder or None")
        stack = DenseStack(flat_size(space), self.widths, self.activation, self.layer_norm, rngs)
        return _FlatTorso(space, stack)


def default_torso(space: spaces.Space) -> Torso:
    """The torso that suits a space."""
    return MLP()
