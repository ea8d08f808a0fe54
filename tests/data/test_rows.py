"""Episodes to rows and back: exact, and the same whoever asks."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.made import ENDINGS, dataset_of, episodes, made
from helpers.recorded import assert_bitwise
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.buffers import fixed
from jaxrl.core import spaces
from jaxrl.core.sources import Dataset, Sequence
from jaxrl.core.types import EnvSpec, Trajectory
from jaxrl.data import rings, views
from jaxrl.data.rows import EpisodeCutter, episode_from_rows, rows_from_episode


@given(episodes())
def test_an_episode_comes_back_exactly_from_its_rows(episode):
    again = episode_from_rows(rows_from_episode(episode), episode.metadata)
    assert again.metadata == episode.metadata
    # What the last action, reward and discount were means nothing: they are zero.
    last = {name: jax.tree.map(np.copy, episode.steps[name]) for name in ("action", "reward", "discount")}
    for leaf in jax.tree.leaves(last):
        leaf[-1] = 0
    assert_bitwise(again.steps, episode.steps | last)


@st.composite
def rows_of_an_episode(draw):
    steps, ending = draw(st.integers(2, 10)), draw(st.sampled_from(["terminated", "truncated"]))
    number = draw(st.integers(0, 99)) + np.arange(steps)
    before_last, last = number == number[-2], number == number[-1]
    return Trajectory(
        observation={"number": number.astype(np.int16), "picture": np.ones((steps, 2, 3), np.uint8)},
        action=np.where(last, 0, number).astype(np.int64),
        reward=np.where(last, 0, number / 3).astype(np.float32),
        terminated=before_last & (ending == "terminated"),
        truncated=before_last & (ending == "truncated"),
        first=number == number[0],
        weight=~last,
        extras={"log_prob": -number.astype(np.float32)},
    )


@given(rows_of_an_episode())
def test_rows_come_back_exactly_from_their_episode(rows):
    assert_bitwise(rows_from_episode(episode_from_rows(rows)), rows)


@given(episodes())
def test_the_rows_of_an_episode_are_cut_into_that_episode(episode):
    rows = rows_from_episode(episode)
    assert rows.weight.tolist() == [True] * episode.length + [False]
    ((_, again),) = EpisodeCutter(1).add(jax.tree.map(lambda x: x[:, None], rows))
    assert again.metadata["ending"] == ("terminated" if episode.is_terminal[-1] else "truncated")
    assert_bitwise(again.steps, episode_from_rows(rows.replace(extras={})).steps)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("told", [True, False])
def test_whatever_did_not_terminate_is_truncated_at_its_last_transition(ending, told):
    episode = made(3, ending)
    rows = rows_from_episode(episode if told else dataclasses.replace(episode, metadata={}))
    end = [False, False, True, False]
    assert rows.terminated.tolist() == (end if ending == "terminated" else [False] * 4)
    assert rows.truncated.tolist() == (end if ending != "terminated" else [False] * 4)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_ring_and_a_view_of_one_episode_say_the_same_of_its_ending(ending):
    """What is in memory and what is streamed once disagreed whether an episode that was cut off is truncated."""
    episode = dataclasses.replace(made(5, ending), extras={})
    spec = EnvSpec(
        "test",
        spaces.Dict(
            {
                "number": spaces.Box(0, 9, (), np.int32),
                "vector": spaces.Box(-9, 9, (2,)),
                "picture": spaces.Box(0, 255, (2, 3, 2), np.uint8),
            }
        ),
        spaces.Dict({"which": spaces.Discrete(9, np.int64), "how": spaces.Box(-9, 9, (1,), np.float64)}),
    )
    ring = rings.rings(dataset_of(episode), {"replay": fixed.source_of(Dataset(1))}, spec, columns=1)[0]["replay"]
    view = views.sequences(episode, Sequence(6, 6, "continue")).rows
    for name in ("terminated", "truncated", "first", "weight", "reward"):
        assert_bitwise(getattr(ring.rows, name)[0, :6], getattr(view, name)[:, 0])


def test_rows_of_different_lengths_are_no_episode():
    rows = rows_from_episode(made(3, "truncated"))
    with pytest.raises(AssertionError, match="shape"):
        episode_from_rows(rows.replace(reward=rows.reward[1:]))
    with pytest.raises(AssertionError, match="shape"):
        rows_from_episode(dataclasses.replace(made(3, "truncated"), action=np.zeros(3)))
