"""Which items of a ring are drawn in an order: as a pass over all of them says, one draw after another."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import one_quick
from hypothesis import strategies as st

from jaxrl.buffers import index
from jaxrl.core.sources import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Replay
from jaxrl.parallel.replicas import SingleReplica

SHARDS, COLUMNS, ROWS, COUNT = 2, 3, 2, 5  # of every write and of every draw, so that each is compiled once
LIMIT = 7  # of a shard, where there is a remover
PRIORITY = st.sampled_from([-1.0, 0.0, 1.0, 2.5])


@functools.cache
def compiled(sampler, most, slots, remover=None):
    source = Replay(SHARDS * LIMIT, SHARDS * COUNT, 1, sampler=sampler, max_times_sampled=most)
    if remover is not None:
        source = dataclasses.replace(source, over="another", remover=remover)
    shard = jnp.arange(SHARDS, dtype=jnp.int32)

    def write(state, start, priority):
        state = state.replace(times_sampled=state.times_sampled.at[:, places(start, slots)].set(0))
        return index.write(state, source, start, priority, LIMIT)

    def draw(state, newest):
        state, *drawn = index.draw(state, source, jax.random.key(0), shard, COUNT, newest)
        return state.replace(updates=state.updates + 1), drawn

    def update(state, shard, position, priority):
        return index.update(state, source, shard, position, priority, jnp.ones(shard.shape, bool))

    return index.init(source, SHARDS, slots, COLUMNS), *map(jax.jit, (write, draw, update))


def places(start, slots):
    return (start * COLUMNS + np.arange(ROWS * COLUMNS)) % (slots * COLUMNS)


class Model:
    """Arrays, and a search through all of them for every draw."""

    def __init__(self, sampler, most, slots, remover=None):
        self.sampler, self.most, self.slots, self.updates, self.newest = sampler, most, slots, 0, slots - 1
        self.remover = remover
        self.priority = np.full((SHARDS, slots * COLUMNS), -1.0, np.float32)
        self.touched, self.times = np.zeros(self.priority.shape, int), np.zeros(self.priority.shape, int)

    def write(self, start, priority):
        of_shard = priority.reshape(ROWS, SHARDS, COLUMNS).swapaxes(0, 1).reshape(SHARDS, -1)
        self.priority[:, places(start, self.slots)] = of_shard
        self.touched[:, places(start, self.slots)], self.times[:, places(start, self.slots)] = self.updates, 0
        self.newest = (start + ROWS - 1) % self.slots
        for shard in range(SHARDS if self.remover else 0):
            while (self.priority[shard] >= 0).sum() > LIMIT:
                self.priority[shard, self.best(shard, self.remover)] = -1.0

    def best(self, shard, rule):
        held = np.flatnonzero(self.priority[shard] >= 0)
        if not held.size:
            return None
        age = {p: ((self.newest - p // COLUMNS) % self.slots, -(p % COLUMNS)) for p in held}
        priority, touched = self.priority[shard], self.touched[shard]
        keys = {
            Fifo: lambda p: (-age[p][0], -age[p][1]),
            Lifo: lambda p: age[p],
            MinHeap: lambda p: (priority[p], touched[p], p),
            MaxHeap: lambda p: (-priority[p], touched[p], p),
        }
        return min(held, key=keys[type(rule)])

    def draw(self):
        drawn = []
        for shard in range(SHARDS):
            for _ in range(COUNT):
                place = self.best(shard, self.sampler)
                if place is None:
                    drawn.append((0, 0.0))
                    continue
                drawn.append((place, 1.0, self.priority[shard, place]))
                self.times[shard, place] += 1
                if self.most and self.times[shard, place] >= self.most:
                    self.priority[shard, place] = -1.0
        self.updates += 1
        return drawn

    def update(self, shard, position, priority):
        live = self.priority[shard, position] >= 0
        for place in {*zip(shard[live], position[live], strict=True)}:
            same = [p for s, i, p in zip(shard, position, priority, strict=True) if (s, i) == place]
            self.priority[place], self.touched[place] = max(same), self.updates


@pytest.mark.parametrize("sampler", [Fifo(), Lifo(), MinHeap(), MaxHeap()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(("most", "slots"), one_quick([(0, 6), (1, 6), (3, 6), (3, 60)], (3, 6)))
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(data=st.data())
def test_draws_are_those_of_a_search_through_all(sampler, most, slots, data):
    compare(data, sampler, most, slots)


@pytest.mark.parametrize(
    ("sampler", "remover"),
    one_quick(
        [(Fifo(), Lifo()), (Lifo(), Fifo()), (MinHeap(), MaxHeap()), (MaxHeap(), MinHeap()), (Lifo(), MinHeap())]
    ),
)
@pytest.mark.parametrize("slots", one_quick([8, 60]))
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(data=st.data())
def test_what_a_view_holds_is_what_its_remover_left(sampler, remover, slots, data):
    """Which items were removed, of those that the ring holds: the remover's choice, one after another."""
    compare(data, sampler, 3, slots, remover)


