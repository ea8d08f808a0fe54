"""A replay: rows go into a ring, items are drawn from it by an index, and new priorities come back.

A `ReplayBuffer` is bound to its rules once; its functions are pure, over a state that is donated. The ring and the
index are apart because a round of updates reads the one and changes the other: only the index, which is small, goes
round with the learner.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.buffers import frames, index, ring, samplers, sequences, signature, transitions, uniform
from jaxrl.buffers.index import Index
from jaxrl.buffers.ring import Ring
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import FrameStack, Prioritized, Replay
from jaxrl.core.types import Metrics, PyTree, Replicas, SampleInfo, SequenceBatch, Trajectory, TransitionBatch

Sources = Mapping[str, Replay]
Batch = TransitionBatch | SequenceBatch


class ReplayState(struct.PyTreeNode):
    """All that a replay is: what sampling only reads, and what it changes."""

    ring: PyTree  # a `Ring`; None where the source draws from another's rows
    index: PyTree  # an `Index`


class Buffer(Protocol):
    """What the training program asks of a replay, whoever implements it: `ReplayBuffer` says what each does."""

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
    """What is stored of the rows, for all sources that draw from them."""

    capacity: int  # rows over all environments
    frame_stack: FrameStack | None
    extras: tuple[str, ...]  # the names of those that are kept
    carries: bool  # whether the recurrent state at every rollout's first row is kept
    episode_steps: bool  # whether rows are numbered within their episode

    def kept(self, rows: Trajectory) -> Trajectory:
        """What is kept of rows `[T, B, ...]`: the newest frames, and the extras that somebody asks for."""
        observation = frames.newest(rows.observation, self.frame_stack)
        return rows.replace(observation=observation, extras={name: rows.extras[name] for name in self.extras})


def storage(sources: Sources, name: str) -> Storage:
    """How the rows are stored that the source `name` draws from."""
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
    )


def lookahead(source: Replay) -> int:
    """How many rows after its first an item reads."""
    return source.n_step if source.sequence is None else source.sequence.rows - 1


def lookback(source: Replay, stored: Storage) -> int:
    """How many rows before its first an item reads: a stack's frames, and the reward that came with a time step."""
    return max(frames.lookback(stored.frame_stack), 0 if source.sequence is None else 1)


def _insertion(source: Replay) -> str | None:
    """The name of the extra that holds the priorities of new rows."""
    return source.sampler.insertion if isinstance(source.sampler, Prioritized) else None


def _eta(source: Replay) -> float:
    """The weight of a sequence's largest priority, not of its mean."""
    return source.sampler.eta if isinstance(source.sampler, Prioritized) else 0.0


