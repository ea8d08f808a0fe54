"""TD3 with a pull towards the data's actions (Fujimoto and Gu, 2021, arXiv:2106.06860)."""

import jax
import jax.numpy as jnp

from jaxrl.algos import regression
from jaxrl.algos.base import algorithm, changed, number
from jaxrl.algos.ddpg import DelayedLearner
from jaxrl.algos.fields import NStepReplayFields
from jaxrl.algos.train_state import weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    TransitionBatch,
)


@algorithm
class TD3BC(NStepReplayFields, DelayedLearner):
    """TD3 whose policy loss adds a squared error to the data's actions; observations are normalized."""

    normalize_observation: bool = changed(True)
    observation_clip: Scalar | None = changed(None)
    alpha: Scalar = number(2.5, above=0, help="weight of the critic's value, normalized to a mean magnitude of 1")

    def _policy_loss(
        self, action: jax.Array, value: jax.Array, replay: TransitionBatch, spec: EnvSpec, replicas: Replicas
    ) -> jax.Array:
        """Return |pi(o) - a|^2 - lambda Q_1(o, pi(o)) [batch], with lambda = alpha / mean |Q_1| (equation 5)."""
        size = replicas.mean(weighted_mean(jnp.abs(jax.lax.stop_gradient(value)), replay.weight, replicas))
        scale = self.alpha / jnp.maximum(size, 1e-6)
        return regression.squared_distance(action, replay.action, spec) - scale * value
