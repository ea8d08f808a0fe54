"""The replay buffer: a ring stores rows, and an index samples items from it and holds their priorities.

A `ReplayBuffer` is created for one source, and its methods are pure functions over a state that is donated. The ring
and the index are separate because a round of updates reads the ring but changes the index: only the index, which is
small, is carried through the loop of updates.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.buffers import batches, frames, index, ring, samplers, sequences, signature, transitions, uniform
from jaxrl.buffers.batches import Batch
from jaxrl.buffers.index import Index
from jaxrl.buffers.ring import Ring
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import FrameStack, Prioritized, Replay, Uniform
from jaxrl.core.types import Metrics, PyTree, Replicas, SampleInfo, Trajectory

Sources = Mapping[str, Replay]


class ReplayState(struct.PyTreeNode):
    """State of a replay: the part that sampling only reads, and the part that it changes."""

    ring: PyTree  # a `Ring`; None if the source samples from another source's rows
    index: PyTree  # an `Index`


class Buffer(Protocol):
    """Interface of replay buffers to the training program; `ReplayBuffer` documents the methods."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> Replay: ...
    def init(self, rows: Trajectory, carry: PyTree) -> ReplayState: ...
    def add(self, state: ReplayState, rows: Trajectory, carry: PyTree) -> ReplayState: ...
    def sample(self, state: ReplayState, key: jax.Array) -> tuple[ReplayState, Batch]: ...
    def update_priorities(self, state: ReplayState, info: SampleInfo, priorities: jax.Array) -> ReplayState: ...
    def statistics(self, state: ReplayState, info: SampleInfo) -> Metrics: ...
    def partition(self, axis: str) -> ReplayState: ...


# --- how rows are stored -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Storage:
    """Description of the stored parts of rows, for all sources that sample from these rows."""

    capacity: int  # rows over all environments
    frame_stack: FrameStack | None
    extras: tuple[str, ...]  # the names of the stored extras
    carries: bool  # whether the recurrent state at every rollout's first row is stored
    episode_steps: bool  # whether rows are numbered within their episode
    on_host: bool  # whether observations and recurrent states are stored in the host's memory

    def select(self, rows: Trajectory) -> Trajectory:
        """Return the stored part of rows `[T, B, ...]`: the newest frames, and the extras that a source uses."""
        observation = frames.newest(rows.observation, self.frame_stack)
        return rows.replace(observation=observation, extras={name: rows.extras[name] for name in self.extras})


def storage(sources: Sources, name: str) -> Storage:
    """Return the storage of the rows that the source `name` samples from."""
    owner = sources[name].over or name
    users = [source for other, source in sources.items() if (source.over or other) == owner]
    stretches = [source.sequence for source in users if source.sequence is not None]
    extras = {*sources[owner].extras, *(found for source in users if (found := _insertion(source)))}
    return Storage(
        capacity=sources[owner].capacity,
        frame_stack=sources[owner].frame_stack,
        extras=tuple(sorted(extras)),
        carries=any(sequence.stored_carry for sequence in stretches),
        episode_steps=any(sequence.end != "continue" for sequence in stretches),
        on_host=sources[owner].storage == "host",
    )


def least_size(source: Replay, num_envs: int) -> int:
    """Return the number of rows, over all environments, that must be stored before the first update.

    The number is at least `min_size`, and enough for one item per environment.
    """
    return max(source.min_size, (source.lookahead + 1) * num_envs)


def lookback(source: Replay, stored: Storage) -> int:
    """Return the number of rows that an item reads before its first row, for stacked frames and the previous reward."""
    return max(frames.lookback(stored.frame_stack), 0 if source.sequence is None else 1)


def _insertion(source: Replay) -> str | None:
    """Return the name of the extra that holds the priorities of new rows, or None."""
    return source.sampler.insertion if isinstance(source.sampler, Prioritized) else None


