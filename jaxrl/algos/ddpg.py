"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv:1509.02971)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy
from jaxrl.algos.actor_critic import OffPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.networks import Actor, Critic
from jaxrl.schedules import Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    Replicas,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class DDPGState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    updates: jax.Array  # int32


@algorithm
class DDPG(OffPolicyActorCritic):
    """A deterministic policy up the gradient of its critic, from a uniform replay."""

    exploration_noise: Scalar = number(0.1, low=0, help="deviation of the actions' noise, over half their range")
    policy: Network = static(Actor(stochastic=False))
    critic: Critic = static(Critic(ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return off_policy.problems(self, spec, stochastic=False)

    def init(self, key: jax.Array, spec: EnvSpec) -> DDPGState:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=True)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        return DDPGState(policy, critic, jnp.int32(0))

    def actor(self, state: DDPGState) -> ActorState:
        return off_policy.actor(state.policy, state.updates, noise=self.exploration_noise)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        return off_policy.act_with_noise(self, actor, timestep, carry, key, spec=spec, explore=explore)

    def update(
        self, state: DDPGState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DDPGState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_action = off_policy.evaluate_policy(self, state.policy.target_params, replay.next_observation, spec)
        target = off_policy.target(self, state.critic, replay, next_action, spec)
        critic, metrics, error = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)
        policy, loss = off_policy.climb(self, state.policy, critic, replay, spec, replicas)
        policy, critic = off_policy.follow(policy, self.tau), off_policy.follow(critic, self.tau)
        metrics = replicas.mean(metrics | {"policy_loss": loss})
        learnt = DDPGState(policy, critic, state.updates + 1)
        return learnt, UpdateInfo(metrics, off_policy.new_priorities(self, error))
