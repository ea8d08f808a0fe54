"""Distributed distributional deterministic policy gradients (Barth-Maron et al., 2018, arXiv:1804.08617)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import combined_replay, off_policy, q_learning, train_state
from jaxrl.algos.acting import DeterministicActing
from jaxrl.algos.base import algorithm, changed, field_problems, number
from jaxrl.algos.fields import (
    CombinedReplayFields,
    NStepFields,
    PrioritizedFields,
    SupportFields,
    TargetFields,
)
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.train_state import TrainState
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import Prioritized, by_priority
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    UpdateInfo,
)
from jaxrl.networks import ActionValues, CategoricalValues, Critic, QuantileValues


class D4PGState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


_HEADS = (ActionValues, CategoricalValues, QuantileValues)


@algorithm
class D4PG(DeterministicActing, TargetFields, PrioritizedFields, NStepFields, CombinedReplayFields, SupportFields):
    """DDPG with a distributional critic, n-step returns and prioritized replay."""

    n_step: int = changed(5)
    exploration_noise: Scalar = changed(0.3)
    critic: Critic = changed(Critic(ensemble=1, head=CategoricalValues(51)))
    quantile_huber: Scalar = number(
        1.0, above=0, only_with="critic.head=quantilevalues", help="Huber threshold, above which the loss is linear"
    )

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("D4PG", self.policy, self.critic, spec, stochastic=False, heads=_HEADS)
        return field_problems(self) + networks

    @property
    def experience(self) -> Mapping[str, Source]:
        prioritized = Prioritized(exponent=self.priority_exponent, beta=self.importance_exponent)
        replay = self.source(prioritized if self.prioritized else None, n_step=self.n_step)
        return self.combined_sources(replay)

    def init(self, key: jax.Array, spec: EnvSpec) -> D4PGState:
        policy_key, critic_key = jax.random.split(key)
        return D4PGState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer, target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=True),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def update(
        self, state: D4PGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[D4PGState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas)
        support = {"v_min": self.v_min, "v_max": self.v_max}

        next_action = off_policy.evaluate_policy(
            self.policy, state.policy.target_variables, replay.next_observation, spec
        )
        slow = state.critic.target_variables
        target = off_policy.smallest_target(self.critic, slow, replay, next_action, self.gamma, spec, **support)
        importance = replay.importance if self._by_priority else None

        def critic_loss(params):
            variables, huber = state.critic.variables.replace(params=params), self.quantile_huber
            return off_policy.critic_loss(
                self.critic,
                variables,
                replay,
                target,
                spec,
                replicas,
                importance=importance,
                quantile_huber=huber,
                **support,
            )

        gradients, fit = jax.grad(critic_loss, has_aux=True)(state.critic.params)
        critic, _ = train_state.apply_gradients(
            state.critic, gradients, self.critic_optimizer, replicas, fit.model_state
        )

        policy, loss = off_policy.dpg_step(
            self.policy, state.policy, self.policy_optimizer, self.critic, critic, replay, spec, replicas, **support
        )
        policy, critic = train_state.polyak_update(policy, self.tau), train_state.polyak_update(critic, self.tau)
        error = combined_replay.replay_part(fit.error, batch, replicas)
        priorities = {"replay": error + q_learning.LEAST_PRIORITY} if self._by_priority else {}
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        return D4PGState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics, priorities)

    @property
    def _by_priority(self) -> bool:
        return self.prioritized or by_priority(self.sampler, self.remover)
