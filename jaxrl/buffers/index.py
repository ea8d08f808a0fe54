"""What a sampler knows of the rows of a ring: which of them begin an item, their priorities, how often each was drawn.

Every logical shard of environments has an index of its own, so that a batch does not depend on how many devices hold
the shards. Items that are drawn by chance are drawn over all shards at once, each with its share of the whole weight
(`draw_over_all`); others shard by shard, an equal part of the batch from each. An item's position within its shard is
`slot * columns + column`.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers import samplers, sum_tree, uniform
from jaxrl.core.sources import Replay, Uniform, by_priority
from jaxrl.core.types import Counter, PyTree, Replicas

_BELOW_ONE = 1.0 - 2.0**-24
_TINY = 1e-37


class Index(struct.PyTreeNode):
    """One sampler's view of a ring; leaves begin with the shard axis, unless said."""

    priority: jax.Array | None  # [shards, positions] float32, -1 where no item; None: rows alike, looked up when drawn
    levels: sum_tree.Levels  # [shards, ...] sums over weights; () where the sampler does not need them
    touched: jax.Array | None  # [shards, positions] int32, the update that last gave a priority; None where unused
    times_sampled: jax.Array  # [shards, positions] int32
    drawable: jax.Array  # [shards] int32, how many items there are
    largest: jax.Array  # [shards] float32, the largest priority ever given
    refused: jax.Array  # [shards] int32, priorities that were NaN, infinite or negative
    stamps: jax.Array  # [slots] int32: `updates` when the slot was written; no shard axis
    updates: jax.Array  # int32, batches drawn so far; no shard axis
    sampled: Counter  # items drawn so far, over all devices; no shard axis
    inserted: Counter  # rows stored so far, over all devices; no shard axis


def dense(source: Replay) -> bool:
    """Whether any row that counts may be drawn and all are alike, so that nothing about them need be kept."""
    return isinstance(source.sampler, Uniform) and source.sequence is None and not source.max_times_sampled


def one_by_one(source: Replay) -> bool:
    """Whether a draw depends on the draws before it in the batch."""
    return bool(source.max_times_sampled) or not samplers.by_chance(source.sampler)


def over_all(source: Replay) -> bool:
    """Whether items are drawn over all shards at once, in proportion to their weights."""
    return samplers.by_chance(source.sampler) and not dense(source) and not one_by_one(source)


def init(source: Replay, shards: int, slots: int, columns: int) -> Index:
    """An index of an empty ring: `shards` shards of `columns` environments each."""
    positions = slots * columns
    every = lambda x: jnp.broadcast_to(x[None], (shards, *x.shape)).copy()  # noqa: E731
    levels = sum_tree.zeros(positions) if samplers.by_chance(source.sampler) and not dense(source) else ()
    heap = by_priority(source.sampler) and not samplers.by_chance(source.sampler)
    return Index(
        priority=None if dense(source) else jnp.full((shards, positions), samplers.ABSENT, jnp.float32),
        levels=tuple(every(level) for level in levels),
        touched=jnp.zeros((shards, positions), jnp.int32) if heap else None,
        times_sampled=jnp.zeros((shards, positions), jnp.int32),
        drawable=jnp.zeros(shards, jnp.int32),
        largest=jnp.ones(shards, jnp.float32),
        refused=jnp.zeros(shards, jnp.int32),
        stamps=jnp.zeros(slots, jnp.int32),
        updates=jnp.int32(0),
        sampled=Counter.zero(),
        inserted=Counter.zero(),
    )


