"""Implicit Q-learning (Kostrikov et al., 2021, arXiv:2110.06169): only the data's actions are evaluated."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import off_policy, regression, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, network_problems, number, static
from jaxrl.algos.fields import NStepReplayFields, TargetFields
from jaxrl.algos.histories import Observations
from jaxrl.algos.off_policy import LearnerState
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Cosine, Scalar
from jaxrl.core.types import (
    TRANSITION_INPUTS,
    EnvSpec,
    ModelState,
    Replicas,
    UpdateInfo,
)
from jaxrl.networks import ActionValues, Critic


class IQLState(LearnerState):
    """State of the learner."""

    value: TrainState


@algorithm
class IQL(StochasticActing, TargetFields, NStepReplayFields):
    """Implicit Q-learning: values by expectile regression, and advantage-weighted regression of the policy."""

    offline = True  # designed for datasets; it also runs without one

    policy_learning_rate: Scalar | None = changed(Cosine(3e-4, 0.0))
    expectile: Scalar = number(
        0.7,
        above=0,
        below=1,
        help="expectile of the value loss; 0.5: value of the data's policy, near 1: value of its best actions",
    )
    inverse_temperature: Scalar = number(
        3.0, low=0, help="inverse temperature beta; actions have weight exp(beta * advantage)"
    )
    max_weight: Scalar = number(100.0, above=0, help="maximum weight of an action")
    value: Critic = static(Critic(ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems, head = self.actor_critic_problems(spec, stochastic=True, discrete=True), self.value.head
        if self.value.ensemble != 1 or not isinstance(head, ActionValues) or head.noisy:
            problems.append(f"IQL.value={self.value!r} must predict one number: use ensemble=1 and head=ActionValues()")
        return problems or network_problems("IQL.value", self.value, spec, TRANSITION_INPUTS)

    def init(self, key: jax.Array, spec: EnvSpec) -> IQLState:
        policy_key, critic_key, value_key = jax.random.split(key, 3)
        value = self.value.init(value_key, without_choice(spec))
        return IQLState(
            **self.learner(policy_key, critic_key, spec), value=train_state.create(*value, self.critic_optimizer)
        )

    def update(
        self, state: IQLState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[IQLState, UpdateInfo]:
        optimizer = self.critic_optimizer
        statistics, replay = self.learning_batch(state, batch, replicas)
        taken = regression.taken_values(self.critic, state.critic.target_variables, replay, spec)

        def value_loss(variables):
            """Return the value loss (equation 5)."""
            value, model_state = state_value(self.value, variables, replay.observation, spec, train=True)
            loss = weighted_mean(expectile_loss(taken - value, self.expectile), replay.weight, replicas)
            metrics = {"value_loss": loss, "value": weighted_mean(value, replay.weight, replicas)}
            return loss, (metrics, model_state)

        value, _, value_metrics = train_state.gradient(value_loss, state.value).step(optimizer, replicas)

        # The policy (equation 7).
        advantage = taken - state_value(self.value, value.variables, replay.observation, spec, train=False)[0]
        weights = jnp.minimum(jnp.exp(self.inverse_temperature * advantage), self.max_weight)
        policy, policy_metrics = regression.policy_step(
            self.policy, state.policy, self.policy_optimizer, replay, weights, spec, replicas
        )

        # The critics (equation 6).
        next_value, _ = state_value(self.value, value.variables, replay.next_observation, spec, train=False)
        target = off_policy.expected_target(replay, next_value, self.gamma)
        critic, fit = off_policy.critic_step(self.critic, state.critic, optimizer, replay, target, spec, replicas)

        critic = train_state.polyak_update(critic, self.tau)
        metrics = replicas.mean(fit.metrics | value_metrics | policy_metrics)
        return IQLState(policy, critic, statistics, state.updates + 1, value), UpdateInfo(metrics)


def state_value(
    network: Critic, value: Variables, inputs: Observations, spec: EnvSpec, *, train: bool
) -> tuple[jax.Array, ModelState]:
    """Return V [batch] of observations, and the new model state."""
    inputs = inputs.replace(action_mask=None)
    output, model_state = inputs.critic_output(network, value, None, without_choice(spec), train=train)
    return output[0, :, 0], model_state


def without_choice(spec: EnvSpec) -> EnvSpec:
    """Return the spec with a single discrete action, so that a critic becomes a state-value function."""
    return dataclasses.replace(spec, action_space=spaces.Discrete(1), masked=False)


def expectile_loss(error: jax.Array, expectile: Scalar) -> jax.Array:
    """Return |expectile - 1[error < 0]| error^2, whose minimum is the expectile (equation 3); any shape.

    Args:
      error: target minus estimate.
      expectile: between 0 and 1; 0.5 is half the squared error.
    """
    return jnp.where(error < 0.0, 1.0 - expectile, expectile) * jnp.square(error)
