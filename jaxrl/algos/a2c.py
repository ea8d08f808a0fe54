"""Advantage actor-critic, the synchronous form of A3C (Mnih et al., 2016, arXiv:1602.01783)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import on_policy
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.on_policy import OnPolicyActorCritic, PolicyState
from jaxrl.algos.optimizers import Optimizer, RMSProp
from jaxrl.algos.train_state import Variables, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Replicas, UpdateInfo


@algorithm
class A2C(OnPolicyActorCritic):
    """Advantage actor-critic: one policy-gradient step per rollout; recurrent when its network is."""

    learning_rate: Scalar = number(7e-4, above=0, help="learning rate (of the policy, if value_learning_rate is set)")
    gae_lambda: Scalar = number(1.0, low=0, high=1, help="lambda of GAE; 1 gives n-step returns")
    rollout_length: int = static(5, low=1, help="steps per environment and batch; whole_episodes: longest episode")
    normalize_advantage: bool = static(False, help="standardize advantages per batch")
    optimizer: Optimizer = number(RMSProp())

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        statistics, rollout = on_policy.update_statistics(self, state.statistics, batch["rollout"], replicas)
        weight = rollout.rows.weight
        advantages, targets = on_policy.advantages(self, state.network.variables, rollout, self.gae_lambda, spec)
        if self.normalize_advantage:
            advantages = on_policy.standardized(advantages, weight, replicas)
        inputs = on_policy.batch_inputs(self, rollout)

        def loss(params):
            network = Variables(params, state.network.model_state)
            output, _, model_state = on_policy.unroll(self, network, inputs, rollout.carry.network, spec, train=True)
            log_prob = output.distribution.log_prob(rollout.rows.action)
            policy_loss = weighted_mean(-log_prob * advantages, weight, replicas)
            value_loss = weighted_mean(0.5 * jnp.square(targets - output.value), weight, replicas)
            entropy = weighted_mean(output.distribution.entropy(), weight, replicas)
            total = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
            return total, ({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}, model_state)

        gradients, (metrics, model_state) = jax.grad(loss, has_aux=True)(state.network.params)
        network, sizes = on_policy.apply_gradients(self, state.network, gradients, replicas, model_state)
        metrics = replicas.mean(metrics) | sizes
        metrics |= {
            "learning_rate": jnp.asarray(self.learning_rate),
            "explained_variance": on_policy.explained_variance(targets, rollout.rows.extras["value"], weight, replicas),
        }
        new = state.replace(network=network, statistics=statistics, updates=state.updates + 1)
        return new, UpdateInfo(metrics)