# --- one replay ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReplayBuffer:
    """A replay source bound to its rules; pure functions over a `ReplayState`.

    A source that draws over another's rows (`Replay.over`) has an index of its own and no ring: it is handed a state
    with the other's ring, and `add` below writes for all of them at once.

    Args:
      name: of the source, for errors.
      source: what an item is, and by which sampler items are drawn.
      storage: how the rows are stored.
      num_envs: environments over all devices.
      rollout_length: rows of every environment that each `add` brings.
      shards: logical shards over all devices.
      replicas: says which shards are here, and sums over devices.
      initial_carry: of one environment, for sequences without a stored one.
    """

    name: str
    source: Replay
    storage: Storage
    num_envs: int
    rollout_length: int
    shards: int
    replicas: Replicas
    initial_carry: PyTree = ()

    @property
    def lookahead(self) -> int:
        """How many rows after its first an item reads."""
        return lookahead(self.source)

    @property
    def lookback(self) -> int:
        """How many rows before its first an item reads."""
        return lookback(self.source, self.storage)

    @property
    def slots(self) -> int:
        """Rows of one environment."""
        return ring.slots(self.storage.capacity, self.num_envs, self.rollout_length)

    def init(self, rows: Trajectory, carry: PyTree) -> ReplayState:
        """An empty replay over all devices.

        Args:
          rows: with leaves `[T, num_envs, ...]`, or their shapes, extras included.
          carry: `[num_envs, ...]` or its shapes.

        Raises:
          ConfigError: rows lack what the source asks for; names the leaf.
        """
        self._check(rows)
        empty = index.init(self.source, self.shards, self.slots, self.num_envs // self.shards)
        if self.source.over is not None:
            return ReplayState(None, empty)
        example = jax.eval_shape(self.storage.kept, rows)
        kept_carry = carry if self.storage.carries else ()
        rows_ring = ring.init(example, kept_carry, self.slots, self.rollout_length, self.storage.episode_steps)
        return ReplayState(rows_ring, empty)

    def partition(self, axis: str) -> ReplayState:
        """How the state lies on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
        rows_ring = None if self.source.over is not None else ring.partition(axis, self.storage.episode_steps)
        return ReplayState(rows_ring, index.partition(axis))

    def add(self, state: ReplayState, rows: Trajectory, carry: PyTree) -> ReplayState:
        """Stores one rollout: rows `[T, B, ...]` with their extras, and the carry `[B, ...]` at the first."""
        return add({self.name: self}, {self.name: state}, rows, carry)[self.name]

    def sample(self, state: ReplayState, key: jax.Array) -> tuple[ReplayState, Batch]:
        """Draws this device's share of a batch.

        Each logical shard of environments gives an equal part of the batch, drawn with its own random numbers, so the
        content does not depend on the number of devices.

        Args:
          state: with the ring to draw from.
          key: for all devices.

        Returns:
          The state, whose ring is as it was, and the batch with its `sample_info`: leaves `[batch, ...]`, or of
          sequences `[length, batch, ...]`; `batch` is `batch_size` over the number of devices.
        """
        source, rows, idx = self.source, state.ring, state.index
        shards, slots = self.replicas.shards, rows.slots
        columns = rows.columns // shards
        count = source.batch_size // self.shards
        here = jnp.arange(shards, dtype=jnp.int32)
        shard = self.replicas.first_shard + here
        if index.dense(source):
            position, held = uniform.draw(rows, key, shard, count, self.lookback, self.lookahead)
            chance = held.astype(jnp.float32) / jnp.maximum(idx.drawable, 1).astype(jnp.float32)[:, None]
            idx = index.count_draws(idx, position, held)
            priority = held.astype(jnp.float32)
        else:
            priorities = idx.priority
            idx, position, chance = index.draw(idx, source, key, shard, count, (rows.cursor - 1) % slots)
            priority = jnp.take_along_axis(priorities, position, axis=1)
        slot, column = position // columns, here[:, None] * columns + position % columns
        step = rows.step_at(slot)
        chance = chance / self.shards
        info = SampleInfo(
            position=position,
            step=step,
            probability=chance,
            importance=self._importance(idx, chance),
            priority=priority,
            age_steps=(rows.written - 1 - step).astype(jnp.int32),
            age_updates=idx.updates - idx.stamps[slot],
            times_sampled=jnp.take_along_axis(idx.times_sampled, position, axis=1),
        )
        info, slot, column = jax.tree.map(lambda x: x.reshape(-1), (info, slot, column))
        state = ReplayState(rows, idx.replace(updates=idx.updates + 1, sampled=idx.sampled.add(count * self.shards)))
        if source.sequence is None:
            batch = transitions.gather(rows, slot, column, source.n_step, self.storage.frame_stack)
            return state, batch.replace(weight=batch.weight & (info.probability > 0.0), sample_info=info)
        initial = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (slot.shape[0], *x.shape)), self.initial_carry)
        batch = sequences.gather(rows, slot, column, info, initial, source.sequence, self.storage.frame_stack)
        return state, batch

    def update_priorities(self, state: ReplayState, info: SampleInfo, priorities: jax.Array) -> ReplayState:
        """Gives the items of a batch new priorities; for a source that keeps them.

        Args:
          state: with the ring that was drawn from.
          info: as the batch came with.
          priorities: float32 [batch], in its order. NaN, infinite and negative ones are refused and counted; those for
            rows that were overwritten since are dropped; of an item that comes twice, the larger counts.
        """
        chex.assert_equal_shape([info.position, priorities])
        position, step, priority, chance = (
            x.reshape(self.replicas.shards, -1) for x in (info.position, info.step, priorities, info.probability)
        )
        live = state.ring.holds(step) & (chance > 0.0)
        return state.replace(index=index.update(state.index, self.source, position, priority.astype(jnp.float32), live))

    def statistics(self, state: ReplayState, info: SampleInfo) -> Metrics:
        """Figures of the replay and of the last batch, over all devices: float32 scalars."""
        idx, replicas = state.index, self.replicas
        inserted, sampled = idx.inserted.as_float(), idx.sampled.as_float()
        return {
            "items": replicas.sum(jnp.sum(idx.drawable)).astype(jnp.float32),
            "inserted": inserted,
            "sampled": sampled,
            "samples_per_insert": sampled / jnp.maximum(inserted, 1.0),
            "age_steps": replicas.mean(jnp.mean(info.age_steps.astype(jnp.float32))),
            "age_updates": replicas.mean(jnp.mean(info.age_updates.astype(jnp.float32))),
            "times_sampled": replicas.mean(jnp.mean(info.times_sampled.astype(jnp.float32))),
            "refused_priorities": replicas.sum(jnp.sum(idx.refused)).astype(jnp.float32),
        }

    def beginnings(self, idx: Index, rows: Ring, start: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """Which of `length` rows from slot `start` begin an item [length, B], and with what priority."""
        sequence, insertion = self.source.sequence, _insertion(self.source)
        largest = jnp.repeat(idx.largest, rows.columns // idx.drawable.shape[0])[None]
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
            per_row = rows.take_all(rows.rows.extras[insertion], slot)
            priority = sequences.mixed_priority(per_row, inside, sequence.rows, _eta(self.source))
        return begun, priority

    def _expiring(self, idx: Index, before: Ring) -> jax.Array:
        """How many items of a dense index the next write ends, int32 [shards]."""
        shards, length, back = idx.drawable.shape[0], self.rollout_length, self.lookback
        if not index.dense(self.source):
            return jnp.zeros(shards, jnp.int32)
        ended = _transitions_begun(before, before.cursor, length + back)
        number = jnp.arange(length + back, dtype=jnp.int32)[:, None]
        # In a full ring the oldest `back` rows begin nothing already. The write that fills it makes them so.
        full = before.filled == before.slots
        filling = before.filled + length == before.slots
        return _per_shard(ended & ((full & (number >= back)) | (filling & (number >= length))), shards)

    def _inserted(self, idx: Index, after: Ring, expired: jax.Array) -> Index:
        """The index once the ring has changed: which rows begin an item now, and which no more."""
        length, ahead, back = self.rollout_length, self.lookahead, self.lookback
        shards = idx.drawable.shape[0]
        columns = after.columns // shards
        written = (after.cursor - length) % after.slots
        fresh = idx.replace(
            times_sampled=jax.lax.dynamic_update_slice_in_dim(
                idx.times_sampled, jnp.zeros((shards, length * columns), jnp.int32), written * columns, 1
            ),
            stamps=jax.lax.dynamic_update_slice_in_dim(
                idx.stamps, jnp.broadcast_to(idx.updates[None], (length,)), written, 0
            ),
            inserted=idx.inserted.add(length * self.num_envs),
        )
        # The rows whose future is complete now: they follow those that were at the last write.
        start = after.cursor - length - ahead
        exists = (length + ahead - jnp.arange(length, dtype=jnp.int32) <= after.filled)[:, None]
        if index.dense(self.source):
            begun = _transitions_begun(after, start, length) & exists
            return fresh.replace(drawable=idx.drawable + _per_shard(begun, shards) - expired)
        begun, priority = self.beginnings(idx, after, start, length)
        # Nothing begins at the newest rows yet, nor at the oldest, whose past the next write takes.
        blank = jnp.full((ahead + back, after.columns), samplers.ABSENT, jnp.float32)
        priority = jnp.where(begun & exists, priority, samplers.ABSENT)
        return index.write(fresh, self.source, start, jnp.concatenate([priority, blank]))

    def _importance(self, idx: Index, chance: jax.Array) -> jax.Array:
        """Importance weights [shards, count] against the true chance of each draw; 1 without priorities."""
        sampler = self.source.sampler
        if not isinstance(sampler, Prioritized):
            return jnp.ones_like(chance)
        items = self.replicas.sum(jnp.sum(idx.drawable)).astype(jnp.float32)
        return importance(sampler, items, chance, self.replicas)

    def _check(self, rows: Trajectory) -> None:
        """Raises if rows `[T, B, ...]` lack what the source asks for."""
        label = f"replay source {self.name!r}:"
        found = [f"{label} {line}" for line in frames.problems(rows.observation, self.storage.frame_stack)]
        for extra in self.storage.extras:
            if extra not in rows.extras:
                found.append(f"{label} rows have no extras[{extra!r}]; act gives {sorted(rows.extras)}")
        insertion = _insertion(self.source)
        if insertion in rows.extras:
            expected = {insertion: jax.ShapeDtypeStruct(rows.reward.shape, jnp.float32)}
            given = {insertion: rows.extras[insertion]}
            found += [f"{label} extras{line}" for line in signature.problems(expected, given)]
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
) -> dict[str, ReplayBuffer]:
    """The buffers of an algorithm's replay sources, by name; arguments as of `ReplayBuffer`."""
    return {
        name: ReplayBuffer(
            name, source, storage(sources, name), num_envs, rollout_length, shards, replicas, initial_carry
        )
        for name, source in sources.items()
    }


def add(
    buffers: Mapping[str, ReplayBuffer], states: Mapping[str, ReplayState], rows: Trajectory, carry: PyTree
) -> dict[str, ReplayState]:
    """Stores one rollout in the rings of buffers, and has it known to every index over them.

    Args:
      buffers: by name, with those whose rows others draw from.
      states: theirs.
      rows: `[T, B, ...]` with their extras, T being `rollout_length`.
      carry: `[B, ...]` at the first row.

    Returns:
      The states after it.
    """
    chex.assert_rank([rows.reward, rows.first, rows.weight], 2)
    chex.assert_type([rows.reward, rows.terminated, rows.truncated, rows.first, rows.weight], [float] + [bool] * 4)
    chex.assert_tree_shape_prefix(rows, rows.reward.shape)
    owner = {name: buffer.source.over or name for name, buffer in buffers.items()}
    rings: dict[str, Ring] = {}
    expired = {name: buffer._expiring(states[name].index, states[owner[name]].ring) for name, buffer in buffers.items()}
    # What is overwritten is read first, then written over: else XLA copies whole arrays to read them afterwards.
    # Observations stay out of it: they may be a part of a larger array, which the barrier would copy.
    rest, expired = jax.lax.optimization_barrier((rows.replace(observation=()), expired))
    rows = rest.replace(observation=rows.observation)
    for name, buffer in buffers.items():
        if owner[name] == name:
            before, kept = states[name].ring, buffer.storage.kept(rows)
            kept_carry = carry if buffer.storage.carries else ()
            signature.check(before.rows, kept, f"rows for replay source {name!r}", leading=2)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), before.carry)
            signature.check(one, kept_carry, f"carry for replay source {name!r}", leading=1)
            rings[name] = ring.add(before, kept, kept_carry)
    return {
        name: ReplayState(rings.get(name), buffer._inserted(states[name].index, rings[owner[name]], expired[name]))
        for name, buffer in buffers.items()
    }


