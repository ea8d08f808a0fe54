"""Indices over the rows of a ring: the rows at which items begin, and the items' priorities and sampling counts.

Every logical shard of environments has a separate index, so that a batch does not depend on the number of devices.
Random samplers draw items over all shards at once, in proportion to their weights (`draw_over_all`); other samplers
take an equal part of the batch from each shard. An item's position within its shard is `slot * columns + column`.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers import best_tree, samplers, sum_tree, uniform
from jaxrl.core.sources import Fifo, Lifo, MaxHeap, MinHeap, Replay, Sampler, Uniform, by_priority
from jaxrl.core.types import Counter, PyTree, Replicas

_BELOW_ONE = 1.0 - 2.0**-24
_TINY = 1e-37


class Index(struct.PyTreeNode):
    """A sampler's view of a ring; leaves have a leading shard axis unless noted."""

    priority: jax.Array | None  # [shards, positions] float32, -1 where no item begins; None if `dense`
    levels: sum_tree.Levels | best_tree.Levels  # [shards, ...], see `_put`; () if `dense`
    removal: best_tree.Levels  # [shards, ...] tournament trees of the remover; () without a remover
    touched: jax.Array | None  # [shards, positions] int32, `updates` when the priority was set; None if unused
    times_sampled: jax.Array  # [shards, positions] int32
    drawable: jax.Array  # [shards] int32, number of items
    largest: jax.Array  # [shards] float32, the largest priority so far
    refused: jax.Array  # [shards] int32, priorities that were NaN, infinite or negative
    stamps: jax.Array  # [slots], or [groups, slots] with groups, int32: `updates` when written; no shard axis
    end: jax.Array | None  # int32, the slot after the last write, for a remover; no shard axis
    updates: jax.Array  # int32, batches sampled so far; no shard axis
    sampled: Counter  # items sampled so far, over all devices; no shard axis
    inserted: Counter  # rows stored so far, over all devices; no shard axis


def dense(source: Replay) -> bool:
    """Return whether all rows of nonzero weight are sampled with equal probability, so that rows need no entries."""
    plain = isinstance(source.sampler, Uniform) and source.sequence is None and not source.max_times_sampled
    return plain and not bounded(source)


def bounded(source: Replay) -> bool:
    """Return whether a source is a view of another source's rows with a limited number of items and a remover."""
    return source.over is not None and source.remover is not None


def heap(source: Replay) -> bool:
    """Return whether items are sampled in the order of their priorities."""
    return isinstance(source.sampler, MinHeap | MaxHeap)


def rules(source: Replay) -> tuple[Sampler, ...]:
    """Return the sampler and, for a bounded view, the remover."""
    remover = source.remover
    return (source.sampler,) if remover is None or not bounded(source) else (source.sampler, remover)


def one_by_one(source: Replay) -> bool:
    """Return whether a draw depends on the earlier draws of the batch."""
    return bool(source.max_times_sampled) or not samplers.by_chance(source.sampler)


def over_all(source: Replay) -> bool:
    """Return whether items are drawn over all shards at once, in proportion to their weights."""
    return samplers.by_chance(source.sampler) and not dense(source) and not one_by_one(source)


def init(source: Replay, shards: int, slots: int, columns: int, groups: int | None = None) -> Index:
    """Return the index of an empty ring with `shards` shards of `columns` environments; `groups` as in `ring.init`."""
    positions = slots * columns
    every = lambda x: jnp.broadcast_to(x[None], (shards, *x.shape)).copy()  # noqa: E731
    levels, heaps = (), any(isinstance(rule, MinHeap | MaxHeap) for rule in rules(source))
    if heap(source):
        levels = best_tree.init(shards, positions)
    elif not dense(source):
        sums = sum_tree.zeros(positions, jnp.float32 if samplers.by_chance(source.sampler) else jnp.int32)
        levels = tuple(every(level) for level in sums)
    return Index(
        priority=None if dense(source) else jnp.full((shards, positions), samplers.ABSENT, jnp.float32),
        levels=levels,
        removal=best_tree.init(shards, positions) if bounded(source) else (),
        touched=jnp.zeros((shards, positions), jnp.int32) if heaps else None,
        times_sampled=jnp.zeros((shards, positions), jnp.int32),
        drawable=jnp.zeros(shards, jnp.int32),
        largest=jnp.ones(shards, jnp.float32),
        refused=jnp.zeros(shards, jnp.int32),
        stamps=jnp.zeros(slots if groups is None else (groups, slots), jnp.int32),
        end=jnp.int32(0) if bounded(source) else None,
        updates=jnp.int32(0),
        sampled=Counter.zero(),
        inserted=Counter.zero(),
    )


