"""Scaling of rewards by the returns seen so far, so that a fixed value support fits any task."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import normalization
from jaxrl.algos.base import number, part_class
from jaxrl.algos.normalization import RunningStatistics
from jaxrl.algos.optimizers import Number
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import Replicas, TransitionBatch

RETURN = "discounted_return"  # extra of each row: the discounted return up to its observation


class ReturnScale(struct.PyTreeNode):
    """Statistics of discounted returns, and their largest absolute value."""

    statistics: RunningStatistics
    largest: jax.Array  # float32, the largest absolute return


@part_class
class RewardScale:
    """Division of rewards by the running deviation of discounted returns."""

    largest_return: Scalar | None = number(
        5.0,
        above=0,
        help="maximum absolute value of scaled discounted returns, enforced by a larger divisor; None: no limit",
    )

    def init(self) -> ReturnScale:
        """Return the scale before the first batch."""
        return ReturnScale(normalization.init(jnp.zeros((), jnp.float32)), jnp.float32(0.0))

    def scaled(
        self, scale: ReturnScale, batch: TransitionBatch, gamma: Number, replicas: Replicas
    ) -> tuple[ReturnScale, TransitionBatch]:
        """Merge a batch's returns into the scale; return the new scale, and the batch with rewards divided by it.

        Actors store the discounted return so far with each row. Rewards are divided by the standard deviation of the
        returns, or by the largest absolute return over `largest_return` if that is more (FlashSAC, arXiv:2604.04539;
        Lee et al., 2025, arXiv:2502.15280, section 4.3). The standard deviation is taken as 1 until two returns have
        been seen, and while returns hardly vary.
        """
        returns = gamma * batch.extras[RETURN] + batch.rewards[:, 0]
        statistics = normalization.update(scale.statistics, returns, batch.weight, replicas)
        largest = replicas.max(jnp.max(jnp.where(batch.weight, jnp.abs(returns), 0.0)))
        largest = jnp.maximum(scale.largest, largest)
        factor = normalization.scale_reward(statistics, jnp.float32(1.0), jnp.inf)
        if self.largest_return is not None:
            factor = jnp.minimum(factor, self.largest_return / jnp.maximum(largest, 1e-8))
        return ReturnScale(statistics, largest), batch.replace(rewards=batch.rewards * factor)
