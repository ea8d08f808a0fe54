"""Scaling of a replay's rewards by the standard deviation of returns, so that a fixed value support fits any task.

Acting stores the discounted return so far with each row. The learner updates statistics of the returns in its batches,
as it does for observations, and divides a batch's rewards by the newest standard deviation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import normalization
from jaxrl.algos.acting import ActingCarry, StochasticActing
from jaxrl.algos.base import field_group, number, static
from jaxrl.algos.normalization import RunningStatistics
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import ActorOutput, ActorState, EnvSpec, Replicas, TimeStep, TransitionBatch

RETURN = "discounted_return"  # extra of each row: of the rewards up to its observation


class ReturnScale(struct.PyTreeNode):
    """Statistics of discounted returns, and their largest absolute value."""

    statistics: RunningStatistics
    largest: jax.Array  # float32, of absolute values


@field_group
class ScaledRewardActing(StochasticActing):
    """Acting as `StochasticActing`, with discounted returns stored if rewards are scaled."""

    normalize_reward: bool = static(False, help="divide rewards by the running deviation of discounted returns")
    largest_return: Scalar | None = number(
        5.0,
        above=0,
        only_with="normalize_reward",
        help="maximum absolute value of scaled discounted returns, enforced by a larger divisor; None: no limit",
    )

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> ActingCarry:
        carry = super().initial_carry(spec, env_index, num_envs)
        return carry.replace(discounted_return=jnp.float32(0.0)) if self.normalize_reward else carry

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: ActingCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        output = super().act(actor, timestep, carry, key, spec=spec, explore=explore)
        if isinstance(carry.discounted_return, tuple):
            return output
        discounted = normalization.discounted_return(carry.discounted_return, timestep, self.gamma)
        carry = output.carry.replace(discounted_return=discounted)
        return output.replace(carry=carry, extras={RETURN: discounted})

    def initial_scale(self) -> ReturnScale | tuple[()]:
        """Return the scale before the first update; () if rewards are not scaled."""
        empty = ReturnScale(normalization.init(jnp.zeros((), jnp.float32)), jnp.float32(0.0))
        return empty if self.normalize_reward else ()

    def scaled(
        self, scale: ReturnScale | tuple[()], batch: TransitionBatch, replicas: Replicas
    ) -> tuple[Any, TransitionBatch]:
        """Return the scale with a batch's returns merged in, and the batch with rewards divided by it.

        Rewards are divided by the deviation of the returns, and at least by the largest return over `largest_return`
        (FlashSAC, arXiv:2604.04539; Lee et al., 2025, arXiv:2502.15280, section 4.3). Before two returns were seen, and
        while they hardly vary, the deviation counts as 1.
        """
        if not isinstance(scale, ReturnScale):
            return scale, batch
        returns = self.gamma * batch.extras[RETURN] + batch.rewards[:, 0]
        statistics = normalization.update(scale.statistics, returns, batch.weight, replicas)
        largest = replicas.max(jnp.max(jnp.where(batch.weight, jnp.abs(returns), 0.0)))
        largest = jnp.maximum(scale.largest, largest)
        factor = normalization.scale_reward(statistics, jnp.float32(1.0), jnp.inf)
        if self.largest_return is not None:
            factor = jnp.minimum(factor, self.largest_return / jnp.maximum(largest, 1e-8))
        return ReturnScale(statistics, largest), batch.replace(rewards=batch.rewards * factor)
