"""A replay source at work: rows go into a ring, items are drawn from it by an index, new priorities come back.

Pure functions over a state that is donated. The ring and the index are apart because a round of updates reads the one
and changes the other: only the index, which is small, goes round with the learner.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers import frames, index, ring, samplers, sequences, signature, transitions, uniform
from jaxrl.buffers.index import Index
from jaxrl.buffers.ring import Ring
from jaxrl.errors import ConfigError
from jaxrl.sources import Prioritised, Replay
from jaxrl.types import Drawn, Metrics, PyTree, Replicas, SequenceBatch, Trajectory, TransitionBatch

Sources = Mapping[str, Replay]


@struct.dataclass
class ReplayState:
    """All that a replay source is."""

    ring: Ring | None  # None where the source draws from another's rows
    index: Index


def storage(sources: Sources, name: str) -> Replay:
    """The source whose rows the source `name` draws from."""
    return sources[sources[name].over or name]


def init(
    sources: Sources, rows: Trajectory, carry: PyTree, *, num_envs: int, rollout: int, shards: int
) -> dict[str, ReplayState]:
    """Empty replays.

    Args:
      sources: the replay sources of an algorithm, by name.
      rows: with leaves `[T, num_envs, ...]`, or their shapes, extras included.
      carry: `[num_envs, ...]` or its shapes.
      num_envs: environments over all devices.
      rollout: rows of every environment that each `add` brings.
      shards: logical shards over all devices.

    Raises:
      ConfigError: rows lack what a source asks for; names the leaf.
    """
    states = {}
    for name, source in sources.items():
        stored = storage(sources, name)
        slots = ring.slots(stored.capacity, num_envs, rollout)
        rows_ring = None
        if source.over is None:
            carry_kept, steps_kept = keeps(sources, name)
            _check_rows(rows, sources, name)
            example = jax.eval_shape(lambda rows: kept_rows(rows, sources, name), rows)  # noqa: B023
            rows_ring = ring.init(example, carry if carry_kept else (), slots, rollout, steps_kept)
        states[name] = ReplayState(rows_ring, index.init(source, shards, slots, num_envs // shards))
    return states


def partition(sources: Sources, axis: str) -> dict[str, ReplayState]:
    """How replays lie on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
    columns, everywhere = PartitionSpec(axis), PartitionSpec()
    states = {}
    for name, source in sources.items():
        rows_ring = None
        if source.over is None:
            steps = columns if keeps(sources, name)[1] else None
            rows_ring = Ring(columns, columns, steps, everywhere, everywhere, everywhere)
        states[name] = ReplayState(rows_ring, index.partition(axis))
    return states


def add(
    states: dict[str, ReplayState], sources: Sources, rows: Trajectory, carry: PyTree, replicas: Replicas
) -> dict[str, ReplayState]:
    """Stores one rollout: rows `[T, B, ...]` with their extras, and the carry `[B, ...]` at the first."""
    rings, new, lost = {}, {}, {}
    for name, source in sources.items():
        owner = source.over or name
        lost[name] = _lost(states[name].index, source, sources[owner], states[owner].ring, rows.reward.shape[0])
    # What is overwritten is read first, then written over: else XLA copies whole arrays to read them afterwards.
    rows, lost = jax.lax.optimization_barrier((rows, lost))
    for name, state in states.items():
        if state.ring is not None:
            stored, kept = kept_rows(rows, sources, name), carry if keeps(sources, name)[0] else ()
            signature.check(state.ring.rows, stored, f"rows for replay source {name!r}", leading=2)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), state.ring.carry)
            signature.check(one, kept, f"carry for replay source {name!r}", leading=1)
            rings[name] = ring.add(state.ring, stored, kept)
    for name, state in states.items():
        source, owner = sources[name], sources[name].over or name
        fresh = _insert(state.index, source, sources[owner], rings[owner], rows.reward.shape[0], lost[name])
        fresh = fresh.replace(inserted=fresh.inserted.add(rows.reward.size * replicas.devices))
        new[name] = ReplayState(rings.get(name), fresh)
    return new


