"""TD3 with a pull towards the data's actions (Fujimoto and Gu, 2021, arXiv:2106.06860)."""

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp

from jaxrl.algos import off_policy, regression, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, number
from jaxrl.algos.ddpg import DelayedLearner
from jaxrl.algos.fields import ReplayFields
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    TransitionBatch,
)


@algorithm
class TD3BC(ReplayFields, DelayedLearner):
    """TD3 whose policy loss adds a squared error to the data's actions; observations are normalized."""

    offline = True  # designed for datasets; it also runs without one

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

    def _policy_step(
        self,
        policy: TrainState,
        critic: TrainState,
        replay: TransitionBatch,
        spec: EnvSpec,
        replicas: Replicas,
    ) -> tuple[TrainState, jax.Array]:
        def policy_loss(params):
            """Return the mean of |pi(o) - a|^2 - lambda Q_1(o, pi(o)), lambda = alpha / mean |Q_1| (equation 5)."""
            variables = policy.variables.replace(params=params)
            action, model_state = off_policy.train_policy(self.policy, variables, replay.observation, spec)
            value = off_policy.first_value(self.critic, critic, replay.observation, action, spec, **self.support)
            size = replicas.mean(weighted_mean(jnp.abs(jax.lax.stop_gradient(value)), replay.weight, replicas))
            scale = self.alpha / jnp.maximum(size, 1e-6)
            distance = regression.squared_distance(action, replay.action, spec)
            return weighted_mean(distance - scale * value, replay.weight, replicas), model_state

        (loss, model_state), gradients = jax.value_and_grad(policy_loss, has_aux=True)(policy.params)
        policy, _ = train_state.apply_gradients(policy, gradients, self.policy_optimizer, replicas, model_state)
        return policy, loss
