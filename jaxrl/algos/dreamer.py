"""DreamerV3 (Hafner et al., 2025, arXiv:2301.04104): an actor-critic that learns in the imagination of a world model.

Equation numbers are those of the paper. Where the published code (github.com/danijar/dreamerv3) differs from the paper,
we follow the code: in the optimizer, the critic's loss on replayed rewards, and the gradients that reach the model.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import q_learning, returns, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, network_problems, number, static
from jaxrl.algos.fields import DiscountFields, Memory, MemoryFields
from jaxrl.algos.optimizers import LaProp, Optimizer
from jaxrl.algos.returns import Segment
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    SEQUENCE_INPUTS,
    ActorOutput,
    ActorState,
    EnvSpec,
    Metrics,
    ModelState,
    NetworkInputs,
    Params,
    PyTree,
    Replicas,
    SequenceBatch,
    Source,
    TimeStep,
    UpdateInfo,
)
from jaxrl.networks.torsos import flat_size, flatten
from jaxrl.networks.two_hot import symlog
from jaxrl.networks.world_model import (
    LatentCarry,
    LatentState,
    Observed,
    Predictions,
    WorldModel,
    latent_noise,
)
from jaxrl.networks.world_model_layers import image, is_image


class DreamerState(struct.PyTreeNode):
    """State of the learner."""

    network: TrainState  # parameters of "model", "predictions" and "critic"
    slow_critic: Params
    return_range: jax.Array  # float32 [2], running 5th and 95th percentiles of imagined returns


class Imagined(struct.PyTreeNode):
    """Imagined trajectories of `H` steps from `N` states, without gradient."""

    features: jax.Array  # [H + 1, N, features]
    action: PyTree  # [H, N, ...]
    mask: PyTree | None  # [H, N, ...] of the actions that were allowed
    returns: jax.Array  # [H, N] lambda-returns
    values: jax.Array  # [H + 1, N]
    weight: jax.Array  # [H, N], discounted probability that the episode continues


@algorithm
class Dreamer(MemoryFields, DiscountFields):
    """DreamerV3: a world model learned from replayed sequences, and a policy learned from imagined trajectories."""

    learning_rate: Scalar = number(4e-5, above=0, help="learning rate")
    gamma: Scalar = changed(0.997)
    return_lambda: Scalar = number(0.95, low=0, high=1, help="lambda of the lambda-returns")
    entropy_cost: Scalar = number(3e-4, low=0, help="weight of the policy's entropy bonus")
    free_nats: Scalar = number(1.0, low=0, help="KL divergence below which the latents are not penalized")
    observation_scale: Scalar = number(1.0, low=0, help="weight of the observation reconstruction loss")
    dynamics_scale: Scalar = number(
        1.0, low=0, help="weight of the dynamics loss, which trains the prior to predict the latents"
    )
    representation_scale: Scalar = number(
        0.1, low=0, help="weight of the representation loss, which makes the latents predictable"
    )
    replay_value_scale: Scalar = number(0.3, low=0, help="weight of the critic loss on replayed sequences")
    return_decay: Scalar = number(0.99, low=0, below=1, help="decay rate of the running percentiles of returns")
    tau: Scalar = number(0.02, above=0, high=1, help="soft update coefficient of the slow critic")
    imagination_length: int = static(15, low=1, help="number of steps of imagined trajectories")
    memory: Memory = changed(Memory(length=64, burn_in=0), only_with=None)
    min_size: int = changed(1_024, help="transitions collected before the first update")
    batch_size: int = changed(16, help="sequences per update")
    rollout_length: int | None = changed(
        None, help="steps per environment and iteration; None: a quarter of memory.length"
    )
    replay_ratio: float | None = changed(0.03125)
    optimizer: Optimizer = number(LaProp(warm_up=1_000.0))
    network: WorldModel = static(WorldModel())

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, rollout_length=self.steps_per_update(num_envs))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = field_problems(self)
        for leaf in spaces.leaves(spec.action_space):
            if isinstance(leaf, spaces.Box) and not (leaf.bounded and (leaf.low < leaf.high).all()):
                problems.append(f"Dreamer needs bounded actions, but {spec.name} has {leaf!r}; use PPO")
        if not isinstance(self.network, WorldModel):
            return [*problems, f"Dreamer.network={self.network!r:.80} must be a jaxrl.networks.WorldModel"]
        return problems or network_problems("Dreamer.network", self.network, spec, SEQUENCE_INPUTS)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": self.source(sequence=self.sequence)}

    def init(self, key: jax.Array, spec: EnvSpec) -> DreamerState:
        model, predictions, critic = jax.random.split(key, 3)
        params = {
            "model": self.network.init(model, spec)[0],
            "predictions": self.network.predictions.init(predictions, spec)[0],
            "critic": self.network.critic.init(critic, spec)[0],
        }
        slow = jax.tree.map(jnp.copy, params["critic"])
        return DreamerState(train_state.create(params, (), self._transformation), slow, jnp.zeros((2,), jnp.float32))

    def actor(self, state: DreamerState) -> ActorState:
        return ActorState(state.network.params["model"])

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> LatentCarry:
        return self.network.initial_carry(spec)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: LatentCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        latent_key, action_key = jax.vmap(jax.random.split, out_axes=1)(key) if explore else (None, None)
        inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x: x[None], timestep))
        policy, carry, _ = self.network.apply(
            actor.params, inputs, carry, spec=spec, model_state=(), train=False, key=latent_key
        )
        policy = jax.tree.map(lambda x: x[0], policy)
        return ActorOutput(policy.mode() if action_key is None else policy.sample(action_key), carry)

    def update(
        self, state: DreamerState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DreamerState, UpdateInfo]:
        [drawn] = batch.values()
        keys = q_learning.transition_keys(key, drawn.mask.shape[1], replicas)
        found = train_state.gradient(self._loss, state.network, state, drawn, keys, spec, replicas)
        network, norm, (metrics, return_range) = found.step(self._transformation, replicas)
        slow = optax.incremental_update(network.params["critic"], state.slow_critic, self.tau)
        metrics = replicas.mean(metrics) | {"return_scale": return_scale(return_range), "gradient_norm": norm}
        return DreamerState(network, slow, return_range), UpdateInfo(metrics)

    @property
    def _transformation(self) -> optax.GradientTransformation:
        return self.optimizer(self.learning_rate)

    def _loss(
        self,
        learned: Variables,
        state: DreamerState,
        batch: SequenceBatch,
        keys: jax.Array,
        spec: EnvSpec,
        replicas: Replicas,
    ) -> tuple[jax.Array, tuple[tuple[Metrics, jax.Array], ModelState]]:
        """Return this device's share of the loss, with metrics and the new percentiles of returns."""
        params = learned.params
        observing, imagining = jax.vmap(jax.random.split, out_axes=1)(keys)
        observed, batch = observe(self.network, params["model"], batch, observing, spec)
        timesteps, count = batch.timesteps, batch.mask.astype(jnp.float32)
        predicted = self.network.predictions.call(params["predictions"], spec, lambda module: module(observed.states))
        losses = model_losses(observed, predicted, timesteps, spec.observation_space, self.free_nats)
        features = observed.states.features
        legal = self.network.call(params["model"], spec, lambda module: module.legal_logits(features))
        if legal is not None:
            losses["mask_loss"] = mask_loss(legal, timesteps.action_mask, spec.action_space)

        start = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), jax.lax.stop_gradient(observed.states))
        imagined = self._imagine(jax.lax.stop_gradient(params), start, imagining, spec)
        newest = percentiles(imagined.returns, replicas)
        return_range = self.return_decay * state.return_range + (1.0 - self.return_decay) * newest
        advantage = (imagined.returns - imagined.values[:-1]) / return_scale(return_range)
        features = imagined.features[:-1]
        policy = self.network.call(params["model"], spec, lambda module: module.policy(features, imagined.mask))
        entropy = policy.entropy()
        reinforce = -(policy.log_prob(imagined.action) * advantage + self.entropy_cost * entropy)

        def critic_loss(features, target):
            """Return the critic's loss for the targets, plus that for the slow critic's predictions."""
            critic = self.network.critic
            slow = critic.call(state.slow_critic, spec, lambda module: module(features).mean())
            values = critic.call(params["critic"], spec, lambda module: module(features))
            return values.loss(target) + values.loss(slow)

        imagined_losses = {"policy_loss": reinforce, "critic_loss": critic_loss(features, imagined.returns)}
        losses |= {
            name: jnp.mean(imagined.weight * x, axis=0).reshape(count.shape) for name, x in imagined_losses.items()
        }
        # A state's imagined return is used as its value, so that replayed returns also follow the newest policy.
        value, rows = imagined.returns[0].reshape(count.shape), jax.tree.map(lambda x: x[:-1], batch.rows)
        replayed = returns.lambda_returns(Segment.of_rows(rows, value[:-1], value[-1]), self.gamma, self.return_lambda)
        replay_loss = jnp.where(rows.weight, critic_loss(observed.states.features[:-1], replayed), 0.0)
        means = {name: weighted_mean(x, count, replicas) for name, x in losses.items()}
        means["replay_critic_loss"] = weighted_mean(replay_loss, count[:-1], replicas)
        scales = {
            "observation_loss": self.observation_scale,
            "dynamics_loss": self.dynamics_scale,
            "representation_loss": self.representation_scale,
            "replay_critic_loss": self.replay_value_scale,
        }
        loss = jnp.sum(jnp.stack([scales.get(name, 1.0) * x for name, x in means.items()]))
        figures = {"entropy": entropy, "imagined_return": imagined.returns, "imagined_value": imagined.values}
        return loss, ((means | {"loss": loss} | jax.tree.map(jnp.mean, figures), return_range), ())

    def _imagine(self, params: Params, start: LatentState, keys: jax.Array, spec: EnvSpec) -> Imagined:
        """Imagine trajectories of the policy in the model.

        Args:
          params: the learner's parameters, without gradient.
          start: the first states [N], which are the flattened rows of sequences.
          keys: one key per sequence.
          spec: the environment's spec.
        """
        steps, rows = self.imagination_length, start.deter.shape[0] // keys.shape[0]
        latent_key, action_key = jax.vmap(jax.random.split, out_axes=1)(keys)
        noise = latent_noise(latent_key, (steps, rows, self.network.stoch))
        action_keys = jax.vmap(lambda key: jax.random.split(key, (steps, rows)), out_axes=2)(action_key)
        inputs = noise.reshape((steps, -1, self.network.stoch)), action_keys.reshape((steps, -1))

        def unroll(module):
            def step(state, inputs):
                noise, keys = inputs
                mask = module.likely_mask(state.features)
                action = module.policy(state.features, mask).sample(keys)
                state = module.imagine(state, spaces.clip(action, spec.action_space), noise)
                return state, (state.features, action, mask)

            return jax.lax.scan(step, start, inputs)[1]

        features, action, mask = self.network.call(params["model"], spec, unroll)
        features = jnp.concatenate([start.features[None], features])
        outcome = self.network.predictions.call(params["predictions"], spec, lambda module: module.outcome(features))
        reward, continues = outcome.reward.mean(), jax.nn.sigmoid(outcome.continues)
        values = self.network.critic.call(params["critic"], spec, lambda module: module(features).mean())
        never = jnp.zeros(reward[1:].shape, bool)
        segment = Segment(reward[1:], values[:-1], values[-1], never, never, ~never, outcome.discount[1:])
        weight = jnp.cumprod(jnp.concatenate([continues[:1], self.gamma * continues[1:-1]]), axis=0)
        return Imagined(
            features=features,
            action=action,
            mask=mask,
            returns=returns.lambda_returns(segment, self.gamma, self.return_lambda),
            values=values,
            weight=weight,
        )