def _lost(idx: Index, source: Replay, stored: Replay, before: Ring, length: int) -> jax.Array:
    """How many items of a dense index the next write ends, int32 [shards]."""
    shards = idx.drawable.shape[0]
    if not index.dense(source):
        return jnp.zeros(shards, jnp.int32)
    back = lookback(source, stored)
    ended = _transitions_begun(before, before.cursor, length + back)
    number = jnp.arange(length + back, dtype=jnp.int32)[:, None]
    # In a full ring the oldest `back` rows begin nothing already. The write that fills it makes them so.
    full = before.filled == before.slots
    filling = before.filled + length == before.slots
    return _per_shard(ended & ((full & (number >= back)) | (filling & (number >= length))), shards)


def _insert(idx: Index, source: Replay, stored: Replay, after: Ring, length: int, lost: jax.Array) -> Index:
    """The index once the ring has changed: which rows begin an item now, and which no more."""
    ahead, back = lookahead(source), lookback(source, stored)
    slots, envs = after.slots, after.columns
    shards = idx.drawable.shape[0]
    columns = envs // shards
    written = (after.cursor - length) % slots
    fresh = idx.replace(
        times_sampled=jax.lax.dynamic_update_slice_in_dim(
            idx.times_sampled, jnp.zeros((shards, length * columns), jnp.int32), written * columns, 1
        ),
        stamps=jax.lax.dynamic_update_slice_in_dim(
            idx.stamps, jnp.broadcast_to(idx.updates[None], (length,)), written, 0
        ),
    )
    # The rows whose future is complete now: they follow those that were at the last write.
    start = after.cursor - length - ahead
    exists = (length + ahead - jnp.arange(length, dtype=jnp.int32) <= after.filled)[:, None]
    if index.dense(source):
        begun = _transitions_begun(after, start, length) & exists
        return fresh.replace(drawable=idx.drawable + _per_shard(begun, shards) - lost)
    begun, priority = beginnings(idx, source, after, start, length)
    # Nothing begins at the newest rows yet, nor at the oldest, whose past the next write takes.
    blank = jnp.full((ahead + back, envs), samplers.ABSENT, jnp.float32)
    priority = jnp.where(begun & exists, priority, samplers.ABSENT)
    return index.write(fresh, source, start, jnp.concatenate([priority, blank]))


