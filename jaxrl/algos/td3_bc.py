"""TD3 with a behavioral cloning term (Fujimoto and Gu, 2021, arXiv:2106.06860)."""

import jax
import jax.numpy as jnp

from jaxrl.algos import regression, train_state
from jaxrl.algos.base import algorithm, changed, number
from jaxrl.algos.ddpg import DelayedLearner
from jaxrl.algos.fields import NStepReplayFields
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    TransitionBatch,
)


@algorithm
class TD3BC(NStepReplayFields, DelayedLearner):
    """TD3 with the squared distance to the data's actions in the policy loss; observations are normalized."""

    offline = True  # designed for datasets; it also runs without one

    normalize_observation: bool = changed(True)
    observation_clip: Scalar | None = changed(None)
    alpha: Scalar = number(2.5, above=0, help="weight of the critic's value, normalized to a mean magnitude of 1")

    def _policy_step(
        self, policy: TrainState, critic: TrainState, replay: TransitionBatch, spec: EnvSpec, replicas: Replicas
    ) -> tuple[TrainState, jax.Array]:
        def loss(variables):
            """Return the mean of |pi(o) - a|^2 - lambda Q_1(o, pi(o)), lambda = alpha / mean |Q_1| (equation 5)."""
            action, value, model_state = self._action_and_value(variables, critic, replay, spec)
            size = replicas.mean(weighted_mean(jnp.abs(jax.lax.stop_gradient(value)), replay.weight, replicas))
            scale = self.alpha / jnp.maximum(size, 1e-6)
            distance = regression.squared_distance(action, replay.action, spec)
            loss = weighted_mean(distance - scale * value, replay.weight, replicas)
            return loss, (loss, model_state)

        policy, _, before = train_state.gradient(loss, policy).step(self.policy_optimizer, replicas)
        return policy, before