# --- one replay ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReplayBuffer:
    """Buffer of a replay source, as pure functions over a `ReplayState`.

    A source that samples from another source's rows (`Replay.over`) has a separate index but no ring: its methods
    receive a state with the other source's ring, and the module's `add` writes for all sources at once.

    Args:
      name: the source's name, for error messages.
      source: defines the items and their sampler.
      storage: the stored parts of the rows.
      num_envs: number of environments over all devices.
      groups: number of groups of environments that store their rollouts independently, with one shard on each device;
        None: every rollout is one of all environments.
      rollout_length: number of rows per environment that each `add` stores.
      shards: number of logical shards over all devices.
      replicas: the devices, with the shards of this device.
      initial_carry: the initial carry of one environment, for sequences without a stored carry.
    """

    name: str
    source: Replay
    storage: Storage
    num_envs: int
    rollout_length: int
    shards: int
    replicas: Replicas
    initial_carry: PyTree = ()
    groups: int | None = None

    @property
    def lookback(self) -> int:
        """The number of rows that an item reads before its first row."""
        return lookback(self.source, self.storage)

    @property
    def slots(self) -> int:
        """The number of rows stored per environment."""
        return ring.slots(self.storage.capacity, self.num_envs, self.rollout_length)

    def init(self, rows: Trajectory, carry: PyTree) -> ReplayState:
        """Return an empty replay over all devices.

        Args:
          rows: rows with leaves `[T, B, ...]`, or their shapes, including extras, for any B.
          carry: carry `[B, ...]`, or its shapes.

        Raises:
          ConfigError: `rows` lack a leaf that the source needs, or a leaf has the wrong type; the message names it.
        """
        self._check(rows)
        empty = index.init(self.source, self.shards, self.slots, self.num_envs // self.shards, self.groups)
        if self.source.over is not None:
            return ReplayState(None, empty)
        example = jax.eval_shape(self.storage.select, rows)
        stored, size = self.storage, (self.num_envs, self.slots, self.rollout_length)
        ring_carry = carry if stored.carries else ()
        made = ring.init(example, ring_carry, *size, stored.episode_steps, stored.on_host, self.groups)
        return ReplayState(made, empty)

    def partition(self, axis: str) -> ReplayState:
        """Return the state's partition specs on a mesh whose axis `axis` shards the environments."""
        stored, rows_ring = self.storage, None
        if self.source.over is None:
            rows_ring = ring.partition(axis, stored.episode_steps, on_host=stored.on_host, groups=self.groups)
        return ReplayState(rows_ring, index.partition(axis, self.groups))

    def add(self, state: ReplayState, rows: Trajectory, carry: PyTree) -> ReplayState:
        """Store one rollout: rows `[T, B, ...]` with their extras, and the carry `[B, ...]` at the first row."""
        return add({self.name: self}, {self.name: state}, rows, carry)[self.name]

    def sample(self, state: ReplayState, key: jax.Array) -> tuple[ReplayState, Batch]:
        """Sample this device's part of a batch, whose content does not depend on the number of devices.

        Weighted items and sequences are drawn over all shards at once, in proportion to their weights; items in shards
        of other devices are copied from those devices. Unweighted transitions are drawn shard by shard, an equal part
        of the batch from each, so that all rows of nonzero weight in a shard are equally likely. (All shards of a
        dataset have the same number of transitions.) Every shard also contributes equally to items drawn one by one.

        Args:
          state: a state with the ring to sample from.
          key: key that is the same on all devices.

        Returns:
          The state, with its ring unchanged, and the batch, with its `sample_info`. Leaves are `[batch, ...]`, or
          `[length, batch, ...]` for sequences, where `batch` is `batch_size` divided by the number of devices.
        """
        source, rows, idx = self.source, state.ring, state.index
        slots, columns = rows.slots, rows.columns // self.replicas.shards
        idx, shard, position, chance, priority, mine = self._drawn(rows, idx, key)
        slot, column = position // columns, shard * columns + position % columns
        own = rows.at(position)
        step = own.step_at(slot)
        stamps = idx.stamps[slot] if self.groups is None else idx.stamps[rows.group_at(position), slot]
        info = SampleInfo(
            position=(self.replicas.first_shard + shard) * (slots * columns) + position,
            step=step,
            probability=chance,
            importance=jnp.ones_like(chance),
            priority=priority,
            age_steps=(own.written - 1 - step).astype(jnp.int32),
            age_updates=idx.updates - stamps,
            times_sampled=idx.times_sampled[shard, position],
        )
        found = source.batch_size
        if index.one_by_one(source):  # the items may run out
            found = self.replicas.sum(jnp.sum(chance > 0.0, dtype=jnp.uint32))
        idx = idx.replace(updates=idx.updates + 1, sampled=idx.sampled.add(found))
        state = ReplayState(rows, idx)
        if source.sequence is None:
            batch = transitions.gather(rows, slot, column, source.n_step, self.storage.frame_stack)
            batch = batch.replace(weight=batch.weight & (chance > 0.0))
        else:
            initial = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (slot.shape[0], *x.shape)), self.initial_carry)
            drawn = slot, column, chance > 0.0
            batch = sequences.gather(rows, *drawn, initial, source.sequence, self.storage.frame_stack)
        batch = batch.replace(sample_info=info)
        if mine is not None:
            batch = batches.deliver(batch, mine, self.replicas)
        info = batch.sample_info
        assert info is not None
        return state, batch.replace(sample_info=info.replace(importance=self._importance(idx, info.probability)))

    def _drawn(
        self, rows: Ring, idx: Index, key: jax.Array
    ) -> tuple[Index, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return the index and, per draw [k], the shard on this device, position, probability, priority, and a flag.

        If every device makes all draws (`index.over_all`), these are the draws of all devices, and the flag is True if
        the item is on this device. Otherwise, they are the draws of this device, and the flag is None.
        """
        source, shards = self.source, self.replicas.shards
        count = source.batch_size // self.shards
        if index.over_all(source):
            return index.draw_over_all(idx, key, source.batch_size, self.shards, self.replicas)
        here = jnp.arange(shards, dtype=jnp.int32)
        shard = self.replicas.first_shard + here
        if index.dense(source):
            position, held = uniform.draw(rows, key, shard, count, self.lookback, source.lookahead, self.shards)
            idx = index.count_draws(idx, position, held)
            of_each = jnp.maximum(idx.drawable, 1).astype(jnp.float32)[:, None] * self.shards
            if rows.parts is not None:
                of_each = rows.parts.total.astype(jnp.float32)
            chance = held.astype(jnp.float32) / of_each
            priority = held.astype(jnp.float32)
        else:
            idx, position, chance, priority = index.draw(idx, source, key, shard, count, (rows.cursor - 1) % rows.slots)
            chance = chance / self.shards
        owner = jnp.broadcast_to(here[:, None], position.shape)
        return idx, owner.reshape(-1), position.reshape(-1), chance.reshape(-1), priority.reshape(-1), None

    def update_priorities(self, state: ReplayState, info: SampleInfo, priorities: jax.Array) -> ReplayState:
        """Set the priorities of a batch's items, for a source that has priorities.

        Args:
          state: a state with the ring from which the batch was sampled.
          info: the batch's `sample_info`.
          priorities: float32 [batch], in the order of `info`. NaN, infinite and negative ones are rejected and counted,
            and those for overwritten rows are dropped. If an item has two priorities, the larger one applies.
        """
        chex.assert_equal_shape([info.position, priorities])
        update = (info.position, info.step, priorities.astype(jnp.float32), info.probability)
        if self.replicas.devices > 1:  # an item may be on any device
            update = tuple(batches.everywhere(x, self.replicas) for x in update)
        number, step, priority, chance = update
        drawn = state.ring.at(number).holds(step) & (chance > 0.0)
        positions = state.index.times_sampled.shape[1]
        shard, position = number // positions - self.replicas.first_shard, number % positions
        if self.groups is not None:  # this device has only the counters of its own groups
            drawn &= shard == 0
        return state.replace(index=index.update(state.index, self.source, shard, position, priority, drawn))

    def statistics(self, state: ReplayState, info: SampleInfo) -> Metrics:
        """Return statistics of the replay and of the last batch, over all devices: float32 scalars."""
        idx, replicas = state.index, self.replicas
        figures = {}
        if isinstance(self.source.sampler, Uniform):
            figures = {"chance_ratio": self._chance_ratio(state)}
        return figures | {
            "items": replicas.sum(jnp.sum(idx.drawable, dtype=jnp.int32)).astype(jnp.float32),
            **batches.drawn_statistics(idx, info, self.source, replicas),
            "refused_priorities": replicas.sum(jnp.sum(idx.refused, dtype=jnp.int32)).astype(jnp.float32),
        }

    def _chance_ratio(self, state: ReplayState) -> jax.Array:
        """Return the largest ratio between the sampling probabilities of two items; 1 if all are equal.

        The ratio is computed from the numbers of items in the shards instead of from a batch, because a maximum over a
        batch makes SAC 7 % slower on two cores.
        """
        if index.over_all(self.source) or (state.ring is not None and state.ring.parts is not None):
            return jnp.float32(1.0)
        items, replicas = state.index.drawable, self.replicas
        least = -replicas.max(-jnp.min(jnp.where(items > 0, items, jnp.iinfo(jnp.int32).max)))
        return replicas.max(jnp.max(items)).astype(jnp.float32) / least.astype(jnp.float32)

    def beginnings(self, largest: jax.Array, rows: Ring, start: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """Return a mask [length, B] of the rows from slot `start` on at which items begin, and the items' priorities.

        Without priorities at insertion, an item's priority is the largest of its shard so far, `largest` [shards].
        """
        sequence, insertion = self.source.sequence, _insertion(self.source)
        largest = jnp.repeat(largest, rows.columns // largest.shape[0])[None]
        if sequence is None:
            begun = _transitions_begun(rows, start, length)
            slot = (start + jnp.arange(length, dtype=jnp.int32)) % rows.slots
            if insertion:
                return begun, rows.take_all(rows.rows.extras[insertion], slot)
            return begun, jnp.broadcast_to(largest, begun.shape)
        slot = (start + jnp.arange(length + sequence.rows - 1, dtype=jnp.int32)) % rows.slots
        begun = sequences.eligible(rows, slot, sequence, self.rollout_length)
        priority = jnp.broadcast_to(largest, begun.shape)
        if insertion:
            inside = jnp.full(begun.shape, sequence.rows, jnp.int32)
            if sequence.end != "continue":
                inside = sequences.lengths(rows.take_all(rows.rows.first, slot), sequence.rows)
            per_row, counts = (rows.take_all(x, slot) for x in (rows.rows.extras[insertion], rows.rows.weight))
            assert isinstance(self.source.sampler, Prioritized), "only Prioritized has priorities at insertion"
            priority = sequences.mixed_priority(per_row, counts, inside, sequence, self.source.sampler.eta)
        return begun, priority

    def _expiring(self, idx: Index, before: Ring) -> jax.Array:
        """Return the number of items that the next write removes from a dense index, int32 [shards]."""
        shards, length, back = idx.drawable.shape[0], self.rollout_length, self.lookback
        if not index.dense(self.source):
            return jnp.zeros(shards, jnp.int32)
        ended = _transitions_begun(before, before.cursor, length + back)
        number = jnp.arange(length + back, dtype=jnp.int32)[:, None]
        # In a full ring, the oldest `back` rows begin no items; the write that fills the ring removes theirs.
        full = before.filled == before.slots
        filling = before.filled + length == before.slots
        return _per_shard(ended & ((full & (number >= back)) | (filling & (number >= length))), shards)

    def _inserted(self, idx: Index, after: Ring, expired: jax.Array) -> Index:
        """Return the index after a write to the ring, with the new items and without the removed ones."""
        length, ahead, back = self.rollout_length, self.source.lookahead, self.lookback
        shards = idx.drawable.shape[0]
        columns = after.columns // shards
        written, members = (after.cursor - length) % after.slots, after.members
        if members is None:
            inserted = length * self.num_envs
            times_sampled = jax.lax.dynamic_update_slice_in_dim(
                idx.times_sampled, jnp.zeros((shards, length * columns), jnp.int32), written * columns, 1
            )
            stamps = jax.lax.dynamic_update_slice_in_dim(
                idx.stamps, jnp.broadcast_to(idx.updates[None], (length,)), written, 0
            )
        else:
            inserted = length * columns * self.replicas.devices
            times_sampled = idx.times_sampled.at[0, index.places(idx, written, length, members)].set(0)
            slot = written + jnp.arange(length, dtype=jnp.int32)
            stamps = idx.stamps.at[members[0] // columns, slot].set(idx.updates)
        fresh = idx.replace(times_sampled=times_sampled, stamps=stamps, inserted=idx.inserted.add(inserted))
        # The rows whose items are now complete: they follow those that became complete at the last write.
        start = after.cursor - length - ahead
        exists = (length + ahead - jnp.arange(length, dtype=jnp.int32) <= after.filled)[:, None]
        if index.dense(self.source):
            begun = _transitions_begun(after, start, length) & exists
            return fresh.replace(drawable=idx.drawable + _per_shard(begun, shards) - expired)
        begun, priority = self.beginnings(idx.largest, after, start, length)
        # No item begins yet at the newest rows, nor at the oldest, whose lookback rows were overwritten.
        blank = jnp.full((ahead + back, after.columns), samplers.ABSENT, jnp.float32)
        priority = jnp.where(begun & exists, priority, samplers.ABSENT)
        limit = self.source.capacity // self.shards
        return index.write(fresh, self.source, start, jnp.concatenate([priority, blank]), limit, members)

    def _importance(self, idx: Index, chance: jax.Array) -> jax.Array:
        """Return the importance weights of draws with probabilities `chance`; 1 without priorities."""
        sampler = self.source.sampler
        if not isinstance(sampler, Prioritized):
            return jnp.ones_like(chance)
        items = self.replicas.sum(jnp.sum(idx.drawable, dtype=jnp.int32)).astype(jnp.float32)
        return batches.importance(sampler, items, chance, self.replicas)

    def _check(self, rows: Trajectory) -> None:
        """Raise a `ConfigError` if rows `[T, B, ...]` lack leaves that the source needs."""
        label = f"replay source {self.name!r}:"
        found = [f"{label} {line}" for line in frames.problems(rows.observation, self.storage.frame_stack)]
        for extra in self.storage.extras:
            if extra not in rows.extras:
                found.append(f"{label} rows have no extras[{extra!r}]; act returns {sorted(rows.extras)}")
        insertion = _insertion(self.source)
        if insertion in rows.extras:
            expected = {insertion: jax.ShapeDtypeStruct(rows.reward.shape, jnp.float32)}
            actual = {insertion: rows.extras[insertion]}
            found += [f"{label} extras{line}" for line in signature.problems(expected, actual)]
        if found:
            raise ConfigError(found)


# --- all replays of an algorithm -----------------------------------------------------------------------------------


def bind(
    sources: Sources,
    *,
    num_envs: int,
    rollout_length: int,
    shards: int,
    replicas: Replicas,
    initial_carry: PyTree = (),
    groups: int | None = None,
) -> dict[str, ReplayBuffer]:
    """Return the buffers of an algorithm's replay sources by name; see `ReplayBuffer` for the arguments."""
    fixed = num_envs, rollout_length, shards, replicas, initial_carry, groups
    return {name: ReplayBuffer(name, source, storage(sources, name), *fixed) for name, source in sources.items()}


def add(
    buffers: Mapping[str, ReplayBuffer],
    states: Mapping[str, ReplayState],
    rows: Trajectory,
    carry: PyTree,
    group: jax.Array | None = None,
) -> dict[str, ReplayState]:
    """Store one rollout in the rings of buffers, and update every index over them.

    Args:
      buffers: buffers by name, including those whose rows other buffers sample.
      states: states of the buffers, by name.
      rows: rows `[T, B, ...]` with their extras; T is `rollout_length`.
      carry: carry `[B, ...]` at the first row.
      group: index of the group of environments that collected the rollout, int32, if groups store independently.

    Returns:
      The states after the write.
    """
    chex.assert_rank([rows.reward, rows.first, rows.weight], 2)
    chex.assert_type([rows.reward, rows.terminated, rows.truncated, rows.first, rows.weight], [float] + [bool] * 4)
    chex.assert_tree_shape_prefix(rows, rows.reward.shape)
    owner = {name: buffer.source.over or name for name, buffer in buffers.items()}
    written: dict[str, Ring] = {}
    rings = {name: states[name].ring for name in buffers if owner[name] == name}
    if group is not None:
        rings = {name: every.of_group(group) for name, every in rings.items()}
    expired = {name: buffer._expiring(states[name].index, rings[owner[name]]) for name, buffer in buffers.items()}
    # Rows are read before they are overwritten: otherwise XLA copies whole arrays to read them afterwards.
    # Observations are left out of the barrier, because it would copy the larger array that they may be part of.
    rest, expired = jax.lax.optimization_barrier((rows.replace(observation=()), expired))
    rows = rest.replace(observation=rows.observation)
    for name, buffer in buffers.items():
        if owner[name] == name:
            before, selected = rings[name], buffer.storage.select(rows)
            ring_carry = carry if buffer.storage.carries else ()
            signature.check(before.rows, selected, f"rows for replay source {name!r}", leading=2)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), before.carry)
            signature.check(one, ring_carry, f"carry for replay source {name!r}", leading=1)
            written[name] = ring.add(before, selected, ring_carry)
    indices = {
        name: buffer._inserted(states[name].index, written[owner[name]], expired[name])
        for name, buffer in buffers.items()
    }
    if group is not None:
        written = {name: states[name].ring.with_group(group, own) for name, own in written.items()}
    return {name: ReplayState(written.get(name), index) for name, index in indices.items()}


def _transitions_begun(rows: Ring, start: jax.Array, count: int) -> jax.Array:
    """Return whether a transition may begin at each of `count` rows from slot `start` on, bool [count, B]."""
    return rows.take_all(rows.rows.weight, start + jnp.arange(count, dtype=jnp.int32))


def _per_shard(flags: jax.Array, shards: int) -> jax.Array:
    """Return the number of true flags [count, B] in each shard, int32 [shards]."""
    return jnp.sum(index.by_shard(flags.astype(jnp.int32), shards), axis=1, dtype=jnp.int32)
