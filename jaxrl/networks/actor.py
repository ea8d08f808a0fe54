"""The policies of the off-policy actor-critics: a squashed Gaussian, one action for certain, or probabilities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError
from jaxrl.networks.body import Body, bind, init_params
from jaxrl.networks.critic import bounded_size, encoder, from_unit
from jaxrl.networks.distributions import Categorical, TanhGaussian
from jaxrl.networks.heads import PolicyHead
from jaxrl.networks.layers import DenseStack, dense, freeze
from jaxrl.networks.torsos import Torso
from jaxrl.types import Carry, EnvSpec, Params, TimeStep


@dataclasses.dataclass(frozen=True)
class Actor:
    """Actions of a bounded `Box` of shape (n,), by a tanh within its bounds, or of a `Discrete` space.

    Args:
      torso: from observations to features; None: a CNN for images, and vectors as they are.
      widths: of the dense layers over the features.
      activation: by name, after each of these.
      layer_norm: whether to normalise before each of these.
      stochastic: whether the output is a distribution: a `TanhGaussian` whose mean and deviation depend on the
        observation (Haarnoja et al., 2018), or a `Categorical`; else an action `[..., n]` (Lillicrap et al., 2016).
      gain: of the outputs' orthogonal initialisation; small, so that no action is at its bounds at first, and none
        preferred.
      initial_log_std: logarithm of the Gaussian's deviation at the start, in units of half the box's range.
    """

    torso: Torso | None = None
    widths: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    layer_norm: bool = False
    stochastic: bool = True
    gain: float = 0.01
    initial_log_std: float = 0.0

    def __post_init__(self):
        freeze(self, "widths")

    @property
    def recurrent(self) -> bool:
        """Whether there is a carry: no."""
        return False

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _ActorModule(self, spec, rngs)

    def init(self, key: jax.Array, spec: EnvSpec) -> Params:
        """Fresh parameters.

        Raises:
          ConfigError: if the network does not fit the spaces.
        """
        return init_params(self, key, spec)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """`()`: it is feed-forward."""
        return ()

    def apply(
        self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec, key: jax.Array | None = None
    ) -> tuple[Any, Carry]:
        """A distribution, or actions `[T, B, n]`, for moments `[T, B, ...]`; see `types.Network`."""
        return bind(self, params, spec)(timesteps), carry


class _ActorModule(nnx.Module):
    def __init__(self, network: Actor, spec: EnvSpec, rngs: nnx.Rngs):
        discrete = isinstance(spec.action_space, spaces.Discrete)
        if discrete and not network.stochastic:
            raise ConfigError(f"Actor(stochastic=False) gives actions of a Box, not of {spec.action_space}")
        size = None if discrete else bounded_size(spec.action_space)
        torso = encoder(spec.observation_space) if network.torso is None else network.torso
        self.space = spec.action_space
        self.stochastic = network.stochastic
        self.body = Body(torso, None, False, False, spec, rngs)
        self.hidden = DenseStack(self.body.features, network.widths, network.activation, network.layer_norm, rngs)
        if network.stochastic:
            self.distribution = PolicyHead(
                self.hidden.features,
                spec.action_space,
                rngs,
                gain=network.gain,
                continuous="tanh",
                initial_log_std=network.initial_log_std,
                state_dependent_std=True,
            )
        else:
            self.action = dense(self.hidden.features, size, network.gain, rngs)

    def __call__(self, timesteps: TimeStep) -> TanhGaussian | Categorical | jax.Array:
        features = self.hidden(self.body(timesteps, ())[0])
        if self.stochastic:
            return self.distribution(features, timesteps.action_mask)
        return from_unit(jnp.tanh(self.action(features)), self.space)
