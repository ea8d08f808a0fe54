"""Views of an episode against what a loop over its steps says."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.made import episodes, made, transitions_in_words
from helpers.recorded import assert_bitwise
from helpers.refused import refused
from helpers.streams import adder
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import Sequence
from jaxrl.data import views
from jaxrl.data.episodes import broken_rules
from jaxrl.data.rows import rows_from_episode


def at(tree, *index):
    return jax.tree.map(lambda x: x[index], tree)


def stack(items):
    return jax.tree.map(lambda *x: np.stack(x), *items)


# --- transitions -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(episodes(), st.integers(1, 12))
def test_transitions_are_right_at_both_ends(episode, n):
    batch, wanted = views.transitions(episode, n), list(transitions_in_words(episode, n))
    assert len(batch.weight) == len(wanted) == episode.length and batch.weight.all()
    assert batch.rewards.shape == (episode.length, n) and batch.rewards.dtype == np.float32
    for i, (t, rewards, steps, bootstrap) in enumerate(wanted):
        assert batch.rewards[i].tolist() == rewards
        assert (batch.steps[i], batch.bootstrap[i]) == (steps, bootstrap)
        assert_bitwise(at(batch.observation, i), at(episode.observation, t))
        assert_bitwise(at(batch.next_observation, i), at(episode.observation, t + steps))
        assert_bitwise(at(batch.action, i), at(episode.action, t))
        assert_bitwise(at(batch.extras, i), at(dict(episode.extras), t))
    assert batch.sample_info is None and batch.action_mask is None


def test_an_episode_without_a_transition_has_no_transitions():
    only_the_last = jax.tree.map(lambda x: x[-1:], made(3, "truncated").steps)
    extras = {"value": only_the_last.pop("value")}
    batch = views.transitions(dataclasses.replace(made(3, "truncated"), **only_the_last, extras=extras), 2)
    assert batch.rewards.shape == (0, 2) and batch.observation["picture"].shape == (0, 2, 3, 2)


def test_n_step_must_be_at_least_one():
    refused(lambda: views.transitions(made(3, "truncated"), 0), "n_step=0 must be at least 1")


# --- sequences -------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.integers(2, 14),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from(("write", "truncate", "zero_pad")),
    st.data(),
)
def test_stretches_are_where_the_adders_put_them(rows, length, period, end, data):
    burn_in = data.draw(st.integers(0, length - 1))
    start, kept = views.stretches(rows, Sequence(length - burn_in, period, end, burn_in))
    wanted = sorted({item for item in adder(rows, length, period, end) if item[1] > 0})
    assert list(zip(start.tolist(), kept.tolist(), strict=True)) == wanted


def test_stretches_that_run_on_begin_on_a_grid():
    start, kept = views.stretches(11, Sequence(4, 3, "continue"))
    assert start.tolist() == [0, 3, 6] and (kept == 4).all()
    assert views.stretches(1, Sequence(1, 1, "truncate"))[0].size == 0


def zeros(tree):
    return jax.tree.map(np.zeros_like, tree)


@settings(max_examples=60)
@given(
    episodes(),
    st.builds(
        Sequence,
        st.integers(1, 5),
        st.integers(1, 4),
        st.sampled_from(("write", "truncate", "zero_pad", "continue")),
        st.integers(0, 2),
    ),
)
def test_sequences_hold_their_rows_and_the_moments_they_were_taken_at(episode, sequence):
    batch, rows = views.sequences(episode, sequence), rows_from_episode(episode)
    starts = list(zip(*views.stretches(episode.length + 1, sequence), strict=True))
    assert batch.mask.shape == (sequence.rows, len(starts)) and batch.burn_in == sequence.burn_in
    assert batch.sample_info is None and batch.carry == ()
    for column, (start, kept) in enumerate(starts):
        for place in range(sequence.rows):
            row, within = at(batch.rows, place, column), place < kept
            stored = at(rows, start + place) if within else zeros(at(rows, 0))
            assert_bitwise(row, stored.replace(weight=stored.weight & (place >= sequence.burn_in)))
            assert batch.mask[place, column] == (within or sequence.end == "zero_pad")
            moment = at(batch.timesteps, place, column)
            assert_bitwise(moment.observation, row.observation)
            assert moment.first == row.first
            before = at(rows, start + place - 1) if within and start + place else zeros(at(rows, 0))
            for name in ("reward", "terminated", "truncated"):
                assert_bitwise(getattr(moment, name), getattr(before, name))
            assert_bitwise(moment.previous_action, before.action)


def test_rules_of_sequences_that_a_dataset_cannot_follow():
    bad = Sequence(0, 0, "later", -1, stored_carry=True)
    with pytest.raises(ConfigError) as error:
        views.sequences(made(3, "truncated"), bad)
    named = [line.partition("=")[0] for line in error.value.problems]
    assert named == [f"sequence.{name}" for name in ("length", "period", "burn_in", "end", "stored_carry")]


# --- returns, alignments, parts --------------------------------------------------------------------------------------


@given(episodes(), st.floats(0, 1, width=32, allow_subnormal=False), st.floats(-5, 5, width=32, allow_subnormal=False))
def test_returns_to_go_are_sums_of_what_follows(episode, gamma, value):
    found = views.return_to_go(episode, gamma, value)
    rewards, own = episode.reward[:-1].astype(np.float64), episode.discount[:-1].astype(np.float64)
    beyond = 0.0 if episode.is_terminal[-1] else value
    for t in range(episode.length + 1):
        reach = np.cumprod([1.0, *(gamma * own[t:])])  # of each reward from there on, and of what is beyond them
        wanted = np.sum(reach[:-1] * rewards[t:]) + reach[-1] * beyond
        assert found[t] == pytest.approx(wanted, abs=1e-9)
    if (episode.discount[: episode.length - 1] == 1).all():
        assert views.return_to_go(episode)[0] == episode.episode_return


@given(episodes())
def test_alignments_move_what_followed_to_where_it_arrived(episode):
    sar, rsa, ars = (views.aligned(episode, kind) for kind in ("SAR", "RSA", "ARS"))
    kinds = {name: episode.steps[name] for name in ("observation", "is_first", "is_last", "is_terminal", "value")}
    for steps in (sar, rsa, ars):
        assert_bitwise({name: steps[name] for name in kinds}, kinds)
    for i in range(episode.length + 1):
        last, first = i == episode.length, i == 0
        nothing = zeros(at(episode.action, 0))
        taken = nothing if last else at(episode.action, i)
        led_here = nothing if first else at(episode.action, i - 1)
        followed = (0.0, 0.0) if last else (episode.reward[i], episode.discount[i])
        arrived = (0.0, 1.0) if first else (episode.reward[i - 1], episode.discount[i - 1])
        for steps, action, (reward, discount) in (
            (sar, taken, followed),
            (rsa, taken, arrived),
            (ars, led_here, arrived),
        ):
            assert_bitwise(at(steps["action"], i), action)
            assert (steps["reward"][i], steps["discount"][i]) == (reward, discount)
    refused(lambda: views.aligned(episode, "ASR"), "alignment='ASR'")
    before = jax.tree.map(np.copy, episode.steps)
    for steps in (sar, rsa, ars):
        for leaf in (steps["reward"], steps["discount"], *jax.tree.leaves(steps["action"])):
            leaf[:] = 9
    assert_bitwise(episode.steps, before)


@given(episodes(), st.integers(0, 12), st.booleans())
def test_an_episode_is_cut_where_a_condition_first_holds(episode, where, terminal):
    before = jax.tree.map(np.copy, episode.steps)
    said = dataclasses.replace(
        episode, metadata={**episode.metadata, "return": episode.episode_return, "length": episode.length}
    )
    numbers = said.observation["number"]
    found = views.truncate(said, lambda e: e.observation["number"] >= numbers[0] + where, terminal=terminal)
    assert_bitwise(episode.steps, before)
    if where > episode.length or (where == episode.length and not terminal):
        assert found is said
        return
    assert found.length == where
    assert broken_rules(found) == []  # also that it says its own return and length
    assert found.is_terminal[-1] == terminal
    assert found.metadata["ending"] == ("terminated" if terminal else "truncated")
    assert found.metadata["score"] == episode.metadata["score"]
    assert_bitwise(found.observation, at(episode.observation, slice(where + 1)))
    assert_bitwise(dict(found.extras), at(dict(episode.extras), slice(where + 1)))
    assert found.reward.tolist() == [*episode.reward[:where].tolist(), 0.0]
    assert not any(leaf[-1].any() for leaf in jax.tree.leaves(found.action))
    assert (views.transitions(found, 3).bootstrap > 0).tolist() == [
        not (terminal and t + 3 >= where) for t in range(where)
    ]


def test_a_condition_gives_one_answer_a_step():
    for wrong in (lambda e: e.reward, lambda e: True, lambda e: e.is_last[:-1]):
        with pytest.raises(ConfigError, match=r"it must return bool \(4,\)"):
            views.truncate(made(3, "truncated"), wrong)
