"""Distributed distributional deterministic policy gradients (Barth-Maron et al., 2018, arXiv:1804.08617)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import newest, off_policy, q_learning, train_state
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.off_policy import ActingCarry, Statistics
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.train_state import TrainState
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.sources import Prioritized, Remover, Sampler, by_priority
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
from jaxrl.networks import Actor, CategoricalValues, Critic, resolve_network


class D4PGState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class D4PG:
    """DDPG with a distributional critic, n-step returns and prioritized replay."""

    learning_rate: Scalar = number(3e-4, above=0, help="learning rate of the critics")
    policy_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the policy; None: learning_rate")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor")
    tau: Scalar = number(0.005, above=0, high=1, help="Polyak fraction of new parameters at each target update")
    exploration_noise: Scalar = number(0.3, low=0, help="noise standard deviation, in units of half the action range")
    noise_correlation: float = static(
        0.0, low=0, below=1, help="correlation of exploration noise from step to step; 0: independent"
    )
    v_min: Scalar = number(-150.0, only_with="critic.head=categoricalvalues", help="lower end of the support")
    v_max: Scalar = number(150.0, only_with="critic.head=categoricalvalues", help="upper end of the support")
    quantile_huber: Scalar = number(
        1.0, above=0, only_with="critic.head=quantilevalues", help="Huber threshold, above which the loss is linear"
    )
    priority_exponent: Scalar = number(0.6, low=0, only_with="prioritized", help="exponent of the priorities (alpha)")
    importance_exponent: Scalar = number(
        Linear(0.4, 1.0), low=0, high=1, only_with="prioritized", help="importance exponent (beta)"
    )
    prioritized: bool = static(True, help="prioritized replay: sample by the last error")
    normalize_observation: bool = static(False, help="normalize observations by running mean and standard deviation")
    observation_clip: Scalar | None = number(
        10.0, above=0, only_with="normalize_observation", help="clip of normalized observations; None: no clipping"
    )
    n_step: int = static(5, low=1, help="number of rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="transitions that the replay buffer holds, over all environments")
    min_size: int = static(1_000, low=1, help="transitions collected with random actions before the first update")
    batch_size: int = static(256, low=1, help="transitions per update")
    rollout_length: int | None = static(
        None, low=1, help="steps of each environment per iteration; None: as many as make one update"
    )
    replay_ratio: float | None = static(1.0, above=0, help="gradient updates per environment step")
    samples_per_insert: float | None = static(
        None, above=0, help="transitions drawn per transition stored, in place of replay_ratio"
    )
    storage: Literal["ring", "table", "flashbax"] = static(
        "ring", choices=("ring", "table", "flashbax"), help="ring of rows, table of items, or flashbax (one-step only)"
    )
    sampler: Sampler | None = static(None, help="which item is drawn; None: by prioritized")
    remover: Remover | None = static(None, help="which item leaves a full table; None: the oldest")
    max_times_sampled: int = static(0, low=0, help="draws after which an item is removed; 0: no limit")
    newest: int = static(
        0, low=0, help="of each batch, so many are the newest transitions (combined experience replay)"
    )
    optimizer: Optimizer = number(Adam(eps=1e-8))
    policy: Network = static(Actor(stochastic=False))
    critic: Critic = static(Critic(ensemble=1, head=CategoricalValues(51)))

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            policy=resolve_network(self.policy, spec),
            critic=resolve_network(self.critic, spec),
            rollout_length=off_policy.rollout_length(self, num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("D4PG", self.policy, self.critic, spec, stochastic=False, categorical=True)
        problems = field_problems(self) + networks
        problems += off_policy.replay_problems(self, prioritized=self.prioritized)
        problems += newest.problems(self, recurrent=False)
        if isinstance(self.critic.head, CategoricalValues):
            problems += q_learning.support_problems("D4PG", self.v_min, self.v_max)
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        prioritized = Prioritized(exponent=self.priority_exponent, beta=self.importance_exponent)
        replay = off_policy.replay(self, prioritized if self.prioritized else None)
        return newest.sources(replay, self.newest)

    def init(self, key: jax.Array, spec: EnvSpec) -> D4PGState:
        policy_key, critic_key = jax.random.split(key)
        critic_optimizer = self.optimizer(self.learning_rate)
        return D4PGState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self._policy_optimizer(), target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), critic_optimizer, target=True),
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
        critic_optimizer = self.optimizer(self.learning_rate)
        critic, _ = train_state.apply_gradients(state.critic, gradients, critic_optimizer, replicas, fit.model_state)

        policy, loss = off_policy.dpg_step(
            self.policy, state.policy, self._policy_optimizer(), self.critic, critic, replay, spec, replicas, **support
        )
        policy, critic = train_state.polyak_update(policy, self.tau), train_state.polyak_update(critic, self.tau)
        error = newest.of_replay(fit.error, batch, replicas)
        priorities = {"replay": error + q_learning.LEAST_PRIORITY} if self._by_priority else {}
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        return D4PGState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics, priorities)

    @property
    def _by_priority(self) -> bool:
        return self.prioritized or by_priority(self.sampler, self.remover)

    def _policy_optimizer(self) -> optax.GradientTransformation:
        return off_policy.policy_optimizer(self.optimizer, self.policy_learning_rate, self.learning_rate)
