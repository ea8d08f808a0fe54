"""Sequences: where Reverb's adders would make them, what they hold, and what never happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.streams import Fed, adder, rows_of
from helpers.tiers import one_quick

from jaxrl.core.sources import Fifo, FrameStack, Prioritized, Replay, Sequence, Uniform

COLUMNS = [[5, 3, 9, 4, 6, 5, 8], [2, 2, 2, 2, 24, 8], [40], [4] * 10]
ROWS = rows_of(COLUMNS, ("terminated", "truncated"))
TICKS = ROWS.reward.shape[0]


def source(sequence, **changes):
    settings = {"capacity": 4 * 24, "batch_size": 32, "min_size": 1, "sequence": sequence} | changes
    return Replay(**settings)


# Episodes of so many rows (the last observation's included), length, period, end: (first row, rows) of each item.
CASES = [
    ("as long as a sequence", 4, 4, 4, "write", [(0, 4)]),
    ("short: dropped", 3, 4, 2, "write", []),
    ("short: truncated", 3, 4, 2, "truncate", [(0, 3)]),
    ("short: padded", 3, 4, 2, "zero_pad", [(0, 3)]),
    ("period divides", 8, 4, 2, "write", [(0, 4), (2, 4), (4, 4)]),
    ("period divides", 8, 4, 2, "truncate", [(0, 4), (2, 4), (4, 4)]),
    ("one more at the end", 9, 4, 2, "write", [(0, 4), (2, 4), (4, 4), (5, 4)]),
    ("a short one at the end", 9, 4, 2, "truncate", [(0, 4), (2, 4), (4, 4), (6, 3)]),
    ("a padded one at the end", 9, 4, 2, "zero_pad", [(0, 4), (2, 4), (4, 4), (6, 3)]),
    ("period 1", 6, 4, 1, "truncate", [(0, 4), (1, 4), (2, 4)]),
    ("no overlap", 7, 3, 3, "write", [(0, 3), (3, 3), (4, 3)]),
    ("no overlap", 7, 3, 3, "truncate", [(0, 3), (3, 3), (6, 1)]),
    ("no overlap", 7, 3, 3, "zero_pad", [(0, 3), (3, 3), (6, 1)]),
    ("long period", 12, 3, 5, "write", [(0, 3), (5, 3), (9, 3)]),
    ("long period", 12, 3, 5, "truncate", [(0, 3), (5, 3), (10, 2)]),
    ("one transition", 2, 4, 2, "truncate", [(0, 2)]),
    ("one transition", 2, 4, 2, "write", []),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "rows", "length", "period", "end", "expected"), one_quick(CASES, *CASES[:4], CASES[7])
)
def test_reverbs_cases(what, rows, length, period, end, expected):
    assert adder(rows, length, period, end) == expected
    # The episode in the middle of others, in a ring that holds it and what it reads after it.
    before, after = 2, 24
    stream = rows_of([[before, rows, after]])
    stream = jax.tree.map(lambda x: x[:20], stream)
    sources = {"replay": Replay(100, 8, 1, sequence=Sequence(length, period, end))}
    fed = Fed(sources, stream, rollout=20).feed(stream)
    inside = {t - before for t, _ in fed.starts() if before <= t < before + rows}
    assert inside == {first for first, _ in expected}
    batch = fed.sample(0)
    for i in range(8):
        first = int(batch.sample_info.step[i]) - before
        if first in inside and first >= 0:
            kept = dict(expected)[first]
            belongs = length if end == "zero_pad" else kept
            np.testing.assert_array_equal(batch.mask[:, i], np.arange(length) < belongs)
            value = np.where(np.arange(length) < kept, before + first + np.arange(length), 0)
            np.testing.assert_array_equal(batch.rows.observation[:, i], value)
            assert not np.asarray(batch.rows.weight[kept:, i]).any()


@pytest.mark.long
def test_continue_runs_on_over_episodes():
    fed = Fed({"replay": source(Sequence(5, 3, "continue"))}, ROWS, rollout=2)
    for upto in range(2, TICKS + 1, 2):
        fed.feed(jax.tree.map(lambda x: x[upto - 2 : upto], ROWS))  # noqa: B023
        oldest = 0 if upto < 24 else upto - 24 + 1
        expected = {(t, c) for t in range(oldest, upto - 4) for c in range(4) if t % 3 == 0}
        assert fed.starts() == expected
    batch = fed.sample(0)
    np.testing.assert_array_equal(np.diff(batch.rows.observation, axis=0), 1.0)
    assert np.asarray(batch.mask).all() and np.asarray(batch.rows.first[1:]).any()


@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "period", "end"),
    one_quick([(4, 2, "write"), (3, 3, "truncate"), (5, 1, "truncate"), (4, 2, "zero_pad")]),
)
def test_sequences_are_the_adders_at_every_moment(end, length, period):
    expected = {}
    for column, lengths in enumerate(COLUMNS):
        start = 0
        for rows in lengths:
            for first, kept in adder(rows, length, period, end):
                if kept > 0:
                    expected[start + first, column] = kept
            start += rows
    fed = Fed({"replay": source(Sequence(length, period, end), sampler=Prioritized())}, ROWS, rollout=2, poison=True)
    for upto in range(2, TICKS + 1, 2):
        fed.feed(jax.tree.map(lambda x: x[upto - 2 : upto], ROWS))  # noqa: B023
        # Decided once the rows after are there; gone with the row before, whose reward is its first moment's.
        oldest = 0 if upto < 24 else upto - 24 + 1
        assert fed.starts() == {(t, c) for t, c in expected if oldest <= t <= upto - length}
        batch = fed.sample(upto)
        for i in np.flatnonzero(np.asarray(batch.sample_info.probability) > 0):
            tick, column = int(batch.sample_info.step[i]), int(batch.rows.observation[0, i]) // 1000
            kept = expected[tick, column]
            part = slice(tick, tick + kept)
            for name in ("observation", "action", "reward", "terminated", "truncated", "first", "weight"):
                np.testing.assert_array_equal(getattr(batch.rows, name)[:kept, i], getattr(ROWS, name)[part, column])
                assert not np.asarray(getattr(batch.rows, name)[kept:, i]).any()
            moments = batch.timesteps
            continued = ~np.asarray(ROWS.first[part, column])
            for name, stored in (("reward", "reward"), ("terminated", "terminated"), ("previous_action", "action")):
                then = np.asarray(jnp.roll(getattr(ROWS, stored), 1, axis=0)[part, column])
                np.testing.assert_array_equal(getattr(moments, name)[:kept, i], np.where(continued, then, 0))
            np.testing.assert_array_equal(moments.first[:kept, i], ROWS.first[part, column])


def test_discounts_arrive_with_the_time_step_after_theirs():
    """1 where an episode begins, as of an environment's own time steps; a batch without any gets 0 at terminations."""
    own = jnp.linspace(0.1, 0.9, TICKS, dtype=jnp.float32)[:, None]
    rows = ROWS.replace(discount=jnp.where(ROWS.weight & ~ROWS.terminated, own, 0.0))
    batch = Fed({"replay": source(Sequence(4, 2))}, rows, rollout=2).feed(rows).sample(0)
    assert batch.timesteps.terminated.any() and batch.timesteps.first.any()
    for i in range(batch.mask.shape[1]):
        tick, column = int(batch.sample_info.step[i]), int(batch.rows.observation[0, i]) // 1000
        then = np.asarray(jnp.roll(rows.discount, 1, axis=0)[tick : tick + 4, column])
        wanted = np.where(ROWS.first[tick : tick + 4, column], 1.0, then)
        np.testing.assert_array_equal(batch.timesteps.discount[:, i], wanted)
    bare = batch.replace(rows=batch.rows.replace(discount=None), timesteps=batch.timesteps.replace(discount=None))
    np.testing.assert_array_equal(bare.with_discounts().timesteps.discount == 0.0, batch.timesteps.terminated)


