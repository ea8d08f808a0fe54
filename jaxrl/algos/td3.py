"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018, arXiv:1802.09477)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import histories, newest, off_policy, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, number, static
from jaxrl.algos.fields import (
    ActorCriticFields,
    CombinedReplayFields,
    ExplorationNoiseFields,
    NormalizationFields,
    SequenceFields,
)
from jaxrl.algos.off_policy import ActingCarry, Statistics
from jaxrl.algos.train_state import TrainState
from jaxrl.core.schedules import Scalar
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
from jaxrl.networks import Actor


class TD3State(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32
    policy_loss: jax.Array  # at the policy's last step: most updates have none


@algorithm
class TD3(SequenceFields, CombinedReplayFields, NormalizationFields, ExplorationNoiseFields, ActorCriticFields):
    """Twin delayed DDPG: the smaller of two critics, smoothed target actions, delayed policy updates."""

    min_size: int = changed(5_000)
    noise_correlation: float = changed(0.9, before=0.0)
    policy: Network = changed(Actor(stochastic=False))
    target_noise: Scalar = number(0.2, low=0, help="target noise standard deviation, in units of half the action range")
    target_noise_clip: Scalar = number(0.5, low=0, help="clip of the target policy's noise, in the same units")
    policy_delay: int = static(2, low=1, help="critic updates per update of the policy and the targets")

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update_with_memory(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("TD3", self.policy, self.critic, spec, stochastic=False, memory=True)
        found = field_problems(self) + networks
        return found

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

    def actor(self, state: TD3State) -> ActorState:
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
        self, state: TD3State, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[TD3State, UpdateInfo]:
        clip = self.observation_clip
        transitions = histories.transitions(newest.drawn(batch, replicas), self.n_step)
        statistics, replay = off_policy.normalize_batch(state.statistics, transitions, clip, replicas)

        following = off_policy.evaluate_policy(
            self.policy, state.policy.target_variables, replay.next_observation, spec
        )
        keys = off_policy.transition_keys(key, replay, replicas)
        next_action = off_policy.smoothed_action(following, keys, self.target_noise, self.target_noise_clip, spec)
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
