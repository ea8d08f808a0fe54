"""Implicit Q-learning (Kostrikov et al., 2021, arXiv:2110.06169): only the data's actions are ever valued."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, regression
from jaxrl.algos.actor_critic import OffPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import weighted_mean
from jaxrl.networks import ActionValues, Critic
from jaxrl.schedules import Cosine, Scalar
from jaxrl.types import EnvSpec, Params, PyTree, Replicas, TransitionBatch, UpdateInfo


@struct.dataclass
class IQLState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    value: Learnt
    updates: jax.Array  # int32


@algorithm
class IQL(OffPolicyActorCritic):
    """Values of the better actions of data by expectile regression, and a policy fitted to those."""

    learning_rate: Scalar = number(3e-4, above=0, help="step size of the critics and of the value")
    policy_learning_rate: Scalar | None = number(
        Cosine(3e-4, 0.0), above=0, help="step size of the policy; None: the critics'"
    )
    expectile: Scalar = number(0.7, above=0, below=1, help="0.5: the value of the data's actions; near 1: of its best")
    inverse_temperature: Scalar = number(3.0, low=0, help="an action weighs exp of this times its advantage")
    max_weight: Scalar = number(100.0, above=0, help="largest weight of an action")
    value: Critic = static(Critic(ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = super().validate(spec, num_envs, shards)
        head = self.value.head
        if self.value.ensemble != 1 or not isinstance(head, ActionValues) or head.noisy:
            problems.append(f"IQL.value={self.value!r} must be one number: ensemble=1 and head=ActionValues()")
        return problems

    def init(self, key: jax.Array, spec: EnvSpec) -> IQLState:
        policy_key, critic_key, value_key = jax.random.split(key, 3)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=False)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        value = off_policy.begin(self, self.value.init(value_key, without_choice(spec)), target=False)
        return IQLState(policy, critic, value, jnp.int32(0))

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
