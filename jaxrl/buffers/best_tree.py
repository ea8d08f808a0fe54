"""Tournament trees with a few wide levels, to find the best of many items without scanning all of them.

Each entry of the lowest level is the position of the best of `FAN` items; each entry of a higher level is the best of
`FAN` entries below. Items are not copied: `ranks` reads their sort keys from the caller's arrays. A write recomputes
the blocks that it changed, from the lowest level up. Only the order of the ranks matters: ranks may be ages, which
grow with time but keep their order.

There is one tree per shard, and all trees have the same number of positions; levels have shape `[trees, width]`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

FAN = 16
TOP = 32  # maximum width of the last level, which is scanned completely; up to this number of items, no levels

Levels = tuple[jax.Array, ...]
# `(trees, positions) -> (ranks, tie_breakers)`, all of the same shape. Trees and positions are int32. The largest rank
# (float32) is best; of equal ranks, the one with the largest tie breaker (int32).
Ranks = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def init(trees: int, size: int) -> Levels:
    """Return the levels of `trees` trees over `size` items each, all of equal rank."""
    levels, covered, width = [], 1, size
    while width > TOP:
        covered, width = covered * FAN, -(-width // FAN)
        first = jnp.minimum(jnp.arange(width, dtype=jnp.int32) * covered, size - 1)
        levels.append(jnp.broadcast_to(first[None], (trees, width)).copy())
    return tuple(levels)


def best(levels: Levels, trees: int, size: int, ranks: Ranks) -> jax.Array:
    """Return the position of each tree's best item, int32 [trees]; of equally good items, the lowest position."""
    everyone = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (trees, size))
    tree = jnp.arange(trees, dtype=jnp.int32)
    return _winner(tree, levels[-1] if levels else everyone, ranks)


def put(levels: Levels, tree: jax.Array, position: jax.Array, size: int, ranks: Ranks) -> Levels:
    """Update the levels after the items at some positions have changed.

    Args:
      levels: levels of all trees.
      tree: indices of trees, int32 [k].
      position: positions of the changed items in these trees, int32 [k]; `sum_tree.NOWHERE` is dropped.
      size: number of items per tree, static.
      ranks: the ranks after the change.
    """
    changed: list[jax.Array] = []
    for level in levels:
        position = position // FAN
        winner = _winner(tree, _blocks(changed, tree, position, size), ranks)
        changed.append(level.at[tree, position].set(winner, mode="drop", wrap_negative_indices=False))
    return tuple(changed)


def put_range(levels: Levels, start: jax.Array, count: int, size: int, ranks: Ranks) -> Levels:
    """Update the levels after the items at `start`, `start + 1`, ... modulo `size` have changed in every tree.

    Args:
      levels: levels of all trees.
      start: position of the first changed item, int32, in [0, size).
      count: number of changed items, static; at most `size`.
      size: number of items per tree, static.
      ranks: the ranks after the change.
    """
    changed: list[jax.Array] = []
    for level in levels:
        trees, blocks = level.shape
        # Three more for partial blocks at both ends and at the wrap; recomputing an unchanged block is harmless.
        count = min(count // FAN + 3, blocks)
        start = start // FAN
        block = jnp.broadcast_to((start + jnp.arange(count, dtype=jnp.int32)) % blocks, (trees, count)).reshape(-1)
        tree = jnp.repeat(jnp.arange(trees, dtype=jnp.int32), count)
        winner = _winner(tree, _blocks(changed, tree, block, size), ranks)
        changed.append(level.at[tree, block].set(winner, unique_indices=True, mode="promise_in_bounds"))
    return tuple(changed)


def _blocks(changed: list[jax.Array], tree: jax.Array, block: jax.Array, size: int) -> jax.Array:
    """Return the positions [k, FAN] of the candidates for entries `block` [k] of the next level.

    A partial block at the end of a level is padded with the level's last entry.
    """
    width = changed[-1].shape[1] if changed else size
    entry = block[:, None] * FAN + jnp.arange(FAN, dtype=jnp.int32)[None]
    entry = jnp.minimum(entry, width - 1)
    return changed[-1].at[tree[:, None], entry].get(mode="promise_in_bounds") if changed else entry


def _winner(tree: jax.Array, position: jax.Array, ranks: Ranks) -> jax.Array:
    """Return the best position, int32 [k], among positions [k, n] of trees [k]."""
    first, second = ranks(jnp.broadcast_to(tree[:, None], position.shape), position)

    def better(a, b):
        later = (a[1] > b[1]) | ((a[1] == b[1]) & (a[2] <= b[2]))
        wins = (a[0] > b[0]) | ((a[0] == b[0]) & later)
        return tuple(jnp.where(wins, x, y) for x, y in zip(a, b, strict=True))

    least = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).min), jnp.int32(jnp.iinfo(jnp.int32).max)
    operands = first.astype(jnp.float32), second.astype(jnp.int32), position
    return jax.lax.reduce(operands, least, better, (1,))[2]
