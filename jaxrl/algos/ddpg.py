"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv:1509.02971)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import histories, newest, off_policy, train_state
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.off_policy import ActingCarry, Statistics
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.train_state import TrainState
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import PlainRemover, PlainSampler
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
from jaxrl.networks import Actor, Critic, resolve_network


class DDPGState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class DDPG:
    """Deep deterministic policy gradients: a deterministic policy that ascends its critic; uniform replay."""

    learning_rate: Scalar = number(3e-4, above=0, help="learning rate of the critics")
    policy_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the policy; None: learning_rate")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor")
    tau: Scalar = number(0.005, above=0, high=1, help="Polyak fraction of new parameters at each target update")
    exploration_noise: Scalar = number(0.1, low=0, help="noise standard deviation, in units of half the action range")
    noise_correlation: float = static(
        0.0, low=0, below=1, help="correlation of exploration noise from step to step; 0: independent"
    )
    normalize_observation: bool = static(False, help="normalize observations by running mean and standard deviation")
    observation_clip: Scalar | None = number(
        10.0, above=0, only_with="normalize_observation", help="clip of normalized observations; None: no clipping"
    )
    sequence_length: int = static(
        17,
        low=2,
        only_with="policy.recurrent or critic.recurrent",
        help="time steps per sequence, the last of which only bootstraps",
    )
    burn_in: int = static(
        8,
        low=0,
        only_with="policy.recurrent or critic.recurrent",
        help="steps before each sequence that only warm up recurrent states",
    )
    n_step: int = static(1, low=1, help="number of rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="transitions that the replay buffer holds, over all environments")
    min_size: int = static(1_000, low=1, help="transitions collected with random actions before the first update")
    batch_size: int = static(256, low=1, help="transitions per update; of sequences as many as are whole")
    rollout_length: int | None = static(
        None,
        low=1,
        help="steps of each environment per iteration; None: those of one update, or a quarter of a sequence",
    )
    replay_ratio: float | None = static(1.0, above=0, help="gradient updates per environment step")
    samples_per_insert: float | None = static(
        None, above=0, help="transitions drawn per transition stored, in place of replay_ratio"
    )
    storage: Literal["ring", "table", "flashbax"] = static(
        "ring", choices=("ring", "table", "flashbax"), help="ring of rows, table of items, or flashbax (one-step only)"
    )
    sampler: PlainSampler | None = static(None, help="which item is drawn; None: uniformly")
    remover: PlainRemover | None = static(None, help="which item leaves a full table; None: the oldest")
    max_times_sampled: int = static(0, low=0, help="draws after which an item is removed; 0: no limit")
    newest: int = static(
        0, low=0, help="of each batch, so many are the newest transitions (combined experience replay)"
    )
    optimizer: Optimizer = number(Adam(eps=1e-8))
    policy: Network = static(Actor(stochastic=False))
    critic: Critic = static(Critic(ensemble=1))

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            policy=resolve_network(self.policy, spec),
            critic=resolve_network(self.critic, spec),
            rollout_length=off_policy.rollout_length_with_memory(self, num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("DDPG", self.policy, self.critic, spec, stochastic=False, memory=True)
        found = field_problems(self) + off_policy.replay_problems(self) + networks
        return found + newest.problems(self, off_policy.is_recurrent(self))

    @property
    def experience(self) -> Mapping[str, Source]:
        return newest.sources(off_policy.replay_with_memory(self), self.newest)

    def init(self, key: jax.Array, spec: EnvSpec) -> DDPGState:
        policy_key, critic_key = jax.random.split(key)
        critic_optimizer = self.optimizer(self.learning_rate)
        return DDPGState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self._policy_optimizer(), target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), critic_optimizer, target=True),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def actor(self, state: DDPGState) -> ActorState:
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
        self, state: DDPGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DDPGState, UpdateInfo]:
        clip = self.observation_clip
        transitions = histories.transitions(newest.drawn(batch, replicas), self.n_step)
        statistics, replay = off_policy.normalize_batch(state.statistics, transitions, clip, replicas)

        next_action = off_policy.evaluate_policy(
            self.policy, state.policy.target_variables, replay.next_observation, spec
        )
        slow = state.critic.target_variables
        target = off_policy.smallest_target(self.critic, slow, replay, next_action, self.gamma, spec)
        critic_optimizer = self.optimizer(self.learning_rate)
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, critic_optimizer, replay, target, spec, replicas
        )

        policy, loss = off_policy.dpg_step(
            self.policy, state.policy, self._policy_optimizer(), self.critic, critic, replay, spec, replicas
        )
        policy, critic = train_state.polyak_update(policy, self.tau), train_state.polyak_update(critic, self.tau)
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        return DDPGState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics)

    def _policy_optimizer(self) -> optax.GradientTransformation:
        return off_policy.policy_optimizer(self.optimizer, self.policy_learning_rate, self.learning_rate)
