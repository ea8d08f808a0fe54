"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv:1509.02971)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy, train_state
from jaxrl.algos.acting import DeterministicActing
from jaxrl.algos.base import algorithm, changed, field_problems
from jaxrl.algos.fields import (
    CombinedReplayFields,
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
from jaxrl.networks import Critic


class DDPGState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class DDPG(DeterministicActing, TargetFields, SequenceFields, CombinedReplayFields):
    """Deep deterministic policy gradients: a deterministic policy that ascends its critic; uniform replay."""

    critic: Critic = changed(Critic(ensemble=1))

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update_with_memory(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return field_problems(self) + off_policy.problems(
            "DDPG", self.policy, self.critic, spec, stochastic=False, memory=True
        )

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(self.source_with_memory())

    def init(self, key: jax.Array, spec: EnvSpec) -> DDPGState:
        policy_key, critic_key = jax.random.split(key)
        return DDPGState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer, target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=True),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def update(
        self, state: DDPGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DDPGState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas, n_step=self.n_step)
        next_action = off_policy.evaluate_policy(
            self.policy, state.policy.target_variables, replay.next_observation, spec
        )
        slow = state.critic.target_variables
        target = off_policy.smallest_target(self.critic, slow, replay, next_action, self.gamma, spec)
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas
        )

        policy, loss = off_policy.dpg_step(
            self.policy, state.policy, self.policy_optimizer, self.critic, critic, replay, spec, replicas
        )
        policy, critic = train_state.polyak_update(policy, self.tau), train_state.polyak_update(critic, self.tau)
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        return DDPGState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics)
