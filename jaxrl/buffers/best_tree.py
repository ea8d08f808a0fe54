"""Tournament trees of a few wide levels, to find the best of many items without scanning all.

Each entry of the lowest level is the position of the best of `FAN` items, each entry of the next level that of the best
of `FAN` entries below. Items are not copied: `ranks` reads their sort keys from the caller's arrays. A write recomputes
the blocks that it changed, from the lowest level up. Only the order matters, so ranks may be ages that grow with a
clock.

There is one tree per shard, all over the same number of positions; levels are `[trees, width]`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

FAN = 16
TOP = 32  # maximum width of the last level, which is scanned completely; so are the items if there are no levels

Levels = tuple[jax.Array, ...]
# Maps trees and positions, int32 of the same shape, to a float32 rank, larger is better, and an int32 to break ties.
Ranks = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def init(trees: int, size: int) -> Levels:
    """Return the levels of `trees` trees over `size` items each, all equal."""
    levels, covered, width = [], 1, size
    while width > TOP:
        covered, width = covered * FAN, -(-width // FAN)
        first = jnp.minimum(jnp.arange(width, dtype=jnp.int32) * covered, size - 1)
        levels.append(jnp.broadcast_to(first[None], (trees, width)).copy())
    return tuple(levels)


def best(levels: Levels, trees: int, size: int, ranks: Ranks) -> jax.Array:
    """Return the position of the best item of each tree, int32 [trees]; the lowest of ties."""
    everyone = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (trees, size))
    tree = jnp.arange(trees, dtype=jnp.int32)
    return _winner(tree, levels[-1] if levels else everyone, ranks)


def put(levels: Levels, tree: jax.Array, position: jax.Array, size: int, ranks: Ranks) -> Levels:
    """Update the levels after the items at some positions have changed.

    Args:
      levels: levels of all trees.
      tree: int32 [k].
      position: int32 [k] in these trees; `sum_tree.NOWHERE` is dropped.
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
      start: int32, in [0, size).
      count: number of changed items, static; at most `size`.
      size: number of items per tree, static.
      ranks: the ranks after the change.
    """
    changed: list[jax.Array] = []
    for level in levels:
        trees, blocks = level.shape
        # Partial blocks at both ends and at the wrap; recomputing an unchanged block is harmless.
        count = min(count // FAN + 3, blocks)
        start = start // FAN
        block = jnp.broadcast_to((start + jnp.arange(count, dtype=jnp.int32)) % blocks, (trees, count)).reshape(-1)
        tree = jnp.repeat(jnp.arange(trees, dtype=jnp.int32), count)
        winner = _winner(tree, _blocks(changed, tree, block, size), ranks)
        changed.append(level.at[tree, block].set(winner, unique_indices=True, mode="promise_in_bounds"))
    return tuple(changed)


def _blocks(changed: list[jax.Array], tree: jax.Array, block: jax.Array, size: int) -> jax.Array:
    """Return the positions [k, FAN] that compete in blocks [k] of the next level; the last repeats past the end."""
    width = changed[-1].shape[1] if changed else size
    entry = block[:, None] * FAN + jnp.arange(FAN, dtype=jnp.int32)[None]
    entry = jnp.minimum(entry, width - 1)
    return changed[-1].at[tree[:, None], entry].get(mode="promise_in_bounds") if changed else entry


def _winner(tree: jax.Array, position: jax.Array, ranks: Ranks) -> jax.Array:
    """Return the best of positions [k, n], each in tree [k]."""
    first, second = ranks(jnp.broadcast_to(tree[:, None], position.shape), position)

    def better(a, b):
        later = (a[1] > b[1]) | ((a[1] == b[1]) & (a[2] <= b[2]))
        wins = (a[0] > b[0]) | ((a[0] == b[0]) & later)
        return tuple(jnp.where(wins, x, y) for x, y in zip(a, b, strict=True))

    least = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).min), jnp.int32(jnp.iinfo(jnp.int32).max)
    operands = first.astype(jnp.float32), second.astype(jnp.int32), position
    return jax.lax.reduce(operands, least, better, (1,))[2]
