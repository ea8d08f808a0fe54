"""Deterministic policies that ascend their critic: DDPG and its extensions TD3 and D4PG.

Lillicrap et al. (2016, arXiv:1509.02971), Fujimoto et al. (2018, arXiv:1802.09477) and Barth-Maron et al. (2018,
arXiv:1804.08617).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import acting, combined_replay, off_policy, q_learning, train_state
from jaxrl.algos.acting import DeterministicActing
from jaxrl.algos.base import algorithm, changed, field_group, field_problems
from jaxrl.algos.fields import (
    CombinedReplayFields,
    DelayedPolicyFields,
    NStepFields,
    PrioritizedFields,
    QuantileFields,
    ResetFields,
    SequenceFields,
    SupportFields,
    TargetFields,
)
from jaxrl.algos.off_policy import CriticLoss, Statistics
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.train_state import TrainState, polyak_update
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import Prioritized
from jaxrl.core.types import EnvSpec, Replicas, Source, TransitionBatch, UpdateInfo
from jaxrl.networks import CategoricalValues, Critic


class DDPGState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


class TD3State(DDPGState):
    """State of the learner."""

    policy_loss: jax.Array  # at the policy's last step; most updates have none


@field_group
class DeterministicLearner(NStepFields, SupportFields, QuantileFields, ResetFields, DeterministicActing, TargetFields):
    """A deterministic policy and critics, with target networks of both."""

    def init(self, key: jax.Array, spec: EnvSpec) -> DDPGState:
        policy_key, critic_key = jax.random.split(key)
        return DDPGState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer, target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=True),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def _target_action(self, state: DDPGState, replay: TransitionBatch, spec: EnvSpec) -> jax.Array:
        """Return the target policy's actions at the next observations, [batch, n]."""
        return off_policy.evaluate_policy(self.policy, state.policy.target_variables, replay.next_observation, spec)

    def _target(self, state: DDPGState, replay: TransitionBatch, next_action: jax.Array, spec: EnvSpec) -> Returns:
        """Return the critics' target for each transition, by the smallest target critic."""
        slow = state.critic.target_variables
        return off_policy.smallest_target(self.critic, slow, replay, next_action, self.gamma, spec, **self.support)

    def _critic_step(
        self,
        critic: TrainState,
        replay: TransitionBatch,
        target: Returns,
        spec: EnvSpec,
        replicas: Replicas,
        importance: jax.Array | None = None,
    ) -> tuple[TrainState, CriticLoss]:
        options = self.support | {"quantile_huber": self.quantile_huber, "importance": importance}
        optimizer = self.critic_optimizer
        return off_policy.critic_step(self.critic, critic, optimizer, replay, target, spec, replicas, **options)

    def _policy_step(
        self, policy: TrainState, critic: TrainState, replay: TransitionBatch, spec: EnvSpec, replicas: Replicas
    ) -> tuple[TrainState, jax.Array]:
        optimizer = self.policy_optimizer
        return off_policy.dpg_step(
            self.policy, policy, optimizer, self.critic, critic, replay, spec, replicas, **self.support
        )


@field_group
class DelayedLearner(DeterministicLearner, DelayedPolicyFields):
    """TD3's update: smoothed target actions, and a step of the policy and the targets every `policy_delay` updates."""

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3State:
        return TD3State(**vars(super().init(key, spec)), policy_loss=jnp.float32(0.0))

    def update(
        self, state: TD3State, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[TD3State, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas, n_step=self.n_step)
        keys = off_policy.transition_keys(key, replay, replicas)
        target_action = self._target_action(state, replay, spec)
        smoothed = acting.smoothed_action(target_action, keys, self.target_noise, self.target_noise_clip, spec)
        target = self._target(state, replay, smoothed, spec)
        critic, fit = self._critic_step(state.critic, replay, target, spec, replicas)

        def policy_step(policy):
            return self._policy_step(policy, critic, replay, spec, replicas)

        updates = state.updates + 1
        due = updates % self.policy_delay == 0
        policy, critic, loss = off_policy.delayed_step(
            policy_step, state.policy, critic, state.policy_loss, due, self.tau, replicas
        )
        metrics = replicas.mean(fit.metrics) | {"policy_loss": loss}
        new = TD3State(policy, critic, statistics, updates, loss)
        return self.after_reset(new, key, spec), UpdateInfo(metrics)


@field_group
class DeterministicSequenceLearner(SequenceFields, CombinedReplayFields, DeterministicLearner):
    """Learner from single transitions, or from sequences if a network is recurrent."""

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        steps = self.steps_per_update_with_memory(num_envs)
        return dataclasses.replace(self, **self.resolved_networks(spec), rollout_length=steps)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        name = type(self).__name__
        networks = off_policy.problems(name, self.policy, self.critic, spec, stochastic=False, memory=True)
        return field_problems(self) + networks

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(self.source_with_memory())


@algorithm
class DDPG(DeterministicSequenceLearner):
    """Deep deterministic policy gradients: a deterministic policy that ascends its critic; uniform replay."""

    critic: Critic = changed(Critic(ensemble=1))

    def update(
        self, state: DDPGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DDPGState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas, n_step=self.n_step)
        target = self._target(state, replay, self._target_action(state, replay, spec), spec)
        critic, fit = self._critic_step(state.critic, replay, target, spec, replicas)
        policy, loss = self._policy_step(state.policy, critic, replay, spec, replicas)
        policy, critic = polyak_update(policy, self.tau), polyak_update(critic, self.tau)
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        new = DDPGState(policy, critic, statistics, state.updates + 1)
        return self.after_reset(new, key, spec), UpdateInfo(metrics)


@algorithm
class TD3(DeterministicSequenceLearner, DelayedLearner):
    """Twin delayed DDPG: the smaller of two critics, smoothed target actions, delayed policy updates."""

    min_size: int = changed(5_000)
    noise_correlation: float = changed(0.9, before=0.0)


@algorithm
class D4PG(PrioritizedFields, CombinedReplayFields, DeterministicLearner):
    """DDPG with a distributional critic, n-step returns and prioritized replay."""

    n_step: int = changed(5)
    exploration_noise: Scalar = changed(0.3)
    critic: Critic = changed(Critic(ensemble=1, head=CategoricalValues(51)))

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        steps = self.steps_per_update(num_envs)
        return dataclasses.replace(self, **self.resolved_networks(spec), rollout_length=steps)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("D4PG", self.policy, self.critic, spec, stochastic=False)
        return field_problems(self) + networks

    @property
    def experience(self) -> Mapping[str, Source]:
        prioritized = Prioritized(exponent=self.priority_exponent, beta=self.importance_exponent)
        replay = self.source(prioritized if self.prioritized else None, n_step=self.n_step)
        return self.combined_sources(replay)

    def update(
        self, state: DDPGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DDPGState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas)
        target = self._target(state, replay, self._target_action(state, replay, spec), spec)
        importance = replay.importance if combined_replay.sources_by_priority(self.experience) else None
        critic, fit = self._critic_step(state.critic, replay, target, spec, replicas, importance)
        policy, policy_loss = self._policy_step(state.policy, critic, replay, spec, replicas)
        policy, critic = polyak_update(policy, self.tau), polyak_update(critic, self.tau)
        priority = fit.error + q_learning.LEAST_PRIORITY
        priorities = combined_replay.priorities(priority, self.experience, batch, replicas)
        metrics = replicas.mean(fit.metrics | {"policy_loss": policy_loss})
        new = DDPGState(policy, critic, statistics, state.updates + 1)
        return self.after_reset(new, key, spec), UpdateInfo(metrics, priorities)
