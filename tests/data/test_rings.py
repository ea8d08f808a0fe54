"""Datasets as rows: every transition of every episode is there once, whatever the columns, and nothing else."""

import contextlib
import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.made import ENDINGS, dataset_of, transitions_in_words, whole
from helpers.refused import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxrl.buffers import fixed, replay, transitions
from jaxrl.core import spaces
from jaxrl.core.errors import DatasetError
from jaxrl.core.sources import Dataset, FrameStack, Prioritized, Replay, Sequence
from jaxrl.core.types import EnvSpec
from jaxrl.data import rings
from jaxrl.parallel import memory
from jaxrl.parallel.replicas import SingleReplica

SOURCE = Dataset(8)
SPEC = EnvSpec("test", spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1.0, 1.0, (1,)))


def episode(number, length, ending):
    """Whose every number tells which step it is of which episode."""
    step = np.arange(length + 1)
    observation = np.stack([np.full(length + 1, number), step], axis=1).astype(np.float32)
    action, reward = (step[:, None] / 1000).astype(np.float32), (100 * number + step).astype(np.float32)
    return whole(observation, action, reward, np.ones(length + 1, np.float32), ending)


def laid(episodes, source=SOURCE, spec=SPEC, columns=1):
    """The ring of a source of these episodes."""
    return rings.rings(dataset_of(*episodes), {"replay": fixed.source_of(source)}, spec, columns=columns)[0]["replay"]


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(ENDINGS)), min_size=1, max_size=7),
    columns=st.sampled_from([1, 2, 4, 8]),
    n=st.integers(1, 3),
)
def test_every_transition_is_there_once(shapes, columns, n):
    episodes = [episode(number, *shape) for number, shape in enumerate(shapes)]
    ring = laid(episodes, Dataset(8, n_step=n), columns=columns)
    wanted = {(i, t): rest for i, one in enumerate(episodes) for t, *rest in transitions_in_words(one, n)}
    seen = []
    for column, (start, stop) in enumerate(ring.parts.own):
        assert stop + n <= ring.slots, "a transition begins where its future is not stored"
        for slot in (start + np.flatnonzero(ring.rows.weight[column, start:stop])).tolist():
            number, step = (int(x) for x in ring.rows.observation[column, slot])
            rewards, steps, bootstrap = wanted[number, step]
            assert gathered(ring.rows, column, slot, n) == (steps, rewards[:steps], not bootstrap)
            np.testing.assert_array_equal(ring.rows.observation[column, slot + steps], [number, step + steps])
            assert ring.rows.action[column, slot][0] == np.float32(step / 1000)
            seen.append((number, step))
    assert sorted(seen) == sorted(wanted)
    assert drawn(ring) == dict.fromkeys(wanted, columns), "not every transition is drawn as often"


def drawn(ring):
    """How often each transition comes if every column makes each of its draws once."""
    counts = Counter()
    for column, offset in enumerate(ring.parts.offset.tolist()):
        for number in range(int(ring.parts.total)):
            slot = ring.parts.slot[column, (offset + number) // ring.columns]
            assert ring.rows.weight[column, slot]
            counts[tuple(int(x) for x in ring.rows.observation[column, slot])] += 1
    return counts


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[1] * 250 + [50] * 5, [20]], ids=["short ones and long ones", "one"])
def test_every_transition_of_a_dataset_is_drawn_alike(lengths):
    """Over eight shards. The short ones were 0.636 of the draws; the last two of the 20 came 1.49 times as often."""
    episodes = [episode(number, length, "terminated") for number, length in enumerate(lengths)]
    source = {"replay": fixed.source_of(Replay(100, 8_000, 50))}
    ring = rings.rings(dataset_of(*episodes), source, SPEC, columns=8)[0]["replay"]
    assert set(drawn(ring).values()) == {8}
    ring = jax.tree.map(jnp.asarray, ring)
    buffer = replay.bind(source, num_envs=8, rollout_length=1, shards=8, replicas=SingleReplica(8))["replay"]
    state = replay.ReplayState(ring, fixed.index_of(buffer, ring))
    assert int(state.index.drawable.sum()) == sum(lengths)
    _, batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    assert batch.weight.all(), "there is nothing to learn from"
    np.testing.assert_allclose(batch.sample_info.probability, 1 / sum(lengths), rtol=1e-6)
    items = np.unique(np.asarray(batch.observation), axis=0, return_counts=True)[1]
    assert len(items) == sum(lengths) and stats.chisquare(items).pvalue > 1e-3