def observe(
    network: WorldModel, params: Params, batch: SequenceBatch, keys: jax.Array, spec: EnvSpec
) -> tuple[Observed, SequenceBatch]:
    """Return the model's states for the rows after the burn-in, and the sequences without the burn-in.

    Args:
      network, params: the model and its parameters.
      batch: sequences, with the states stored while acting before their first rows.
      keys: keys [batch] for sampling latents.
      spec: the environment's spec.
    """
    noise = latent_noise(keys, (batch.mask.shape[0], network.stoch))

    def unroll(params, carry, time):
        inputs = NetworkInputs.of_timesteps(batch.timesteps[time])
        return network.call(params, spec, lambda module: module.observe(inputs, carry, noise[time]))

    carry, rest = batch.carry, slice(batch.burn_in, None)
    if batch.burn_in:
        carry = unroll(jax.lax.stop_gradient(params), carry, slice(batch.burn_in))[1]
    rows, timesteps, mask = jax.tree.map(lambda x: x[rest], (batch.rows, batch.timesteps, batch.mask))
    return unroll(params, carry, rest)[0], batch.replace(rows=rows, timesteps=timesteps, mask=mask, burn_in=0)


def model_losses(
    observed: Observed, predicted: Predictions, timesteps: TimeStep, space: spaces.Space, free_nats: Scalar
) -> Metrics:
    """Return the model's losses of each time step, [T, B] (equations 2 and 3).

    Rewards and terminations are predicted from the observation that follows the action, so an episode's last
    observation counts like any other, and only a termination ends an imagined trajectory. If the environment has its
    own discounts, their magnitude is predicted as a continuation probability, and their sign separately: it is negative
    if the other of two players moves next.

    Args:
      observed: the model's states at the time steps.
      predicted: predictions from these states.
      timesteps: time steps [T, B].
      space: the observation space.
      free_nats: KL divergence below which the latents are not penalized.
    """
    posterior, prior = observed.posterior, observed.prior
    fixed_posterior, fixed_prior = jax.lax.stop_gradient((posterior, prior))
    outcome, discount = predicted.outcome, timesteps.discount
    if discount is None:
        discount = (~timesteps.terminated).astype(jnp.float32)
    losses = {
        "observation_loss": observation_loss(predicted.observation, timesteps.observation, space),
        "reward_loss": outcome.reward.loss(timesteps.reward),
        "continue_loss": optax.sigmoid_binary_cross_entropy(outcome.continues, jnp.abs(discount)),
        "dynamics_loss": jnp.maximum(jnp.sum(fixed_posterior.kl(prior), axis=-1), free_nats),
        "representation_loss": jnp.maximum(jnp.sum(posterior.kl(fixed_prior), axis=-1), free_nats),
    }
    if outcome.negative is not None:
        negative = (discount < 0.0).astype(jnp.float32)
        wrong = optax.sigmoid_binary_cross_entropy(outcome.negative, negative)
        losses["sign_loss"] = jnp.where(discount != 0.0, wrong, 0.0)
    return losses


