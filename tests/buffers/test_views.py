"""Views of one ring, each with its own sampler and remover: what they hold, as plain Python says, on any device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.streams import Fed, assert_two_devices_are_one, rows_of

from jaxrl.buffers import checks, replay
from jaxrl.core.sources import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Replay, Sequence, Uniform, View
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

# Four environments of 64 rows, which a ring of 24 holds in part.
ROWS = rows_of([[5, 3, 8] * 4, [30, 34], [2, 14] * 4, [4] * 16], ("terminated", "truncated"))
SLOTS, ROLLOUT, SHARDS = 24, 4, 2
REPLAY = Replay(4 * SLOTS, 8, 1, rollout_length=ROLLOUT, n_step=2)
SOURCES = {
    "replay": REPLAY,
    "first": View(8, Fifo(), 20, Lifo(), max_times_sampled=2).of("replay", REPLAY),
    "lowest": View(8, Prioritized(0.6), 16, MinHeap()).of("replay", REPLAY),
    "highest": View(8, Uniform(), 12, MaxHeap()).of("replay", REPLAY),
    "lately": View(8, MaxHeap(), 10, Fifo()).of("replay", REPLAY),
    "stretches": Replay(6, 8, 1, sequence=Sequence(4, 2, "truncate"), sampler=Lifo(), over="replay", remover=Fifo()),
}
ENDING = {Sequence: 3, type(None): 2}  # rows that follow the first of an item


class Model:
    """Items of one view in plain Python: by (shard, tick, column) their priority and when it was given."""

    def __init__(self, source):
        self.source, self.items, self.largest, self.updates = source, {}, [1.0] * SHARDS, 0
        self.ahead = ENDING[type(source.sequence)]
        self.lookback = 0 if source.sequence is None else 1

    def begins(self, tick, column):
        if self.source.sequence is None:
            return ROWS.weight[tick, column]
        began = max(t for t in range(tick + 1) if ROWS.first[t, column])
        ends = next((t for t in range(tick + 1, len(ROWS.reward)) if ROWS.first[t, column]), 99)
        step, length = tick - began, min(ends - tick, 4)
        return step % 2 == 0 and (length == 4 or step < 2 or length > 2)

    def feed(self, written):
        """The rows before tick `written` are there, of which the last rollout is new."""
        oldest = written - SLOTS + (self.lookback if written >= SLOTS else 0)
        self.items = {place: item for place, item in self.items.items() if place[1] >= oldest}
        for tick in range(max(written - ROLLOUT - self.ahead, 0), written - self.ahead):
            for column in range(4):
                if self.begins(tick, column):
                    shard = column // 2
                    self.items[shard, tick, column] = [self.largest[shard], self.updates]
        for shard in range(SHARDS if self.source.remover is not None else 0):
            while len(held := self.of(shard)) > self.source.capacity // SHARDS:
                del self.items[min(held, key=lambda place: self.key(place))]

    def of(self, shard):
        return [place for place in self.items if place[0] == shard]

    def key(self, place):
        (priority, touched), (_, tick, column) = self.items[place], place
        slot = (tick % SLOTS, column)
        return {
            Fifo: (tick, column),
            Lifo: (-tick, -column),
            MinHeap: (priority, touched, slot),
            MaxHeap: (-priority, touched, slot),
        }[type(self.source.remover)]

    def update(self, info, priorities):
        """After a batch was drawn: items that were drawn too often are gone, and the others have new priorities."""
        self.updates += 1
        ring = SLOTS * 2
        given = {}
        for position, step, chance, value in zip(info.position, info.step, info.probability, priorities, strict=True):
            if chance > 0:
                place = (int(position) // ring, int(step), int(position) // ring * 2 + int(position) % ring % 2)
                given[place] = max(given.get(place, 0.0), float(value))
        for place, value in given.items():
            if place in self.items:
                self.items[place] = [value, self.updates]
        if given:  # the largest of any shard
            self.largest = [max(one, *given.values()) for one in self.largest]


@pytest.mark.long
def test_every_view_holds_what_its_remover_left_of_what_the_ring_holds():
    fed = Fed(SOURCES, ROWS, rollout=ROLLOUT, shards=SHARDS)
    models = {name: Model(source) for name, source in SOURCES.items() if name != "replay"}
    assert [name for name, state in fed.states.items() if state.ring is not None] == ["replay"]
    seen = {name: set() for name in models}
    for written in range(ROLLOUT, len(ROWS.reward) + 1, ROLLOUT):
        fed.feed(jax.tree.map(lambda x: x[written - ROLLOUT : written], ROWS))  # noqa: B023
        for number, (name, model) in enumerate(models.items()):
            model.feed(written)
            held = {(tick, column) for _, tick, column in model.items}
            assert fed.starts(name) == held, (name, written)
            seen[name] |= held
            np.testing.assert_array_equal(fed.states[name].index.drawable, [len(model.of(s)) for s in range(SHARDS)])
            batch = fed.sample(number, name)
            info = batch.sample_info
            drawn = {(int(p) // 48, int(s), int(p) // 48 * 2 + int(p) % 2) for p, s in zip(info.position, info.step)}  # noqa: B905
            assert drawn <= model.items.keys() or not held
            priorities = np.random.default_rng(written + number).permutation(8).astype(np.float32) + 0.5
            fed.update(info, priorities, name)
            gone = {place for place in model.items if place[1:] not in fed.starts(name)}
            if name == "first":  # drawn twice
                assert gone <= drawn
                model.items = {place: item for place, item in model.items.items() if place not in gone}
            assert name == "first" or not gone
            model.update(info, priorities)
    assert all(len(places) > 2 * SOURCES[name].capacity for name, places in seen.items() if name != "first"), seen


@pytest.mark.long
def test_two_devices_draw_what_one_does():
    layout = {"num_envs": 4, "rollout_length": ROLLOUT, "shards": 2}
    one = replay.bind(SOURCES, replicas=SingleReplica(2), **layout)
    two = replay.bind(SOURCES, replicas=MeshReplicas("data", 1), **layout)

    def step(buffers, states, rows, key):
        states, drawn = replay.add(buffers, states, rows, ()), {}
        for name in SOURCES:
            buffer, state = buffers[name], states[name].replace(ring=states["replay"].ring)
            state, batch = buffer.sample(state, key)
            drawn[name] = batch.sample_info
            if name != "replay":
                error = batch.sample_info.position.astype(jnp.float32) / 7.0
                state = buffer.update_priorities(state, batch.sample_info, error)
            states[name] = states[name].replace(index=state.index)
        return states, drawn

    parts = {name: buffer.partition("data") for name, buffer in two.items()}
    state = {name: buffer.init(ROWS, ()) for name, buffer in one.items()}
    assert_two_devices_are_one(step, one, two, state, parts, ROWS)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (View(8, capacity=17), "capacity=17 is not divisible by 2 shards; use 18"),
        (View(8, capacity=16, remover=Uniform()), "remover=Uniform() is random"),
        (View(7), "batch_size=7 is not divisible by 2 shards"),
    ],
)
def test_what_is_no_view_is_refused(source, said):
    found = checks.source_problems({"replay": REPLAY, "view": source.of("replay", REPLAY)}, 4, ROLLOUT, 2)
    assert any(said in line for line in found), found
