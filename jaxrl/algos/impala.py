"""IMPALA: importance-weighted actor-learners, corrected by V-trace (Espeholt et al., 2018, arXiv:1802.01561)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxrl.algos import on_policy, returns, rnd
from jaxrl.algos.base import algorithm, changed, number, part, static
from jaxrl.algos.on_policy import OnPolicy, PolicyState
from jaxrl.algos.optimizers import Optimizer, RMSProp
from jaxrl.algos.rnd import RND
from jaxrl.algos.train_state import weighted_mean
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    TimeStep,
    UpdateInfo,
)


@algorithm
class IMPALA(OnPolicy):
    """Advantage actor-critic with V-trace: one off-policy-corrected step per rollout; recurrent when its network is."""

    learning_rate: Scalar = changed(Linear(6e-4, 0.0))
    max_grad_norm: Scalar | None = changed(40.0)
    rollout_length: int = changed(20)
    normalize_reward: bool | None = changed(
        None,
        help="divide rewards by the running deviation of discounted returns; None: only if rewards are not clipped",
    )
    optimizer: Optimizer = changed(RMSProp(eps=0.01))
    exploration_bonus: RND | None = part(RND, help="intrinsic reward for novel observations; None: no bonus")
    trace_lambda: Scalar = number(1.0, low=0, high=1, help="lambda of V-trace; 1 uses the whole rollout")
    clip_rho: Scalar = number(1.0, above=0, help="V-trace rho-bar: maximum importance weight of a TD error")
    clip_c: Scalar = number(1.0, above=0, help="V-trace c-bar: maximum trace coefficient")
    clip_pg_rho: Scalar = number(1.0, above=0, help="maximum importance weight in the policy gradient")
    reduction: str = static("sum", choices=("sum", "mean"), help="reduction of the loss over the batch")
    reward_clipping: str = static(
        "none",
        choices=("none", "abs_one", "soft_asymmetric"),
        help="reward clipping, applied before any other use of the rewards",
    )

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        # With a loss summed over the batch, unscaled returns saturate the critic.
        scaled = self.reward_clipping == "none" if self.normalize_reward is None else self.normalize_reward
        return dataclasses.replace(self, **self.resolved(spec) | {"normalize_reward": scaled})

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"rollout": self.rollouts(max_policy_lag=None)}  # V-trace corrects for the lag

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        statistics, rollout = self.prepare(state.statistics, batch, replicas)
        bonus, intrinsic, explored = self.explored(state, rollout, spec=spec, key=key, replicas=replicas)
        network, norms, metrics = self.gradient_step(
            self._loss, state.network, replicas, rollout, intrinsic, spec, replicas
        )
        metrics = replicas.mean(metrics) | norms | explored | {"learning_rate": jnp.asarray(self.learning_rate)}
        new = state.replace(network=network, statistics=statistics, bonus=bonus, updates=state.updates + 1)
        return new, UpdateInfo(metrics)

    def _loss(self, network, rollout, intrinsic, spec, replicas):
        rows, weight = rollout.rows, rollout.rows.weight
        acting = on_policy.acting(weight, rollout.active)
        inputs = self.inputs(rollout)
        output, carry, model_state = self.unroll(network, inputs, rollout.carry.network, spec, train=True)
        log_prob = output.distribution.log_prob(rows.action)
        log_rho = log_prob - rows.extras["log_prob"]
        # Use the learner's own carry, because the actors' `final_carry` is from older parameters.
        fixed, values, log_rhos, carry = jax.lax.stop_gradient((network, output.value, log_rho, carry))
        corrected = returns.vtrace(
            self.segment(rollout, fixed, values, carry, spec),
            jnp.exp(log_rhos),
            self.gamma,
            trace_lambda=self.trace_lambda,
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            clip_pg_rho=self.clip_pg_rho,
        )
        if intrinsic is not None:  # weighted like the advantages of V-trace
            intrinsic = jnp.minimum(self.clip_pg_rho, jnp.exp(log_rhos)) * intrinsic
        advantages = rnd.with_bonus(self.exploration_bonus, corrected.advantages, intrinsic)

        def mean(x):
            return weighted_mean(x, acting, replicas)

        policy_loss = mean(-log_prob * advantages)
        value_loss = weighted_mean(0.5 * jnp.square(corrected.values - output.value), weight, replicas)
        entropy = mean(output.distribution.entropy())
        share = 1.0
        if self.reduction == "sum" and acting is not weight:
            share = replicas.sum(jnp.sum(acting, dtype=jnp.float32)) / replicas.sum(jnp.sum(weight, dtype=jnp.float32))
        loss = self.total_loss(share * policy_loss, value_loss, share * entropy)
        if self.reduction == "sum":  # over all replicas, like the mean
            loss = loss * replicas.sum(jnp.sum(weight, dtype=loss.dtype))
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approximate_kl": mean(jnp.expm1(log_rho) - log_rho),
            "importance_weight": mean(jnp.minimum(jnp.exp(log_rho), self.clip_rho)),
            "explained_variance": on_policy.explained_variance(corrected.values, output.value, weight, replicas),
        }
        return loss, (metrics, model_state)

    def preprocess(self, timesteps: TimeStep) -> TimeStep:
        return timesteps.replace(reward=clipped_reward(timesteps.reward, self.reward_clipping))


def clipped_reward(reward: jax.Array, how: str) -> jax.Array:
    """Clip rewards as in IMPALA's experiments (Espeholt et al., 2018, appendix D.2 and its released code).

    Args:
      reward: any shape.
      how: "none"; "abs_one": clip to [-1, 1]; "soft_asymmetric": 5 tanh(r / 5), times 0.3 if negative.

    Returns:
      The clipped rewards, of the same shape.
    """
    if how == "abs_one":
        return jnp.clip(reward, -1.0, 1.0)
    if how == "soft_asymmetric":
        squeezed = 5.0 * jnp.tanh(reward / 5.0)
        return jnp.where(reward < 0, 0.3 * squeezed, squeezed)
    return reward
