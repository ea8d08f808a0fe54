"""What a sampler knows of the rows of a ring: which of them begin an item, their priorities, how often each was drawn.

Every logical shard of environments has an index of its own and gives an equal part of every batch, so that a batch
does not depend on how many devices hold the shards. An item's position is `slot * columns + column` within its shard.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers import samplers, sum_tree, uniform
from jaxrl.core.sources import Replay, Uniform
from jaxrl.core.types import Counter, PyTree


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


def init(source: Replay, shards: int, slots: int, columns: int) -> Index:
    """An index of an empty ring: `shards` shards of `columns` environments each."""
    positions = slots * columns
    every = lambda x: jnp.broadcast_to(x[None], (shards, *x.shape)).copy()  # noqa: E731
    levels = sum_tree.zeros(positions) if samplers.by_chance(source.sampler) and not dense(source) else ()
    heap = samplers.by_priority(source.sampler) and not samplers.by_chance(source.sampler)
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
        refused=index.refused + jnp.sum(refuse.astype(jnp.int32), axis=1),
    )


def _held(priority: jax.Array) -> jax.Array:
    """How many of these positions hold an item."""
    return jnp.sum((priority >= 0.0).astype(jnp.int32))


def draw(
    index: Index, source: Replay, key: jax.Array, shard: jax.Array, count: int, newest: jax.Array
) -> tuple[Index, jax.Array, jax.Array]:
    """Draws `count` items from every shard, and counts that they were.

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
    if one_by_one(source):
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(shard)
        return _draw_in_turn(index, source, keys, count, newest)

    def weighted(levels, u):
        spread = (jnp.arange(count, dtype=jnp.float32) + u[-1]) / count
        u = jnp.concatenate([u[:-1], jnp.minimum(spread, 1.0 - 2.0**-24)[None]])
        position = sum_tree.draw(levels, u)
        return position, levels[0][position] / jnp.maximum(sum_tree.total(levels), jnp.finfo(jnp.float32).tiny)

    def alike(priority, bits):
        held = jnp.cumsum((priority >= 0.0).astype(jnp.int32))
        rank = uniform.below(bits, held[-1])
        position = jnp.minimum(jnp.searchsorted(held, rank, side="right"), priority.shape[0] - 1).astype(jnp.int32)
        return position, (held[-1:] > 0).astype(jnp.float32) / jnp.maximum(held[-1:], 1).astype(jnp.float32)

    bits = uniform.bits(key, shard, len(index.levels) * count).reshape(-1, len(index.levels), count)
    position, chance = jax.vmap(weighted)(index.levels, uniform.unit(bits))
    nothing = jnp.sum(index.levels[-1], axis=1) <= 0.0

    def fall_back():
        other, other_chance = jax.vmap(alike)(index.priority, bits[:, 0])
        return jnp.where(nothing[:, None], other, position), jnp.where(nothing[:, None], other_chance, chance)

    # Passes over every position, hence only where some shard has no weight left.
    position, chance = jax.lax.cond(jnp.any(nothing), fall_back, lambda: (position, chance))
    return count_draws(index, position, chance > 0.0), position, chance


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
    drawable = jnp.sum((priority >= 0.0).astype(jnp.int32), axis=1)
    index = index.replace(priority=priority, levels=levels, times_sampled=times, drawable=drawable)
    return index, position, chance


def update(index: Index, source: Replay, position: jax.Array, priority: jax.Array, live: jax.Array) -> Index:
    """Gives items new priorities; of an item that comes twice, the larger counts.

    Args:
      index: not a dense one.
      source: gives the sampler.
      position: int32 [shards, k].
      priority: float32 [shards, k]; unacceptable ones are refused and counted.
      live: bool [shards, k], False where the item's row was overwritten: dropped.
    """

    def one(old, levels, touched, position, priority, live):
        fine = samplers.acceptable(priority)
        live = live & (old[position] >= 0.0)
        where = jnp.where(live & fine, position, sum_tree.NOWHERE)
        # Two writes that do not depend on the order of equal positions, so that the result is the same on any device.
        new = old.at[where].set(0.0, mode="drop").at[where].max(priority, mode="drop")
        if levels:
            levels = sum_tree.put(levels, where, samplers.weight(source.sampler, new[position]))
        if touched is not None:
            touched = touched.at[where].set(index.updates, mode="drop")
        given = jnp.max(jnp.where(fine & live, priority, 0.0))
        return new, levels, touched, given, jnp.sum((live & ~fine).astype(jnp.int32))

    new, levels, touched, given, refused = jax.vmap(one)(
        index.priority, index.levels, index.touched, position, priority, live
    )
    return index.replace(
        priority=new,
        levels=levels,
        touched=touched,
        largest=jnp.maximum(index.largest, given),
        refused=index.refused + refused,
    )
