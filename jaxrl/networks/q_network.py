"""The network of the DQN family: one value for each action, or what another head makes of the features."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError
from jaxrl.networks.body import Body, bind, init_params
from jaxrl.networks.cores import Core
from jaxrl.networks.q_heads import ActionValues, QHead
from jaxrl.networks.torsos import Torso
from jaxrl.types import Carry, EnvSpec, Params, TimeStep


@dataclasses.dataclass(frozen=True)
class QNetwork:
    """Action values of a discrete action space, feed-forward or recurrent.

    Args:
      torso: from observations to features; None takes the one that suits the observation space.
      core: recurrent core after the torso, or None.
      head: what the features become: `ActionValues(dueling=True)` for a dueling network, `CategoricalValues()` and
        `QuantileValues()` for distributions of returns; each may be noisy.
      previous_action, previous_reward: whether they join the features.
    """

    torso: Torso | None = None
    core: Core | None = None
    head: QHead = dataclasses.field(default_factory=ActionValues)
    previous_action: bool = False
    previous_reward: bool = False

    @property
    def recurrent(self) -> bool:
        """Whether there is a carry."""
        return self.core is not None

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _QModule(self, spec, rngs)

    def init(self, key: jax.Array, spec: EnvSpec) -> Params:
        """Fresh parameters, a dict with the keys "torso" (torso and core) and "head".

        Raises:
          ConfigError: if the network does not fit the spaces.
        """
        return init_params(self, key, spec)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """The recurrent state of one environment; `()` if feed-forward."""
        return () if self.core is None else self.core.initial_carry()

    def apply(
        self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec, key: jax.Array | None = None
    ) -> tuple[Any, Carry]:
        """The head's output for moments `[T, B, ...]`, and the carry after the last; see `types.Network`.

        Of `ActionValues`: values `[T, B, n]`, the most negative finite number where the action mask forbids. `key` is
        of noisy heads: keys `[B]`, one noise for each element of the batch at all moments; None: no noise.
        """
        return bind(self, params, spec)(timesteps, carry, key)


class _QModule(nnx.Module):
    def __init__(self, network: QNetwork, spec: EnvSpec, rngs: nnx.Rngs):
        if not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(f"QNetwork needs a Discrete action space, not {spec.action_space}; use an actor-critic")
        self.torso = Body(network.torso, network.core, network.previous_action, network.previous_reward, spec, rngs)
        self.head = network.head.build(self.torso.features, spec.action_space.n, rngs)

    def __call__(self, timesteps: TimeStep, carry: Carry, key: jax.Array | None) -> tuple[Any, Carry]:
        features, carry = self.torso(timesteps, carry)
        return self.head(features, timesteps.action_mask, key), carry