def _transitions_begun(rows: Ring, start: jax.Array, count: int) -> jax.Array:
    """Whether a transition may begin, bool [count, B], from slot `start` on."""
    return rows.take_all(rows.rows.weight, start + jnp.arange(count, dtype=jnp.int32))


def _per_shard(flags: jax.Array, shards: int) -> jax.Array:
    """How many flags [count, B] hold in each shard, int32 [shards]."""
    return jnp.sum(index.by_shard(flags.astype(jnp.int32), shards), axis=1)


# --- batches -------------------------------------------------------------------------------------------------------


def importance(sampler: Prioritized, items: jax.Array, chance: jax.Array, replicas: Replicas) -> jax.Array:
    """Importance weights (N P)^-beta of draws (Schaul et al., 2016, section 3.4).

    Args:
      sampler: gives beta, and whether to divide by the largest.
      items: N, float32, over all devices.
      chance: P of each draw, float32 [...]; 0 where nothing was drawn, whose weight is 0.
      replicas: over which the largest is taken.
    """
    beta = jnp.asarray(sampler.beta, jnp.float32)
    raised = jnp.power(items * jnp.where(chance > 0.0, chance, 1.0), -beta)
    weight = jnp.where(chance > 0.0, raised, 0.0)
    if sampler.normalize == "none":
        return weight
    return weight / jnp.maximum(replicas.max(jnp.max(weight)), jnp.finfo(jnp.float32).tiny)