def beginnings(idx: Index, source: Replay, after: Ring, start: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Which of `length` rows from slot `start` begin an item [length, B], and with what priority."""
    slots, envs = after.slots, after.columns
    shards = idx.drawable.shape[0]
    largest = jnp.repeat(idx.largest, envs // shards)[None]
    insertion = source.sampler.insertion if isinstance(source.sampler, Prioritised) else None
    if source.sequence is None:
        begun = _transitions_begun(after, start, length)
        slot = (start + jnp.arange(length, dtype=jnp.int32)) % slots
        if insertion:
            return begun, after.take_all(after.rows.extras[insertion], slot)
        return begun, jnp.broadcast_to(largest, begun.shape)
    sequence = source.sequence
    slot = (start + jnp.arange(length + sequence.rows - 1, dtype=jnp.int32)) % slots
    begun = sequences.eligible(after, slot, sequence, _rollout(after, length))
    priority = jnp.broadcast_to(largest, begun.shape)
    if insertion:
        inside = jnp.full(begun.shape, sequence.rows, jnp.int32)
        if sequence.end != "continue":
            inside = sequences.lengths(after.take_all(after.rows.first, slot), sequence.rows)
        per_row = after.take_all(after.rows.extras[insertion], slot)
        priority = sequences.mixed_priority(per_row, inside, sequence.rows, source.sampler.eta)
    return begun, priority


def sample(
    rows: Ring,
    idx: Index,
    source: Replay,
    stored: Replay,
    key: jax.Array,
    replicas: Replicas,
    initial_carry: PyTree = (),
) -> tuple[Index, TransitionBatch | SequenceBatch]:
    """Draws this device's share of a batch.

    Each logical shard of environments gives an equal part of the batch, drawn with its own random numbers, so the
    content does not depend on the number of devices.

    Args:
      rows: the rows to draw from.
      idx: of this source.
      source: what is drawn and how.
      stored: the source that stored the rows.
      key: for all devices.
      replicas: says which shards are here.
      initial_carry: of one environment, for sequences without a stored one.

    Returns:
      The index, and the batch.
    """
    shards, slots = replicas.shards, rows.slots
    columns = rows.columns // shards
    count = source.batch_size // (shards * replicas.devices)
    here = jnp.arange(shards, dtype=jnp.int32)
    shard = replicas.first_shard + here
    if index.dense(source):
        place, held = uniform.draw(rows, key, shard, count, lookback(source, stored), lookahead(source))
        chance = held.astype(jnp.float32) / jnp.maximum(idx.drawable, 1).astype(jnp.float32)[:, None]
        idx = index.count_draws(idx, place, held)
        priority = held.astype(jnp.float32)
    else:
        priorities = idx.priority
        idx, place, chance = index.draw(idx, source, key, shard, count, (rows.cursor - 1) % slots)
        priority = jnp.take_along_axis(priorities, place, axis=1)
    slot, column = place // columns, here[:, None] * columns + place % columns
    tick = rows.tick(slot)
    chance = chance / (shards * replicas.devices)
    drawn = Drawn(
        place=place,
        tick=tick,
        probability=chance,
        importance=_importance(source, idx, chance, replicas),
        priority=priority,
        age_steps=(rows.written - 1 - tick).astype(jnp.int32),
        age_updates=idx.updates - idx.stamps[slot],
        times_sampled=jnp.take_along_axis(idx.times_sampled, place, axis=1),
    )
    drawn, slot, column = jax.tree.map(lambda x: x.reshape(-1), (drawn, slot, column))
    idx = idx.replace(updates=idx.updates + 1, sampled=idx.sampled.add(count * shards * replicas.devices))
    valid = drawn.probability > 0.0
    if source.sequence is None:
        batch = transitions.gather(rows, slot, column, source, stored)
        return idx, batch.replace(weight=batch.weight & valid, drawn=drawn)
    initial = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (slot.shape[0], *x.shape)), initial_carry)
    batch = sequences.gather(rows, slot, column, valid, initial, source, stored)
    return idx, batch.replace(drawn=drawn)


def _importance(source, idx, chance, replicas):
    """Importance weights [shards, count] against the true chance of each draw; 1 without priorities."""
    if not isinstance(source.sampler, Prioritised):
        return jnp.ones_like(chance)
    items = replicas.sum(jnp.sum(idx.drawable)).astype(jnp.float32)
    beta = jnp.asarray(source.sampler.beta, jnp.float32)
    raised = jnp.power(items * jnp.where(chance > 0.0, chance, 1.0), -beta)
    weight = jnp.where(chance > 0.0, raised, 0.0)
    if source.sampler.normalise == "none":
        return weight
    return weight / jnp.maximum(replicas.max(jnp.max(weight)), jnp.finfo(jnp.float32).tiny)


def update_priorities(rows: Ring, idx: Index, source: Replay, drawn: Drawn, priorities: jax.Array) -> Index:
    """Gives the items of a batch new priorities.

    Args:
      rows: the rows that were drawn from.
      idx: of the source.
      source: one that keeps priorities.
      drawn: as the batch came with.
      priorities: float32 [batch], in its order. NaN, infinite and negative ones are refused and counted; those for
        rows that were overwritten since are dropped; of an item that comes twice, the larger counts.
    """
    shards = idx.drawable.shape[0]
    place, tick, priority, chance = (
        x.reshape(shards, -1) for x in (drawn.place, drawn.tick, priorities, drawn.probability)
    )
    return index.update(idx, source, place, priority.astype(jnp.float32), rows.holds(tick) & (chance > 0.0))


def joined(batches: list[TransitionBatch] | list[SequenceBatch], shards: int) -> TransitionBatch | SequenceBatch:
    """Parts of a batch as one, in which every shard's items lie side by side."""
    if len(batches) == 1:
        return batches[0]

    def along(axis):
        def join(*parts):
            split = [x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :]) for x in parts]
            whole = jnp.concatenate(split, axis=axis + 1)
            return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])

        return join

    first = batches[0]
    if isinstance(first, TransitionBatch):
        return jax.tree.map(along(0), *batches)
    over_time = {name: [getattr(batch, name) for batch in batches] for name in ("rows", "timesteps", "mask")}
    of_items = {name: [getattr(batch, name) for batch in batches] for name in ("carry", "drawn")}
    parts = {name: jax.tree.map(along(1), *found) for name, found in over_time.items()}
    return first.replace(**parts, **{name: jax.tree.map(along(0), *found) for name, found in of_items.items()})


