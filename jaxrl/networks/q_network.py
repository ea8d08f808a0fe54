"""Network of the DQN family: a value for each action, or the output of another head."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry, EnvSpec, NetworkInputs
from jaxrl.networks.body import Network
from jaxrl.networks.cores import Core
from jaxrl.networks.q_heads import ActionValues, QHead
from jaxrl.networks.torsos import Torso


@dataclasses.dataclass(frozen=True)
class QNetwork(Network):
    """Action values of a discrete action space, feed-forward or recurrent.

    With `ActionValues`, the output is values `[T, B, n]`; the value of an action that the mask forbids is the most
    negative finite number. Noisy heads sample their noise from the keys `[B]`, once per batch element for all time
    steps; without keys, there is no noise. Parameters are a dict with the keys "torso" (torso and core) and "head".

    Args:
      torso: module that maps observations to features; None: the default for the observation space.
      core: recurrent core after the torso, or None.
      head: output head: `ActionValues(dueling=True)` for a dueling network, `CategoricalValues()` and
        `QuantileValues()` for distributions of returns; each may be noisy.
      previous_action, previous_reward: append the previous action or reward to the features.
      observation_keys: keys of a dictionary observation to read; None: all.
    """

    torso: Torso | None = None
    core: Core | None = None
    head: QHead = dataclasses.field(default_factory=ActionValues)
    previous_action: bool = False
    previous_reward: bool = False
    observation_keys: tuple[str, ...] | None = None

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _QModule(self, spec, rngs)


class _QModule(nnx.Module):
    def __init__(self, network: QNetwork, spec: EnvSpec, rngs: nnx.Rngs):
        if not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(f"QNetwork needs a Discrete action space, not {spec.action_space}; use an actor-critic")
        self.torso = network.body(network.torso, spec, rngs)
        self.head = network.head.build(self.torso.features, spec.action_space.n, rngs)

    def __call__(self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None) -> tuple[Any, Carry]:
        features, carry = self.torso(inputs, carry)
        return self.head(features, inputs.action_mask, key), carry
