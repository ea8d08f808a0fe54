"""Network of MuZero: a learned model of the environment, with a policy and a value for each latent state."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params
from jaxrl.networks.body import Network, run_module
from jaxrl.networks.layers import DeepHead, DenseStack, check_positive, dense
from jaxrl.networks.torsos import Torso

_SMALL_GAIN = 0.01  # for the output layers, so that initially values are near 0 and actions equally likely


class ModelOutput(struct.PyTreeNode):
    """Latent state of the model, and the network's predictions for this state; leaves have any leading axes."""

    latent: jax.Array
    logits: jax.Array  # logits of the policy, [..., actions]
    value: jax.Array  # logits of a categorical value, [..., atoms]
    reward: jax.Array  # logits of a categorical reward for the action that led to this state, [..., atoms]
    discount: jax.Array  # the environment's discount, [...]; unused if the environment has no discounts


@dataclasses.dataclass(frozen=True)
class ModelNetwork(Network):
    """Learned model that predicts rewards, values and policies of an environment with discrete actions.

    A dense layer maps the torso's features of an observation to the latent state. The next state is the state plus the
    output of dense layers that read state and action. States are scaled to [0, 1] (Schrittwieser et al., 2020,
    arXiv:1911.08265, appendix G).

    Args:
      torso: module that maps observations to features; None: the default for the observation space.
      width: size of the latent state.
      widths: widths of the hidden layers of the dynamics, and of the heads (policy, value, reward and discount).
      activation: function after each hidden layer, by name.
      atoms: number of atoms of categorical values and rewards.
    """

    torso: Torso | None = None
    width: int = 64
    widths: tuple[int, ...] = (64,)
    activation: str = "relu"
    atoms: int = 51

    def __post_init__(self):
        check_positive("width", self.width)

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _Model(self, spec, rngs)

    def step(
        self, params: Params, latent: jax.Array, action: jax.Array, *, spec: EnvSpec, model_state: ModelState
    ) -> ModelOutput:
        """Return the latent states that follow `latent` [..., width] after actions [...], and their predictions."""
        return run_module(self, params, model_state, spec, lambda m: m.follow(latent, action), train=False)[0]


class _Model(nnx.Module):
    def __init__(self, network: ModelNetwork, spec: EnvSpec, rngs: nnx.Rngs):
        if not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(
                f"ModelNetwork needs a Discrete action space, not {spec.action_space}; use AlphaZero or PPO"
            )
        self.actions = spec.action_space.n
        self.torso = network.body(network.torso, spec, rngs)
        self.encode = dense(self.torso.features, network.width, 1.0, rngs)

        def stack(inputs: int, outputs: int, gain: float) -> DeepHead:
            hidden = DenseStack(inputs, network.widths, network.activation, None, rngs)
            return DeepHead(hidden, dense(hidden.features, outputs, gain, rngs))

        self.dynamics = stack(network.width + self.actions, network.width, 1.0)
        self.reward = stack(network.width, network.atoms, _SMALL_GAIN)
        self.policy = stack(network.width, self.actions, _SMALL_GAIN)
        self.value = stack(network.width, network.atoms, _SMALL_GAIN)
        self.discount = stack(network.width, 1, _SMALL_GAIN)

    def __call__(self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None) -> tuple[ModelOutput, Carry]:
        return self._seen(self.encode(self.torso(inputs, ())[0])), carry

    def follow(self, latent: jax.Array, action: jax.Array) -> ModelOutput:
        chosen = jax.nn.one_hot(action, self.actions, dtype=latent.dtype)
        return self._seen(latent + self.dynamics(jnp.concatenate([latent, chosen], axis=-1)))

    def _seen(self, raw: jax.Array) -> ModelOutput:
        low, high = (f(raw, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
        latent = (raw - low) / (high - low + 1e-5)
        heads = self.policy(latent), self.value(latent), self.reward(latent), self.discount(latent)[..., 0]
        return ModelOutput(latent, *heads)
