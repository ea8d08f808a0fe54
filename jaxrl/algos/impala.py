"""IMPALA: importance-weighted actor-learners, corrected by V-trace (Espeholt et al., 2018, arXiv:1802.01561)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import policy_gradient, returns
from jaxrl.algos.actor_critic import OnPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.optimisers import Optimiser, RMSProp, descend, weighted_mean
from jaxrl.algos.policy_gradient import PolicyCarry, PolicyState
from jaxrl.schedules import Scalar
from jaxrl.types import ActorOutput, ActorState, EnvSpec, Replicas, RolloutBatch, TimeStep, UpdateInfo


@algorithm
class IMPALA(OnPolicyActorCritic):
    """One corrected policy-gradient step a rollout, however old its policy; recurrent or not by its network."""

    learning_rate: Scalar = number(6e-4, above=0, help="step size; of the policy, if the value has its own")
    trace_lambda: Scalar = number(1.0, low=0, high=1, help="of V-trace; 1 corrects to the rollout's end")
    clip_rho: Scalar = number(1.0, above=0, help="largest weight of an error: which policy is evaluated")
    clip_c: Scalar = number(1.0, above=0, help="largest weight of a trace: how far errors reach back")
    clip_pg_rho: Scalar = number(1.0, above=0, help="largest weight of a policy gradient")
    max_grad_norm: Scalar | None = number(40.0, above=0, help="largest global norm of a gradient; None: no limit")
    rollout_length: int = static(20, low=1, help="rows of every environment a batch; the longest episode, if whole")
    reduction: str = static("sum", choices=("sum", "mean"), help="of the loss, over the rows that count")
    reward_clipping: str = static(
        "none", choices=("none", "abs_one", "soft_asymmetric"), help="of rewards as they come, also those it sees"
    )
    optimiser: Optimiser = number(RMSProp(eps=0.01))

    def act(
        self,
        actor: ActorState,
        timestep: TimeStep,
        carry: PolicyCarry,
        key: jax.Array,
        *,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        timestep = self._with_clipped_reward(timestep)
        return super().act(actor, timestep, carry, key, spec=spec, explore=explore)

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        rollout: RolloutBatch = batch["rollout"]
        rollout = rollout.replace(
            rows=self._with_clipped_reward(rollout.rows),
            timesteps=self._with_clipped_reward(rollout.timesteps),
            final=self._with_clipped_reward(rollout.final),
        )
        gradients, metrics = jax.grad(self._loss, has_aux=True)(state.params, rollout, spec, replicas)
        params, optimiser, norm = descend(
            self.optimiser,
            state.params,
            gradients,
            state.optimiser,
            learning_rate=policy_gradient.learning_rates(self),
            max_grad_norm=self.max_grad_norm,
            replicas=replicas,
        )
        metrics = replicas.mean(metrics) | {"gradient_norm": norm, "learning_rate": jnp.asarray(self.learning_rate)}
        new = state.replace(
            params=params,
            optimiser=optimiser,
            statistics=policy_gradient.update_statistics(self, state.statistics, rollout, replicas),
            updates=state.updates + 1,
        )
        return new, UpdateInfo(metrics)

    def _loss(self, params, rollout, spec, replicas):
        rows, weight = rollout.rows, rollout.rows.weight
        seen = policy_gradient.observe(self, rollout.timesteps, rollout.statistics)
        output, carry = self.network.apply(params, seen, rollout.carry.network, spec=spec)
        log_prob = output.distribution.log_prob(rows.action)
        # What the learner would carry by now, where the actors' `final_carry` is of their older parameters.
        final = rollout.replace(final_carry=rollout.final_carry.replace(network=carry))
        log_rho = log_prob - rows.extras["log_prob"]
        corrected = self._vtrace(*jax.lax.stop_gradient((params, output.value, log_rho, final)), spec)

        def mean(x):
            return weighted_mean(x, weight, replicas)

        policy_loss = mean(-log_prob * corrected.advantages)
        value_loss = mean(0.5 * jnp.square(corrected.values - output.value))
        entropy = mean(output.distribution.entropy())
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        if self.reduction == "sum":  # over all replicas, as the mean is
            loss = loss * replicas.sum(jnp.sum(weight, dtype=loss.dtype))
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approximate_kl": mean(jnp.expm1(log_rho) - log_rho),
            "importance_weight": mean(jnp.minimum(jnp.exp(log_rho), self.clip_rho)),
            "explained_variance": policy_gradient.explained_variance(corrected.values, output.value, weight, replicas),
        }

    def _vtrace(self, params, values, log_rho, rollout, spec):
        rows = rollout.rows
        return returns.vtrace(
            policy_gradient.rewards(self, rollout),
            values,
            policy_gradient.bootstrap_value(self, params, rollout, spec),
            jnp.exp(log_rho),
            rows.terminated if self.bootstrap_truncated else rows.terminated | rows.truncated,
            rows.truncated,
            rows.weight,
            self.gamma,
            trace_lambda=self.trace_lambda,
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            clip_pg_rho=self.clip_pg_rho,
        )

    def _with_clipped_reward(self, moments):
        return moments.replace(reward=clipped_reward(moments.reward, self.reward_clipping))


def clipped_reward(reward: jax.Array, how: str) -> jax.Array:
    """Rewards as IMPALA's experiments clip them (Espeholt et al., 2018, appendix D.2 and its released code).

    Args:
      reward: any shape.
      how: "none"; "abs_one", into [-1, 1]; "soft_asymmetric", 5 tanh(r / 5), and 0.3 of that where it is negative.

    Returns:
      The same shape.
    """
    if how == "abs_one":
        return jnp.clip(reward, -1.0, 1.0)
    if how == "soft_asymmetric":
        squeezed = 5.0 * jnp.tanh(reward / 5.0)
        return jnp.where(reward < 0, 0.3 * squeezed, squeezed)
    return reward
