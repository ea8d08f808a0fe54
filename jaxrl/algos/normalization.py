"""Running mean and variance of observations and of returns, merged over batches and devices.

Precision: the count is exact to 2^64. Mean and variance are float32, merged with the compensated batch form of
Chan, Golub and LeVeque (1983), and each keeps its rounding error, so that neither thousands of small merges
nor a mean far from zero lose more than a few units in the last place of the largest number seen.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.limits import varies
from jaxrl.core.trees import named_leaves
from jaxrl.core.types import Counter, PyTree, Replicas, TimeStep

_EPSILON = 1e-8  # added to the variance, as in Gymnasium's and SB3's normalizers
_MOST_EPSILON = 1e-4  # limit as a fraction of the variance, so that small units are normalized as well


class Moments(struct.PyTreeNode):
    """Mean and population variance of one leaf, each of the leaf's shape, float32."""

    mean: jax.Array
    variance: jax.Array
    mean_rest: jax.Array  # Kahan compensation of the additions to `mean`
    variance_rest: jax.Array


class RunningStatistics(struct.PyTreeNode):
    """Statistics of a tree of arrays.

    `moments` has one entry for each leaf that is normalized, by the leaf's path ("camera/depth"; "array" for a tree
    that is one array); leaves without an entry are not normalized.
    """

    count: Counter
    moments: dict[str, Moments]


def init(example: Any, *, integers: bool = False) -> RunningStatistics:
    """Return empty statistics.

    Args:
      example: a space, or a tree of arrays without batch axes.
      integers: include integer boxes and arrays too (pixels, which networks otherwise scale themselves). `Discrete` and
        `MultiDiscrete` spaces and booleans are never included: their numbers are categories.
    """
    kinds = (jnp.floating, jnp.integer) if integers else (jnp.floating,)
    if isinstance(example, spaces.Space):
        example = spaces.tree_map(lambda leaf: leaf, example)
    leaves = {name: x if isinstance(x, spaces.ArraySpace) else jnp.asarray(x) for name, x in _named(example).items()}
    return RunningStatistics(
        count=Counter.zero(),
        moments={
            name: Moments(*(jnp.zeros(leaf.shape, jnp.float32) for _ in range(4)))
            for name, leaf in leaves.items()
            if not isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
            and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)
        },
    )


def update(statistics: RunningStatistics, batch: PyTree, weight: jax.Array, replicas: Replicas) -> RunningStatistics:
    """Merge a batch from all replicas into the statistics; the result is the same on every replica.

    Args:
      statistics: the statistics so far, the same on every replica.
      batch: a tree like the example, leaves `weight.shape + leaf.shape`.
      weight: bool, e.g. of shape (T, B), True for entries that count. Include the last observations of episodes.
      replicas: as passed to `update`; entries are summed over them.
    """
    added = replicas.sum(jnp.sum(weight, dtype=jnp.uint32))
    count = statistics.count.add(added)
    entries = jnp.maximum(added.astype(jnp.float32), 1.0)
    fraction = added.astype(jnp.float32) / jnp.maximum(count.as_float(), 1.0)

    def merge(moments, x):
        axes = tuple(range(weight.ndim))
        counts = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
        mean = jnp.expand_dims(moments.mean, axes)
        # Deviations from the running mean, then from the batch's mean: two passes, because squares of numbers far
        # from zero would cancel, and the second pass also corrects the rounding of the first.
        shifted = jnp.where(counts, x.astype(jnp.float32) - mean, 0.0)
        shift = replicas.sum(jnp.sum(shifted, axes)) / entries
        deviation = jnp.where(counts, shifted - jnp.expand_dims(shift, axes), 0.0)
        left, squares = replicas.sum((jnp.sum(deviation, axes), jnp.sum(jnp.square(deviation), axes)))
        correction = left / entries
        variance = squares / entries - jnp.square(correction)
        # The running mean is `mean + mean_rest`, but the shift was measured from `mean` only.
        correction = correction - moments.mean_rest
        distance = jnp.square(shift + correction)
        change = variance - moments.variance - moments.variance_rest + distance * (1.0 - fraction)
        new_mean, mean_rest = _compensated(moments.mean, moments.mean_rest, fraction * shift)
        new_mean, mean_rest = _compensated(new_mean, mean_rest, fraction * correction)
        new_variance, variance_rest = _compensated(moments.variance, moments.variance_rest, fraction * change)
        return Moments(new_mean, new_variance, mean_rest, variance_rest)

    leaves = _named(batch)
    return RunningStatistics(count, {name: merge(old, leaves[name]) for name, old in statistics.moments.items()})


