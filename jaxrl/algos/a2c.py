"""Advantage actor-critic, the synchronous form of A3C (Mnih et al., 2016, arXiv:1602.01783)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import on_policy, returns, rnd
from jaxrl.algos.base import algorithm, changed, number, part, static
from jaxrl.algos.on_policy import OnPolicy, PolicyState
from jaxrl.algos.optimizers import Optimizer, RMSProp
from jaxrl.algos.rnd import RND
from jaxrl.algos.train_state import weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    UpdateInfo,
)


@algorithm
class A2C(OnPolicy):
    """Advantage actor-critic: one policy-gradient step per rollout; recurrent when its network is."""

    learning_rate: Scalar = changed(7e-4)
    rollout_length: int = changed(5)
    optimizer: Optimizer = changed(RMSProp())
    gae_lambda: Scalar = number(
        1.0, low=0, high=1, help="lambda of GAE; 0: one-step TD errors, 1: returns of the whole rollout"
    )
    exploration_bonus: RND | None = part(RND, help="intrinsic reward for novel observations; None: no bonus")
    normalize_advantage: bool = static(False, help="standardize advantages per batch")

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"rollout": self.rollouts(max_policy_lag=0)}

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        statistics, rollout = self.prepare(state.statistics, batch, replicas)
        weight = rollout.rows.weight
        acting = on_policy.acting(weight, rollout.active)
        bonus, intrinsic, explored = self.explored(state, rollout, spec=spec, key=key, replicas=replicas)
        segment = self.recorded_segment(rollout, state.network.variables, spec)
        advantages = returns.gae(segment, self.gamma, self.gae_lambda)
        targets = advantages + segment.values
        advantages = rnd.with_bonus(self.exploration_bonus, advantages, intrinsic)
        if self.normalize_advantage:
            advantages = on_policy.standardized(advantages, acting, replicas)
        inputs = self.inputs(rollout)

        def loss(network):
            output, _, model_state = self.unroll(network, inputs, rollout.carry.network, spec, train=True)
            log_prob = output.distribution.log_prob(rollout.rows.action)
            policy_loss = weighted_mean(-log_prob * advantages, acting, replicas)
            value_loss = weighted_mean(0.5 * jnp.square(targets - output.value), weight, replicas)
            entropy = weighted_mean(output.distribution.entropy(), acting, replicas)
            total = self.total_loss(policy_loss, value_loss, entropy)
            return total, ({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}, model_state)

        network, norms, metrics = self.gradient_step(loss, state.network, replicas)
        metrics = replicas.mean(metrics) | norms | explored
        metrics |= {
            "learning_rate": jnp.asarray(self.learning_rate),
            "explained_variance": on_policy.explained_variance(targets, segment.values, weight, replicas),
        }
        new = state.replace(network=network, statistics=statistics, bonus=bonus, updates=state.updates + 1)
        return new, UpdateInfo(metrics)
