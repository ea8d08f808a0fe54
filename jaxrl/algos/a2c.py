"""Advantage actor-critic, the synchronous form of A3C (Mnih et al., 2016, arXiv:1602.01783)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import policy_gradient
from jaxrl.algos.actor_critic import OnPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.optimisers import Optimiser, RMSProp, descend, weighted_mean
from jaxrl.algos.policy_gradient import PolicyState
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec, Replicas, RolloutBatch, UpdateInfo


@algorithm
class A2C(OnPolicyActorCritic):
    """One policy-gradient step a rollout; feed-forward or recurrent by its network."""

    learning_rate: Scalar = number(7e-4, above=0, help="step size; of the policy, if the value has its own")
    gae_lambda: Scalar = number(1.0, low=0, high=1, help="of generalised advantages; 1 is the n-step return")
    rollout_length: int = static(5, low=1, help="rows of every environment a batch; the longest episode, if whole")
    normalize_advantage: bool = static(False, help="per batch")
    optimiser: Optimiser = number(RMSProp())

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        rollout: RolloutBatch = batch["rollout"]
        weight = rollout.rows.weight
        advantages, targets = policy_gradient.advantages(self, state.params, rollout, spec)
        if self.normalize_advantage:
            advantages = policy_gradient.standardised(advantages, weight, replicas)
        seen = policy_gradient.observe(self, rollout.timesteps, rollout.statistics)

        def loss(params):
            output = policy_gradient.unrolled(self, params, seen, rollout.carry, spec)
            log_prob = output.distribution.log_prob(rollout.rows.action)
            policy_loss = weighted_mean(-log_prob * advantages, weight, replicas)
            value_loss = weighted_mean(0.5 * jnp.square(targets - output.value), weight, replicas)
            entropy = weighted_mean(output.distribution.entropy(), weight, replicas)
            total = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
            return total, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        params, optimiser, norm = descend(
            self.optimiser,
            state.params,
            gradients,
            state.optimiser,
            learning_rate=policy_gradient.learning_rates(self),
            max_grad_norm=self.max_grad_norm,
            replicas=replicas,
        )
        metrics = replicas.mean(metrics) | {
            "gradient_norm": norm,
            "learning_rate": jnp.asarray(self.learning_rate),
            "explained_variance": policy_gradient.explained_variance(
                targets, rollout.rows.extras["value"], weight, replicas
            ),
        }
        new = state.replace(
            params=params,
            optimiser=optimiser,
            statistics=policy_gradient.update_statistics(self, state.statistics, rollout, replicas),
            updates=state.updates + 1,
        )
        return new, UpdateInfo(metrics)