@pytest.mark.long
def test_stored_carry_and_burn_in():
    rollout = 4
    sequence = Sequence(4, period=8, end="continue", burn_in=3, stored_carry=True)
    carry = lambda start: {"h": jnp.arange(4, dtype=jnp.float32)[:, None] * 1000 + start}  # noqa: E731
    fed = Fed({"replay": source(sequence)}, ROWS, rollout=rollout, carry=carry(0)).feed(ROWS, carry)
    assert {t for t, _ in fed.starts()} == {24, 32}
    batch = fed.sample(0)
    assert batch.burn_in == 3 and batch.rows.weight.shape == (7, 32)
    assert not np.asarray(batch.rows.weight[:3]).any() and np.asarray(batch.mask).all()
    np.testing.assert_array_equal(batch.carry["h"][:, 0], batch.rows.observation[0])


@pytest.mark.long
@pytest.mark.parametrize("burn_in", one_quick([0, 2]))
def test_stored_carries_with_ends_learn_every_transition_past_the_burn_in_within_its_episode(burn_in):
    rollout, length = 4, 6
    sequence = Sequence(length, rollout, "truncate", burn_in=burn_in, stored_carry=True)
    carry = lambda start: {"h": jnp.arange(4, dtype=jnp.float32)[:, None] * 1000 + start}  # noqa: E731
    settings = source(sequence, capacity=4 * 48, sampler=Prioritized(), batch_size=128)
    fed = Fed({"replay": settings}, ROWS, rollout=rollout, carry=carry(0)).feed(ROWS, carry)
    first, starts = np.asarray(ROWS.first), fed.starts()
    assert all(t % rollout == 0 or first[t, c] for t, c in starts)
    learned = set()
    for seed in range(3):
        batch = fed.sample(seed)
        mask = np.asarray(batch.mask)
        assert not np.asarray(batch.rows.first)[1:][mask[1:]].any(), "none runs on into the next episode"
        assert (np.asarray(batch.rows.weight).sum(axis=0) > 0).all(), "each has something to learn"
        begins = np.asarray(batch.rows.first[0])
        np.testing.assert_array_equal(batch.carry["h"][~begins, 0], np.asarray(batch.rows.observation[0])[~begins])
        counted = np.asarray(batch.rows.weight & batch.mask)[:-1]
        learned |= set(np.asarray(batch.rows.observation)[:-1][counted].astype(int))
    step = np.arange(TICKS)[:, None] - np.maximum.accumulate(np.where(first, np.arange(TICKS)[:, None], 0))
    inside = np.asarray(ROWS.weight) & (step >= burn_in) & (np.arange(TICKS)[:, None] < TICKS - length - burn_in)
    assert learned >= set(np.asarray(ROWS.observation)[inside].astype(int))


