"""Implicit Q-learning (Kostrikov et al., 2021, arXiv:2110.06169): only the data's actions are ever valued."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, regression
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import Adam, Optimiser, weighted_mean
from jaxrl.networks import ActionValues, Actor, Critic
from jaxrl.schedules import Cosine, Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    Params,
    PyTree,
    Replicas,
    Source,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class IQLState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    value: Learnt
    updates: jax.Array  # int32


@algorithm
class IQL:
    """Values of the better actions of data by expectile regression, and a policy fitted to those."""

    learning_rate: Scalar = number(3e-4, above=0, help="step size of the critics and of the value")
    policy_learning_rate: Scalar | None = number(
        Cosine(3e-4, 0.0), above=0, help="step size of the policy; None: the critics'"
    )
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    tau: Scalar = number(0.005, above=0, high=1, help="share of the new parameters at each target update")
    expectile: Scalar = number(0.7, above=0, below=1, help="0.5: the value of the data's actions; near 1: of its best")
    inverse_temperature: Scalar = number(3.0, low=0, help="an action weighs exp of this times its advantage")
    max_weight: Scalar = number(100.0, above=0, help="largest weight of an action")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update, of random actions")
    batch_size: int = static(256, low=1, help="transitions an update")
    rollout_length: int = static(1, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    policy: Network = static(Actor())
    critic: Critic = static(Critic())
    value: Critic = static(Critic(ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = off_policy.problems(self, spec, stochastic=True, discrete=True)
        head = self.value.head
        if self.value.ensemble != 1 or not isinstance(head, ActionValues) or head.noisy:
            problems.append(f"IQL.value={self.value!r} must be one number: ensemble=1 and head=ActionValues()")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": off_policy.replay(self)}

    def init(self, key: jax.Array, spec: EnvSpec) -> IQLState:
        policy_key, critic_key, value_key = jax.random.split(key, 3)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=False)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        value = off_policy.begin(self, self.value.init(value_key, without_choice(spec)), target=False)
        return IQLState(policy, critic, value, jnp.int32(0))

    def actor(self, state: IQLState) -> ActorState:
        return off_policy.actor(state.policy, state.updates)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        return off_policy.act_by_sampling(self, actor, timestep, carry, key, spec=spec, explore=explore)

    def update(
        self, state: IQLState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[IQLState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        taken = regression.taken_values(self, state.critic.target_params, replay, spec)

        def value_loss(params):
            value = self.state_value(params, replay.observation, spec)
            losses = expectile_loss(taken - value, self.expectile)
            loss = weighted_mean(losses, replay.weight, replicas)
            return loss, {"value_loss": loss, "value": weighted_mean(value, replay.weight, replicas)}

        gradients, value_metrics = jax.grad(value_loss, has_aux=True)(state.value.params)
        value = off_policy.step(self, state.value, gradients, self.learning_rate, replicas)

        advantage = taken - self.state_value(value.params, replay.observation, spec)
        weights = jnp.minimum(jnp.exp(self.inverse_temperature * advantage), self.max_weight)
        policy, policy_metrics = regression.fit_policy(self, state.policy, replay, weights, spec, replicas)

        target = off_policy.expected_target(self, replay, self.state_value(value.params, replay.next_observation, spec))
        critic, critic_metrics, _ = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)
        critic = off_policy.follow(critic, self.tau)
        metrics = replicas.mean(critic_metrics | value_metrics | policy_metrics)
        return IQLState(policy, critic, value, state.updates + 1), UpdateInfo(metrics)

    def state_value(self, params: Params, observation: PyTree, spec: EnvSpec) -> jax.Array:
        """V [batch] of observations [batch, ...]."""
        moments = off_policy.moments(observation, None)
        return self.value.apply(params, moments, None, spec=without_choice(spec))[0, 0, :, 0]


def without_choice(spec: EnvSpec) -> EnvSpec:
    """The same task with one action only: what a critic says of that is a value of the observation."""
    return dataclasses.replace(spec, action_space=spaces.Discrete(1), masked=False)


def expectile_loss(error: jax.Array, expectile: Scalar) -> jax.Array:
    """|expectile - 1[error < 0]| error^2, whose minimum is the expectile (equation 3); any shape.

    Args:
      error: what was met minus what was said.
      expectile: between 0 and 1; 0.5 is half the squared error.
    """
    return jnp.where(error < 0.0, 1.0 - expectile, expectile) * jnp.square(error)
