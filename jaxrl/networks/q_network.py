"""The network of the DQN family: a value for each action, or the output of another head."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params
from jaxrl.networks.body import Body, init_variables, required_inputs, run_module
from jaxrl.networks.cores import Core
from jaxrl.networks.layers import freeze
from jaxrl.networks.q_heads import ActionValues, QHead
from jaxrl.networks.torsos import Torso


@dataclasses.dataclass(frozen=True)
class QNetwork:
    """Action values of a discrete action space, feed-forward or recurrent.

    Args:
      torso: from observations to features; None takes the one that suits the observation space.
      core: recurrent core after the torso, or None.
      head: what the features become: `ActionValues(dueling=True)` for a dueling network, `CategoricalValues()` and
        `QuantileValues()` for distributions of returns; each may be noisy.
      previous_action, previous_reward: append it to the features.
      observation_keys: the keys of a dictionary observation that it reads; None: all.
    """

    torso: Torso | None = None
    core: Core | None = None
    head: QHead = dataclasses.field(default_factory=ActionValues)
    previous_action: bool = False
    previous_reward: bool = False
    observation_keys: tuple[str, ...] | None = None

    def __post_init__(self):
        freeze(self, "observation_keys")

    @property
    def recurrent(self) -> bool:
        """Return whether the network has a carry."""
        return self.core is not None

    @property
    def requires(self) -> frozenset[str]:
        """Return the fields of `NetworkInputs` that the network needs."""
        return required_inputs(
            recurrent=self.recurrent, previous_action=self.previous_action, previous_reward=self.previous_reward
        )

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _QModule(self, spec, rngs)

    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
        """Return fresh parameters, a dict with the keys "torso" (torso and core) and "head", and model state.

        Raises:
          ConfigError: if the network does not fit the spaces.
        """
        return init_variables(self, key, spec)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """Return the initial recurrent state of one environment; `()` if feed-forward."""
        return () if self.core is None else self.core.initial_carry()

    def apply(
        self,
        params: Params,
        inputs: NetworkInputs,
        carry: Carry,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[Any, Carry, ModelState]:
        """Return the head's output for time steps `[T, B, ...]`, and the next carry; see `types.Network`.

        Of `ActionValues`: values `[T, B, n]`, the most negative finite number where the action mask forbids. `key` is
        of noisy heads: keys `[B]`, one noise for each element of the batch at all time steps; None: no noise.
        """
        (output, carry), model_state = run_module(
            self, params, model_state, spec, lambda module: module(inputs, carry, key), train=train
        )
        return output, carry, model_state


class _QModule(nnx.Module):
    def __init__(self, network: QNetwork, spec: EnvSpec, rngs: nnx.Rngs):
        if not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(f"QNetwork needs a Discrete action space, not {spec.action_space}; use an actor-critic")
        self.torso = Body(
            network.torso,
            spec,
            rngs,
            core=network.core,
            previous_action=network.previous_action,
            previous_reward=network.previous_reward,
            observation_keys=network.observation_keys,
        )
        self.head = network.head.build(self.torso.features, spec.action_space.n, rngs)

    def __call__(self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None) -> tuple[Any, Carry]:
        features, carry = self.torso(inputs, carry)
        return self.head(features, inputs.action_mask, key), carry
