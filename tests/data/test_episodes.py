"""Episodes to rows and back, and cut out of rows: whatever ended them, wherever calls begin, of any environments."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from helpers.made import episodes, made
from helpers.recorded import assert_bitwise
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxrl.core.errors import DatasetError
from jaxrl.core.types import Trajectory
from jaxrl.data.episodes import broken_rules, cast
from jaxrl.data.rows import EpisodeCutter, episode_from_rows, rows_from_episode

# What ends an episode, and what the dataset says of it. "broken": the environment failed, so that the last row does
# not count; "lost": rows are missing, the next that follows is a first one.
ENDINGS = {
    "terminated": "terminated",
    "both": "terminated",
    "truncated": "truncated",
    "broken": "cut off",
    "lost": "cut off",
}


@st.composite
def streams(draw):
    """Scripts of some environments, [(transitions, ending)]; how many rows are seen, from which on, in which calls."""
    one = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(sorted(ENDINGS))), min_size=1, max_size=6)
    scripts = draw(st.lists(one, min_size=1, max_size=4))
    rows = min(sum(n + 1 for n, _ in script) for script in scripts)
    begin = draw(st.integers(0, rows - 1))
    bounds = draw(st.lists(st.integers(begin, rows), max_size=5))
    return scripts, begin, sorted({begin, rows, *bounds}), draw(st.none() | st.integers(1, 5))


def rows_of(script, env):
    """The rows of one environment, every number of them another."""
    rows = []
    for n, ending in script:
        for step in range(n + 1):
            ends, last = step == n - 1, step == n
            number = 1000 * env + len(rows)
            rows.append(
                {
                    "observation": {"number": np.int32(number), "picture": np.full((2, 3), number % 256, np.uint8)},
                    "action": np.float32([number, -number]),
                    "reward": np.float32(0.1 * number + 0.3 if ending == "lost" or not last else 0.0),
                    "terminated": ends and ending in ("terminated", "both"),
                    "truncated": ends and ending in ("truncated", "both"),
                    "first": step == 0,
                    "weight": not last or ending == "lost",
                }
            )
    return rows


def expected(script, env, begin, end, max_steps):
    """(numbers of the steps, their rewards, how it ended) of every episode that is seen from its beginning."""
    rows, at, found = rows_of(script, env), 0, []
    for n, ending in script:
        start, stop = at, at + n + 1
        at = stop
        if start < begin or start >= end:
            continue
        said = ENDINGS[ending] if stop <= end else "cut off"
        stop = min(stop, end)
        if max_steps is not None and stop - start > max_steps + 1:
            stop, said = start + max_steps + 1, "cut off"
        if stop - start >= 2:
            rewards = [row["reward"] for row in rows[start : stop - 1]]
            found.append(([1000 * env + row for row in range(start, stop)], rewards, said))
    return found


def stacked(rows):
    """Rows of environments [B][T] as a trajectory [T, B, ...]."""
    by_time = [jax.tree.map(lambda *x: np.stack(x), *moment) for moment in zip(*rows, strict=True)]
    return Trajectory(**jax.tree.map(lambda *x: np.stack(x), *by_time))


@settings(max_examples=150)
@given(streams())
def test_any_ends_any_boundaries_any_number_of_environments(stream):
    scripts, begin, bounds, max_steps = stream
    rows = [rows_of(script, env) for env, script in enumerate(scripts)]
    cutter = EpisodeCutter(len(scripts), max_steps)
    found = [[] for _ in scripts]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        for env, episode in cutter.add(stacked([x[start:stop] for x in rows])):
            found[env].append(episode)
    for env, episode in cutter.finish():
        found[env].append(episode)
    for env, script in enumerate(scripts):
        wanted = expected(script, env, begin, bounds[-1], max_steps)
        assert [episode.observation["number"].tolist() for episode in found[env]] == [ids for ids, _, _ in wanted]
        for episode, (numbers, rewards, ending) in zip(found[env], wanted, strict=True):
            assert broken_rules(episode) == []
            steps = len(numbers)
            assert episode.metadata["ending"] == ending
            assert episode.length == steps - 1
            assert episode.reward.tolist() == [*rewards, 0.0]
            assert episode.episode_return == sum(map(float, rewards))
            assert episode.action[:-1, 0].tolist() == numbers[:-1] and not episode.action[-1].any()
            assert (episode.observation["picture"] == np.reshape(numbers, (-1, 1, 1)) % 256).all()
            assert episode.is_first.tolist() == [True] + [False] * (steps - 1)
            assert episode.is_last.tolist() == [False] * (steps - 1) + [True]
            over = ending == "terminated"
            assert episode.is_terminal.tolist() == [False] * (steps - 1) + [over]
            assert episode.discount.tolist() == [1.0] * (steps - 2) + [0.0 if over else 1.0, 0.0]


def test_only_unfinished_episodes_are_kept():
    """A long episode beside short ones holds its own rows, and not those of its neighbors."""
    long, short = rows_of([(10_000, "terminated")], 0), rows_of([(1, "truncated")] * 5000, 1)
    cutter, ended = EpisodeCutter(2), 0
    for start in range(0, 8000, 100):
        ended += sum(1 for _ in cutter.add(stacked([x[start : start + 100] for x in (long, short)])))
    assert ended == 4000
    kept = [leaf for pieces in cutter._open if pieces for piece in pieces for leaf in piece]
    held = {id(leaf.base if leaf.base is not None else leaf): leaf for leaf in kept}
    in_memory = sum((leaf if leaf.base is None else leaf.base).nbytes for leaf in held.values())
    a_row = 4 + 6 + 8 + 4 + 1 + 1
    assert in_memory == 8000 * a_row


def test_an_episode_shares_no_memory_with_the_rows():
    rows = stacked([rows_of([(3, "terminated")], 0)])
    before = jax.tree.map(np.copy, rows)
    ((_, episode),) = EpisodeCutter(1).add(rows)
    assert not any(
        np.shares_memory(x, y) for x in jax.tree.leaves(episode.steps) for y in jax.tree.leaves(rows) if y.size
    )
    jax.tree.map(np.testing.assert_array_equal, rows, before)


def flags(*true):
    return np.isin(np.arange(3), true)


@pytest.mark.parametrize(
    "change, field, what",
    [
        ({"is_last": flags()}, "is_last", "no step"),
        ({"is_last": flags(1, 2)}, "is_last", "step 1, 2"),
        ({"is_first": flags(1)}, "is_first", "step 1"),
        ({"is_terminal": flags(1, 2)}, "is_terminal", "step 1"),
        ({"reward": np.ones((3, 1))}, "reward", "has shape (1,) at each step"),
        ({"discount": np.ones((3, 1))}, "discount", "has shape (1,) at each step"),
        ({"reward": np.ones(2)}, "reward", "2 steps"),
        ({"metadata": {"return": 7.0}, "reward": np.float32([0.1, 0.3, 0])}, "return", "but 0.4"),
        ({"metadata": {"length": 3}}, "length", "but 2"),
    ],
)
def test_every_broken_rule_is_found_with_its_field(change, field, what):
    ((name, problem),) = broken_rules(dataclasses.replace(made(2, "terminated"), **change))
    assert name == field and what in problem


@given(episodes())
def test_an_episode_comes_back_exactly_from_its_rows_and_they_from_it(episode):
    rows = rows_from_episode(episode)
    assert rows.weight.tolist() == [True] * episode.length + [False]
    again = episode_from_rows(rows, episode.metadata)
    assert_bitwise(rows_from_episode(again), rows)
    assert again.metadata == episode.metadata
    # What the last action, reward and discount were means nothing: they are zero.
    last = {name: jax.tree.map(np.copy, episode.steps[name]) for name in ("action", "reward", "discount")}
    for leaf in jax.tree.leaves(last):
        leaf[-1] = 0
    assert_bitwise(again.steps, episode.steps | last)


@pytest.mark.parametrize("ending", sorted(set(ENDINGS.values())))
@pytest.mark.parametrize("has_metadata", [True, False])
def test_whatever_did_not_terminate_is_truncated_at_its_last_transition(ending, has_metadata):
    episode = made(3, ending)
    rows = rows_from_episode(episode if has_metadata else dataclasses.replace(episode, metadata={}))
    end = [False, False, True, False]
    assert rows.terminated.tolist() == (end if ending == "terminated" else [False] * 4)
    assert rows.truncated.tolist() == (end if ending != "terminated" else [False] * 4)


def test_rows_of_different_lengths_are_no_episode():
    rows = rows_from_episode(made(3, "truncated"))
    with pytest.raises(AssertionError, match="shape"):
        episode_from_rows(rows.replace(reward=rows.reward[1:]))
    with pytest.raises(AssertionError, match="shape"):
        rows_from_episode(dataclasses.replace(made(3, "truncated"), action=np.zeros(3)))


NUMBERS = ["bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]


@given(
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
    st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-3, 300), st.floats(width=64)),
)
def test_a_cast_rounds_or_raises(before, after, value):
    """Against Python's own numbers: an integer comes back as it was, others within rounding, infinities as they are."""
    with np.errstate(all="ignore"):
        try:
            x = np.asarray([0, value]).astype(before)
        except (OverflowError, ValueError):
            assume(False)
    was, to = x[1].item(), np.dtype(after)
    if to.kind == "f":
        fits = not math.isfinite(was) or abs(was) <= float(np.finfo(to).max)
    else:
        low, high = (0, 1) if to.kind == "b" else (np.iinfo(to).min, np.iinfo(to).max)
        fits = math.isfinite(was) and was == int(was) and low <= was <= high
    counts = np.asarray([True, True])
    if not fits:
        with pytest.raises(DatasetError, match=f"it is .* at step 1.*{after}"):
            cast(x, to, "it", counts)
        cast(x, to, "it", np.asarray([True, False]))
        return
    found = cast(x, to, "it", counts)
    assert found.dtype == to
    if to.kind != "f":
        assert found[1].item() == was
    else:
        np.testing.assert_array_equal(found, x.astype(to))


@pytest.mark.parametrize("x", [np.asarray(["1", "2"]), np.asarray([1j, 2j]), np.asarray([None, 1])])
def test_what_is_no_real_number_is_not_cast(x):
    with pytest.raises(DatasetError, match="reward has dtype"):
        cast(x, np.float32, "reward", np.ones(2, bool))
