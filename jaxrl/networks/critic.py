"""Action-value networks of off-policy actor-critics: an ensemble of critics, each with its own parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params
from jaxrl.networks.body import Body, Encoder, init_variables, run_module, select_space
from jaxrl.networks.cores import Core
from jaxrl.networks.heads import action_size
from jaxrl.networks.layers import DenseStack, check_positive
from jaxrl.networks.q_heads import ActionValues, QHead
from jaxrl.networks.torsos import MLP, Torso, default_torso


def encoder(space: spaces.Space) -> Torso:
    """Return the default torso for a network that adds dense layers: `default_torso`, but the identity for vectors."""
    torso = default_torso(space)
    return MLP(()) if isinstance(torso, MLP) else torso


def encoding_body(network: Encoder, torso: Torso | None, spec: EnvSpec, rngs: nnx.Rngs) -> Body:
    """Return the body of a network with `torso`; if it is None, use `encoder` of the observation space."""
    space = select_space(spec.observation_space, network.observation_keys)
    return network.body(encoder(space) if torso is None else torso, spec, rngs)


def bounded_size(space: spaces.Space) -> int:
    """Return the size n of a bounded `Box` of shape (n,).

    Raises:
      ConfigError: the space is not such a `Box`.
    """
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"continuous critics and bounded policies need a Box of actions, not {space}; use a QNetwork")
    return action_size(space, "tanh")


def _bounds(action, space):
    return (jnp.expand_dims(jnp.asarray(bound), range(action.ndim - 1)) for bound in (space.low, space.high))


def to_unit(action: jax.Array, space: spaces.Box) -> jax.Array:
    """Rescale actions `[..., n]` of a bounded box to [-1, 1], so that `low` becomes -1 and `high` becomes 1."""
    low, high = _bounds(action, space)
    return (action - low) / (0.5 * (high - low)) - 1.0


def from_unit(action: jax.Array, space: spaces.Box) -> jax.Array:
    """Invert `to_unit`; values outside [-1, 1] are clipped to the box."""
    low, high = _bounds(action, space)
    return jnp.clip(low + (high - low) * (0.5 * (action + 1.0)), low, high)


@dataclasses.dataclass(frozen=True)
class Critic(Encoder):
    """Ensemble of critics, which evaluate (observation, action) pairs, or all actions of a `Discrete` space at once.

    Each member encodes the observation (with a core, all observations so far), appends the action, rescaled to [-1, 1],
    if the space is a bounded `Box` of shape (n,), and applies dense layers and a head. Members differ only in their
    initial parameters; they are vmapped over a leading axis.

    Args:
      torso: module that maps observations to features; None: a CNN for images, the identity for vectors.
      trunk: layers over the concatenated features and action, before the dense layers: a torso for vectors, such as
        `InvertedResidual()`; None: no trunk.
      widths: widths of the dense layers over features and action.
      activation: function after each dense layer, by name.
      normalization: "layer", "rms", "batch" or "batch_renorm" before each activation; None: no normalization.
      normalize_inputs: normalize the inputs of each dense layer and of the head instead, after the activations.
      ensemble: number of members.
      head: output head: `ActionValues()` for values, `CategoricalValues()` or `QuantileValues()` for distributions of
        returns. Noisy heads are not supported.
      observation_keys: keys of a dictionary observation to read; None: all.
      core: recurrent core between torso and dense layers, or None.
      previous_action, previous_reward: append the previous action or reward to the core's inputs.
      dtype: compute dtype of the dense layers, "float32" or "bfloat16", as in `MLP`; the torso's dtype is separate.
      dropout: dropout rate in SAC's updates, applied to the output of each dense layer before normalization.
    """

    torso: Torso | None = None
    widths: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    normalization: str | None = None
    ensemble: int = 2
    head: QHead = dataclasses.field(default_factory=ActionValues)
    observation_keys: tuple[str, ...] | None = None
    dtype: str = "float32"
    core: Core | None = None
    previous_action: bool = False
    previous_reward: bool = False
    normalize_inputs: bool = False
    trunk: Torso | None = None
    dropout: float = dataclasses.field(default=0.0, metadata={"limits": {"low": 0, "below": 1}})

    def __post_init__(self):
        check_positive("ensemble", self.ensemble)
        if self.dropout and not self.widths:
            raise ConfigError(
                f"Critic.dropout={self.dropout} has no effect without dense layers (widths=()); set dropout=0.0"
            )

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _Member(self, spec, rngs)

    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
        """Initialize the parameters and the model state; every leaf has a leading axis of size `ensemble`.

        Raises:
          ConfigError: the network does not fit the spaces.
        """
        return jax.vmap(lambda member: init_variables(self, member, spec))(jax.random.split(key, self.ensemble))

    def apply(
        self,
        params: Params,
        inputs: NetworkInputs,
        action: jax.Array | None,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[Any, ModelState]:
        """Return the output of the head for inputs `[T, B, ...]`, and the model state.

        The leaves of the output are `[ensemble, T, B, actions, ...]`. Values of actions that the mask forbids are the
        most negative finite number. A critic with a core needs `encode` and `evaluate` instead.

        Args:
          params: the parameters of all members.
          inputs: the inputs of the network, `[T, B, ...]`.
          action: for a box, the actions `[T, B, n]` to evaluate (the output's axis `actions` then has size 1); None for
            a discrete space, where all actions are evaluated.
          spec: the environment's spec.
          model_state: see `types.Network`.
          train: see `types.Network`.
          key: keys `[B]` for dropout; None: no dropout.
        """

        def call(module, key):
            return module(inputs, action, key)

        return self._of_members(call, params, model_state, _keys_of_members(params, key), spec=spec, train=train)

    def encode(
        self,
        params: Params,
        inputs: NetworkInputs,
        carry: Carry,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
    ) -> tuple[jax.Array, Carry, ModelState]:
        """Return the features `[ensemble, T, B, features]` of inputs `[T, B, ...]`, the next carry and the model state.

        Both carries are `[ensemble, B, ...]`.
        """

        def call(module, carry):
            return module.body(inputs, carry)

        (features, carry), model_state = self._of_members(call, params, model_state, carry, spec=spec, train=train)
        return features, carry, model_state

    def evaluate(
        self,
        params: Params,
        features: jax.Array,
        action: jax.Array | None,
        mask: jax.Array | None = None,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[Any, ModelState]:
        """Return the result of `apply`, given the features `[ensemble, T, B, features]` returned by `encode`."""

        def call(module, features, key):
            return module.evaluate(features, action, mask, key)

        each = features, _keys_of_members(params, key)
        return self._of_members(call, params, model_state, *each, spec=spec, train=train)

    def _of_members(self, call, params, model_state, *each, spec, train):
        """Return `call(module, *each)` and the model state, vmapped over members, the first axis of `each`."""

        def member(params, model_state, *each):
            return run_module(self, params, model_state, spec, lambda module: call(module, *each), train=train)

        return jax.vmap(member)(params, model_state, *each)


def _keys_of_members(params: Params, key: jax.Array | None) -> jax.Array | None:
    """Derive keys [ensemble, B] from keys [B]; return None if `key` is None."""
    if key is None:
        return None
    members = jnp.arange(jax.tree.leaves(params)[0].shape[0], dtype=jnp.uint32)
    return jax.vmap(lambda member: jax.vmap(lambda k: jax.random.fold_in(k, member))(key))(members)


class _Member(nnx.Module):
    def __init__(self, network: Critic, spec: EnvSpec, rngs: nnx.Rngs):
        self.space = spec.action_space
        size, actions = 0, 1
        if isinstance(self.space, spaces.Discrete):
            actions = self.space.n
        else:
            size = bounded_size(self.space)
        self.body = encoding_body(network, network.torso, spec, rngs)
        inputs = self.body.features + size
        self.has_trunk = network.trunk is not None
        if network.trunk is not None:
            self.trunk = network.trunk.build(spaces.Box(-np.inf, np.inf, (inputs,)), rngs)
            inputs = self.trunk.features
        self.hidden = DenseStack(
            inputs,
            network.widths,
            network.activation,
            network.normalization,
            rngs,
            network.dtype,
            normalize_inputs=network.normalize_inputs,
            dropout=network.dropout,
        )
        self.head = network.head.build(self.hidden.features, actions, rngs)

    def __call__(self, inputs: NetworkInputs, action: jax.Array | None, key: jax.Array | None = None) -> Any:
        return self.evaluate(self.body(inputs, ())[0], action, inputs.action_mask, key)

    def evaluate(
        self, x: jax.Array, action: jax.Array | None, mask: jax.Array | None, key: jax.Array | None = None
    ) -> Any:
        if action is not None:
            unit, mask = to_unit(action, spaces.expect(self.space, spaces.Box)), None
            x = jnp.concatenate([x, unit], axis=-1)
        return self.head(self.hidden(self.trunk(x) if self.has_trunk else x, key), mask, None)