def parted(values: jax.Array, sizes: list[int], shards: int) -> list[jax.Array]:
    """The entries [batch] of a joined batch for each of its parts, of the given sizes."""
    by_shard = values.reshape(shards, -1)
    ends = [sum(sizes[: number + 1]) // shards for number in range(len(sizes))]
    return [part.reshape(-1) for part in jnp.split(by_shard, ends[:-1], axis=1)]


def statistics(idx: Index, drawn: Drawn, replicas: Replicas) -> Metrics:
    """Figures of a replay and of the last batch, over all devices: float32 scalars."""
    inserted, sampled = idx.inserted.as_float(), idx.sampled.as_float()
    return {
        "items": replicas.sum(jnp.sum(idx.drawable)).astype(jnp.float32),
        "inserted": inserted,
        "sampled": sampled,
        "samples_per_insert": sampled / jnp.maximum(inserted, 1.0),
        "age_steps": replicas.mean(jnp.mean(drawn.age_steps.astype(jnp.float32))),
        "age_updates": replicas.mean(jnp.mean(drawn.age_updates.astype(jnp.float32))),
        "times_sampled": replicas.mean(jnp.mean(drawn.times_sampled.astype(jnp.float32))),
        "refused_priorities": replicas.sum(jnp.sum(idx.refused)).astype(jnp.float32),
    }


def lookahead(source: Replay) -> int:
    """How many rows after its first an item reads."""
    return transitions.lookahead(source) if source.sequence is None else sequences.lookahead(source)


def lookback(source: Replay, stored: Replay) -> int:
    """How many rows before its first an item reads: a stack's frames, and the reward that came with a moment."""
    return max(frames.lookback(stored.frame_stack), 0 if source.sequence is None else 1)


def _transitions_begun(rows: Ring, start: jax.Array, count: int) -> jax.Array:
    """Whether a transition may begin, bool [count, B], from slot `start` on."""
    return rows.take_all(rows.rows.weight, start + jnp.arange(count, dtype=jnp.int32))


def _per_shard(flags: jax.Array, shards: int) -> jax.Array:
    """How many flags [count, B] hold in each shard, int32 [shards]."""
    return jnp.sum(index.by_shard(flags.astype(jnp.int32), shards), axis=1)


def _rollout(rows: Ring, length: int) -> int:
    leaves = jax.tree.leaves(rows.carry)
    return rows.slots // leaves[0].shape[1] if leaves else length


def _users(sources: Sources, name: str) -> list[Replay]:
    """The sources that draw from the rows of `name`."""
    return [source for other, source in sources.items() if (source.over or other) == name]


def keeps(sources: Sources, name: str) -> tuple[bool, bool]:
    """Whether the rows of `name` are stored with carries, and with their place in the episode."""
    asked = [source.sequence for source in _users(sources, name) if source.sequence is not None]
    return any(s.stored_carry for s in asked), any(s.end != "continue" for s in asked)


def _extras(sources: Sources, name: str) -> list[str]:
    """The names of the extras that are stored with the rows of `name`."""
    insertions = [s.sampler.insertion for s in _users(sources, name) if isinstance(s.sampler, Prioritised)]
    return sorted({*sources[name].extras, *(insertion for insertion in insertions if insertion)})


def kept_rows(rows: Trajectory, sources: Sources, name: str) -> Trajectory:
    """What is kept of rows: the newest frames, and the extras that somebody asks for."""
    observation = frames.newest(rows.observation, sources[name].frame_stack)
    return rows.replace(observation=observation, extras={k: rows.extras[k] for k in _extras(sources, name)})


def _check_rows(rows: Trajectory, sources: Sources, name: str) -> None:
    """Raises if rows `[T, B, ...]` lack what the sources over `name` ask for."""
    label = f"replay source {name!r}:"
    found = [f"{label} {line}" for line in frames.problems(rows.observation, sources[name].frame_stack)]
    for extra in _extras(sources, name):
        if extra not in rows.extras:
            found.append(f"{label} rows have no extras[{extra!r}]; act gives {sorted(rows.extras)}")
    for source in _users(sources, name):
        insertion = source.sampler.insertion if isinstance(source.sampler, Prioritised) else None
        if insertion in rows.extras:
            expected = {insertion: jax.ShapeDtypeStruct(rows.reward.shape, jnp.float32)}
            given = {insertion: rows.extras[insertion]}
            found += [f"{label} extras{line}" for line in signature.problems(expected, given)]
    if found:
        raise ConfigError(found)
