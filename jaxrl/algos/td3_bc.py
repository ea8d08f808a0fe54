"""TD3 with a pull towards the data's actions (Fujimoto and Gu, 2021, arXiv:2106.06860)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import acting, off_policy, regression, train_state
from jaxrl.algos.acting import DeterministicActing
from jaxrl.algos.base import algorithm, changed, field_problems, number
from jaxrl.algos.fields import DelayedPolicyFields, NStepFields, ReplayFields, TargetFields
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    UpdateInfo,
)


class TD3BCState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32
    policy_loss: jax.Array  # at the policy's last step: most updates have none


@algorithm
class TD3BC(DeterministicActing, TargetFields, ReplayFields, NStepFields, DelayedPolicyFields):
    """TD3 whose policy loss adds a squared error to the data's actions; observations are normalized."""

    normalize_observation: bool = changed(True)
    observation_clip: Scalar | None = changed(None)
    alpha: Scalar = number(2.5, above=0, help="weight of the critic's value, normalized to a mean magnitude of 1")

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("TD3BC", self.policy, self.critic, spec, stochastic=False)
        return field_problems(self) + networks

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": self.source(n_step=self.n_step)}

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3BCState:
        policy_key, critic_key = jax.random.split(key)
        return TD3BCState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer, target=True),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=True),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
            policy_loss=jnp.float32(0.0),
        )

    def update(
        self, state: TD3BCState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[TD3BCState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas)

        next_policy = off_policy.evaluate_policy(
            self.policy, state.policy.target_variables, replay.next_observation, spec
        )
        keys = off_policy.transition_keys(key, replay, replicas)
        next_action = acting.smoothed_action(next_policy, keys, self.target_noise, self.target_noise_clip, spec)
        target_critic = state.critic.target_variables
        target = off_policy.smallest_target(self.critic, target_critic, replay, next_action, self.gamma, spec)
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas
        )

        def policy_loss(params):
            """Return the mean of |pi(o) - a|^2 - lambda Q_1(o, pi(o)), lambda = alpha / mean |Q_1| (equation 5)."""
            variables = state.policy.variables.replace(params=params)
            action, model_state = off_policy.train_policy(self.policy, variables, replay.observation, spec)
            value = off_policy.first_value(self.critic, critic, replay.observation, action, spec)
            size = replicas.mean(weighted_mean(jnp.abs(jax.lax.stop_gradient(value)), replay.weight, replicas))
            scale = self.alpha / jnp.maximum(size, 1e-6)
            distance = regression.squared_distance(action, replay.action, spec)
            return weighted_mean(distance - scale * value, replay.weight, replicas), model_state

        def policy_step(policy):
            (loss, model_state), gradients = jax.value_and_grad(policy_loss, has_aux=True)(policy.params)
            policy, _ = train_state.apply_gradients(policy, gradients, self.policy_optimizer, replicas, model_state)
            return policy, loss

        updates = state.updates + 1
        due = updates % self.policy_delay == 0
        policy, critic, loss = off_policy.delayed_step(
            policy_step, state.policy, critic, state.policy_loss, due, self.tau, replicas
        )
        metrics = replicas.mean(fit.metrics) | {"policy_loss": loss}
        return TD3BCState(policy, critic, statistics, updates, loss), UpdateInfo(metrics)
