"""Replay of whole items, n-step transitions or sequences, with Reverb's samplers and removers.

Rows of the last rollouts wait in a short ring until the rows after them have arrived. An item then begins at each row
and is stored separately. The remover, not the age of the rows, decides which items are removed. Compared with a ring,
this needs more memory (an observation is stored in every item that contains it) and time (items are inserted and
sampled one by one).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers import index, ring, samplers, sequences, transitions
from jaxrl.buffers.batches import Batch, drawn_statistics, importance, map_items
from jaxrl.buffers.item_table import Key, Table, TableState
from jaxrl.buffers.replay import ReplayBuffer, ReplayState
from jaxrl.buffers.ring import Ring
from jaxrl.core.sources import Fifo, Prioritized, Replay
from jaxrl.core.types import Counter, Metrics, PyTree, SampleInfo, Trajectory, TransitionBatch


class Item(struct.PyTreeNode):
    """Items of the table, with leaves `[items, ...]`."""

    batch: PyTree  # a batch with leading axes of items, without `sample_info`, with weights that ignore burn-in
    column: jax.Array  # int32, the number of its environment
    step: jax.Array  # uint32, the step of its first row in its environment
    truncated: jax.Array  # bool, whether the episode was truncated at the end of the transition
    stamp: jax.Array  # int32: `updates` when it was inserted


class TableRows(struct.PyTreeNode):
    """Part of a replay's state that sampling only reads."""

    recent: Ring  # rows of the next items
    items: Item  # [shards, positions, ...]


class TableIndex(struct.PyTreeNode):
    """Part of a replay's state that sampling and priority updates change."""

    tables: TableState  # [shards, ...], without the items
    largest: jax.Array  # [shards] float32, the largest priority so far
    refused: jax.Array  # [shards] int32, priorities that were NaN, infinite or negative
    updates: jax.Array  # int32, batches sampled so far
    sampled: Counter  # items sampled so far, over all devices
    inserted: Counter  # rows stored so far, over all devices