def partition(axis: str) -> Index:
    """How an index lies on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
    shards: PyTree = PartitionSpec(axis)
    everywhere: PyTree = PartitionSpec()
    return Index(*([shards] * 7), *([everywhere] * 4))


def by_shard(x: jax.Array, shards: int) -> jax.Array:
    """Entries of rows [slots, B] as positions [shards, slots * columns]."""
    slots, envs = x.shape
    return jnp.moveaxis(x.reshape(slots, shards, envs // shards), 1, 0).reshape(shards, -1)


def write(index: Index, source: Replay, start: jax.Array, priority: jax.Array) -> Index:
    """Sets what rows begin, over a range of slots.

    Args:
      index: of all shards here.
      source: gives the sampler.
      start: int32, the first slot, modulo the number of slots.
      priority: float32 [count, B], negative where a row begins no item.
    """
    assert index.priority is not None, "a dense index is not written to"
    shards, positions = index.priority.shape
    slots = index.stamps.shape[0]
    columns = positions // slots
    new = by_shard(priority, shards)
    refuse = ~samplers.acceptable(new) & (new != samplers.ABSENT)
    new = jnp.where(refuse, samplers.ABSENT, new)
    first = (start % slots) * columns
    position = (first + jnp.arange(new.shape[1], dtype=jnp.int32)) % positions

    def one(old, levels, new):
        before, after = _held(old[position]), _held(new)
        # Read first, then write: else XLA copies the whole array to read it afterwards.
        before, new = jax.lax.optimization_barrier((before, new))
        if levels:
            levels = sum_tree.put_range(levels, first, samplers.weight(source.sampler, new), positions)
        return old.at[position].set(new, unique_indices=True), levels, after - before

    written, levels, more = jax.vmap(one)(index.priority, index.levels, new)
    touched = index.touched
    if touched is not None:
        touched = touched.at[:, position].set(index.updates, unique_indices=True)
    return index.replace(
        priority=written,
        levels=levels,
        touched=touched,
        drawable=index.drawable + more,
        largest=jnp.maximum(index.largest, jnp.max(new, axis=1)),
        refused=index.refused + jnp.sum(refuse.astype(jnp.int32), axis=1, dtype=jnp.int32),
    )


def _held(priority: jax.Array) -> jax.Array:
    """How many of these positions hold an item."""
    return jnp.sum((priority >= 0.0).astype(jnp.int32), dtype=jnp.int32)


def draw(
    index: Index, source: Replay, key: jax.Array, shard: jax.Array, count: int, newest: jax.Array
) -> tuple[Index, jax.Array, jax.Array]:
    """Draws `count` items from every shard one after another, and counts that they were.

    Args:
      index: not a dense one.
      source: gives the sampler.
      key: for all devices.
      shard: int32 [shards], the numbers of the logical shards here.
      count: static.
      newest: int32, the slot written last.

    Returns:
      The index; positions int32 [shards, count]; the chance of each draw within its shard, 0 where there was nothing.
    """
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(shard)
    return _draw_in_turn(index, source, keys, count, newest)


def draw_over_all(
    index: Index, key: jax.Array, count: int, used: jax.Array | None, shards: int, replicas: Replicas
) -> tuple[Index, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Draws a whole batch by chance, over the shards of all devices, and counts what was drawn here.

    An item is drawn with a chance proportional to its weight among all; where all weights are 0, every item alike.
    Every device makes all draws, and finds the items of its own shards.

    Args:
      index: of the shards here; its source is one of those that `over_all` names.
      key: for all devices.
      count: of draws, static.
      used: bool [count], which draws count; None: all.
      shards: over all devices, static.
      replicas: the devices.

    Returns:
      The index; of every draw the shard among those here, int32 [count], its position there, its chance, 0 where there
      was nothing; and whether it is here, bool. The rest means nothing of a draw that is not here.
    """
    here, depth, priority = index.drawable.shape[0], len(index.levels), index.priority
    assert priority is not None, "a dense index is not drawn from by weight"

    def everywhere(x):
        return replicas.sum(jax.lax.dynamic_update_slice(jnp.zeros(shards, x.dtype), x, (replicas.first_shard,)))

    first = jnp.asarray(replicas.first_shard, jnp.int32)
    weights = everywhere(jnp.sum(index.levels[-1], axis=1))
    ends = jnp.cumsum(weights)
    total = ends[-1]
    bits = uniform.bits(key, jnp.zeros(1, jnp.int32), depth * count).reshape(depth, count)

    def weighted():
        u = uniform.unit(bits)
        spread = jnp.minimum((jnp.arange(count, dtype=jnp.float32) + u[-1]) / count, _BELOW_ONE)
        shard = sum_tree.choose(weights[None], spread)
        # What is left of the number chooses within the shard, so that the draws are spread evenly there too.
        left = (spread * total - (ends - weights)[shard]) / jnp.maximum(weights[shard], _TINY)
        tree = jnp.clip(shard - first, 0, here - 1)
        u = jnp.concatenate([u[:-1], jnp.clip(left, 0.0, _BELOW_ONE)[None]])
        position = sum_tree.draw_in(index.levels, tree, u)
        chance = index.levels[0][tree, position] / jnp.maximum(total, _TINY)
        return tree, position, chance, shard == first + tree

    items, priority = everywhere(index.drawable), index.priority
    assert priority is not None, "a dense index is drawn from otherwise"

    def alike():
        held = jnp.cumsum((priority >= 0.0).reshape(-1).astype(jnp.int32), dtype=jnp.int32)
        before = jnp.sum(jnp.where(jnp.arange(shards, dtype=jnp.int32) < first, items, 0), dtype=jnp.int32)
        rank = uniform.below(bits[0], jnp.sum(items, dtype=jnp.int32)) - before
        found = jnp.minimum(jnp.searchsorted(held, rank, side="right"), held.shape[0] - 1).astype(jnp.int32)
        some = jnp.sum(items, dtype=jnp.int32)
        chance = jnp.full(count, (some > 0).astype(jnp.float32) / jnp.maximum(some, 1).astype(jnp.float32))
        tree, position = found // priority.shape[1], found % priority.shape[1]
        return tree, position, chance, (rank >= 0) & (rank < held[-1])

    tree, position, chance, mine = samplers.usual_or(total > 0.0, weighted, alike)
    if used is not None:
        chance = jnp.where(used, chance, 0.0)
    drawn = jnp.where(mine & (chance > 0.0), position, sum_tree.NOWHERE)
    times_sampled = index.times_sampled.at[tree, drawn].add(1, mode="drop")
    return index.replace(times_sampled=times_sampled), tree, position, chance, mine


