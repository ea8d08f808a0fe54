"""Groups of environments that store rollouts each on its own: what one holds is what a ring of its own would hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.streams import Fed, n_step, rows_of
from scipy import stats

from jaxrl.buffers import checks, replay
from jaxrl.core import keys
from jaxrl.core.sources import Fifo, FrameStack, Lifo, MaxHeap, MinHeap, Prioritized, Replay, Sequence, Uniform, View
from jaxrl.parallel.replicas import SingleReplica

GROUPS, SIZE, SLOTS, ROLLOUT = 3, 2, 24, 4
ENVS = GROUPS * SIZE
ROWS = rows_of([[5, 3, 8] * 4, [30, 34], [2, 14] * 4, [4] * 16, [64], [7] * 9 + [1]], ("terminated", "truncated"))
REPLAY = Replay(ENVS * SLOTS, 32, 1, rollout_length=ROLLOUT, n_step=3)
STORED = dataclasses.replace(REPLAY, n_step=1, sequence=Sequence(8, 4, "continue", burn_in=2, stored_carry=True))
SOURCES = {
    "uniform": {"replay": REPLAY},
    "prioritized": {"replay": dataclasses.replace(REPLAY, sampler=Prioritized(0.6))},
    "used up": {"replay": dataclasses.replace(REPLAY, max_times_sampled=4)},
    "heap": {"replay": dataclasses.replace(REPLAY, sampler=MaxHeap())},
    "frames": {"replay": dataclasses.replace(REPLAY, frame_stack=FrameStack(3, -1))},
    "sequences": {"replay": dataclasses.replace(STORED, sampler=Prioritized(0.9))},
    "whole episodes": {"replay": dataclasses.replace(STORED, sequence=Sequence(5, 2, "truncate"))},
    "views": {"replay": REPLAY, "view": View(8, Prioritized(0.6), 18, MinHeap()).of("replay", REPLAY)},
}
ORDER = np.random.default_rng(1).permutation(np.repeat(np.arange(GROUPS), [2, 9, 13]))  # of all rollouts


class Grouped:
    """A replay that is fed rollouts of one group at a time, beside one of each group alone."""

    def __init__(self, sources):
        stacked = sources["replay"].frame_stack is not None
        self.rows = ROWS.replace(observation=_stacked(3) if stacked else ROWS.observation)
        fixed = {"num_envs": ENVS, "rollout_length": ROLLOUT, "shards": 1, "replicas": SingleReplica(1)}
        self.buffers = replay.bind(sources, groups=GROUPS, **fixed)
        self.add = jax.jit(lambda *arguments: replay.add(self.buffers, *arguments))
        self.draw = jax.jit(lambda name, state, key: self.buffers[name].sample(state, key), static_argnums=0)
        carry = jnp.zeros((SIZE, 1))
        self.states = {name: one.init(self.of(0, 0), carry) for name, one in self.buffers.items()}
        own = {
            name: dataclasses.replace(one, capacity=SIZE * SLOTS) for name, one in sources.items() if one.over is None
        }
        self.alone = [Fed(own, self.of(g, 0), rollout=ROLLOUT, carry=carry) for g in range(GROUPS)]
        self.times = [0] * GROUPS

    def of(self, group, number):
        """Rollout `number` of a group, [ROLLOUT, SIZE, ...]."""
        return jax.tree.map(lambda x: x[number * ROLLOUT :][:ROLLOUT, group * SIZE :][:, :SIZE], self.rows)

    def feed(self, group):
        part = self.of(group, self.times[group])
        carry = jnp.full((SIZE, 1), self.times[group] + 100.0 * group)
        self.states = self.add(self.states, part, carry, jnp.int32(group))
        self.alone[group].feed(part, carry)
        self.times[group] += 1

    def whole(self, name="replay"):
        return self.states[name].replace(ring=self.states["replay"].ring)

    def sample(self, seed, name="replay"):
        state, batch = self.draw(name, self.whole(name), keys.root_key(seed))
        self.states[name] = self.states[name].replace(index=state.index)
        return jax.device_get(batch)

    def priorities(self, name="replay"):
        """[group, SLOTS * SIZE]"""
        priority = np.asarray(self.states[name].index.priority).reshape(SLOTS, GROUPS, SIZE)
        return priority.swapaxes(0, 1).reshape(GROUPS, -1)


def _stacked(frames):
    """Observations [T, B, 1, frames] whose last frame is the row's value and whose others an episode's before."""
    found = np.zeros((*ROWS.reward.shape, 1, frames), np.float32)
    for tick in range(len(found)):
        again = found[max(tick - 1, 0)][..., 1:] if tick else found[0][..., 1:]
        value = ROWS.observation[tick][:, None, None]
        found[tick] = np.where(ROWS.first[tick][:, None, None], value, np.concatenate([again, value], -1))
    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_a_group_holds_what_a_ring_of_its_own_holds(kind):
    grouped = Grouped(SOURCES[kind])
    for number, group in enumerate(ORDER):
        grouped.feed(group)
        ring, own = grouped.whole().ring, grouped.alone[group].ring()
        columns = slice(group * SIZE, (group + 1) * SIZE)
        for every, one in zip(*(jax.tree.leaves((x.rows, x.carry, x.episode_step)) for x in (ring, own)), strict=True):
            np.testing.assert_array_equal(every[columns], one)
        for name in ("cursor", "filled", "written"):
            assert int(getattr(ring, name)[group]) == int(getattr(own, name))
        index, apart = grouped.states["replay"].index, [alone.states["replay"].index for alone in grouped.alone]
        assert int(index.drawable.sum()) == sum(int(one.drawable.sum()) for one in apart)
        assert int(index.inserted) == (number + 1) * ROLLOUT * SIZE
        if index.priority is not None:
            np.testing.assert_array_equal(grouped.priorities(), [one.priority[0] for one in apart])
        if kind in ("prioritized", "sequences"):
            top = sum(float(one.levels[-1].sum()) for one in apart)
            assert float(index.levels[-1].sum()) == pytest.approx(top)


@pytest.mark.parametrize("kind", SOURCES)
def test_items_are_consecutive_rows_of_one_environment(kind):
    """Every item is that of its environment's rows, with the steps that its own counters say."""
    grouped, name, found = Grouped(SOURCES[kind]), [*SOURCES[kind]][-1], 0
    sequence = SOURCES[kind][name].sequence
    for number, group in enumerate(ORDER):
        grouped.feed(group)
        batch = grouped.sample(number, name)
        info = batch.sample_info
        for i in np.flatnonzero(info.probability > 0):
            column = int(info.position[i]) % ENVS
            tick, written = int(info.step[i]), grouped.times[column // SIZE] * ROLLOUT
            assert max(written - SLOTS, 0) <= tick < written and int(info.age_steps[i]) == written - 1 - tick
            if sequence is None:
                if not batch.weight[i]:
                    continue
                rewards, steps, bootstrap, following = n_step(ROWS, tick, column, REPLAY.n_step)
                np.testing.assert_allclose(batch.rewards[i], rewards)
                assert int(batch.steps[i]) == steps and float(batch.bootstrap[i]) == bootstrap
                np.testing.assert_array_equal(batch.observation[i], grouped.rows.observation[tick, column])
                np.testing.assert_array_equal(batch.next_observation[i].ravel()[-1], following)
            else:
                rows = np.flatnonzero(batch.mask[:, i])
                np.testing.assert_array_equal(batch.rows.observation[rows, i], ROWS.observation[tick + rows, column])
                if sequence.stored_carry:
                    assert float(batch.carry[i, 0]) == tick // ROLLOUT + 100 * (column // SIZE)
            found += 1
    assert found > 100


def test_rows_of_all_groups_are_equally_likely():
    grouped = Grouped({"replay": dataclasses.replace(REPLAY, n_step=1, batch_size=4000)})
    for group in ORDER[:12]:
        grouped.feed(group)
    batch = grouped.sample(0)
    fine = batch.weight
    _, counts = np.unique(batch.sample_info.position[fine], return_counts=True)
    assert len(counts) == int(grouped.states["replay"].index.drawable.sum())
    assert len({*(batch.sample_info.position[fine] % ENVS)}) == ENVS
    assert stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_allclose(batch.sample_info.probability[fine], 1 / len(counts), rtol=1e-6)


def test_priorities_of_rows_that_were_overwritten_meanwhile_are_dropped():
    grouped = Grouped(SOURCES["prioritized"])
    for group in ORDER:
        grouped.feed(group)
    info = grouped.sample(0).sample_info
    for _ in range(3):
        grouped.feed(1)
    ring, before = grouped.whole().ring, grouped.priorities()
    held = np.asarray(ring.at(jnp.asarray(info.position)).holds(jnp.asarray(info.step)))
    of_first = info.position % ENVS // SIZE == 1
    assert held[~of_first].all() and 0 < held[of_first].sum() < of_first.sum()
    state = grouped.buffers["replay"].update_priorities(grouped.whole(), info, jnp.full(32, 5.0))
    grouped.states["replay"] = grouped.states["replay"].replace(index=state.index)
    changed = np.flatnonzero(np.asarray(state.index.priority[0] == 5.0))
    assert {*changed} == {*info.position[held]} and (before < 5.0).all()


@pytest.mark.parametrize(
    "source",
    [
        dataclasses.replace(REPLAY, sampler=Fifo()),
        dataclasses.replace(REPLAY, sampler=Lifo()),
        View(8, Uniform(), 12, Fifo()).of("replay", REPLAY),
        dataclasses.replace(REPLAY, storage="flashbax"),
    ],
    ids=["fifo", "lifo", "remover", "flashbax"],
)
def test_what_needs_one_order_of_all_rows_is_refused(source):
    assert len(checks.group_problems("replay", source)) == 1
