"""Sum trees with a few wide levels, for sampling items with probability proportional to their weights.

Level 0 holds the weights, and each entry of the next level is the sum of `FAN` entries below. A write recomputes the
sums of the blocks that it changed from the level below, so float32 errors do not accumulate over many writes. A draw
uses a new uniform number on each level: a single number of 24 bits is too coarse for a million items. With counts
instead of weights, the tree finds an item by its rank.
"""

from typing import Any

import jax
import jax.numpy as jnp

FAN = 16  # measured on CPU: 16 is faster than 32, 64 and 128
TOP = 32  # maximum width of the last level, which is scanned completely
NOWHERE = 2**31 - 1  # a position out of range on every level: writes to it are dropped

Levels = tuple[jax.Array, ...]


def widths(size: int) -> tuple[int, ...]:
    """Return the widths of the levels over `size` weights, lowest first; all but the last are multiples of FAN."""
    found, width = [], size
    while width > TOP:
        found.append(-(-width // FAN) * FAN)
        width = found[-1] // FAN
    return *found, width


def zeros(size: int, dtype: Any = jnp.float32) -> Levels:
    """Return the levels over `size` weights of 0; an integer `dtype` is for counts (see `find`)."""
    return tuple(jnp.zeros(width, dtype) for width in widths(size))


def put_range(levels: Levels, start: jax.Array, weight: jax.Array, size: int) -> Levels:
    """Set the weights of one tree at `start`, `start + 1`, ... modulo `size`; cheaper than `put` for a range.

    Args:
      levels: levels of the tree.
      start: position of the first weight, int32, in [0, size).
      weight: new weights, float32 [k], k <= size.
      size: number of weights in the tree, static.
    """
    count = weight.shape[0]
    position = (start + jnp.arange(count, dtype=jnp.int32)) % size
    changed = [levels[0].at[position].set(weight, unique_indices=True)]
    for level in levels[1:]:
        blocks = changed[-1].shape[0] // FAN
        # Three more for partial blocks at both ends and at the wrap; recomputing an unchanged block is harmless.
        count = min(count // FAN + 3, blocks)
        start = start // FAN
        block = (start + jnp.arange(count, dtype=jnp.int32)) % blocks
        sums = jnp.sum(_blocks(changed[-1], block), axis=-1, dtype=level.dtype)
        changed.append(level.at[block].set(sums, unique_indices=True))
    return tuple(changed)


def put(levels: Levels, tree: jax.Array, position: jax.Array, weight: jax.Array) -> Levels:
    """Set weights at any positions of several trees.

    Args:
      levels: levels of all trees, [trees, ...].
      tree: indices of trees, int32 [k].
      position: positions in these trees, int32 [k]; equal positions must have equal weights; `NOWHERE` is dropped.
      weight: new weights, float32 [k], finite and >= 0.
    """
    changed = [levels[0].at[tree, position].set(weight, mode="drop", wrap_negative_indices=False)]
    for level in levels[1:]:
        position = position // FAN
        blocks = changed[-1].reshape(level.shape[0], -1, FAN)
        of_block = blocks.at[tree, position].get(mode="clip", wrap_negative_indices=False)
        sums = jnp.sum(of_block, axis=-1, dtype=level.dtype)
        changed.append(level.at[tree, position].set(sums, mode="drop", wrap_negative_indices=False))
    return tuple(changed)


def draw(levels: Levels, tree: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draw positions with probability proportional to their weights; never one of weight 0 unless all weights are 0.

    Args:
      levels: levels of all trees, [trees, ...].
      tree: int32 [k], the tree of each draw.
      uniform: float32 [len(levels), k] in [0, 1); the last row chooses on the last level, so stratifying it spreads
        the draws evenly over the tree.

    Returns:
      int32 [k].
    """
    position = choose(levels[-1][tree], uniform[-1])
    for level, u in zip(levels[-2::-1], uniform[-2::-1], strict=True):
        blocks = level.reshape(level.shape[0], -1, FAN)
        block = blocks.at[tree, position].get(mode="promise_in_bounds", wrap_negative_indices=False)
        position = position * FAN + choose(block, u)
    return position


def before(levels: Levels, tree: jax.Array, position: jax.Array) -> jax.Array:
    """Return the sum of the weights before each position [k] in trees [k]; levels are [trees, ...]."""
    total = jnp.zeros(position.shape, levels[0].dtype)
    for level in levels:
        width = level.shape[1] if level is levels[-1] else FAN
        block = level.reshape(level.shape[0], -1, width).at[tree, position // width].get(mode="promise_in_bounds")
        earlier = jnp.arange(width, dtype=jnp.int32)[None] < (position % width)[:, None]
        total = total + jnp.sum(jnp.where(earlier, block, 0), axis=1, dtype=total.dtype)
        position = position // width
    return total


def find(levels: Levels, tree: jax.Array, rank: jax.Array) -> jax.Array:
    """Return the positions [k] of the items with ranks [k], from 0, in trees [k]; levels are int32 [trees, ...].

    If a tree has no more than `rank` items, the position is arbitrary but in range.
    """
    position = jnp.zeros_like(rank)
    for level in levels[::-1]:
        width = level.shape[1] if level is levels[-1] else FAN
        block = level.reshape(level.shape[0], -1, width).at[tree, position].get(mode="clip")
        sums = jnp.cumsum(block, axis=1, dtype=jnp.int32)
        passed = sums <= rank[:, None]
        column = jnp.minimum(jnp.sum(passed.astype(jnp.int32), axis=1, dtype=jnp.int32), width - 1)
        rank = rank - jnp.max(jnp.where(passed, sums, 0), axis=1)
        position = position * width + column
    return jnp.minimum(position, levels[0].shape[1] - 1)


def _blocks(level: jax.Array, block: jax.Array) -> jax.Array:
    """Return the entries [k, FAN] of blocks [k]; block numbers out of range are clipped."""
    return level.reshape(-1, FAN).at[block].get(mode="clip", wrap_negative_indices=False)


def choose(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the columns [k] that uniform numbers [k] select from weights [k, n], or from shared weights [1, n]."""
    width = weight.shape[-1]
    # For few columns, a product with a triangular matrix is twice as fast as a cumulative sum.
    triangle = jnp.triu(jnp.ones((width, width), jnp.float32))
    sums = jnp.dot(weight, triangle, precision=jax.lax.Precision.HIGHEST)
    beyond = sums > (uniform * sums[:, -1])[:, None]
    column = jnp.arange(width, dtype=jnp.int32)[None]
    # Choose the first column of nonzero weight whose sum exceeds the target. If rounding leaves the target at or past
    # the last sum, choose the last column of nonzero weight, which has the lowest rank of the others.
    rank = jnp.where(beyond, column, 2 * width - column)
    best = jnp.min(jnp.where(weight > 0.0, rank, 2 * width), axis=-1)
    return jnp.where(best < width, best, 2 * width - best)