def partition(axis: str, groups: int | None = None) -> Index:
    """Return an index's partition specs, a prefix tree, on a mesh whose axis `axis` shards the environments."""
    shards: PyTree = PartitionSpec(axis)
    everywhere: PyTree = PartitionSpec()
    specs = Index(*([shards] * 8), *([everywhere] * 5))
    return specs if groups is None else specs.replace(stamps=shards)


def by_shard(x: jax.Array, shards: int) -> jax.Array:
    """Reorder the entries of rows [slots, B] by shard and position, [shards, slots * columns]."""
    slots, envs = x.shape
    return jnp.moveaxis(x.reshape(slots, shards, envs // shards), 1, 0).reshape(shards, -1)


def places(index: Index, start: jax.Array, count: int, members: jax.Array) -> jax.Array:
    """Return the positions, int32 [count * k], of rows in the columns `members` [k] of a single shard.

    The rows are those in `count` slots from `start` on, modulo the number of slots.
    """
    positions, slots = index.times_sampled.shape[1], index.stamps.shape[-1]
    slot = (start + jnp.arange(count, dtype=jnp.int32)) % slots
    return (slot[:, None] * (positions // slots) + members[None]).reshape(-1)


def write(
    index: Index,
    source: Replay,
    start: jax.Array,
    priority: jax.Array,
    limit: int = 0,
    members: jax.Array | None = None,
) -> Index:
    """Set the items that begin at the rows in a range of slots.

    Args:
      index: index of all shards on this device.
      source: the source that defines the sampler and remover.
      start: the first slot, int32, modulo the number of slots.
      priority: priorities of the items, float32 [count, B], negative where no item begins.
      limit: maximum number of items of a shard in a bounded view, static.
      members: the B columns in a single shard, int32 [B]; None: all columns.
    """
    assert index.priority is not None, "a dense index is read-only"
    shards, positions = index.priority.shape
    slots = index.stamps.shape[-1]
    columns = positions // slots
    new = by_shard(priority, shards)
    refuse = ~samplers.acceptable(new) & (new != samplers.ABSENT)
    new = jnp.where(refuse, samplers.ABSENT, new)
    first = (start % slots) * columns
    position = (first + jnp.arange(new.shape[1], dtype=jnp.int32)) % positions
    if members is not None:
        position = places(index, start, priority.shape[0], members)

    before, after = _held(index.priority[:, position]), _held(new)
    # Read first, then write: otherwise XLA copies the whole array to read it afterwards.
    before, new = jax.lax.optimization_barrier((before, new))
    touched = index.touched
    if touched is not None:
        touched = touched.at[:, position].set(index.updates, unique_indices=True)
    index = index.replace(
        priority=index.priority.at[:, position].set(new, unique_indices=True),
        touched=touched,
        drawable=index.drawable + after - before,
        largest=jnp.maximum(index.largest, jnp.max(new, axis=1)),
        refused=index.refused + jnp.sum(refuse.astype(jnp.int32), axis=1, dtype=jnp.int32),
        # Only used in samplers and removers that need one order of all rows, which groups do not have.
        end=index.end if index.end is None or members is not None else (start + priority.shape[0]) % slots,
    )
    if members is not None:
        index = _put(index, source, jnp.zeros_like(position), position, new[0])
        return _limited(index, source, limit) if bounded(source) else index
    if heap(source):
        levels = best_tree.put_range(index.levels, first, new.shape[1], positions, _ranks(index, source.sampler))
    else:
        put = jax.vmap(lambda levels, weight: sum_tree.put_range(levels, first, weight, positions))
        levels = put(index.levels, _weight(source, new))
    index = index.replace(levels=levels)
    if not bounded(source):
        return index
    removal = best_tree.put_range(index.removal, first, new.shape[1], positions, _ranks(index, source.remover))
    return _limited(index.replace(removal=removal), source, limit)


def _limited(index, source, limit):
    """Return the index without the items in excess of `limit`, removed in the order of the remover."""
    shards, positions = index.times_sampled.shape

    def remove(index):
        # One shard after another: sums over several at once may round differently with one shard per device.
        tree = jnp.argmax(index.drawable > limit).astype(jnp.int32)[None]
        position = best_tree.best(index.removal, shards, positions, _ranks(index, source.remover))[tree]
        # Read all first, then write: otherwise XLA copies whole arrays to read them afterwards.
        position, index = jax.lax.optimization_barrier((position, index))
        return _remove(index, source, tree, position)

    return jax.lax.while_loop(lambda index: jnp.any(index.drawable > limit), remove, index)


def _put(index: Index, source: Replay, tree: jax.Array, position: jax.Array, priority: jax.Array) -> Index:
    """Return the index with its levels updated for new priorities [k] at positions [k] of trees [k].

    The levels of random samplers are sums over weights, those of samplers in insertion order are counts that find an
    item by rank, and those of heaps are a tournament tree.
    """
    positions = index.times_sampled.shape[1]
    removal = best_tree.put(index.removal, tree, position, positions, _ranks(index, source.remover))
    if heap(source):
        levels = best_tree.put(index.levels, tree, position, positions, _ranks(index, source.sampler))
    else:
        levels = sum_tree.put(index.levels, tree, position, _weight(source, priority))
    return index.replace(levels=levels, removal=removal)


def _weight(source: Replay, priority: jax.Array) -> jax.Array:
    weight = samplers.weight(source.sampler, priority)
    return weight if samplers.by_chance(source.sampler) else weight.astype(jnp.int32)


def _ranks(index: Index, rule: Sampler | None) -> best_tree.Ranks:
    (_, positions), slots = index.times_sampled.shape, index.stamps.shape[-1]

    def ranks(tree, position):
        assert index.priority is not None and rule is not None, "only ordered samplers have ranks"
        if index.end is not None and isinstance(rule, Fifo | Lifo):
            since = (index.end * (positions // slots) - 1 - position) % positions
        else:
            assert index.touched is not None, "touched is only stored for heaps"
            since = index.updates - index.touched[tree, position]
        return samplers.rank(rule, index.priority[tree, position], since, since)

    return ranks


def _held(priority: jax.Array) -> jax.Array:
    """Return the number of items in each shard, int32 [shards], given the priorities [shards, k] of positions."""
    return jnp.sum((priority >= 0.0).astype(jnp.int32), axis=1, dtype=jnp.int32)


def draw(
    index: Index, source: Replay, key: jax.Array, shard: jax.Array, count: int, newest: jax.Array
) -> tuple[Index, jax.Array, jax.Array, jax.Array]:
    """Draw `count` items from every shard, one after another, and count the draws.

    Args:
      index: an index that is not dense.
      source: the source that defines the sampler and `max_times_sampled`.
      key: key that is the same on all devices.
      shard: numbers of the logical shards on this device, int32 [shards].
      count: number of draws per shard, static.
      newest: the slot that was written last, int32.

    Returns:
      The index; positions int32 [shards, count]; the probability of each draw within its shard, 0 if the shard was
      empty; and the items' priorities before the draw, which may remove items.
    """
    if samplers.by_chance(source.sampler) or heap(source):
        return _draw_in_turn(index, source, key, shard, count)
    return _draw_in_order(index, source, count, newest)


def _draw_in_order(index, source, count, newest):
    """Take a whole batch at once, in the order of insertion or its reverse."""
    most, slots, (shards, positions) = source.max_times_sampled, index.stamps.shape[0], index.times_sampled.shape
    here, items = jnp.arange(shards, dtype=jnp.int32), index.drawable[:, None]
    # One item after another; without a limit all draws return the same item.
    number = jnp.arange(count if most else 1, dtype=jnp.int32)[None]
    tree = jnp.broadcast_to(here[:, None], (shards, number.size))
    oldest = jnp.broadcast_to((newest + 1) % slots * (positions // slots), (shards,))
    rank = sum_tree.before(index.levels, here, oldest)[:, None]
    rank = rank + (number if isinstance(source.sampler, Fifo) else items - 1 - number)
    rank = (rank % jnp.maximum(items, 1)).reshape(-1)
    position = sum_tree.find(index.levels, tree.reshape(-1), rank).reshape(tree.shape)
    # `room` is the number of draws that each item has left, `times` the number of its draws in this batch.
    room = most - index.times_sampled[tree, position] if most else jnp.full(tree.shape, count, jnp.int32)
    room = jnp.where(number < items, room, 0)
    ends = jnp.cumsum(room, axis=1, dtype=jnp.int32)
    draws = jnp.arange(count, dtype=jnp.int32)
    which = jax.vmap(lambda ends: jnp.searchsorted(ends, draws, side="right"))(ends).astype(jnp.int32)
    held = draws[None] < ends[:, -1:]
    drawn = jnp.where(held, jnp.take_along_axis(position, jnp.minimum(which, number.size - 1), axis=1), 0)
    times = jnp.clip(count - (ends - room), 0, room)
    # Read all first, then write: otherwise XLA copies whole arrays to read them afterwards.
    read = position, room, times, drawn, held, index.priority[here[:, None], drawn]
    (position, room, times, drawn, held, priority), index = jax.lax.optimization_barrier((read, index))
    position = jnp.where(times > 0, position, sum_tree.NOWHERE)
    index = index.replace(times_sampled=index.times_sampled.at[tree, position].add(times, mode="drop"))
    if most:
        worn = jnp.where(times == room, position, sum_tree.NOWHERE)
        index = _remove(index, source, tree.reshape(-1), worn.reshape(-1))
    return index, drawn, held.astype(jnp.float32), priority


def _draw_in_turn(index, source, key, shard, count):
    """Take items one after another, at random or from a heap."""
    (shards, positions), most = index.times_sampled.shape, source.max_times_sampled
    here, keys = jnp.arange(shards, dtype=jnp.int32), None
    if heap(source):
        # Without a limit all draws return the same item.
        turns = jnp.tile(here, (count if most else 1, 1))
    else:
        # One shard after another: sums over several at once may round differently with one shard per device.
        keys = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number), count))(shard).reshape(-1)
        turns = jnp.repeat(here, count)[:, None]
    times = shards * count // turns.size

    def step(index, turn):
        tree, key = turn
        items = index.drawable[tree]
        if key is None:
            best = best_tree.best(index.levels, shards, positions, _ranks(index, source.sampler))
            position, chance = jnp.where(items > 0, best, 0), (items > 0).astype(jnp.float32)
        else:
            position, chance = samplers.draw(key, index.priority, index.levels, tree, items)
        # Read all first, then write: otherwise XLA copies whole arrays to read them afterwards.
        read = position, chance, index.priority[tree, position]
        (position, chance, priority), index = jax.lax.optimization_barrier((read, index))
        drawn = jnp.where(chance > 0.0, position, sum_tree.NOWHERE)
        index = index.replace(times_sampled=index.times_sampled.at[tree, drawn].add(times, mode="drop"))
        if most:
            worn = index.times_sampled[tree, position] >= most
            index = _remove(index, source, tree, jnp.where(worn, drawn, sum_tree.NOWHERE))
        return index, (position, chance, priority)

    index, drawn = jax.lax.scan(step, index, (turns, keys))
    if keys is None:
        drawn = jax.tree.map(lambda x: jnp.broadcast_to(x.T, (shards, count)), drawn)
    return index, *jax.tree.map(lambda x: x.reshape(shards, count), drawn)


def _remove(index, source, tree, position):
    """Return the index without the items at positions [k] of trees [k]; `NOWHERE` is ignored."""
    gone = (position != sum_tree.NOWHERE).astype(jnp.int32)
    index = index.replace(
        priority=index.priority.at[tree, position].set(samplers.ABSENT, mode="drop"),
        drawable=index.drawable.at[tree].add(-gone),
    )
    return _put(index, source, tree, position, jnp.full(position.shape, samplers.ABSENT, jnp.float32))


def draw_over_all(
    index: Index, key: jax.Array, count: int, shards: int, replicas: Replicas
) -> tuple[Index, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sample a batch at random over the shards of all devices, and count the draws from the shards on this device.

    An item's probability is proportional to its weight; if all weights are 0, all items are equally likely. Every
    device makes all draws, and looks up the items of its own shards.

    Args:
      index: index of the shards on this device, for a source that satisfies `over_all`.
      key: key that is the same on all devices.
      count: number of draws, static.
      shards: number of shards on all devices, static.
      replicas: the devices.

    Returns:
      The index and, for every draw [count], the item's shard among those on this device, its position in the shard, its
      probability (0 if there are no items), its priority, and a bool that is True if the shard is on this device. If
      False, the other values are undefined.
    """
    here, depth, priority = index.drawable.shape[0], len(index.levels), index.priority
    assert priority is not None, "a dense index does not support weighted sampling"

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
        # The rest of the random number chooses within the shard, so that draws are stratified within shards, too.
        left = (spread * total - (ends - weights)[shard]) / jnp.maximum(weights[shard], _TINY)
        tree = jnp.clip(shard - first, 0, here - 1)
        u = jnp.concatenate([u[:-1], jnp.clip(left, 0.0, _BELOW_ONE)[None]])
        position = sum_tree.draw(index.levels, tree, u)
        chance = index.levels[0][tree, position] / jnp.maximum(total, _TINY)
        return tree, position, chance, shard == first + tree

    items, priority = everywhere(index.drawable), index.priority
    assert priority is not None, "a dense index has its own sampling method"

    def uniformly():
        held = jnp.cumsum((priority >= 0.0).reshape(-1).astype(jnp.int32), dtype=jnp.int32)
        before = jnp.sum(jnp.where(jnp.arange(shards, dtype=jnp.int32) < first, items, 0), dtype=jnp.int32)
        rank = uniform.below(bits[0], jnp.sum(items, dtype=jnp.int32)) - before
        found = jnp.minimum(jnp.searchsorted(held, rank, side="right"), held.shape[0] - 1).astype(jnp.int32)
        some = jnp.sum(items, dtype=jnp.int32)
        chance = jnp.full(count, (some > 0).astype(jnp.float32) / jnp.maximum(some, 1).astype(jnp.float32))
        tree, position = found // priority.shape[1], found % priority.shape[1]
        return tree, position, chance, (rank >= 0) & (rank < held[-1])

    tree, position, chance, mine = samplers.usual_or(total > 0.0, weighted, uniformly)
    drawn = jnp.where(mine & (chance > 0.0), position, sum_tree.NOWHERE)
    times_sampled = index.times_sampled.at[tree, drawn].add(1, mode="drop")
    # Read priorities before they are updated: otherwise XLA copies the whole array to read it afterwards.
    of_drawn, priority = jax.lax.optimization_barrier((priority[tree, position], priority))
    index = index.replace(priority=priority, times_sampled=times_sampled)
    return index, tree, position, chance, of_drawn, mine


def count_draws(index: Index, position: jax.Array, held: jax.Array) -> Index:
    """Count the draws at positions [shards, k] where `held` is True."""
    times = jax.vmap(lambda times, position, held: times.at[position].add(held.astype(jnp.int32)))
    return index.replace(times_sampled=times(index.times_sampled, position, held))


def update(
    index: Index, source: Replay, shard: jax.Array, position: jax.Array, priority: jax.Array, drawn: jax.Array
) -> Index:
    """Set the priorities of items; if an item has two priorities, the larger one applies.

    Args:
      index: an index that is not dense.
      source: the source that defines the sampler and remover.
      shard: shard of each item among those on this device, int32 [k]; out of range for a shard of another device.
      position: position of each item in its shard, int32 [k].
      priority: new priorities, float32 [k]; NaN, infinite and negative ones are rejected and counted.
      drawn: bool [k]; False drops the priority, because the item's row was overwritten or nothing was drawn.
    """
    shards = index.drawable.shape[0]
    fine = samplers.acceptable(priority)
    here = drawn & (shard >= 0) & (shard < shards)
    shard = jnp.clip(shard, 0, shards - 1)
    assert index.priority is not None, "a dense index has no priorities"
    live = here & (index.priority[shard, position] >= 0.0)
    where = jnp.where(live & fine, position, sum_tree.NOWHERE)
    # These two writes do not depend on the order of equal positions, so the result is the same on any device.
    new = index.priority.at[shard, where].set(0.0, mode="drop").at[shard, where].max(priority, mode="drop")
    index = index.replace(
        priority=new,
        largest=jnp.maximum(index.largest, jnp.max(jnp.where(fine & drawn, priority, 0.0))),
        refused=index.refused.at[shard].add((live & ~fine).astype(jnp.int32)),
    )
    if not by_priority(*rules(source)):
        return index
    if index.touched is not None:
        index = index.replace(touched=index.touched.at[shard, where].set(index.updates, mode="drop"))
    return _put(index, source, shard, where, new[shard, position])
