"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), with a learned or a fixed temperature.

Where actions are discrete, expectations over them are exact (Christodoulou, 2019, arXiv:1910.07207). From
demonstrations without rewards it is SQIL (Reddy et al., 2019, arXiv:1905.11108).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.algos import imitation, off_policy, q_learning, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, field_problems, static
from jaxrl.algos.fields import CombinedReplayFields, SequenceFields, TargetFields, TemperatureFields
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.optimizers import Number
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.types import (
    EnvSpec,
    PyTree,
    Replicas,
    Source,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import Categorical, Critic, TanhGaussian


class SACState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    critic: TrainState
    log_temperature: TrainState  # a float32 scalar; () throughout where the temperature is fixed
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class SAC(StochasticActing, SequenceFields, CombinedReplayFields, TargetFields, TemperatureFields):
    """Soft actor-critic: a stochastic policy that maximizes reward and entropy, with two critics; uniform replay."""

    random_correlation: float | None = changed(0.9, before=None)
    imitate: bool = static(
        False, help="SQIL: a dataset's demonstrations are half of each batch, with reward 1, and others 0"
    )

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update_with_memory(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems(
            "SAC", self.policy, self.critic, spec, stochastic=True, discrete=True, memory=True
        )
        problems = field_problems(self) + networks
        if self.imitate and (self.newest or self.view):
            what = f"newest={self.newest} and view={self.view}"
            problems.append(f"SAC.imitate=True learns without parts of its own experience; {what} must be 0 and None")
        if self.imitate and self.recurrent:
            problems.append("SAC.imitate=True learns from single transitions; use networks without a recurrent core")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        replay = self.source_with_memory()
        return imitation.sources(replay) if self.imitate else self.combined_sources(replay)

    def init(self, key: jax.Array, spec: EnvSpec) -> SACState:
        policy_key, critic_key = jax.random.split(key)
        return SACState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=True),
            log_temperature=initial_temperature(self),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def update(
        self, state: SACState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[SACState, UpdateInfo]:
        if self.imitate:
            batch = {"replay": imitation.rewarded(batch, replicas)}
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas, n_step=self.n_step)
        next_key, key = (off_policy.transition_keys(k, replay, replicas) for k in jax.random.split(key))
        temperature = temperature_of(self, state.log_temperature)

        # The critics (equations 5 and 6).
        observation, mask = replay.next_observation, replay.next_action_mask
        next_policy = off_policy.evaluate_policy(self.policy, state.policy.variables, observation, spec, mask)
        value, log_prob, _ = value_and_log_prob(
            self.critic, state.critic.target_variables, next_policy, observation, mask, next_key, spec
        )
        target = off_policy.expected_target(replay, value - temperature * log_prob, self.gamma)
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas
        )

        policy, loss, log_prob = policy_step(self, state.policy, critic, replay, temperature, key, spec, replicas)
        log_temperature = temperature_step(self, state.log_temperature, replay, log_prob, spec, replicas)
        metrics = {"policy_loss": loss, "entropy": weighted_mean(-log_prob, replay.weight, replicas)}
        metrics = replicas.mean(fit.metrics | metrics) | {"temperature": temperature}
        critic = train_state.polyak_update(critic, self.tau)
        return SACState(policy, critic, log_temperature, statistics, state.updates + 1), UpdateInfo(metrics)