def normalize(statistics: RunningStatistics, x: PyTree, clip: float | jax.Array = 10.0) -> PyTree:
    """Return `(x - mean) / std`, clipped to [-clip, clip]; `x` is unchanged until two entries have been seen.

    Entries that hardly varied (see `varies`) become 0, whatever their current value.

    Args:
      statistics: frozen statistics; in a loss, those used for acting. Leaves may have a batch axis, for rows collected
        with different statistics.
      x: a tree like the example; leaves may have leading axes, the last of which is the batch.
      clip: maximum absolute value of the result.

    Returns:
      The same tree; normalized leaves keep their floating type, integers become float32.
    """
    known = _is_known(statistics)

    def one(moments, leaf):
        if moments is None:
            return leaf
        scale, mean = (_with_axes(x, leaf.ndim) for x in (_inverse_std(moments, 0.0), moments.mean))
        value = leaf.astype(jnp.float32)
        scaled = jnp.clip((value - mean) * scale, -clip, clip)
        dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.float32
        of_row = known.reshape(known.shape + (1,) * (moments.mean.ndim - known.ndim))
        return jnp.where(_with_axes(of_row, leaf.ndim), scaled, value).astype(dtype)

    normalized = [one(statistics.moments.get(name), leaf) for name, leaf in _named(x).items()]
    return jax.tree.unflatten(jax.tree.structure(x), normalized)


def scale_reward(statistics: RunningStatistics, reward: jax.Array, clip: float | jax.Array = 10.0) -> jax.Array:
    """Divide rewards by the standard deviation of the running discounted return, and clip them to [-clip, clip].

    The mean is not subtracted, because that would change the optimal policy. Rewards are unchanged until two returns
    have been seen, and while returns hardly vary (see `varies`).

    Args:
      statistics: statistics of the running discounted return (see `discounted_return`), made by `init` for a scalar.
        Leaves may have a batch axis.
      reward: any shape.
      clip: maximum absolute value of the result.
    """
    (moments,) = statistics.moments.values()
    scaled = jnp.clip(reward * _with_axes(_inverse_std(moments, 1.0), reward.ndim), -clip, clip)
    return jnp.where(_with_axes(_is_known(statistics), reward.ndim), scaled, reward)


def discounted_return(previous: jax.Array, timestep: TimeStep, gamma: float | jax.Array) -> jax.Array:
    """Return the running discounted return R <- gamma R + r, whose deviation scales rewards (Engstrom et al., 2020).

    Args:
      previous: the discounted return at the previous time step, [...].
      timestep: the time step with the reward, [...]; at an episode's beginning, the return is 0.
      gamma: discount; it is multiplied by the environment's own discounts.
    """
    if timestep.discount is not None:  # at an episode's end, there is no later reward to discount
        gamma = gamma * jnp.where(timestep.terminated, 1.0, timestep.discount)
    return jnp.where(timestep.first, 0.0, gamma * previous + timestep.reward)


def _named(tree):
    return named_leaves(tree, root="array")


def _with_axes(x, rank):
    """Prepend axes of size 1 to `x`, up to `rank` axes."""
    return jnp.expand_dims(x, tuple(range(rank - x.ndim)))


def _is_known(statistics: RunningStatistics) -> jax.Array:
    """Return whether at least two entries were seen, which normalization requires; bool, of the count's shape."""
    return (statistics.count.high > 0) | (statistics.count.low >= 2)


def _inverse_std(moments: Moments, otherwise: float) -> jax.Array:
    """Return 1 / std of each entry, or `otherwise` where it hardly varies."""
    variance = jnp.maximum(moments.variance, 0.0)
    inverse = jax.lax.rsqrt(variance + jnp.minimum(_EPSILON, _MOST_EPSILON * variance))
    return jnp.where(varies(moments.mean, jnp.sqrt(variance)), inverse, otherwise)


def _compensated(total, rest, increment):
    """Add `increment` to `total + rest` by Kahan summation; return the rounded total and the rest."""
    increment = increment + rest
    new = total + increment
    return new, increment - (new - total)
