"""Heads: from features to a distribution over actions, and to values."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError, unknown
from jaxrl.networks.distributions import Categorical, DiagonalGaussian, MultiCategorical
from jaxrl.networks.layers import dense

CONTINUOUS = ("gaussian", "tanh")


def action_size(space: spaces.Space) -> int:
    """How many numbers parametrise the location of a distribution over `space`: logits, or means.

    Raises:
      ConfigError: if there is no distribution over such a space.
    """
    if isinstance(space, spaces.Discrete):
        return space.n
    if isinstance(space, spaces.MultiDiscrete):
        return sum(space.nvec)
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        return math.prod(space.shape)
    raise ConfigError(
        f"no policy for the action space {space}; allowed are Discrete, MultiDiscrete, and Box of floats of shape (n,)"
    )


def to_distribution(space: spaces.Space, location: jax.Array, log_std: jax.Array | None, mask: Any, continuous: str):
    """The distribution over `space` that a policy head's outputs stand for.

    Args:
      space: of actions.
      location: logits or means, `[..., action_size(space)]`.
      log_std: `[..., n]` for boxes, else ignored.
      mask: bool, True where allowed, `[..., action_size(space)]`, or None.
      continuous: "gaussian" or "tanh", for boxes.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical.masked(location, mask)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical.masked(location, space.nvec, mask)
    return DiagonalGaussian(location, log_std)


class PolicyHead(nnx.Module):
    """Maps features `[..., inputs]` to a distribution over the action space."""

    def __init__(
        self, inputs: int, space: spaces.Space, gain: float, continuous: str, initial_log_std: float, rngs: nnx.Rngs
    ):
        if continuous not in CONTINUOUS:
            raise unknown("continuous policy", str(continuous), CONTINUOUS)
        self.space = space
        self.continuous = continuous
        size = action_size(space)
        self.output = dense(inputs, size, gain, rngs)
        self.is_box = isinstance(space, spaces.Box)
        if self.is_box:
            self.log_std = nnx.Param(jnp.full((size,), initial_log_std, jnp.float32))

    def __call__(self, features: jax.Array, mask: jax.Array | None):
        location = self.output(features)
        log_std = None
        if self.is_box:
            shape = (1,) * (location.ndim - 1) + (-1,)
            log_std = jnp.broadcast_to(self.log_std[...].reshape(shape), location.shape)
        return to_distribution(self.space, location, log_std, mask, self.continuous)


class ValueHead(nnx.Module):
    """Maps features `[..., inputs]` to values `[...]`."""

    def __init__(self, inputs: int, gain: float, rngs: nnx.Rngs):
        self.output = dense(inputs, 1, gain, rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        return self.output(features)[..., 0]
