"""Which item is drawn, or removed, next: `jaxrl.core.sources` names the rules, this is what they do.

Items are known by arrays over their positions: a priority (negative where there is no item) and ages. A rule that goes
by chance also has sums over weights (`sum_tree`), any other a tournament (`best_tree`), so that no choice passes
over all. What a weight is depends on the sampler alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.buffers import sum_tree
from jaxrl.core.sources import Fifo, Lifo, MinHeap, Prioritized, Sampler, Uniform

ABSENT = -1.0  # the priority of a position that holds no item
_LARGEST_WEIGHT = 1e30  # so that the sum over a hundred million items stays finite


def by_chance(sampler: Sampler) -> bool:
    """Whether the sampler draws at random, and so needs sums over weights."""
    return isinstance(sampler, Uniform | Prioritized)


def weight(sampler: Sampler, priority: jax.Array) -> jax.Array:
    """What items are drawn in proportion to, float32 [...]: 0 where absent, and where the priority is 0."""
    if not isinstance(sampler, Prioritized):
        return (priority >= 0.0).astype(jnp.float32)
    positive = priority > 0.0
    exponent = jnp.asarray(sampler.exponent, jnp.float32)
    raised = jnp.power(jnp.where(positive, priority, 1.0), exponent)
    return jnp.where(positive, jnp.minimum(raised, _LARGEST_WEIGHT), 0.0)


def acceptable(priority: jax.Array) -> jax.Array:
    """Whether values can be priorities: finite and not negative. Bool [...]."""
    return jnp.isfinite(priority) & (priority >= 0.0)


def draw(
    key: jax.Array, priority: jax.Array, levels: sum_tree.Levels, tree: jax.Array, items: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw an item of one of several trees by chance.

    Args:
      key: for this draw.
      priority: float32 [trees, n], negative where there is no item.
      levels: over `weight(sampler, priority)`.
      tree: int32 [1], which tree.
      items: int32 [1], how many there are in it.

    Returns:
      Its position, int32 [1], and the chance it had, float32 [1]; both 0 where there is no item at all.
    """
    uniform = jax.random.uniform(key, (len(levels), 1), jnp.float32)
    total = jnp.sum(levels[-1][tree[0]])

    def weighted():
        position = sum_tree.draw_in(levels, tree, uniform)
        return position, levels[0][tree, position] / total

    def alike():
        counts = jnp.cumsum((priority[tree[0]] >= 0.0).astype(jnp.int32), dtype=jnp.int32)
        number = (uniform[0, 0] * counts[-1].astype(jnp.float32)).astype(jnp.int32)
        position = jnp.argmax(counts > jnp.minimum(number, counts[-1] - 1)).astype(jnp.int32)
        return position[None], 1.0 / counts[-1].astype(jnp.float32)[None]

    position, chance = usual_or((total > 0.0) | (items[0] == 0), weighted, alike)
    return position, jnp.where(items > 0, chance, 0.0)


def rank(rule: Sampler, priority: jax.Array, inserted: jax.Array, touched: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what items are compared by where a rule goes by an order, as `best_tree` compares them.

    Args:
      rule: a sampler or a remover.
      priority: float32 [...], negative where there is no item.
      inserted: how long ago each was inserted, int32 [...], no two alike.
      touched: how long ago each was inserted or given a priority, likewise; not read where priorities do not count.

    Returns:
      A float32, -inf where there is no item, and an int32; the item comes first that has the largest, of those that are
      equal in it the one with the largest second.
    """
    present = priority >= 0.0
    if isinstance(rule, Fifo | Lifo):
        return jnp.where(present, 0.0, -jnp.inf), inserted if isinstance(rule, Fifo) else -inserted
    return jnp.where(present, -priority if isinstance(rule, MinHeap) else priority, -jnp.inf), touched


def usual_or[Drawn](fits: jax.Array, usual: Callable[[], Drawn], rare: Callable[[], Drawn]) -> Drawn:
    """`usual()` where the scalar `fits`, else `rare()`, which passes over every position.

    A loop of one turn at most, and no branch: under `vmap`, as in a sweep, a branch computes both for every run, and
    the loop `rare` only where some run needs it.
    """
    found = fits, usual()
    return jax.lax.while_loop(lambda held: ~held[0], lambda held: (jnp.ones_like(held[0]), rare()), found)[1]
