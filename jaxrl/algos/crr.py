"""Critic regularized regression (Wang et al., 2020, arXiv:2006.15134)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import off_policy, regression, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, number, static
from jaxrl.algos.fields import NStepReplayFields, PeriodicTargetFields
from jaxrl.algos.off_policy import Inputs, LearnerState
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import Critic


@algorithm
class CRR(StochasticActing, PeriodicTargetFields, NStepReplayFields):
    """Critic-regularized regression: regression on the data's actions, weighted by the critic's advantage."""

    offline = True  # designed for datasets; it also runs without one

    critic: Critic = changed(Critic(ensemble=1))
    weighting: str = static(
        "exp", choices=("exp", "indicator", "constant"), help="weight of an action as a function of its advantage"
    )
    baseline: str = static(
        "mean", choices=("mean", "max"), help="baseline of the advantage: mean or maximum value of the policy's actions"
    )
    samples: int = static(4, low=1, help="continuous actions: policy samples per baseline")
    temperature: Scalar = number(
        1.0, above=0, only_with="weighting=exp", help="divisor of the advantages in the exponential weights"
    )
    max_weight: Scalar = number(20.0, above=0, only_with="weighting=exp", help="maximum weight of an action")

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return self.actor_critic_problems(spec, stochastic=True, discrete=True)

    def update(
        self, state: LearnerState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[LearnerState, UpdateInfo]:
        statistics, replay = self.learning_batch(state, batch, replicas)
        next_key, key = (replay.observation.keys(k, replicas) for k in jax.random.split(key))

        next_values = self._policy_values(
            state.policy.target_variables,
            state.critic.target_variables,
            replay.next_observation,
            next_key,
            samples=1,
            reduction="mean",
            spec=spec,
        )
        target = off_policy.expected_target(replay, next_values, self.gamma)
        weights = self._weights(state.policy.variables, state.critic.variables, replay, key, spec)
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas
        )
        policy, metrics = regression.policy_step(
            self.policy, state.policy, self.policy_optimizer, replay, weights, spec, replicas
        )

        updates = state.updates + 1
        tau = jnp.where(updates % self.target_period == 0, self.tau, 0.0)
        policy, critic = train_state.polyak_update(policy, tau), train_state.polyak_update(critic, tau)
        return LearnerState(policy, critic, statistics, updates), UpdateInfo(replicas.mean(fit.metrics | metrics))

    def _weights(
        self, policy: Variables, critic: Variables, batch: TransitionBatch, key: jax.Array, spec: EnvSpec
    ) -> jax.Array:
        """Return the weight [batch] of each transition's action: equations 2 to 4."""
        if self.weighting == "constant":
            return jnp.ones(batch.weight.shape, jnp.float32)
        baseline = self._policy_values(
            policy,
            critic,
            batch.observation,
            key,
            samples=self.samples,
            reduction=self.baseline,
            spec=spec,
        )
        advantage = regression.taken_values(self.critic, critic, batch, spec) - baseline
        if self.weighting == "indicator":
            return (advantage > 0.0).astype(jnp.float32)
        return jnp.minimum(jnp.exp(advantage / self.temperature), self.max_weight)

    def _policy_values(
        self,
        policy: Variables,
        critic: Variables,
        inputs: Inputs,
        key: jax.Array,
        *,
        samples: int,
        reduction: str,
        spec: EnvSpec,
    ) -> jax.Array:
        """Return the smallest critic's value [batch], as the mean or maximum over the policy's actions.

        Box actions are sampled with keys [batch]; for discrete actions, all allowed ones are evaluated.
        """
        distribution = inputs.policy_output(self.policy, policy, spec)[0]
        if isinstance(spec.action_space, spaces.Discrete):
            values = jnp.min(inputs.critic_output(self.critic, critic, None, spec)[0], axis=0)
            return jnp.max(values, axis=-1) if reduction == "max" else off_policy.expected_value(distribution, values)
        keys = jax.vmap(lambda k: jax.random.split(k, samples), out_axes=1)(key)
        actions = jax.vmap(distribution.sample)(keys)
        # vmap over the actions only, so that each observation is encoded once.
        each = jax.vmap(lambda x: inputs.critic_output(self.critic, critic, x, spec)[0])
        values = jnp.min(each(actions), axis=1)[..., 0]
        return jnp.max(values, axis=0) if reduction == "max" else jnp.mean(values, axis=0)
