"""Networks of DreamerV3 (Hafner et al., 2025, arXiv:2301.04104): a recurrent state-space model and its heads.

Sizes, layers and initialization follow the published code (github.com/danijar/dreamerv3). A latent state has a
deterministic part, computed by a gated recurrent unit with block-diagonal weights, and a stochastic part, which
consists of sampled categorical variables. `WorldModel` contains the parts for acting: encoder, dynamics and policy. The
parts that are used only for learning are separate networks: `WorldModel.predictions`, which predicts observations,
rewards and continuation, and `WorldModel.critic`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params, PyTree
from jaxrl.networks.body import Network, known, run_module
from jaxrl.networks.cores import unroll
from jaxrl.networks.critic import to_unit
from jaxrl.networks.distributions import Categorical, Distribution
from jaxrl.networks.heads import action_size, to_distribution
from jaxrl.networks.layers import check_positive
from jaxrl.networks.torsos import FlatTorso, flat_size, flatten
from jaxrl.networks.two_hot import TwoHot
from jaxrl.networks.world_model_layers import ImageDecoder, ImageEncoder, Layer, Stack, is_image

BINS = 255  # number of two-hot bins of rewards and values


class LatentState(struct.PyTreeNode):
    """Latent state of the model, with any leading axes."""

    deter: jax.Array  # [..., deter]
    stoch: jax.Array  # [..., stoch, classes], one-hot; all 0 before an episode

    @property
    def features(self) -> jax.Array:
        """The vector `[..., deter + stoch * classes]` that is the input of the heads."""
        return jnp.concatenate([self.deter, self.stoch.reshape((*self.deter.shape[:-1], -1))], axis=-1)


class LatentCarry(struct.PyTreeNode):
    """Latent state between time steps, small enough to be stored in a replay buffer."""

    deter: jax.Array  # [..., deter]
    classes: jax.Array  # int32 [..., stoch]; -1 before an episode


class Observed(struct.PyTreeNode):
    """Latent states at time steps `[T, B]`, with the distributions of the stochastic parts."""

    states: LatentState
    posterior: Categorical  # [T, B, stoch], given the observation
    prior: Categorical  # [T, B, stoch], predicted without the observation


class Outcome(struct.PyTreeNode):
    """Predicted reward and continuation of a state, with any leading axes."""

    reward: TwoHot
    continues: jax.Array  # logits of the episode continuing
    negative: jax.Array | None  # logits of a negative discount; None if the environment has no discounts

    @property
    def discount(self) -> jax.Array:
        """The expected discount of the following steps, `[...]`, between -1 and 1."""
        goes_on = jax.nn.sigmoid(self.continues)
        return goes_on if self.negative is None else goes_on * -jnp.tanh(0.5 * self.negative)


class Predictions(struct.PyTreeNode):
    """Predictions for the time step of a state, with any leading axes."""

    observation: list[jax.Array]  # for each array of an observation: an image, symlog of the flat array, or logits
    outcome: Outcome


class _Called(Network):
    """Network without model state, whose module has parts that are called separately."""

    def call[Output](self, params: Params, spec: EnvSpec, function: Callable[[Any], Output]) -> Output:
        """Return `function(module)` for the module with these parameters."""
        return run_module(self, params, (), spec, function, train=True)[0]


@dataclasses.dataclass(frozen=True)
class WorldModel(_Called):
    """Encoder, recurrent state-space model, and a policy that reads its states.

    The defaults are those of the published model with 1M parameters, which is small enough for two CPU cores.

    Args:
      deter: width of the recurrent unit, which is the deterministic part of a state.
      stoch: number of categorical variables, which are the stochastic part of a state.
      classes: number of classes of each categorical variable.
      hidden: width of the layers within the dynamics.
      units: width of the layers of encoder, decoder and heads.
      depth: base number of channels for images, which the multipliers scale.
      blocks: number of diagonal blocks of the recurrent unit's weights; 1: dense.
      layers: number of layers of encoder, decoder, policy and critic; the reward and continuation heads have one layer.
      multipliers: multipliers of the number of channels after each halving of an image, until its size is at most 4.
      kernel: height and width of convolutions.
      uniform: fraction of a uniform distribution mixed into the latents and discrete actions.
      min_std: minimum standard deviation of continuous actions, in units of half the range of actions.
      max_std: maximum standard deviation of continuous actions, in the same units.
    """

    deter: int = 512
    stoch: int = 32
    classes: int = 4
    hidden: int = 64
    units: int = 64
    depth: int = 4
    blocks: int = 8
    layers: int = 3
    multipliers: tuple[int, ...] = (2, 3, 4, 4)
    kernel: int = 5
    uniform: float = 0.01
    min_std: float = 0.1
    max_std: float = 1.0

    recurrent = True
    previous_action = True

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of channels after each halving of an image."""
        return tuple(self.depth * multiplier for multiplier in self.multipliers)

    @property
    def predictions(self) -> "ModelPart":
        """The network of the decoder and the heads for reward and continuation."""
        return ModelPart(self, PredictionModule)

    @property
    def critic(self) -> "ModelPart":
        """The critic, a network that maps features to `TwoHot` values."""
        return ModelPart(self, CriticModule)

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return ModelModule(self, spec, rngs)

    def initial_carry(self, spec: EnvSpec) -> LatentCarry:
        """Return the carry before the first step of an episode."""
        return LatentCarry(jnp.zeros((self.deter,), jnp.float32), jnp.full((self.stoch,), -1, jnp.int32))

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
    ) -> tuple[Distribution, Carry, ModelState]:
        """Return the policy's distribution for inputs `[T, B, ...]`, the next carry and the model state.

        Latents are sampled with `key`; without a key, they are the most likely classes. See `types.Network`.
        """
        rows = jax.tree.leaves(inputs.observation)[0].shape[0]
        noise = None if key is None else latent_noise(key, (rows, self.stoch))

        def act(module):
            observed, after = module.observe(inputs, carry, noise)
            return module.policy(observed.states.features, inputs.action_mask), after

        return *self.call(params, spec, act), model_state


