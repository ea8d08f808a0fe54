"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018, arXiv:1802.09477)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import acting, off_policy, train_state
from jaxrl.algos.acting import DeterministicActing
from jaxrl.algos.base import algorithm, changed, field_problems
from jaxrl.algos.fields import (
    CombinedReplayFields,
    DelayedPolicyFields,
    SequenceFields,
    TargetFields,
)
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.train_state import TrainState
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    UpdateInfo,
)


class TD3State(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32
    policy_loss: jax.Array  # at the policy's last step: most updates have none


@algorithm
class TD3(DeterministicActing, TargetFields, SequenceFields, CombinedReplayFields, DelayedPolicyFields):
    """Twin delayed DDPG: the smaller of two critics, smoothed target actions, delayed policy updates."""

    min_size: int = changed(5_000)
    noise_correlation: float = changed(0.9, before=0.0)

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update_with_memory(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return field_problems(self) + off_policy.problems(
            "TD3", self.policy, self.critic, spec, stochastic=False, memory=True
        )

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(self.source_with_memory())

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3State:
        policy_key, critic_key = jax.random.split(key)
        return TD3State(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer, target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=True),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
            policy_loss=jnp.float32(0.0),
        )

    def update(
        self, state: TD3State, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[TD3State, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas, n_step=self.n_step)
        following = off_policy.evaluate_policy(
            self.policy, state.policy.target_variables, replay.next_observation, spec
        )
        keys = off_policy.transition_keys(key, replay, replicas)
        next_action = acting.smoothed_action(following, keys, self.target_noise, self.target_noise_clip, spec)
        slow = state.critic.target_variables
        target = off_policy.smallest_target(self.critic, slow, replay, next_action, self.gamma, spec)
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas
        )

        def policy_step(policy):
            return off_policy.dpg_step(
                self.policy, policy, self.policy_optimizer, self.critic, critic, replay, spec, replicas
            )

        updates = state.updates + 1
        due = updates % self.policy_delay == 0
        policy, critic, loss = off_policy.delayed_step(
            policy_step, state.policy, critic, state.policy_loss, due, self.tau, replicas
        )
        metrics = replicas.mean(fit.metrics) | {"policy_loss": loss}
        return TD3State(policy, critic, statistics, updates, loss), UpdateInfo(metrics)
