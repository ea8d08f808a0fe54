"""A replay of whole items: those of the episodes, drawn and removed as a plain-Python table does, on any device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.streams import assert_two_devices_are_one, n_step, rows_of
from helpers.tables import RULES, Model
from helpers.tiers import one_quick

from jaxrl.buffers import checks, replay
from jaxrl.buffers.table_replay import TableReplay
from jaxrl.core.sources import Fifo, FrameStack, Lifo, Prioritized, Replay, Sequence, Uniform
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

ROWS = rows_of([[5, 3, 8], [16], [2, 14], [4, 4, 4, 4]], ("terminated", "truncated"))
SOURCE = Replay(16, 8, 8, rollout_length=4, n_step=2, storage="table")
STRETCHES = dataclasses.replace(SOURCE, sequence=Sequence(length=3, period=2, burn_in=1))


def bound(source, replicas, shards):
    (buffer,) = replay.bind({"replay": source}, num_envs=4, rollout_length=4, shards=shards, replicas=replicas).values()
    return TableReplay(buffer)


def compiled(buffer):
    return jax.jit(buffer.add), jax.jit(buffer.sample), jax.jit(buffer.update_priorities)


def rollouts():
    for start in range(0, 16, 4):
        yield jax.tree.map(lambda x: jnp.asarray(x[start : start + 4]), ROWS)  # noqa: B023


@pytest.mark.long
@pytest.mark.parametrize(("sampler", "remover", "most"), one_quick(RULES, RULES[1]))
def test_it_is_the_plain_table_of_every_shard(sampler, remover, most):
    shards, n = 2, SOURCE.n_step
    source = dataclasses.replace(SOURCE, sampler=sampler, remover=remover, max_times_sampled=most)
    buffer = bound(source, SingleReplica(shards), shards)
    add, sample, update = compiled(buffer)
    state, models = buffer.init(ROWS, ()), [Model(buffer._table) for _ in range(shards)]
    largest, complete, drawn = [1.0] * shards, 0, 0
    for number, rows in enumerate(rollouts()):
        state = add(state, rows, ())
        while complete + n < 4 * (number + 1):  # the rows whose n followers are there
            for column in range(4):
                if ROWS.weight[complete, column]:
                    models[column // 2].insert(complete + 1000 * column, largest[column // 2])
            complete += 1
        state, batch = sample(state, jax.random.key(number))
        priorities = np.random.default_rng(number).permutation(8).astype(np.float32)
        for i in range(8):
            model, value = models[i // 4], int(batch.observation[i])
            if not model.items:
                assert not batch.weight[i] and batch.sample_info.probability[i] == 0
                continue
            drawn += 1
            possible = model.pick(sampler)
            assert value in possible and batch.weight[i]
            np.testing.assert_allclose(batch.sample_info.probability[i], possible[value] / shards, rtol=1e-5)
            tick, column = value % 1000, value // 1000
            rewards, steps, bootstrap, following = n_step(ROWS, tick, column, n)
            np.testing.assert_array_equal(batch.rewards[i], rewards)
            assert (int(batch.steps[i]), bool(batch.bootstrap[i])) == (steps, bootstrap)
            assert float(batch.next_observation[i]) == following
            assert int(batch.sample_info.age_steps[i]) == 4 * (number + 1) - 1 - tick
            item = model.draw(value)
            assert (batch.sample_info.times_sampled[i], batch.sample_info.priority[i]) == (
                item["times"],
                item["priority"],
            )
        info, held = batch.sample_info, [list(model.items) for model in models]
        state = update(state, info, priorities)
        for i in np.flatnonzero(np.asarray(info.probability) > 0):
            models[i // 4].update(int(batch.observation[i]), float(priorities[i]))
            largest[i // 4] = max(largest[i // 4], float(priorities[i]))
        assert [len(items) for items in held] == list(state.index.tables.size)
        figures = buffer.statistics(state, info)
        assert figures["items"] == sum(map(len, held)) and figures["inserted"] == 16 * (number + 1)
        assert figures["sampled"] == drawn
    assert drawn > 16, "next to nothing was drawn"


@pytest.mark.long
def test_sequences_are_those_of_the_ring():
    """Every stretch that the ring begins is an item, whole and once, though the rows are long gone."""
    source = dataclasses.replace(STRETCHES, capacity=64, sampler=Fifo(), max_times_sampled=1)
    buffer = bound(source, SingleReplica(1), 1)
    add, sample, _ = compiled(buffer)
    state = buffer.init(ROWS, ())
    for rows in rollouts():
        state = add(state, rows, ())
    found = []
    for number in range(4):
        state, batch = sample(state, jax.random.key(number))
        found += [jax.tree.map(lambda x, i=i: np.asarray(x[:, i]), (batch.rows, batch.mask)) for i in range(8)]
    found = [rows for rows, mask in found if mask.all()]
    starts = [(tick, column) for tick in range(0, 16 - 3, 2) for column in range(4)]
    assert [(int(rows.observation[0]) % 1000, int(rows.observation[0]) // 1000) for rows in found] == starts
    for rows, (tick, column) in zip(found, starts, strict=True):
        np.testing.assert_array_equal(rows.reward, ROWS.reward[tick : tick + 4, column])
        np.testing.assert_array_equal(rows.weight[1:], ROWS.weight[tick + 1 : tick + 4, column])
        assert not rows.weight[0], "the burn-in"


@pytest.mark.long
def test_stacks_of_frames_are_whole_though_only_frames_are_kept_of_rows():
    began = np.maximum.accumulate(np.where(ROWS.first, np.arange(16)[:, None], 0), axis=0)
    back = np.maximum(np.arange(16)[:, None, None] - np.arange(2, -1, -1), began[..., None])
    stacks = (back + 1000 * np.arange(4)[None, :, None]).astype(np.float32)
    stacked = ROWS.replace(observation=stacks)
    source = dataclasses.replace(SOURCE, frame_stack=FrameStack(3), capacity=64, sampler=Fifo(), max_times_sampled=1)
    buffer = bound(source, SingleReplica(1), 1)
    add, sample, _ = compiled(buffer)
    state, found = buffer.init(stacked, ()), 0
    assert state.ring.recent.rows.observation.shape[2:] == (1,)
    for start in range(0, 16, 4):
        state = add(state, jax.tree.map(lambda x: jnp.asarray(x[start : start + 4]), stacked), ())  # noqa: B023
        state, batch = sample(state, jax.random.key(start))
        for i in np.flatnonzero(np.asarray(batch.weight)):
            tick, column = int(batch.action[i]) % 1000, int(batch.action[i]) // 1000
            np.testing.assert_array_equal(batch.observation[i], stacks[tick, column])
            np.testing.assert_array_equal(batch.next_observation[i], stacks[tick + int(batch.steps[i]), column])
            found += 1
    assert found > 16


@pytest.mark.long
@pytest.mark.parametrize("source", [dataclasses.replace(SOURCE, sampler=Prioritized(0.6)), STRETCHES])
def test_two_devices_draw_what_one_does(source):
    one, two = bound(source, SingleReplica(2), 2), bound(source, MeshReplicas("data", 1), 2)

    def step(buffer, state, rows, key):
        state, batch = buffer.sample(buffer.add(state, rows, ()), key)
        info = batch.sample_info
        state = buffer.update_priorities(state, info, info.position.astype(jnp.float32))
        return state, info if source.sequence else batch

    assert_two_devices_are_one(step, one, two, one.init(ROWS, ()), two.partition("data"), ROWS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"storage": "ring", "remover": Lifo()}, "remover=Lifo() needs storage='table'"),
        ({"storage": "flashbax", "n_step": 1, "remover": Lifo()}, "remover=Lifo() needs storage='table'"),
        ({"capacity": 17}, "is not divisible by 2 shards; use 18"),
        ({"over": "replay"}, "is not a source that stores rows"),
        ({"remover": Uniform()}, "is random"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, said):
    source = dataclasses.replace(SOURCE, **changes)
    found = checks.source_problems({"replay": source}, 4, 4, 2)
    assert any(said in line for line in found), found