@dataclasses.dataclass(frozen=True)
class TableReplay:
    """`jaxrl.buffers.replay.Buffer` that stores a source's items in one `Table` per shard.

    Every shard contributes an equal part of a batch, regardless of its priorities, and has an equal part of the
    capacity.

    Args:
      rules: the source's `ReplayBuffer`, which defines the items and their first rows.
    """

    rules: ReplayBuffer

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.rules.name

    @property
    def source(self) -> Replay:
        """The source, which defines the stored items and their sampling."""
        return self.rules.source

    @property
    def _table(self) -> Table:
        """The table of one shard."""
        source = self.source
        remover = source.remover or Fifo()
        return Table(source.capacity // self.rules.shards, source.sampler, remover, source.max_times_sampled)

    def init(self, rows: Trajectory, carry: PyTree) -> ReplayState:
        rules, length, shards = self.rules, self.rules.rollout_length, self.rules.shards
        slots = -(-(rules.lookback + length + rules.source.lookahead) // length) * length
        # A ring with only the rows of the next items.
        short = dataclasses.replace(rules.storage, capacity=slots * rules.num_envs)
        recent = dataclasses.replace(rules, storage=short).init(rows, carry).ring
        item = jax.eval_shape(lambda rows: self._made(rows, jnp.int32(0), jnp.zeros((1, 1), jnp.int32))[0], recent)
        tables = self._table.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), item))
        tables = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (shards, *x.shape)).copy(), tables)
        empty = TableIndex(
            tables=tables.replace(items=()),
            largest=jnp.ones(shards, jnp.float32),
            refused=jnp.zeros(shards, jnp.int32),
            updates=jnp.int32(0),
            sampled=Counter.zero(),
            inserted=Counter.zero(),
        )
        return ReplayState(TableRows(recent, tables.items), empty)

    def partition(self, axis: str) -> ReplayState:
        shards: PyTree = PartitionSpec(axis)
        everywhere: PyTree = PartitionSpec()
        rows = TableRows(ring.partition(axis, self.rules.storage.episode_steps), shards)
        return ReplayState(rows, TableIndex(shards, shards, shards, everywhere, everywhere, everywhere))

    def add(self, state: ReplayState, rows: Trajectory, carry: PyTree) -> ReplayState:
        """Store one rollout, rows `[T, B, ...]`, and insert the items that it completes, oldest first."""
        rules, idx, shards = self.rules, state.index, self.rules.replicas.shards
        length, ahead = rules.rollout_length, rules.source.lookahead
        recent = ring.add(state.ring.recent, rules.storage.select(rows), carry if rules.storage.carries else ())
        start = recent.cursor - length - ahead
        exists = (length + ahead - jnp.arange(length, dtype=jnp.int32) <= recent.filled)[:, None]
        begun, priority = rules.beginnings(idx.largest, recent, start, length)
        priority = index.by_shard(jnp.where(begun & exists, priority, samplers.ABSENT), shards)
        positions = jnp.broadcast_to(jnp.arange(priority.shape[1], dtype=jnp.int32)[None], priority.shape)
        item, slot = self._made(recent, start, positions)
        before = jnp.asarray(rules.replicas.first_shard, jnp.int32) * (recent.columns // shards)
        stamp = jnp.broadcast_to(idx.updates, slot.shape)
        item = item.replace(column=before + item.column, step=recent.step_at(slot), stamp=stamp)
        tables, _ = jax.vmap(self._table.insert)(idx.tables.replace(items=state.ring.items), item, priority)
        idx = _noted(idx, priority, priority != samplers.ABSENT)
        idx = idx.replace(tables=tables.replace(items=()), inserted=idx.inserted.add(length * rules.num_envs))
        return ReplayState(TableRows(recent, tables.items), idx)

    def _made(self, recent: Ring, start: jax.Array, position: jax.Array) -> tuple[Item, jax.Array]:
        """Return the items that begin at positions [shards, n] of the rows from slot `start` on, and their slots.

        Positions are ordered as in `index.by_shard`. Steps and stamps are 0, and columns are numbered on this device.
        """
        columns = recent.columns // position.shape[0]
        shard = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None]
        slot, column = start + position // columns, shard * columns + position % columns
        where, source, stack = (slot.reshape(-1), column.reshape(-1)), self.source, self.rules.storage.frame_stack
        truncated = jnp.zeros(slot.shape, bool)
        if source.sequence is None:
            batch = transitions.gather(recent, *where, source.n_step, stack)
            last = slot + batch.steps.reshape(slot.shape) - 1
            truncated = recent.take(recent.rows.truncated, last, column)
        else:
            count = where[0].shape[0]
            initial = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), self.rules.initial_carry)
            whole = dataclasses.replace(source.sequence, length=source.sequence.rows, burn_in=0)
            batch = sequences.gather(recent, *where, jnp.ones(count, bool), initial, whole, stack)

        def items_first(axis):
            return lambda x: jnp.moveaxis(x, axis, 0).reshape(*slot.shape, *x.shape[:axis], *x.shape[axis + 1 :])

        batch = map_items(items_first, batch)
        step, stamp = jnp.zeros(slot.shape, jnp.uint32), jnp.zeros(slot.shape, jnp.int32)
        return Item(batch, column, step, truncated, stamp), slot

    def sample(self, state: ReplayState, key: jax.Array) -> tuple[ReplayState, Batch]:
        """Sample this device's part of a batch, with the same number of items from every shard."""
        rules, rows, idx, source = self.rules, state.ring, state.index, self.source
        shards, count = rules.replicas.shards, source.batch_size // rules.shards
        shard = rules.replicas.first_shard + jnp.arange(shards, dtype=jnp.int32)
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(shard)
        size = rules.replicas.sum(jnp.sum(idx.tables.size, dtype=jnp.int32)).astype(jnp.float32)
        draw = jax.vmap(lambda table, key: self._table.sample(table, key, count))
        tables, drawn = draw(idx.tables.replace(items=rows.items), keys)
        drawn, shard = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (drawn, jnp.broadcast_to(shard[:, None], drawn.held.shape))
        )
        chance = jnp.where(drawn.held, drawn.probability / rules.shards, 0.0)
        weights = jnp.ones_like(chance)
        if isinstance(source.sampler, Prioritized):
            weights = importance(source.sampler, size, chance, rules.replicas)
        info = SampleInfo(
            position=shard * (self._table.capacity + 1) + drawn.key.position,
            step=drawn.key.generation.astype(jnp.uint32),
            probability=chance,
            importance=weights,
            priority=jnp.where(drawn.held, drawn.priority, 0.0),
            age_steps=(rows.recent.written - 1 - drawn.items.step).astype(jnp.int32),
            age_updates=idx.updates - drawn.items.stamp,
            times_sampled=drawn.times_sampled,
        )
        batch = map_items(lambda axis: lambda x: jnp.moveaxis(x, 0, axis), drawn.items.batch)
        if isinstance(batch, TransitionBatch):
            batch = batch.replace(weight=batch.weight & drawn.held)
        else:
            assert source.sequence is not None, "a batch of sequences needs a source with a Sequence"
            burn_in = source.sequence.burn_in
            learned = drawn.held[None] & (jnp.arange(batch.mask.shape[0], dtype=jnp.int32) >= burn_in)[:, None]
            batch = batch.replace(mask=batch.mask & drawn.held[None], burn_in=burn_in)
            batch = batch.replace(rows=batch.rows.replace(weight=batch.rows.weight & learned))
        found = rules.replicas.sum(jnp.sum(drawn.held, dtype=jnp.uint32))
        idx = idx.replace(tables=tables.replace(items=()), updates=idx.updates + 1, sampled=idx.sampled.add(found))
        return ReplayState(rows, idx), batch.replace(sample_info=info)

    def update_priorities(self, state: ReplayState, info: SampleInfo, priorities: jax.Array) -> ReplayState:
        """Set the priorities [batch] of sampled items; if an item has two priorities, the last one applies.

        Priorities of removed items are dropped.
        """
        idx, shards = state.index, self.rules.replicas.shards
        key = Key(info.position % (self._table.capacity + 1), info.step.astype(jnp.int32))
        key, priority, drawn = jax.tree.map(
            lambda x: x.reshape(shards, -1), (key, priorities.astype(jnp.float32), info.probability > 0.0)
        )
        tables = jax.vmap(self._table.update_priorities)(idx.tables, key, priority)
        return state.replace(index=_noted(idx, priority, drawn).replace(tables=tables))

    def statistics(self, state: ReplayState, info: SampleInfo) -> Metrics:
        idx, replicas = state.index, self.rules.replicas
        counts = {"items": idx.tables.size, "refused_priorities": idx.refused}
        return drawn_statistics(idx, info, self.source, replicas) | {
            name: replicas.sum(jnp.sum(x, dtype=jnp.int32)).astype(jnp.float32) for name, x in counts.items()
        }


def _noted(idx: TableIndex, priority: jax.Array, counts: jax.Array) -> TableIndex:
    """Return the index with `largest` and `refused` updated by new priorities [shards, k] where `counts` is True."""
    fine = samplers.acceptable(priority)
    return idx.replace(
        largest=jnp.maximum(idx.largest, jnp.max(jnp.where(fine & counts, priority, 0.0), axis=1)),
        refused=idx.refused + jnp.sum((counts & ~fine).astype(jnp.int32), axis=1, dtype=jnp.int32),
    )