def count_draws(index: Index, position: jax.Array, held: jax.Array) -> Index:
    """With the draws at positions [shards, k] counted, where they held an item."""
    times = jax.vmap(lambda times, position, held: times.at[position].add(held.astype(jnp.int32)))
    return index.replace(times_sampled=times(index.times_sampled, position, held))


def _draw_in_turn(index, source, keys, count, newest):
    slots, positions = index.stamps.shape[0], index.priority.shape[1]
    columns = positions // slots
    position = jnp.arange(positions, dtype=jnp.int32)
    inserted = ((newest - position // columns) % slots) * columns + columns - 1 - position % columns

    def shard(carried):
        priority, levels, touched, times, key = carried
        since = inserted if touched is None else index.updates - touched

        def step(state, key):
            priority, levels, times = state
            position, chance = samplers.choose(source.sampler, key, priority, levels, inserted, since)
            drawn = jnp.where(chance > 0.0, position, sum_tree.NOWHERE)
            times = times.at[drawn].add(1, mode="drop")
            if source.max_times_sampled:
                gone = jnp.where(times[position] >= source.max_times_sampled, drawn, sum_tree.NOWHERE)
                priority = priority.at[gone].set(samplers.ABSENT, mode="drop")
                if levels:
                    levels = sum_tree.put(levels, gone[None], jnp.zeros(1, jnp.float32))
            return (priority, levels, times), (position, chance)

        return jax.lax.scan(step, (priority, levels, times), jax.random.split(key, count))

    # In turn, not mapped: under vmap both branches of the choice would run.
    carried = (index.priority, index.levels, index.touched, index.times_sampled, keys)
    (priority, levels, times), (position, chance) = jax.lax.map(shard, carried)
    drawable = jnp.sum((priority >= 0.0).astype(jnp.int32), axis=1, dtype=jnp.int32)
    index = index.replace(priority=priority, levels=levels, times_sampled=times, drawable=drawable)
    return index, position, chance


def update(
    index: Index, source: Replay, shard: jax.Array, position: jax.Array, priority: jax.Array, drawn: jax.Array
) -> Index:
    """Gives items new priorities; of an item that comes twice, the larger counts.

    Args:
      index: not a dense one.
      source: gives the sampler.
      shard: int32 [k], among those here; others are those of other devices.
      position: int32 [k].
      priority: float32 [k]; unacceptable ones are refused and counted.
      drawn: bool [k], False where the item's row was overwritten, or nothing was drawn: dropped.
    """
    shards = index.drawable.shape[0]
    fine = samplers.acceptable(priority)
    here = drawn & (shard >= 0) & (shard < shards)
    shard = jnp.clip(shard, 0, shards - 1)
    assert index.priority is not None, "a dense index has no priorities"
    live = here & (index.priority[shard, position] >= 0.0)
    where = jnp.where(live & fine, position, sum_tree.NOWHERE)
    # Two writes that do not depend on the order of equal positions, so that the result is the same on any device.
    new = index.priority.at[shard, where].set(0.0, mode="drop").at[shard, where].max(priority, mode="drop")
    levels, touched = index.levels, index.touched
    if levels:
        levels = sum_tree.put_in(levels, shard, where, samplers.weight(source.sampler, new[shard, position]))
    if touched is not None:
        touched = touched.at[shard, where].set(index.updates, mode="drop")
    return index.replace(
        priority=new,
        levels=levels,
        touched=touched,
        largest=jnp.maximum(index.largest, jnp.max(jnp.where(fine & drawn, priority, 0.0))),
        refused=index.refused.at[shard].add((live & ~fine).astype(jnp.int32)),
    )
