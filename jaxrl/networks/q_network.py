"""The network of the DQN family: one value for each action."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError
from jaxrl.networks.body import Body, bind, init_params
from jaxrl.networks.cores import Core
from jaxrl.networks.layers import dense
from jaxrl.networks.torsos import Torso
from jaxrl.types import Carry, EnvSpec, Params, TimeStep


class QHead(nnx.Module):
    """Maps features `[..., inputs]` to action values `[..., actions]`.

    With `dueling` they are V + A - mean A (Wang et al., 2016, equation 9).
    """

    def __init__(self, inputs: int, actions: int, dueling: bool, gain: float, rngs: nnx.Rngs):
        self.dueling = dueling
        self.advantage = dense(inputs, actions, gain, rngs)
        if dueling:
            self.state_value = dense(inputs, 1, gain, rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        advantage = self.advantage(features)
        if not self.dueling:
            return advantage
        return self.state_value(features) + advantage - jnp.mean(advantage, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class QNetwork:
    """Action values of a discrete action space, feed-forward or recurrent.

    Args:
      torso: from observations to features; None takes the one that suits the observation space.
      core: recurrent core after the torso, or None.
      dueling: whether state value and advantages have their own outputs.
      previous_action, previous_reward: whether they join the features.
      gain: of the head's orthogonal initialisation.
    """

    torso: Torso | None = None
    core: Core | None = None
    dueling: bool = False
    previous_action: bool = False
    previous_reward: bool = False
    gain: float = 1.0

    @property
    def recurrent(self) -> bool:
        """Whether there is a carry."""
        return self.core is not None

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _QModule(self, spec, rngs)

    def init(self, key: jax.Array, spec: EnvSpec) -> Params:
        """Fresh parameters, a dict with the keys "torso" and "head".

        Raises:
          ConfigError: if the network does not fit the spaces.
        """
        return init_params(self, key, spec)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """The recurrent state of one environment; `()` if feed-forward."""
        return () if self.core is None else self.core.initial_carry()

    def apply(
        self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec, key: jax.Array | None = None
    ) -> tuple[jax.Array, Carry]:
        """Action values `[T, B, n]` of moments `[T, B, ...]`, and the carry after the last.

        Masked actions have the most negative finite value. See `types.Network`.
        """
        return bind(self, params, spec)(timesteps, carry)


class _QModule(nnx.Module):
    def __init__(self, network: QNetwork, spec: EnvSpec, rngs: nnx.Rngs):
        if not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(f"QNetwork needs a Discrete action space, not {spec.action_space}; use an actor-critic")
        self.torso = Body(network.torso, network.core, network.previous_action, network.previous_reward, spec, rngs)
        self.head = QHead(self.torso.features, spec.action_space.n, network.dueling, network.gain, rngs)

    def __call__(self, timesteps: TimeStep, carry: Carry) -> tuple[jax.Array, Carry]:
        features, carry = self.torso(timesteps, carry)
        values = self.head(features)
        if timesteps.action_mask is not None:
            values = jnp.where(timesteps.action_mask, values, jnp.finfo(values.dtype).min)
        return values, carry
