"""Implementations of the samplers and removers of `jaxrl.core.sources`.

Items are described by arrays over their positions: a priority (negative where there is no item) and ages. Random
samplers also use sums over weights (`sum_tree`), all others a tournament tree (`best_tree`), so that items are selected
without scanning all of them. Weights depend only on the sampler and the priorities.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.buffers import sum_tree
from jaxrl.core.sources import Fifo, Lifo, MinHeap, Prioritized, Sampler, Uniform

ABSENT = -1.0  # the priority of a position that holds no item
_LARGEST_WEIGHT = 1e30  # so that the sum over a hundred million items stays finite


def by_chance(sampler: Sampler) -> bool:
    """Return whether the sampler is random, and therefore needs sums over weights."""
    return isinstance(sampler, Uniform | Prioritized)


def weight(sampler: Sampler, priority: jax.Array) -> jax.Array:
    """Return the items' sampling weights, float32 [...]: 0 for absent items and, if prioritized, for priority 0."""
    if not isinstance(sampler, Prioritized):
        return (priority >= 0.0).astype(jnp.float32)
    positive = priority > 0.0
    exponent = jnp.asarray(sampler.exponent, jnp.float32)
    raised = jnp.power(jnp.where(positive, priority, 1.0), exponent)
    return jnp.where(positive, jnp.minimum(raised, _LARGEST_WEIGHT), 0.0)


def acceptable(priority: jax.Array) -> jax.Array:
    """Return whether values are valid priorities, finite and not negative; bool [...]."""
    return jnp.isfinite(priority) & (priority >= 0.0)


def draw(
    key: jax.Array, priority: jax.Array, levels: sum_tree.Levels, tree: jax.Array, items: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw an item from one of several trees at random.

    Args:
      key: key of this draw.
      priority: float32 [trees, n], negative where there is no item.
      levels: sum trees over `weight(sampler, priority)`.
      tree: the tree to draw from, int32 [1].
      items: the number of items in this tree, int32 [1].

    Returns:
      The item's position, int32 [1], and its probability, float32 [1]; both are 0 if the tree is empty.
    """
    uniform = jax.random.uniform(key, (len(levels), 1), jnp.float32)
    total = jnp.sum(levels[-1][tree[0]])

    def weighted():
        position = sum_tree.draw(levels, tree, uniform)
        return position, levels[0][tree, position] / total

    def uniformly():
        counts = jnp.cumsum((priority[tree[0]] >= 0.0).astype(jnp.int32), dtype=jnp.int32)
        number = (uniform[0, 0] * counts[-1].astype(jnp.float32)).astype(jnp.int32)
        position = jnp.argmax(counts > jnp.minimum(number, counts[-1] - 1)).astype(jnp.int32)
        return position[None], 1.0 / counts[-1].astype(jnp.float32)[None]

    position, chance = usual_or((total > 0.0) | (items[0] == 0), weighted, uniformly)
    return position, jnp.where(items > 0, chance, 0.0)


def rank(rule: Sampler, priority: jax.Array, inserted: jax.Array, touched: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ranks of items under a rule that is not random, as `best_tree` compares them.

    Args:
      rule: a sampler or a remover.
      priority: float32 [...], negative where there is no item.
      inserted: the time since each item was inserted, int32 [...], all different.
      touched: the time since each item was inserted or its priority set, int32 [...]; not read by `Fifo` and `Lifo`.

    Returns:
      A float32, -inf where there is no item, and an int32: the item with the largest float32 is first, with ties broken
      by the largest int32.
    """
    present = priority >= 0.0
    if isinstance(rule, Fifo | Lifo):
        return jnp.where(present, 0.0, -jnp.inf), inserted if isinstance(rule, Fifo) else -inserted
    return jnp.where(present, -priority if isinstance(rule, MinHeap) else priority, -jnp.inf), touched


def usual_or[Drawn](fits: jax.Array, usual: Callable[[], Drawn], rare: Callable[[], Drawn]) -> Drawn:
    """Return `usual()` if the scalar `fits` is true, otherwise `rare()`, which scans every position.

    This is a loop of at most one iteration instead of a branch: under `vmap`, as in a sweep, a branch calls both
    functions for every run, but the loop calls `rare` only if some run needs it.
    """
    found = fits, usual()
    return jax.lax.while_loop(lambda held: ~held[0], lambda held: (jnp.ones_like(held[0]), rare()), found)[1]