@dataclasses.dataclass(frozen=True)
class ModelPart(_Called):
    """Network of a part of the model that is not needed for acting."""

    network: WorldModel
    module: Callable[[WorldModel, EnvSpec, nnx.Rngs], nnx.Module]

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return self.module(self.network, spec, rngs)


def latent_noise(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform numbers for sampling latents: `shape`, with the axis of `keys` `[B]` inserted before the last."""
    return jax.vmap(lambda key: jax.random.uniform(key, shape, jnp.float32), out_axes=-2)(keys)


def action_vector(action: PyTree, space: spaces.Space) -> jax.Array:
    """Convert actions to vectors `[..., n]`: discrete actions are one-hot encoded, boxes are rescaled to [-1, 1]."""
    parts = zip(jax.tree.leaves(action), spaces.leaves(space), strict=True)
    flat = [
        jnp.clip(to_unit(x, leaf), -1.0, 1.0) if isinstance(leaf, spaces.Box) else flatten(x, leaf) for x, leaf in parts
    ]
    return jnp.concatenate(flat, axis=-1)


# --- modules ---------------------------------------------------------------------------------------------------------


def _taking(x: jax.Array) -> Callable[[int], jax.Array]:
    """Return a function `take(n)` that returns the next n entries of the last axis of `x` at each call."""
    start = 0

    def take(size):
        nonlocal start
        start += size
        return x[..., start - size : start]

    return take


def _features(network: WorldModel) -> int:
    return network.deter + network.stoch * network.classes


class ModelModule(nnx.Module):
    """Module of a `WorldModel`: encoder, dynamics and policy."""

    def __init__(self, network: WorldModel, spec: EnvSpec, rngs: nnx.Rngs):
        for name in ("deter", "stoch", "classes", "hidden", "units", "depth", "blocks", "layers", "multipliers"):
            check_positive(f"WorldModel.{name}", getattr(network, name))
        if network.deter % network.blocks:
            raise ConfigError(f"WorldModel.deter={network.deter} must be divisible by blocks={network.blocks}")
        self.network, self.spec = network, spec
        deter, latents, hidden, units = network.deter, network.stoch * network.classes, network.hidden, network.units
        observed = spaces.leaves(spec.observation_space)
        vectors = spaces.Tuple(tuple(leaf for leaf in observed if not is_image(leaf)))
        size = flat_size(vectors)
        self.vector = FlatTorso(vectors, Stack(size, units, network.layers, None, rngs), symlog=True) if size else None
        encoded = units * bool(size)
        for i, leaf in enumerate(observed):
            if is_image(leaf):
                setattr(self, f"image_{i}", encoder := ImageEncoder(leaf, network.depths, network.kernel, rngs))
                encoded += encoder.features
        self.of_deter = Layer(deter, hidden, rngs)
        self.of_stoch = Layer(latents, hidden, rngs)
        self.of_action = Layer(flat_size(spec.action_space), hidden, rngs)
        self.recurrent = Layer(deter + 3 * hidden * network.blocks, deter, rngs, blocks=network.blocks)
        self.gates = Layer(deter, 3 * deter, rngs, blocks=network.blocks, hidden=False)
        self.posterior_head = Stack(deter + encoded, hidden, 1, latents, rngs)
        self.prior_head = Stack(deter, hidden, 2, latents, rngs)
        self.actor = Stack(_features(network), units, network.layers, None, rngs)
        size = sum(action_size(leaf, "tanh") * (1 + isinstance(leaf, spaces.Box)) for leaf in self._parts)
        self.action = Layer(units, size, rngs, scale=0.01, hidden=False)
        legal = sum(flat_size(leaf) for leaf in self._parts if not isinstance(leaf, spaces.Box))
        self.legal = Stack(_features(network), units, 1, legal, rngs) if spec.masked else None

    @property
    def _parts(self) -> list[spaces.Space]:
        return list(spaces.leaves(self.spec.action_space))

    def encode(self, observation: PyTree) -> jax.Array:
        """Encode observations `[..., *shape]` as inputs of the posterior network."""
        leaves = spaces.leaves(self.spec.observation_space)
        pairs = list(zip(jax.tree.leaves(observation), leaves, strict=True))
        encoded = [getattr(self, f"image_{i}")(x) for i, (x, leaf) in enumerate(pairs) if is_image(leaf)]
        if self.vector is not None:
            encoded.append(self.vector([x for x, leaf in pairs if not is_image(leaf)]))
        return jnp.concatenate(encoded, axis=-1)

    def observe(
        self, inputs: NetworkInputs, carry: LatentCarry, noise: jax.Array | None
    ) -> tuple[Observed, LatentCarry]:
        """Unroll the model over time steps with known observations.

        Args:
          inputs: the inputs of the network, `[T, B, ...]`.
          carry: the carry before the first step, `[B, ...]`; it is reset at the beginning of episodes.
          noise: uniform numbers `[T, B, stoch]` for sampling latents; None: use the most likely latents.

        Returns:
          The latent states with their distributions, and the carry after the last time step.
        """
        first = known(inputs, "first")
        encoded = self.encode(inputs.observation)
        action = action_vector(inputs.previous_action, self.spec.action_space)
        action = jnp.where(first[..., None], 0.0, action)

        def step(state, inputs):
            encoded, action, noise = inputs
            deter = self._recur(state, action)
            posterior = self._latents(self.posterior_head(jnp.concatenate([deter, encoded], axis=-1)))
            state = LatentState(deter, self._draw(posterior, noise))
            return state, (state, posterior)

        classes = self.network.classes
        before = LatentState(carry.deter, jax.nn.one_hot(carry.classes, classes, dtype=jnp.float32))
        initial = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), before)
        (states, posterior), after = unroll(step, before, (encoded, action, noise), first, initial)
        after = LatentCarry(after.deter, jnp.argmax(after.stoch, axis=-1).astype(jnp.int32))
        return Observed(states, posterior, self.prior(states.deter)), after

    def imagine(self, state: LatentState, action: PyTree, noise: jax.Array) -> LatentState:
        """Predict the next states from states and actions `[N, ...]`, without observations.

        The stochastic parts are sampled with the uniform numbers `noise`, `[N, stoch]`.
        """
        deter = self._recur(state, action_vector(action, self.spec.action_space))
        return LatentState(deter, self._draw(self.prior(deter), noise))

    def prior(self, deter: jax.Array) -> Categorical:
        """Predict the distribution `[..., stoch]` of the stochastic part from the deterministic part `[..., deter]`."""
        return self._latents(self.prior_head(deter))

    def policy(self, features: jax.Array, mask: PyTree | None) -> Distribution:
        """Return the distribution of actions for features `[..., n]` and a mask of allowed actions, or None."""
        low, high, uniform = self.network.min_std, self.network.max_std, self.network.uniform
        take = _taking(self.action(self.actor(features)))

        def part(space):
            if isinstance(space, spaces.Box):
                location, std = take(space.shape[0]), (high - low) * jax.nn.sigmoid(take(space.shape[0]) + 2.0) + low
                half_range = jnp.asarray(0.5 * (space.high - space.low), std.dtype)
                return location, jnp.log(std * jnp.expand_dims(half_range, range(std.ndim - 1)))
            sizes = (space.n,) if isinstance(space, spaces.Discrete) else space.nvec
            logits = [Categorical(take(n)).mixed(uniform).logits for n in sizes]
            return jnp.concatenate(logits, axis=-1), None

        space = self.spec.action_space
        found = spaces.tree_map(part, space)
        location, log_std = (spaces.tree_map(lambda _, x, i=i: x[i], space, found) for i in range(2))
        return to_distribution(space, location, log_std, mask, continuous="tanh_mean")

    def legal_logits(self, features: jax.Array) -> jax.Array | None:
        """Return the logits `[..., n]` of each discrete action being allowed; None if the spec has no action masks."""
        return None if self.legal is None else self.legal(features)

    def likely_mask(self, features: jax.Array) -> PyTree | None:
        """Return the mask of actions predicted to be allowed, in the structure of an action.

        The mask is None if the spec has no action masks.
        """
        if (logits := self.legal_logits(features)) is None:
            return None
        take = _taking(logits)
        return spaces.tree_map(
            lambda space: None if isinstance(space, spaces.Box) else take(flat_size(space)) > 0.0,
            self.spec.action_space,
        )

    def _recur(self, state: LatentState, action: jax.Array) -> jax.Array:
        """Return the next deterministic part `[B, deter]`.

        Each block of the weights reads its part of the deterministic state, and an embedding of the whole state and the
        action.
        """
        blocks, (rows, width) = self.network.blocks, state.deter.shape
        stoch = state.stoch.reshape((rows, -1))
        shared = jnp.concatenate([self.of_deter(state.deter), self.of_stoch(stoch), self.of_action(action)], axis=-1)
        shared = jnp.broadcast_to(shared[:, None], (rows, blocks, shared.shape[-1]))
        own = state.deter.reshape((rows, blocks, width // blocks))
        hidden = self.recurrent(jnp.concatenate([own, shared], axis=-1).reshape((rows, -1)))
        gates = self.gates(hidden).reshape((rows, blocks, 3, width // blocks))
        reset, candidate, update = (gates[:, :, i].reshape((rows, width)) for i in range(3))
        candidate, update = jnp.tanh(jax.nn.sigmoid(reset) * candidate), jax.nn.sigmoid(update - 1.0)
        return update * candidate + (1.0 - update) * state.deter

    def _latents(self, logits: jax.Array) -> Categorical:
        shape = (*logits.shape[:-1], self.network.stoch, self.network.classes)
        return Categorical(logits.reshape(shape)).mixed(self.network.uniform)

    def _draw(self, latents: Categorical, noise: jax.Array | None) -> jax.Array:
        """Sample one-hot classes `[..., stoch, classes]`, with straight-through gradients of the probabilities."""
        classes = latents.mode() if noise is None else latents.of_uniform(noise)
        probability = jnp.exp(latents.log_probs())
        one_hot = jax.nn.one_hot(classes, self.network.classes, dtype=probability.dtype)
        return one_hot + (probability - jax.lax.stop_gradient(probability))


class PredictionModule(nnx.Module):
    """Module of `WorldModel.predictions`: decoder, reward head and continuation head."""

    def __init__(self, network: WorldModel, spec: EnvSpec, rngs: nnx.Rngs):
        self.leaves = tuple(spaces.leaves(spec.observation_space))
        features, units = _features(network), network.units
        vectors = sum(flat_size(leaf) for leaf in self.leaves if not is_image(leaf))
        self.vector = Stack(features, units, network.layers, vectors, rngs) if vectors else None
        for i, leaf in enumerate(self.leaves):
            if is_image(leaf):
                sizes = network.deter, network.stoch * network.classes, units, network.blocks
                decoder = ImageDecoder(*sizes, leaf, network.depths, network.kernel, rngs)
                setattr(self, f"image_{i}", decoder)
        self.reward = Stack(features, units, 1, BINS, rngs, scale=0.0)
        self.continues = Stack(features, units, 1, 1, rngs)
        self.negative = Stack(features, units, 1, 1, rngs) if spec.discounted else None

    def __call__(self, states: LatentState) -> Predictions:
        start, observation = 0, []
        flat = states.stoch.reshape((*states.deter.shape[:-1], -1))
        vector = None if self.vector is None else self.vector(states.features)
        for i, leaf in enumerate(self.leaves):
            if vector is None or is_image(leaf):
                observation.append(getattr(self, f"image_{i}")(states.deter, flat))
            else:
                observation.append(vector[..., start : start + flat_size(leaf)])
                start += flat_size(leaf)
        return Predictions(observation, self.outcome(states.features))

    def outcome(self, features: jax.Array) -> Outcome:
        """Predict the reward that arrived with a state, and the logits of the episode continuing after the state."""
        negative = None if self.negative is None else self.negative(features)[..., 0]
        return Outcome(TwoHot(self.reward(features)), self.continues(features)[..., 0], negative)


class CriticModule(nnx.Module):
    """Module of `WorldModel.critic`, which maps features of states to distributions of values."""

    def __init__(self, network: WorldModel, spec: EnvSpec, rngs: nnx.Rngs):
        self.value = Stack(_features(network), network.units, network.layers, BINS, rngs, scale=0.0)

    def __call__(self, features: jax.Array) -> TwoHot:
        return TwoHot(self.value(features))
