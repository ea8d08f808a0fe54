"""Transitions from a ring: what is drawn, how often, and what an update of priorities does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.streams import Fed, assert_two_devices_are_one, n_step, rows_of
from helpers.tiers import one_quick
from scipy import stats

from jaxrl.buffers import replay
from jaxrl.core.sources import Fifo, FrameStack, Lifo, MaxHeap, MinHeap, Prioritized, Replay, Sequence, Uniform
from jaxrl.core.types import TransitionBatch
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

# Four environments; the second ends every episode at once but one, the third never.
COLUMNS = [[5, 3, 9, 4, 6, 5], [2, 2, 2, 2, 24], [32], [4, 4, 4, 4, 4, 4, 4, 4]]
ROWS = rows_of(COLUMNS, ("terminated", "truncated"))
TICKS = ROWS.reward.shape[0]
OWN = np.random.default_rng(0).uniform(0.2, 1.0, ROWS.reward.shape).astype(np.float32)
DISCOUNTED = ROWS.replace(discount=OWN * (ROWS.weight & ~ROWS.terminated))


def source(sampler=None, **changes):
    return dataclasses.replace(
        Replay(capacity=4 * 16, batch_size=64, min_size=1, sampler=sampler or Uniform()), **changes
    )


def begins(n, upto, slots=16, back=0):
    """Every (tick, column) that a transition may begin at after `upto` steps_per_env."""
    oldest = max(upto - slots, 0) + (back if upto >= slots else 0)
    return {(t, c) for t in range(oldest, upto - n) for c in range(4) if ROWS.weight[t, c]}


@pytest.mark.parametrize("n", one_quick([1, 3], 3))
@pytest.mark.parametrize(
    ("sampler", "rows"),
    [(Uniform(), ROWS), (Prioritized(), ROWS), (Uniform(), DISCOUNTED)],
    ids=["uniform", "prioritized", "discounted"],
)
def test_transitions_are_those_of_the_episodes(sampler, rows, n):
    fed = Fed({"replay": source(sampler, n_step=n)}, rows, rollout=2, poison=True)
    for upto in range(2, TICKS + 1, 2):
        fed.feed(jax.tree.map(lambda x: x[upto - 2 : upto], rows))  # noqa: B023
        expected = begins(n, upto)
        if not isinstance(sampler, Uniform):
            assert fed.starts() == expected
        assert int(fed.states["replay"].index.drawable.sum()) == len(expected)
        batch = fed.sample(upto)
        for i in np.flatnonzero(np.asarray(batch.weight)):
            tick, column = int(batch.observation[i]) % 1000, int(batch.observation[i]) // 1000
            assert (tick, column) in expected
            rewards, steps, bootstrap, following = n_step(rows, tick, column, n)
            np.testing.assert_allclose(batch.rewards[i], rewards, rtol=1e-5)
            np.testing.assert_allclose(batch.bootstrap[i], bootstrap, rtol=1e-5)
            assert int(batch.steps[i]) == steps and float(batch.next_observation[i]) == following
            assert int(batch.sample_info.age_steps[i]) == upto - 1 - tick
            assert int(batch.sample_info.step[i]) == tick
        if not expected:
            assert not np.asarray(batch.weight).any()


@pytest.mark.long
def test_a_run_resumed_with_new_host_environments_loses_the_row_before():
    cut = jax.tree.map(lambda x: x[:8], ROWS)
    again = rows_of([[8], [8], [8], [8]])
    fed = Fed({"replay": source(Prioritized(), n_step=3)}, ROWS, rollout=8).feed(cut).feed(again)
    assert not {(7, c) for c in range(4)} & fed.starts()
    batch = fed.sample(0)
    tick = np.asarray(batch.sample_info.step)
    running = np.asarray(batch.observation) // 1000 == 2
    for i in np.flatnonzero((tick >= 5) & (tick < 8) & running):
        # The stretch stops at the last row before the gap, and that row's observation is bootstrapped from.
        assert int(batch.steps[i]) == 7 - tick[i]
        assert float(batch.next_observation[i]) == 2007.0 and bool(batch.bootstrap[i])


def test_uniform_draws_every_item_alike():
    fed = Fed({"replay": source(batch_size=4000)}, ROWS, rollout=2, shards=2).feed(ROWS)
    items = sorted(begins(1, TICKS))
    counts = dict.fromkeys(items, 0)
    for seed in range(5):
        batch = fed.sample(seed)
        # Draws try four times: episodes of one transition leave a few without anything to learn from.
        for value, ok in zip(np.asarray(batch.observation), np.asarray(batch.weight), strict=True):
            if ok:
                counts[(int(value) % 1000, int(value) // 1000)] += 1
    for half in (0, 1):
        assert stats.chisquare([n for (_, c), n in counts.items() if c // 2 == half]).pvalue > 1e-3
    # The probability is the item's, whose shard gives half of the batch.
    sizes = [sum(c // 2 == half for _, c in items) for half in (0, 1)]
    shard = (np.asarray(batch.observation) // 2000).astype(int)
    ok = np.asarray(batch.weight)
    np.testing.assert_allclose(
        np.asarray(batch.sample_info.probability)[ok], 0.5 / np.take(sizes, shard[ok]), rtol=1e-6
    )
    np.testing.assert_array_equal(batch.sample_info.importance, 1.0)


@pytest.mark.long
def test_how_unevenly_shards_of_their_own_lengths_are_drawn_is_told():
    fed = Fed({"replay": source(batch_size=64)}, ROWS, rollout=2, shards=4).feed(ROWS)
    figures = fed.buffers["replay"].statistics(fed.states["replay"], fed.sample(0).sample_info)
    sizes = [sum(c == shard for _, c in begins(1, TICKS)) for shard in range(4)]
    assert max(sizes) > min(sizes) and float(figures["chance_ratio"]) == pytest.approx(max(sizes) / min(sizes))


def given_priorities(fed, function):
    """Draws until every item was drawn, and gives each the priority that `function` makes of its observation."""
    for seed in range(40):
        batch = fed.sample(1000 + seed)
        fed.update(batch.sample_info, function(batch.observation))


@pytest.mark.long
@pytest.mark.parametrize("exponent", one_quick([0.0, 0.6, 1.0], 0.6))
@pytest.mark.parametrize("shards", [1, 2])
def test_prioritized_frequencies_and_weights(exponent, shards):
    priority_of = lambda obs: jnp.where(obs % 5 == 0, 0.0, (obs % 1000 % 7 + 1.0) ** 2)  # noqa: E731
    sampler = Prioritized(exponent=exponent, beta=0.7)
    fed = Fed({"replay": source(sampler, batch_size=1024)}, ROWS, rollout=2, shards=shards).feed(ROWS)
    given_priorities(fed, priority_of)
    items = sorted(begins(1, TICKS))
    values = np.array([t + 1000 * c for t, c in items], np.float32)
    mass = np.asarray(priority_of(jnp.asarray(values)), np.float64)
    mass = np.where(mass > 0, mass**exponent, 0.0)
    chance = mass / mass.sum()  # over all shards, though they hold different parts of the whole
    counts = np.zeros(len(items))
    place = {value: i for i, value in enumerate(values)}
    for seed in range(20):
        batch = fed.sample(seed)
        for value in np.asarray(batch.observation):
            counts[place[value]] += 1
    assert counts[mass == 0].sum() == 0
    drawn = mass > 0
    assert stats.chisquare(counts[drawn], chance[drawn] * counts.sum()).pvalue > 1e-3
    where = [place[value] for value in np.asarray(batch.observation)]
    np.testing.assert_allclose(batch.sample_info.probability, chance[where], rtol=1e-5)
    weight = (len(items) * chance[where]) ** -0.7
    np.testing.assert_allclose(batch.sample_info.importance, weight / weight.max(), rtol=1e-5)
    np.testing.assert_allclose(batch.sample_info.priority, priority_of(batch.observation), rtol=1e-6)


@pytest.mark.long
def test_all_zero_falls_back_to_uniform():
    fed = Fed({"replay": source(Prioritized(), batch_size=1000)}, ROWS, rollout=2).feed(ROWS)
    given_priorities(fed, jnp.zeros_like)
    batch = fed.sample(0)
    counts = np.unique(np.asarray(batch.observation), return_counts=True)[1]
    assert len(counts) == len(begins(1, TICKS)) and stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_allclose(batch.sample_info.probability, 1.0 / len(counts), rtol=1e-6)
    np.testing.assert_allclose(batch.sample_info.importance, 1.0, rtol=1e-6)


@pytest.mark.long
def test_bad_priorities_are_refused_and_counted():
    fed = Fed({"replay": source(Prioritized(), batch_size=4)}, ROWS, rollout=2).feed(ROWS)
    batch = fed.sample(0)
    before = fed.states["replay"].index
    fed.update(batch.sample_info, jnp.array([jnp.nan, -1.0, jnp.inf, 3.0]))
    after = fed.states["replay"].index
    changed = np.flatnonzero(np.asarray(before.priority != after.priority))
    assert list(changed) == [int(batch.sample_info.position[3])]
    assert int(after.refused.sum()) == 3 and float(after.largest[0]) == 3.0


@pytest.mark.long
def test_the_larger_priority_of_an_item_drawn_twice_counts():
    fed = Fed({"replay": source(Prioritized(), batch_size=4)}, ROWS, rollout=2).feed(ROWS)
    drawn = jax.tree.map(lambda x: jnp.repeat(x[:1], 4, axis=0), fed.sample(0).sample_info)
    for given in ([1.0, 5.0, 2.0, 3.0], [0.5, 0.1, 0.2, 0.0]):
        fed.update(drawn, jnp.array(given))
        index = fed.states["replay"].index
        place = int(drawn.position[0])
        assert float(index.priority[0, place]) == max(given)
        np.testing.assert_allclose(index.levels[0][0, place], max(given) ** 0.6, rtol=1e-6)


@pytest.mark.long
def test_priorities_for_overwritten_rows_are_dropped():
    fed = Fed({"replay": source(Prioritized(), batch_size=16)}, ROWS, rollout=2)
    fed.feed(jax.tree.map(lambda x: x[:16], ROWS))
    batch = fed.sample(0)
    fed.feed(jax.tree.map(lambda x: x[16:20], ROWS))
    before = fed.states["replay"].index.priority
    fed.update(batch.sample_info, jnp.full(16, 50.0))
    after = fed.states["replay"].index.priority
    ring = fed.ring()
    expected = {int(t) for t in batch.sample_info.step if t >= 4}
    assert {int(ring.step_at(jnp.int32(p // 4))) for p in np.flatnonzero(np.asarray(before != after)[0])} == expected
    assert any(t < 4 for t in np.asarray(batch.sample_info.step))


@pytest.mark.long
def test_priorities_at_insertion():
    rows = ROWS.replace(extras={"error": jnp.abs(ROWS.reward)})
    fed = Fed({"replay": source(Prioritized(insertion="error"), n_step=2)}, rows, rollout=4).feed(rows)
    batch = fed.sample(0)
    np.testing.assert_allclose(batch.sample_info.priority, batch.rewards[:, 0])
    assert fed.starts() == begins(2, TICKS)


@pytest.mark.long
def test_new_items_get_the_largest_priority_so_far():
    fed = Fed({"replay": source(Prioritized(), batch_size=2)}, ROWS, rollout=2)
    fed.feed(jax.tree.map(lambda x: x[:8], ROWS))
    fed.update(fed.sample(0).sample_info, jnp.array([9.0, 4.0]))
    fed.feed(jax.tree.map(lambda x: x[8:12], ROWS))
    index, ring = fed.states["replay"].index, fed.ring()
    priority = np.asarray(index.priority)[0].reshape(16, 4)
    new = [int(s) for s in range(16) if 7 <= int(ring.step_at(jnp.int32(s))) < 11]
    assert set(priority[new].ravel()) == {-1.0, 9.0}


@pytest.mark.long
def test_ages_and_times_sampled():
    fed = Fed({"replay": source(Prioritized(), batch_size=64)}, ROWS, rollout=2)
    fed.feed(jax.tree.map(lambda x: x[:8], ROWS))
    seen = {}
    for number in range(3):
        batch = fed.sample(number)
        now = [(int(p)) for p in batch.sample_info.position]
        for p in now:
            seen[p] = seen.get(p, 0) + 1
        np.testing.assert_array_equal(batch.sample_info.times_sampled, [seen[p] for p in now])
        np.testing.assert_array_equal(batch.sample_info.age_updates, number)
    fed.feed(jax.tree.map(lambda x: x[8:24], ROWS))
    batch = fed.sample(9)
    np.testing.assert_array_equal(batch.sample_info.age_updates, 0)
    assert int(batch.sample_info.times_sampled.max()) <= 64
    statistics = fed.buffers["replay"].statistics(fed.states["replay"], batch.sample_info)
    assert float(statistics["sampled"]) == 256 and float(statistics["inserted"]) == 96
    assert float(statistics["samples_per_insert"]) == pytest.approx(256 / 96)


@pytest.mark.parametrize("sampler", one_quick([Fifo(), Lifo(), MinHeap(), MaxHeap()]))
def test_ordered_samplers_and_max_times_sampled(sampler):
    rows = jax.tree.map(lambda x: x[:12], ROWS)
    fed = Fed({"replay": source(sampler, batch_size=6, max_times_sampled=2)}, rows, rollout=2).feed(rows)
    items = sorted(begins(1, 12))
    if isinstance(sampler, MinHeap | MaxHeap):
        # SampleInfo once, each item gets its priority; equal ones are avoided.
        fed = Fed({"replay": source(sampler, batch_size=1)}, rows, rollout=2).feed(rows)
        place = {(t, c): (t % 16) * 4 + c for t, c in items}
        drawn = fed.sample(0).sample_info
        for tick, column in items:
            one = drawn.replace(
                position=jnp.array([place[tick, column]], jnp.int32), step=jnp.array([tick], jnp.uint32)
            )
            fed.update(one.replace(probability=jnp.ones(1)), jnp.array([float((tick * 7 + column * 3) % 31 + column)]))
        key = lambda item: (item[0] * 7 + item[1] * 3) % 31 + item[1]  # noqa: E731
        best = (min if isinstance(sampler, MinHeap) else max)(items, key=key)
        value = float(fed.sample(1).observation[0])
        assert key((int(value) % 1000, int(value) // 1000)) == key(best)
        return
    order = items if isinstance(sampler, Fifo) else sorted(items, key=lambda item: (-item[0], -item[1]))
    expected = [t + 1000 * c for t, c in order for _ in range(2)]
    drawn = []
    for number in range(len(expected) // 6 + 2):
        batch = fed.sample(number)
        drawn += [int(v) for v, ok in zip(batch.observation, batch.weight, strict=True) if ok]
    assert drawn == expected
    assert fed.starts() == set()
    statistics = fed.buffers["replay"].statistics(fed.states["replay"], batch.sample_info)
    assert (statistics["sampled"], statistics["found"]) == (len(expected), 0), "empty draws are no samples"


def test_prioritized_items_go_after_max_times_sampled():
    fed = Fed({"replay": source(Prioritized(), batch_size=16, max_times_sampled=3)}, ROWS, rollout=2).feed(ROWS)
    counts = {}
    for number in range(12):
        batch = fed.sample(number)
        for v, ok in zip(np.asarray(batch.observation), np.asarray(batch.weight), strict=True):
            if ok:
                counts[v] = counts.get(v, 0) + 1
    assert set(counts.values()) == {3} and len(counts) == len(begins(1, TICKS))
    assert not np.asarray(batch.weight).any()
    assert int(fed.states["replay"].index.sampled) == 3 * len(counts)


@pytest.mark.long
@pytest.mark.parametrize("fill", one_quick(["repeat", "zeros"]))
@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=["uniform", "prioritized"])
def test_frame_sharing_gives_the_stacks(sampler, fill):
    frames = 3
    picture = (np.arange(TICKS)[:, None] * 4 + np.arange(4)[None] + 1)[..., None, None] + np.zeros((1, 1, 2, 1))
    picture, stacks = picture.astype(np.uint8), np.zeros((TICKS, 4, 2, frames), np.uint8)
    for c in range(4):
        for t in range(TICKS):
            start = max(s for s in range(t + 1) if ROWS.first[s, c])
            for k in range(frames):
                at = t - (frames - 1 - k)
                if at >= start:
                    stacks[t, c, :, k] = picture[at, c, :, 0]
                elif fill == "repeat":
                    stacks[t, c, :, k] = picture[start, c, :, 0]
    rows = ROWS.replace(observation={"stack": jnp.asarray(stacks)}, action=ROWS.observation)
    stack = FrameStack(frames, fill=fill)
    fed = Fed({"replay": source(sampler, n_step=2, frame_stack=stack)}, rows, rollout=2)
    assert fed.ring().rows.observation["stack"].shape == (4, 16, 2, 1)
    assert fed.ring().rows.observation["stack"].dtype == jnp.uint8
    for upto in range(2, TICKS + 1, 2):
        fed.feed(jax.tree.map(lambda x: x[upto - 2 : upto], rows))  # noqa: B023
        expected = begins(2, upto, back=frames - 1)
        assert int(fed.states["replay"].index.drawable.sum()) == len(expected)
        batch = fed.sample(upto)
        for i in np.flatnonzero(np.asarray(batch.weight)):
            tick, column = int(batch.action[i]) % 1000, int(batch.action[i]) // 1000
            assert (tick, column) in expected
            np.testing.assert_array_equal(batch.observation["stack"][i], stacks[tick, column])
            after = tick + int(batch.steps[i])
            np.testing.assert_array_equal(batch.next_observation["stack"][i], stacks[after, column])


@pytest.mark.long
def test_a_shard_gives_as_much_of_a_batch_as_it_has_of_the_priorities():
    """The review's case: 86.5 % of the priority in one of eight shards gave 12.5 % of the batch."""
    rows = rows_of([[24]] * 8)
    sampler = Prioritized(exponent=1.0, beta=0.4, insertion="error")
    rows = rows.replace(extras={"error": np.where(np.arange(8) == 2, 45.0, 1.0) * np.ones((24, 1), np.float32)})
    rows.extras["error"] = rows.extras["error"].astype(np.float32)
    asked = Replay(8 * 24, 512, 1, sampler=sampler)
    batch = Fed({"replay": asked}, rows, rollout=8, shards=8).feed(rows).sample(0)
    of_it = float(np.mean(np.asarray(batch.observation) // 1000 == 2))
    assert of_it == pytest.approx(45 / 52, abs=2 / 512)  # stratified over the whole
    assert batch.sample_info.probability.sum() == pytest.approx(512 * (of_it * 45 + (1 - of_it)) / (52 * 23), rel=1e-4)


@pytest.mark.long
def test_sequences_are_drawn_alike_over_all_shards():
    fed = Fed({"replay": source(sequence=Sequence(5, 1, "write"), batch_size=2000)}, ROWS, rollout=2, shards=2)
    fed.feed(ROWS)
    counts = dict.fromkeys(fed.starts(), 0)
    for seed in range(4):
        for value in np.asarray(fed.sample(seed).rows.observation[0]):
            counts[int(value) % 1000, int(value) // 1000] += 1
    halves = [sum(c // 2 == half for _, c in counts) for half in (0, 1)]
    assert halves[0] != halves[1] and stats.chisquare(list(counts.values())).pvalue > 1e-3


ASKED = {
    "uniform": source(batch_size=32),
    "prioritized": source(Prioritized(), batch_size=32),
    "sequences": source(Prioritized(), batch_size=32, sequence=Sequence(3, 2, "truncate")),
    "ordered": source(MaxHeap(), batch_size=32),
}


def by_item(batch):
    """Leaves [batch, ...]."""
    if isinstance(batch, TransitionBatch):
        return batch
    over_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (batch.rows, batch.timesteps, batch.mask))
    return over_time, batch.sample_info


def errors(batch):
    return batch.rewards[:, 0] if isinstance(batch, TransitionBatch) else batch.rows.reward[0]


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(ASKED))
def test_two_devices_draw_what_one_does(name):
    settings = {"num_envs": 4, "rollout_length": 4, "shards": 4}
    one, two = (
        replay.bind({"replay": ASKED[name]}, **settings, replicas=replicas)["replay"]
        for replicas in (SingleReplica(4), MeshReplicas("data", 2))
    )

    def step(buffer, state, rows, key):
        state, batch = buffer.sample(buffer.add(state, rows, ()), key)
        if not isinstance(ASKED[name].sampler, Uniform):
            state = buffer.update_priorities(state, batch.sample_info, errors(batch))
        return state, by_item(batch)

    assert_two_devices_are_one(step, one, two, one.init(ROWS, ()), two.partition("data"), ROWS)