def compare(data, sampler, most, slots, remover=None):
    state, write, draw, update = compiled(sampler, most, slots, remover)
    model, cursor = Model(sampler, most, slots, remover), data.draw(st.integers(0, slots // ROWS - 1)) * ROWS
    for _ in range(data.draw(st.integers(1, 8))):
        move = data.draw(st.sampled_from(["write", "write", "draw", "update"]))
        if move == "write":
            count = ROWS * SHARDS * COLUMNS
            priority = np.array(data.draw(st.lists(PRIORITY, min_size=count, max_size=count)), np.float32)
            priority = priority.reshape(ROWS, -1)
            state = write(state, np.int32(cursor), priority)
            model.write(cursor, priority)
            cursor = (cursor + ROWS) % slots
        elif move == "draw":
            state, (position, chance, priority) = jax.device_get(draw(state, np.int32(model.newest)))
            for found, expected in zip(zip(position.flat, chance.flat, priority.flat, strict=True), model.draw()):  # noqa: B905
                assert found[: len(expected)] == expected
        else:
            shard = np.array(data.draw(st.lists(st.integers(0, SHARDS - 1), min_size=4, max_size=4)), np.int32)
            places = st.integers(0, slots * COLUMNS - 1)
            position = np.array(data.draw(st.lists(places, min_size=4, max_size=4)), np.int32)
            priority = np.array(
                data.draw(st.lists(PRIORITY.filter(lambda x: x >= 0), min_size=4, max_size=4)), np.float32
            )
            state = update(state, shard, position, priority)
            model.update(shard, position, priority)
        np.testing.assert_array_equal(state.priority, model.priority)
        np.testing.assert_array_equal(state.times_sampled, model.times)
        np.testing.assert_array_equal(state.drawable, np.sum(model.priority >= 0, axis=1))


def test_items_are_equally_likely_where_all_priorities_are_zero():
    count, source = 3000, Replay(SHARDS * LIMIT, 3000, 1, sampler=Prioritized(), max_times_sampled=3000)
    held = np.array([[0, 0, 0, -1, 0, -1], [-1, -1, 0, -1, 0, 0]], np.float32)  # [row, shards * columns]
    state = index.write(index.init(source, SHARDS, 6, COLUMNS), source, np.int32(2), held, LIMIT)
    state, shard, position, chance, priority, _ = index.draw_over_all(
        state, jax.random.key(0), count, SHARDS, SingleReplica()
    )
    items = np.asarray(state.priority) >= 0
    assert items.sum() == 7 and not priority.any()
    np.testing.assert_allclose(chance, 1 / 7, rtol=1e-6)
    drawn = np.zeros(items.shape, int)
    np.add.at(drawn, (shard, position), 1)
    np.testing.assert_array_equal(drawn, state.times_sampled)
    assert not drawn[~items].any() and (abs(drawn[items] - count / 7) < 5 * (count / 7) ** 0.5).all()
