"""Which item is drawn, or removed, next: `jaxrl.core.sources` names the rules, this is what they do.

Items are known by arrays over their positions: a priority (negative where there is no item), sums over weights where
the rule draws by chance, and ages. What a weight is depends on the sampler alone.
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


def choose(
    sampler: Sampler,
    key: jax.Array,
    priority: jax.Array,
    levels: sum_tree.Levels,
    inserted: jax.Array,
    touched: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One item.

    Args:
      sampler: the rule; removers use the same, but not those that draw by chance.
      key: for those that do.
      priority: float32 [n], negative where there is no item.
      levels: over `weight(sampler, priority)`; () where the rule does not draw by chance.
      inserted: how long ago each was inserted, int32 [n], no two alike.
      touched: how long ago each was inserted or given a priority, likewise.

    Returns:
      Its position, int32, and the chance it had, float32: 0 where there is no item at all.
    """
    present = priority >= 0.0
    if by_chance(sampler):
        uniform = jax.random.uniform(key, (len(levels), 1), jnp.float32)

        def weighted():
            position = sum_tree.draw(levels, uniform)[0]
            return position, levels[0][position] / sum_tree.total(levels)

        def alike():
            counts = jnp.cumsum(present.astype(jnp.int32), dtype=jnp.int32)
            rank = (uniform[0, 0] * counts[-1].astype(jnp.float32)).astype(jnp.int32)
            position = jnp.argmax(counts > jnp.minimum(rank, counts[-1] - 1)).astype(jnp.int32)
            return position, 1.0 / jnp.maximum(counts[-1].astype(jnp.float32), 1.0)

        position, chance = usual_or(sum_tree.total(levels) > 0.0, weighted, alike)
    else:
        if isinstance(sampler, Fifo):
            best, age = present, inserted
        elif isinstance(sampler, Lifo):
            best, age = present, -inserted
        elif isinstance(sampler, MinHeap):
            best, age = present & (priority == jnp.min(jnp.where(present, priority, jnp.inf))), touched
        else:
            best, age = present & (priority == jnp.max(priority)), touched
        position = jnp.argmax(jnp.where(best, age, jnp.iinfo(jnp.int32).min)).astype(jnp.int32)
        chance = jnp.float32(1.0)
    return position, jnp.where(jnp.any(present), chance, 0.0)


def usual_or[Drawn](fits: jax.Array, usual: Callable[[], Drawn], rare: Callable[[], Drawn]) -> Drawn:
    """`usual()` where the scalar `fits`, else `rare()`, which passes over every position.

    A loop of one turn at most, and no branch: under `vmap`, as in a sweep, a branch computes both for every run, and
    the loop `rare` only where some run needs it.
    """
    found = fits, usual()
    return jax.lax.while_loop(lambda held: ~held[0], lambda held: (jnp.ones_like(held[0]), rare()), found)[1]
