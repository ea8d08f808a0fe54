"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv:1509.02971)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import Adam, Optimiser
from jaxrl.networks import Actor, Critic
from jaxrl.schedules import Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    Replicas,
    Source,
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
class DDPG:
    """A deterministic policy up the gradient of its critic, from a uniform replay."""

    learning_rate: Scalar = number(3e-4, above=0, help="step size of the critic")
    policy_learning_rate: Scalar | None = number(None, above=0, help="step size of the policy; None: the critic's")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    tau: Scalar = number(0.005, above=0, high=1, help="share of the new parameters at each target update")
    exploration_noise: Scalar = number(0.1, low=0, help="deviation of the actions' noise, over half their range")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update, of random actions")
    batch_size: int = static(256, low=1, help="transitions an update")
    rollout_length: int = static(1, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    policy: Network = static(Actor(stochastic=False))
    critic: Critic = static(Critic(ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return off_policy.problems(self, spec, stochastic=False)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": off_policy.replay(self)}

    def init(self, key: jax.Array, spec: EnvSpec) -> DDPGState:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=True)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        return DDPGState(policy, critic, jnp.int32(0))

    def actor(self, state: DDPGState) -> ActorState:
        return off_policy.actor(state.policy, state.updates, noise=self.exploration_noise)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

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