def value_and_log_prob(
    network: Critic,
    critic: Variables,
    distribution: Categorical | TanhGaussian,
    observation: PyTree,
    mask: jax.Array | None,
    key: jax.Array,
    spec: EnvSpec,
    *,
    v_min: Number = 0.0,
    v_max: Number = 0.0,
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the smallest critic's value of the policy's action, its log-probability, and the critics' output.

    Both are [batch], of an action sampled with keys [batch] from a box; expectations over all actions where they are
    discrete. The log-density is over actions in [-1, 1]: units should not matter. `v_min` and `v_max` are the ends of
    the support of a categorical head.
    """

    def evaluated(action):
        output = off_policy.evaluate_critic(network, critic, observation, action, spec, mask)
        return jnp.min(q_learning.action_values(output, v_min, v_max), axis=0), output

    if isinstance(distribution, Categorical):
        values, output = evaluated(None)
        return off_policy.expected_value(distribution, values), -distribution.entropy(), output
    action, log_prob = distribution.sample_and_log_prob(key)
    values, output = evaluated(action)
    return values[:, 0], log_prob + log_half_range(spec.action_space), output


def policy_step(
    algo: TemperatureFields,
    policy: TrainState,
    critic: TrainState,
    batch: TransitionBatch,
    temperature: Number,
    key: jax.Array,
    spec: EnvSpec,
    replicas: Replicas,
    *,
    value_of: Callable[[Any, jax.Array], jax.Array] = lambda distribution, value: value,
) -> tuple[TrainState, jax.Array, jax.Array]:
    """Take a step of the policy up the smallest critic's value and its own entropy (equation 9).

    Args:
      algo: gives the networks and the optimizer.
      policy, critic: their training states.
      batch: transitions, normalized.
      temperature: weight of the entropy.
      key: keys [batch].
      spec: of the environment.
      replicas: as passed to `update`.
      value_of: replaces the values [batch], from the policy's distributions and those values.

    Returns:
      The policy after the step, this device's loss before it, and the log-probabilities [batch] of what it does.
    """
    observation, mask = batch.observation, batch.action_mask

    def loss(params):
        variables = policy.variables.replace(params=params)
        distribution, model_state = off_policy.train_policy(algo.policy, variables, observation, spec, mask)
        value, log_prob, _ = value_and_log_prob(
            algo.critic, critic.variables, distribution, observation, mask, key, spec
        )
        value = value_of(distribution, value)
        loss = weighted_mean(temperature * log_prob - value, batch.weight, replicas)
        return loss, (loss, log_prob, model_state)

    gradients, (before, log_prob, model_state) = jax.grad(loss, has_aux=True)(policy.params)
    policy, _ = train_state.apply_gradients(policy, gradients, algo.policy_optimizer, replicas, model_state)
    return policy, before, log_prob


def initial_temperature(algo: TemperatureFields) -> TrainState:
    """Return the initial log(alpha), a float32 scalar; () where the temperature is fixed."""
    log_temperature = jnp.log(jnp.asarray(algo.temperature, jnp.float32)) if algo.learn_temperature else ()
    return train_state.create(log_temperature, (), algo.temperature_optimizer)


def temperature_of(algo: TemperatureFields, log_temperature: TrainState) -> Number:
    """Return the weight of the entropy, learned or fixed."""
    return jnp.exp(log_temperature.params) if algo.learn_temperature else algo.temperature


def temperature_step(
    algo: TemperatureFields,
    log_temperature: TrainState,
    batch: TransitionBatch,
    log_prob: jax.Array,
    spec: EnvSpec,
    replicas: Replicas,
) -> TrainState:
    """Take a step of log(alpha), if it is learned, towards the target entropy (equation 18).

    Args:
      algo: gives the target and the optimizer.
      log_temperature: as it is.
      batch: transitions.
      log_prob: [batch], of the policy's actions there.
      spec: of the environment.
      replicas: as passed to `update`.
    """
    if not algo.learn_temperature:
        return log_temperature
    target = target_entropy(batch, algo.target_entropy, algo.target_entropy_fraction, spec)
    missing = weighted_mean(log_prob + target, batch.weight, replicas)
    # The loss is -log(alpha) times the missing entropy: log_prob is a sample, and has no gradient here.
    return train_state.apply_gradients(log_temperature, -missing, algo.temperature_optimizer, replicas)[0]


def target_entropy(batch: TransitionBatch, per_dimension: Number, fraction: Number, spec: EnvSpec) -> jax.Array:
    """Return the temperature's target entropy [batch] for each transition's observation.

    Args:
      batch: transitions.
      per_dimension: of a box in [-1, 1], in nats.
      fraction: of the largest entropy over the discrete actions that are allowed.
      spec: of the environment.
    """
    if isinstance(spec.action_space, spaces.Box):
        return jnp.full_like(batch.weight, per_dimension * spec.action_space.shape[0], jnp.float32)
    allowed = spaces.expect(spec.action_space, spaces.Discrete).n
    if batch.action_mask is not None:
        allowed = jnp.maximum(jnp.sum(batch.action_mask, axis=-1), 1)
    return jnp.broadcast_to(fraction * jnp.log(jnp.float32(allowed)), batch.weight.shape)


def log_half_range(space: spaces.Space) -> float:
    """Return the logarithm of a box's volume in units of the sides of [-1, 1]; 0 of discrete actions."""
    if not isinstance(space, spaces.Box):
        return 0.0
    return float(np.sum(np.log(0.5 * (space.high.astype(np.float64) - space.low))))
