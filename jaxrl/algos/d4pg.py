"""Distributed distributional deterministic policy gradients (Barth-Maron et al., 2018, arXiv:1804.08617)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import newest, off_policy, q_learning, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, number
from jaxrl.algos.fields import (
    ActorCriticFields,
    CombinedReplayFields,
    ExplorationNoiseFields,
    NormalizationFields,
    NStepFields,
    PrioritizedFields,
    SupportFields,
)
from jaxrl.algos.off_policy import ActingCarry, Statistics
from jaxrl.algos.train_state import TrainState
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import Prioritized, by_priority
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    EnvSpec,
    Network,
    Replicas,
    Source,
    TimeStep,
    UpdateInfo,
)
from jaxrl.networks import Actor, CategoricalValues, Critic


class D4PGState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class D4PG(
    PrioritizedFields,
    NStepFields,
    CombinedReplayFields,
    NormalizationFields,
    ExplorationNoiseFields,
    SupportFields,
    ActorCriticFields,
):
    """DDPG with a distributional critic, n-step returns and prioritized replay."""

    n_step: int = changed(5)
    exploration_noise: Scalar = changed(0.3)
    policy: Network = changed(Actor(stochastic=False))
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
        networks = off_policy.problems("D4PG", self.policy, self.critic, spec, stochastic=False, categorical=True)
        problems = field_problems(self) + networks
        return problems

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

    def actor(self, state: D4PGState) -> ActorState:
        return off_policy.actor(state.policy, state.statistics, state.updates, noise=self.exploration_noise)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> ActingCarry:
        return off_policy.initial_carry(self.policy, spec, self.noise_correlation)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: ActingCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        action, memory = off_policy.act_from(self.policy, actor, timestep, carry.network, self.observation_clip, spec)
        noise = off_policy.next_noise(carry.noise, self.noise_correlation, timestep, key)
        action = off_policy.noisy_action(action, actor, key, spec=spec, explore=explore, noise=noise)
        return ActorOutput(action, ActingCarry(memory, noise))

    def update(
        self, state: D4PGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[D4PGState, UpdateInfo]:
        clip = self.observation_clip
        drawn = newest.drawn(batch, replicas)
        statistics, replay = off_policy.normalize_batch(state.statistics, drawn, clip, replicas)
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
        error = newest.of_replay(fit.error, batch, replicas)
        priorities = {"replay": error + q_learning.LEAST_PRIORITY} if self._by_priority else {}
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        return D4PGState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics, priorities)

    @property
    def _by_priority(self) -> bool:
        return self.prioritized or by_priority(self.sampler, self.remover)
