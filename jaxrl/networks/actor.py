"""Policies of the off-policy actor-critics: squashed Gaussian, deterministic, or categorical."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry, EnvSpec, NetworkInputs
from jaxrl.networks.body import Network
from jaxrl.networks.cores import Core
from jaxrl.networks.critic import bounded_size, encoding_body, from_unit
from jaxrl.networks.distributions import Distribution
from jaxrl.networks.heads import PolicyHead
from jaxrl.networks.layers import DenseStack, check_range, dense
from jaxrl.networks.torsos import Torso


@dataclasses.dataclass(frozen=True)
class Actor(Network):
    """Policy over a bounded `Box` of shape (n,), squashed by tanh into its bounds, or over a `Discrete` space.

    Args:
      torso: module that maps observations to features; None: a CNN for images, the identity for vectors.
      widths: widths of the dense layers over the features.
      activation: function after each dense layer, by name.
      normalization: "layer", "rms", "batch" or "batch_renorm" before each activation; None: no normalization.
      normalize_inputs: normalize the inputs of each dense layer and of the output layer instead, after the activations.
      stochastic: whether the output is a distribution: a `TanhGaussian` whose mean and deviation depend on the
        observation (Haarnoja et al., 2018), or a `Categorical`; otherwise, the output is an action `[..., n]`
        (Lillicrap et al., 2016).
      gain: gain of the output layer's orthogonal initialization; small, so that no action is initially preferred or at
        its bounds. None: weights of unit norm, also while training (`unit.UnitDense`).
      initial_log_std: initial logarithm of the Gaussian's standard deviation, in units of half the box's range; if
        the log standard deviation has a range, an offset before the tanh, so that 0 is the middle of that range.
      log_std_range: minimum and maximum of the log standard deviation, which tanh squashes into this range; None:
        clipped to -20 to 2.
      observation_keys: keys of a dictionary observation to read; None: all.
      core: recurrent core between torso and dense layers, or None.
      previous_action, previous_reward: append the previous action or reward to the core's inputs.
      dtype: compute dtype of the dense layers, "float32" or "bfloat16", as in `MLP`; the torso's dtype is separate.
    """

    torso: Torso | None = None
    widths: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    normalization: str | None = None
    stochastic: bool = True
    gain: float | None = 0.01
    initial_log_std: float = 0.0
    observation_keys: tuple[str, ...] | None = None
    dtype: str = "float32"
    core: Core | None = None
    previous_action: bool = False
    previous_reward: bool = False
    normalize_inputs: bool = False
    log_std_range: tuple[float, float] | None = None

    def __post_init__(self):
        if self.log_std_range is None:
            return
        check_range("Actor.log_std_range", self.log_std_range)
        if not self.stochastic:
            raise ConfigError("Actor(stochastic=False) has no standard deviation; leave log_std_range unset")

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _ActorModule(self, spec, rngs)


class _ActorModule(nnx.Module):
    def __init__(self, network: Actor, spec: EnvSpec, rngs: nnx.Rngs):
        discrete = isinstance(spec.action_space, spaces.Discrete)
        if discrete and not network.stochastic:
            raise ConfigError(f"Actor(stochastic=False) needs a Box of actions, not {spec.action_space}")
        size = 0 if discrete else bounded_size(spec.action_space)
        self.space = spec.action_space
        self.stochastic = network.stochastic
        self.body = encoding_body(network, network.torso, spec, rngs)
        self.hidden = DenseStack(
            self.body.features,
            network.widths,
            network.activation,
            network.normalization,
            rngs,
            network.dtype,
            normalize_inputs=network.normalize_inputs,
        )
        if network.stochastic:
            self.distribution = PolicyHead(
                self.hidden.features,
                spec.action_space,
                rngs,
                gain=network.gain,
                continuous="tanh",
                initial_log_std=network.initial_log_std,
                state_dependent_std=True,
                log_std_range=network.log_std_range,
            )
        else:
            self.action = dense(self.hidden.features, size, network.gain, rngs)

    def __call__(
        self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None
    ) -> tuple[Distribution | jax.Array, Carry]:
        features, carry = self.body(inputs, carry)
        features = self.hidden(features)
        if self.stochastic:
            return self.distribution(features, inputs.action_mask), carry
        return from_unit(jnp.tanh(self.action(features)), spaces.expect(self.space, spaces.Box)), carry
