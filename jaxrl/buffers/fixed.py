"""Replay buffers of existing rows, such as those of a dataset; they are filled once and then read-only."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxrl.buffers import index, replay, samplers
from jaxrl.buffers.index import Index
from jaxrl.buffers.replay import ReplayBuffer
from jaxrl.buffers.ring import Parts, Ring
from jaxrl.buffers.ring import partition as ring_specs
from jaxrl.core.sources import Dataset, Prioritized, Replay, Uniform
from jaxrl.core.types import Counter, PyTree, Trajectory

Rings = Mapping[str, Ring]

_ROOM = 2**31 - 1  # capacity in rows: no limit


def source_of(source: Replay | Dataset) -> Replay:
    """Return `source` adapted to existing rows, which have no insertion priorities and no recurrent states.

    Items are sampled by priority or uniformly. A sampler in insertion order or from a heap would return the same item
    every time, because items are never added or removed.
    """
    if isinstance(source, Dataset):
        source = Replay(_ROOM, source.batch_size, 1, n_step=source.n_step, sequence=source.sequence)
    sampler, sequence = source.sampler, source.sequence
    sampler = dataclasses.replace(sampler, insertion=None) if isinstance(sampler, Prioritized) else Uniform()
    if sequence is not None:
        sequence = dataclasses.replace(sequence, stored_carry=False)
    return dataclasses.replace(
        source,
        capacity=_ROOM,
        min_size=1,
        rollout_length=1,
        sampler=sampler,
        sequence=sequence,
        max_times_sampled=0,
        storage="ring",
        remover=None,
    )


def margins(sources: Mapping[str, Replay]) -> tuple[int, int]:
    """Return the numbers of rows to add before and after a column's rows, so that an item can begin at each row."""
    before = max(replay.lookback(source, replay.storage(sources, name)) for name, source in sources.items())
    return before, max(source.lookahead for source in sources.values())


def rings(sources: Mapping[str, Replay], rows: Trajectory, step: np.ndarray, parts: Parts) -> dict[str, Ring]:
    """Return full rings, as NumPy arrays, for the sources that store rows.

    Args:
      sources: sources by name, as returned by `source_of`.
      rows: rows with leaves [columns, slots, ...], including the margins.
      step: number of each row in its episode, int32 [columns, slots].
      parts: the division of the transitions into columns.
    """
    slots = rows.reward.shape[1]
    made = {}
    for name, source in sources.items():
        if source.over is None:
            stored = replay.storage(sources, name)
            # NumPy, because the caller decides on which devices the rows are placed.
            numbered: PyTree = step if stored.episode_steps else None
            counts: PyTree = np.int32(0), np.int32(slots), np.uint32(slots)
            made[name] = Ring(stored.select(rows), (), numbered, *counts, parts=parts)
    return made


def partition(made: Mapping[str, Ring], axis: str) -> dict[str, Ring]:
    """Return the rings' partition specs, a prefix tree, on a mesh whose axis `axis` shards the columns."""
    return {name: ring_specs(axis, ring.episode_step is not None, parts=True) for name, ring in made.items()}


def index_of(buffer: ReplayBuffer, ring: Ring) -> Index:
    """Return the index of a buffer over a full ring, in which all items can be sampled.

    Args:
      buffer: buffer of a source returned by `source_of`.
      ring: the ring, with the columns of all devices, one per shard.
    """
    source, shards, parts = buffer.source, buffer.shards, ring.parts
    assert parts is not None and ring.columns == shards
    empty = index.init(source, shards, ring.slots, 1)
    if index.dense(source):
        # The number of transitions that begin in each column's part.
        drawable = (parts.offset + parts.total) // shards
        return empty.replace(drawable=drawable, inserted=Counter.zero().add(parts.total))
    ahead = source.lookahead
    begun, priority = buffer.beginnings(empty.largest, ring, jnp.int32(0), ring.slots - ahead)
    slot = jnp.arange(ring.slots - ahead, dtype=jnp.int32)[:, None]
    inside = (slot >= parts.own[None, :, 0]) & (slot < parts.own[None, :, 1])
    priority = jnp.where(begun & inside, priority, samplers.ABSENT)
    blank = jnp.full((ahead, ring.columns), samplers.ABSENT, jnp.float32)
    full = index.write(empty, source, jnp.int32(0), jnp.concatenate([priority, blank]))
    return full.replace(inserted=Counter.zero().add(parts.total))