def observation_loss(predicted: list[jax.Array], observation: PyTree, space: spaces.Space) -> jax.Array:
    """Return the decoder's loss [...]: squared errors of images and symlog values, cross-entropies of categories.

    The errors are summed over the parts of the observation.
    """
    total = jnp.float32(0.0)
    for x, target, leaf in zip(predicted, jax.tree.leaves(observation), spaces.leaves(space), strict=True):
        if is_image(leaf):
            total += jnp.sum(jnp.square(x - image(target, leaf)), axis=(-3, -2, -1))
        elif isinstance(leaf, spaces.Box):
            total += jnp.sum(jnp.square(x - symlog(flatten(target, leaf))), axis=-1)
        else:
            sizes = (leaf.n,) if isinstance(leaf, spaces.Discrete) else leaf.nvec
            ends = list(itertools.accumulate(sizes))[:-1]
            log_probs = [jax.nn.log_softmax(part, axis=-1) for part in jnp.split(x, ends, axis=-1)]
            total -= jnp.sum(flatten(target, leaf) * jnp.concatenate(log_probs, axis=-1), axis=-1)
    return total


def mask_loss(logits: jax.Array, mask: PyTree, space: spaces.Space) -> jax.Array:
    """Return the loss [...] of predicting which discrete actions are allowed, summed over the logits [..., n]."""

    def flat(space, mask):
        if isinstance(space, spaces.Composite):
            parts = spaces.optional_parts(space, mask)
            return [x for key, child in space.items for x in flat(child, parts[key])]
        if isinstance(space, spaces.Box):
            return []
        return [jnp.ones((*logits.shape[:-1], flat_size(space)), bool) if mask is None else mask]

    allowed = jnp.concatenate(flat(space, mask), axis=-1).astype(logits.dtype)
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, allowed), axis=-1)


def percentiles(x: jax.Array, replicas: Replicas) -> jax.Array:
    """Return the 5th and 95th percentiles, [2], of the values on all devices."""
    if replicas.devices > 1:
        device = replicas.first_shard // replicas.shards
        everywhere = jnp.zeros((replicas.devices, *x.shape), x.dtype)
        x = replicas.sum(jax.lax.dynamic_update_index_in_dim(everywhere, x, device, 0))
    return jnp.percentile(x, jnp.asarray([5.0, 95.0], x.dtype))


def return_scale(return_range: jax.Array) -> jax.Array:
    """Return the divisor of returns: the width of their range [2], at least 1, so that small noise stays small."""
    return jnp.maximum(return_range[1] - return_range[0], 1.0)