def gathered(kept, column, slot, n):
    """A transition as `jaxrl.buffers.transitions` reads it: its steps, their rewards, whether it terminated."""
    rewards, terminated = [], False
    for at in range(slot, slot + n):
        if not kept.weight[column, at]:
            break
        rewards.append(float(kept.reward[column, at]))
        terminated = bool(kept.terminated[column, at])
        if terminated or kept.truncated[column, at]:
            break
    return len(rewards), rewards, terminated


@pytest.mark.long
def test_an_index_holds_what_may_be_drawn():
    episodes = [episode(0, 7, "terminated"), episode(1, 4, "truncated"), episode(2, 9, "cut off")]
    asked = {
        "uniform": Replay(100, 8, 50),
        "prioritized": Replay(100, 8, 50, n_step=2, sampler=Prioritized(), over="uniform"),
        "sequences": Replay(100, 8, 50, sequence=Sequence(4, period=2, end="write"), over="uniform"),
        "running on": Replay(100, 8, 50, sequence=Sequence(4, burn_in=2, stored_carry=True), over="uniform"),
    }
    sources = {name: fixed.source_of(source) for name, source in asked.items()}
    ring = jax.tree.map(jnp.asarray, rings.rings(dataset_of(*episodes), sources, SPEC, columns=2)[0]["uniform"])
    buffers = replay.bind(sources, num_envs=2, rollout_length=1, shards=2, replicas=SingleReplica(2))
    found = {name: fixed.index_of(buffer, ring) for name, buffer in buffers.items()}
    assert found["uniform"].drawable.sum() == found["prioritized"].drawable.sum() == 20
    assert found["prioritized"].inserted.as_float() == 20
    assert fixed.margins(sources) == (1, 5)
    # Every row begins a stretch that runs on: the period is 1. And each row is one column's own.
    assert found["running on"].drawable.sum() == 8 + 5 + 10
    starts = found["sequences"].priority.reshape(2, ring.slots) >= 0
    slots = np.asarray(ring.rows.first | ~ring.rows.weight)
    for shard, slot in np.argwhere(np.asarray(starts)):
        inside = np.asarray(ring.rows.first)[shard, slot + 1 : slot + 4]
        assert not inside.any(), f"a stretch runs into another episode {slots[shard]}"


def test_frames_are_stored_once():
    spec = dataclasses.replace(SPEC, observation_space=spaces.Box(0, 255, (1, 3), np.uint8))
    steps = np.arange(1, 7, dtype=np.uint8)
    stacked = np.stack([np.where(steps > back, steps - back, steps[0]) for back in (2, 1, 0)], axis=-1)
    stacked = np.maximum(stacked, 1)[:, None].astype(np.uint8)
    e = dataclasses.replace(episode(0, 5, "truncated"), observation=stacked)
    ring = laid([e], Replay(100, 4, 1, frame_stack=FrameStack(3)), spec, columns=2)
    assert ring.rows.observation.shape == (2, ring.slots, 1, 1)
    at = np.arange(ring.slots)
    own = (at >= ring.parts.own[:, :1]) & (at < ring.parts.own[:, 1:])
    column, slot = np.nonzero(ring.rows.weight & own)
    ring = jax.tree.map(jnp.asarray, ring)
    batch = transitions.gather(ring, jnp.asarray(slot), jnp.asarray(column), 1, FrameStack(3))
    np.testing.assert_array_equal(batch.observation, stacked[:5])
    np.testing.assert_array_equal(batch.next_observation, stacked[1:])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"observation": np.zeros((4, 3), np.float32)}, r"episode 1: observation is float32 \(3,\)"),
        ({"observation": {"x": np.zeros((4, 2), np.float32)}}, r"episode 1: observation has the keys \['x'\]"),
        ({"action": np.full((4, 1), 2, np.int32)}, r"episode 1: action is \[2\] at step 0.*scale it"),
        (
            {"action": np.full((4, 1), 1e300)},
            r"episode 1: action is \[1.e\+300\] at step 0; it does not fit into float32",
        ),
        ({"action": np.zeros((4, 1), np.int32)}, None),
        ({"reward": np.array([0, np.inf, 0, 0], np.float32)}, "episode 1: reward is not finite at step 1"),
    ],
)
def test_what_is_not_of_the_environment_is_refused_by_name(change, said):
    episodes = [episode(0, 3, "truncated"), dataclasses.replace(episode(1, 3, "truncated"), **change)]
    # Whole numbers are numbers.
    with contextlib.nullcontext() if said is None else pytest.raises(DatasetError, match=said):
        laid(episodes)


