"""Advantage actor-critic, the synchronous form of A3C (Mnih et al., 2016, arXiv:1602.01783)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import on_policy
from jaxrl.algos.base import algorithm, changed, static
from jaxrl.algos.on_policy import AdvantageFields, BonusFields, PolicyState, PolicyValueActing
from jaxrl.algos.optimizers import Optimizer, RMSProp
from jaxrl.algos.train_state import weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Rollout,
    Source,
    UpdateInfo,
)


@algorithm
class A2C(BonusFields, AdvantageFields, PolicyValueActing):
    """Advantage actor-critic: one policy-gradient step per rollout; recurrent when its network is."""

    learning_rate: Scalar = changed(7e-4)
    rollout_length: int = changed(5)
    optimizer: Optimizer = changed(RMSProp())
    gae_lambda: Scalar = changed(1.0)
    normalize_advantage: bool = static(False, help="standardize advantages per batch")

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"rollout": on_policy.source(self, max_policy_lag=0)}

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        rollout: Rollout = batch["rollout"]
        statistics = on_policy.update_statistics(self, state.statistics, rollout, replicas)
        weight = rollout.rows.weight
        acting = on_policy.acting(weight, rollout.active)
        bonus, intrinsic, explored = on_policy.explore(
            self, state.bonus, rollout, spec=spec, key=key, replicas=replicas
        )
        advantages, targets = on_policy.advantages(self, state.network.variables, rollout, self.gae_lambda, spec)
        advantages = on_policy.with_bonus(self, advantages, intrinsic)
        if self.normalize_advantage:
            advantages = on_policy.standardized(advantages, acting, replicas)
        inputs = on_policy.batch_inputs(self, rollout)

        def loss(network):
            output, _, model_state = on_policy.unroll(self, network, inputs, rollout.carry.network, spec, train=True)
            log_prob = output.distribution.log_prob(rollout.rows.action)
            policy_loss = weighted_mean(-log_prob * advantages, acting, replicas)
            value_loss = weighted_mean(0.5 * jnp.square(targets - output.value), weight, replicas)
            entropy = weighted_mean(output.distribution.entropy(), acting, replicas)
            total = on_policy.total_loss(self, policy_loss, value_loss, entropy)
            return total, ({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}, model_state)

        network, norms, metrics = on_policy.gradient_step(self, loss, state.network, replicas)
        metrics = replicas.mean(metrics) | norms | explored
        metrics |= {
            "learning_rate": jnp.asarray(self.learning_rate),
            "explained_variance": on_policy.explained_variance(targets, rollout.rows.extras["value"], weight, replicas),
        }
        new = state.replace(network=network, statistics=statistics, bonus=bonus, updates=state.updates + 1)
        return new, UpdateInfo(metrics)