def join(batches: list[Batch], shards: int) -> Batch:
    """Parts of a batch as one, in which every shard's items lie side by side."""
    if len(batches) == 1:
        return batches[0]

    def along(axis):
        def joined(*parts):
            split = [x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :]) for x in parts]
            whole = jnp.concatenate(split, axis=axis + 1)
            return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])

        return joined

    first = batches[0]
    if isinstance(first, TransitionBatch):
        return jax.tree.map(along(0), *batches)
    over_time = {name: [getattr(batch, name) for batch in batches] for name in ("rows", "timesteps", "mask")}
    of_items = {name: [getattr(batch, name) for batch in batches] for name in ("carry", "sample_info")}
    parts = {name: jax.tree.map(along(1), *found) for name, found in over_time.items()}
    return first.replace(**parts, **{name: jax.tree.map(along(0), *found) for name, found in of_items.items()})


def split(values: PyTree, sizes: list[int], shards: int) -> list[PyTree]:
    """The entries, leaves [batch], of a joined batch for each of its parts, of the given sizes over all shards here."""
    ends = [sum(sizes[: number + 1]) // shards for number in range(len(sizes))]

    def parts(x):
        return [part.reshape(-1) for part in jnp.split(x.reshape(shards, -1), ends[:-1], axis=1)]

    leaves, structure = jax.tree.flatten(values)
    return [jax.tree.unflatten(structure, part) for part in zip(*map(parts, leaves), strict=True)]