@pytest.mark.long
def test_a_carry_that_is_not_stored_is_the_initial_one():
    fed = Fed({"replay": source(Sequence(4))}, ROWS, rollout=4).feed(ROWS)
    batch = fed.sample(0, initial_carry={"h": jnp.array([1.0, 2.0])})
    np.testing.assert_array_equal(batch.carry["h"], np.broadcast_to([1.0, 2.0], (32, 2)))


@pytest.mark.long
def test_priorities_at_insertion_are_mixed_over_the_rows():
    rows = ROWS.replace(extras={"error": jnp.abs(ROWS.reward) % 7})
    sampler = Prioritized(insertion="error", eta=0.9)
    fed = Fed({"replay": source(Sequence(6, 2, "truncate"), sampler=sampler)}, rows, rollout=2).feed(rows)
    batch = fed.sample(0)
    # Of the rows that are learned from: the last of a stretch only bootstraps.
    counts = np.asarray(batch.mask & batch.rows.weight) & (np.arange(6) < 5)[:, None]
    error = np.abs(np.asarray(batch.rows.reward)) % 7 * counts
    expected = 0.9 * error.max(0) + 0.1 * error.sum(0) / np.maximum(counts.sum(0), 1)
    assert len(set(counts.sum(0))) > 1
    np.testing.assert_allclose(batch.sample_info.priority, expected, rtol=1e-6)


@pytest.mark.long
def test_a_lost_successor_is_not_learned_from():
    again = rows_of([[8], [8], [8], [8]])
    fed = Fed({"replay": source(Sequence(4), batch_size=64)}, ROWS, rollout=8)
    fed.feed(jax.tree.map(lambda x: x[:8], ROWS)).feed(again)
    batch = fed.sample(0)
    tick = np.asarray(batch.sample_info.step)[None] + np.arange(4)[:, None]
    assert (tick == 7)[:-1].any()
    assert not np.asarray(batch.rows.weight)[:-1][(tick == 7)[:-1]].any()


@pytest.mark.long
def test_views_over_one_storage():
    sources = {
        "replay": source(None, sampler=Prioritized(), n_step=3),
        "recent": source(Sequence(4, 4, "continue"), sampler=Fifo(), max_times_sampled=1, over="replay", batch_size=4),
        "demonstrations": source(None, sampler=Uniform(), capacity=32, batch_size=4),
    }
    fed = Fed(sources, ROWS, rollout=4).feed(ROWS)
    assert fed.states["recent"].ring is None
    assert fed.ring("recent") is fed.ring("replay") and fed.ring("demonstrations").slots == 8
    transitions, sequences = fed.sample(0), fed.sample(0, "recent")
    assert transitions.rewards.shape == (32, 3)
    # The oldest are at tick 16, whose row before is gone: so 20 it is, column by column, each drawn once.
    np.testing.assert_array_equal(sequences.rows.observation[0], [20, 1020, 2020, 3020])
    np.testing.assert_array_equal(fed.sample(0, "recent").rows.observation[0], [24, 1024, 2024, 3024])
    fed.update(transitions.sample_info, jnp.ones(32) * 5)
    assert float(fed.states["replay"].index.largest[0]) == 5.0


@pytest.mark.long
def test_frames_are_shared_in_sequences_too():
    rows = ROWS.replace(observation=jnp.stack([ROWS.observation - 1, ROWS.observation], -1), action=ROWS.observation)
    rows = rows.replace(
        observation=jnp.where(ROWS.first[..., None], ROWS.observation[..., None], rows.observation).astype(jnp.int32)
    )
    settings = source(Sequence(4, 2, "truncate"), frame_stack=FrameStack(2))
    fed = Fed({"replay": settings}, rows, rollout=2).feed(rows)
    whole = Fed({"replay": source(Sequence(4, 2, "truncate"))}, rows, rollout=2).feed(rows)
    for a, b in zip(jax.tree.leaves(fed.sample(3)), jax.tree.leaves(whole.sample(3)), strict=True):
        np.testing.assert_array_equal(a, b)
