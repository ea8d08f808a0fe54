"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv:1509.02971)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import histories, newest, off_policy, train_state
from jaxrl.algos.base import algorithm, changed, field_problems
from jaxrl.algos.fields import (
    ActorCriticFields,
    CombinedReplayFields,
    ExplorationNoiseFields,
    NormalizationFields,
    SequenceFields,
)
from jaxrl.algos.off_policy import ActingCarry, Statistics
from jaxrl.algos.train_state import TrainState
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
from jaxrl.networks import Actor, Critic


class DDPGState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class DDPG(SequenceFields, CombinedReplayFields, NormalizationFields, ExplorationNoiseFields, ActorCriticFields):
    """Deep deterministic policy gradients: a deterministic policy that ascends its critic; uniform replay."""

    policy: Network = changed(Actor(stochastic=False))
    critic: Critic = changed(Critic(ensemble=1))

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update_with_memory(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("DDPG", self.policy, self.critic, spec, stochastic=False, memory=True)
        found = field_problems(self) + networks
        return found

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
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas
        )

        policy, loss = off_policy.dpg_step(
            self.policy, state.policy, self.policy_optimizer, self.critic, critic, replay, spec, replicas
        )
        policy, critic = train_state.polyak_update(policy, self.tau), train_state.polyak_update(critic, self.tau)
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        return DDPGState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics)