def test_casts_change_nothing_but_rounding():
    def cast(space, observation):
        one = dataclasses.replace(episode(0, 3, "truncated"), observation=observation)
        return laid([one], spec=dataclasses.replace(SPEC, observation_space=space)).rows.observation[0]

    pixels, unit = np.full((4, 2), 255, np.uint8), spaces.Box(0.0, 1.0, (2,))
    with pytest.raises(DatasetError, match="observation is .255 255. at st"):
        cast(unit, pixels)
    assert cast(spaces.Box(0, 255, (2,)), pixels).max() == 255.0
    with pytest.raises(DatasetError, match="it does not fit into int32"):
        cast(spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32), np.full((4, 2), 2**31, np.int64))
    with pytest.raises(DatasetError, match="observation is .3 3. at step 0"):
        cast(spaces.MultiDiscrete((3, 4)), np.full((4, 2), 3))
    np.testing.assert_array_equal(cast(unit, np.full((4, 2), 0.1))[:3], np.float32(0.1))


def test_actions_beyond_their_bounds_are_clipped_and_counted():
    actions = np.float32([[1.5], [-3.0], [0.5], [99.0]])
    bad = dataclasses.replace(episode(1, 3, "truncated"), action=actions)
    with pytest.warns(UserWarning, match=r"2 of 6 .*33.3%.*by up to 2"):
        rows = laid([episode(0, 3, "truncated"), bad]).rows
    assert rows.action[rows.observation[..., 0] == 1][:3, 0].tolist() == [1.0, -1.0, 0.5]


def test_rewards_that_are_left_out_are_told():
    last = dataclasses.replace(episode(0, 3, "terminated"), reward=np.float32([0, 0, 0, 1]))
    with pytest.warns(UserWarning) as told:
        laid([last])
    said = [str(warning.message) for warning in told]
    assert any("1 of 1 episodes have a reward at their last step" in line for line in said)
    assert any("every reward is 0" in line for line in said)


def test_discrete_actions_are_checked_and_the_last_ones_are_not():
    spec = dataclasses.replace(SPEC, action_space=spaces.Discrete(3))
    good = dataclasses.replace(episode(0, 3, "truncated"), action=np.array([0, 2, 1, 99], np.int64))
    ring = laid([good], spec=spec)
    assert ring.rows.action.dtype == spec.action_space.dtype and ring.rows.action.max() == 2
    bad = dataclasses.replace(good, action=np.array([0, 3, 1, 0], np.int64))
    with pytest.raises(DatasetError, match="episode 0: action is 3 at st"):
        laid([bad], spec=spec)


def test_a_dataset_that_does_not_fit_is_refused_before_it_is_laid_out(monkeypatch):
    monkeypatch.setattr(memory, "free_on_host", lambda: 1_000)
    refused(lambda: laid([episode(0, 30, "truncated")]), "GiB are free")


def test_nothing_to_learn_from():
    refused(lambda: laid([]), "no episodes")
    with pytest.raises(DatasetError, match="no transition"):
        laid([episode(0, 0, "cut off")])


def test_a_stream_clips_actions_as_well_and_names_the_first_episode():
    pytest.importorskip("grain")
    episodes = [
        dataclasses.replace(
            episode(number, 3, "truncated"),
            action=np.full((4, 1), 1.0 + number, np.float32),
            metadata={"episode_id": number},
        )
        for number in range(2)
    ]
    with rings.stream(dataset_of(*episodes), fixed.source_of(Dataset(6)), SPEC, seed=0) as stream:
        with pytest.warns(UserWarning, match=r"episode 1: 3 of 3 .*100.0%"):
            batch = stream.batch(0)
    assert batch.action.shape == (6, 1) and (batch.action == 1.0).all()
