"""Wrappers, over a tiny environment that shows which episode it is in, how far, and what was done to it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.discounted import Discounted
from helpers.played import played
from helpers.refused import raises, refused

import jaxrl
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.envs import (
    ActionRepeat,
    AutoReset,
    ClipAction,
    ClipReward,
    EpisodeStatistics,
    Flatten,
    FrameStack,
    Hide,
    PooledReset,
    RescaleAction,
    ScaleReward,
    StickyActions,
    TimeLimit,
    check_env,
    prepared,
    with_parameters,
)
from jaxrl.envs.episode import restart, transition

COUNTER_SPACE = spaces.Box(0.0, 1000.0, (3,))


@struct.dataclass
class Counter:
    """Observes (episode's random tag, time, last action); the reward is the action; terminates after `length`."""

    length: Any = 5

    name = "test:Counter"
    observation_space = COUNTER_SPACE
    action_space = spaces.Box(0.0, 10.0, ())
    resets = False

    def reset(self, key):
        state = jnp.stack([jnp.floor(jax.random.uniform(key) * 900.0), jnp.float32(0), jnp.float32(0)])
        return state, restart(state)

    def step(self, state, action, key):
        state = jnp.stack([state[0], state[1] + 1.0, action])
        return state, transition(state, action, state[1] >= self.length, jnp.bool_(False))


def test_auto_reset_gives_the_last_observation_its_own_row():
    steps = played(AutoReset(Counter(length=3)), jnp.float32(2), jax.random.key(0), 8)
    np.testing.assert_array_equal(steps.observation[:, 1], [0, 1, 2, 3, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(steps.first, [1, 0, 0, 0, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(steps.terminated, [0, 0, 0, 1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(steps.truncated, np.zeros(9))
    np.testing.assert_array_equal(steps.reward, [0, 2, 2, 2, 0, 2, 2, 2, 0])
    tags = np.asarray(steps.observation[:, 0])
    assert len(set(tags[:4])) == 1 and len({tags[0], tags[4], tags[8]}) == 3


def test_auto_reset_begins_with_the_reset_of_the_steps_key():
    env, key = AutoReset(Counter(length=1)), jax.random.key(7)
    state, _ = env.reset(jax.random.key(0))
    state, last = env.step(state, jnp.float32(1), key)
    assert last.terminated
    _, begun = env.step(state, jnp.float32(9), key)
    np.testing.assert_array_equal(begun.observation, env.env.reset(key)[1].observation)


def test_time_limit_truncates_and_termination_wins():
    steps = played(AutoReset(TimeLimit(Counter(length=5), 3)), jnp.float32(1), jax.random.key(0), 4)
    np.testing.assert_array_equal(steps.truncated, [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(steps.terminated, np.zeros(5))
    steps = played(AutoReset(TimeLimit(Counter(length=5), 5)), jnp.float32(1), jax.random.key(0), 5)
    assert steps.terminated[5] and not steps.truncated[5]


def test_time_limit_refuses_an_environment_that_resets():
    refused(lambda: TimeLimit(FrameStack(AutoReset(Counter())), 3), "inside the auto-reset")


def test_episode_statistics_equal_numpy_and_ignore_reward_wrappers():
    actions = jnp.arange(12, dtype=jnp.float32) * 0.5
    env = AutoReset(ScaleReward(ClipReward(EpisodeStatistics(Counter(length=4)), -1.0, 1.0), 10.0))
    steps = played(env, actions, jax.random.key(0), 12)
    returns, length, total, count = [0.0], [0], 0.0, 0
    for t in range(1, 13):
        if steps.first[t]:
            total, count = 0.0, 0
        else:
            total, count = total + float(actions[t - 1]), count + 1
        returns.append(total)
        length.append(count)
    np.testing.assert_allclose(steps.episode.returns, returns)
    np.testing.assert_array_equal(steps.episode.length, length)
    expected = np.where(steps.first[1:], 0.0, 10.0 * np.clip(actions, -1.0, 1.0))
    np.testing.assert_allclose(steps.reward[1:], expected)


@pytest.mark.long
@pytest.mark.parametrize("actions", [jnp.arange(1.0, 4.0), jnp.full(3, 5.0)])
def test_returns_are_of_the_rewards_before_wrappers_of_a_user_change_them(actions):
    """Also where a wrapper of another kind is around those that do; 5 a step for 3 steps is 15, not 3."""
    for env in (
        ClipReward(Counter(length=3)),
        TimeLimit(ScaleReward(ClipReward(ClipAction(Counter(length=3))), 9.0), 8),
    ):
        steps = played(prepared(env), actions, jax.random.key(0), 3)
        np.testing.assert_allclose(steps.episode.returns[-1], actions.sum())
        assert steps.terminated[-1] and steps.reward[-1] in (1.0, 9.0)


def test_episode_statistics_over_an_auto_reset_are_the_same():
    inside = played(AutoReset(EpisodeStatistics(Counter(length=4))), jnp.float32(3), jax.random.key(0), 12)
    outside = played(EpisodeStatistics(AutoReset(Counter(length=4))), jnp.float32(3), jax.random.key(0), 12)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)


def test_clip_reward_leaves_first_rewards_alone():
    steps = played(ClipReward(AutoReset(Counter(length=2)), 5.0, 6.0), jnp.float32(1), jax.random.key(0), 5)
    np.testing.assert_array_equal(steps.reward, [0, 5, 5, 0, 5, 5])


@pytest.mark.parametrize("over", [True, False], ids=["over auto-reset", "under auto-reset"])
def test_frame_stack_refills_at_a_new_episode(over):
    env = FrameStack(AutoReset(Counter(length=3)), 3) if over else AutoReset(FrameStack(Counter(length=3), 3))
    assert env.observation_space.shape == (9,)
    steps = played(env, jnp.float32(1), jax.random.key(0), 6)
    times = np.asarray(steps.observation)[:, 1::3]
    np.testing.assert_array_equal(times, [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0], [0, 0, 1], [0, 1, 2]])
    tags = np.asarray(steps.observation)[:, 0::3]
    assert (tags == tags[:, :1]).all() and tags[0, 0] != tags[4, 0]


@pytest.mark.long
def test_action_repeat_adds_rewards_and_stops_at_the_end():
    for env in (
        AutoReset(ActionRepeat(EpisodeStatistics(Counter(length=5)), 3)),
        ActionRepeat(AutoReset(EpisodeStatistics(Counter(length=5))), 3),
    ):
        steps = played(env, jnp.float32(2), jax.random.key(0), 4)
        np.testing.assert_array_equal(steps.observation[:, 1], [0, 3, 5, 0, 3])
        np.testing.assert_array_equal(steps.reward, [0, 6, 4, 0, 6])
        np.testing.assert_array_equal(steps.first, [1, 0, 0, 1, 0])
        np.testing.assert_array_equal(steps.terminated, [0, 0, 1, 0, 0])
        np.testing.assert_array_equal(steps.episode.length, [0, 3, 5, 0, 3])


def test_sticky_actions_stick_as_often_as_said_and_forget_at_a_new_episode():
    length, steps = 50, 5100
    # All actions differ, so that what was done tells where it stuck.
    actions = jnp.arange(steps, dtype=jnp.float32)
    sticky = played(StickyActions(AutoReset(Counter(length=length)), 0.25), actions, jax.random.key(0), steps)
    done, first = np.asarray(sticky.observation)[1:, 2], np.asarray(sticky.first)
    own = done == np.asarray(actions)
    after_first = first[:-1]
    real = ~first[1:]
    assert own[after_first].all()
    stuck = ~own[real & ~after_first]
    assert abs(stuck.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / stuck.size)
    previous = np.asarray(sticky.observation)[:-1, 2]
    assert (done[real & ~own] == previous[real & ~own]).all()
    never = played(StickyActions(AutoReset(Counter(length=length)), 0.0), actions, jax.random.key(0), steps)
    assert (np.asarray(never.observation)[1:, 2] == np.asarray(actions))[~np.asarray(never.first)[1:]].all()


def test_rescale_and_clip_action():
    env = RescaleAction(Counter())
    assert env.action_space == spaces.Box(-1.0, 1.0, ())
    for given, done in ((-1.0, 0.0), (0.0, 5.0), (1.0, 10.0), (3.0, 10.0)):
        assert played(AutoReset(env), jnp.float32(given), jax.random.key(0), 1).reward[1] == done
    env = ClipAction(Counter())
    assert not env.action_space.bounded
    assert played(AutoReset(env), jnp.float32(99), jax.random.key(0), 1).reward[1] == 10
    with pytest.raises(ConfigError, match="RescaleAction.*finite"):
        _ = RescaleAction(ClipAction(Counter())).action_space


@struct.dataclass
class Mixed:
    """Observations of every kind of space."""

    name = "test:Mixed"
    observation_space = spaces.Dict(
        {
            "b": spaces.Discrete(3),
            "a": spaces.Box(-2.0, 2.0, (2, 2)),
            "c": spaces.MultiDiscrete((2, 3)),
            "d": spaces.Box(0, 255, (1,), np.uint8),
        }
    )
    action_space = spaces.Discrete(2)
    resets = False

    def reset(self, key):
        return key, restart(self._observe())

    def step(self, state, action, key):
        return key, transition(self._observe(), jnp.float32(0), jnp.bool_(False), action == 1)

    def _observe(self):
        return {
            "a": jnp.asarray([[0.0, 1.0], [2.0, -2.0]]),
            "b": jnp.int32(1),
            "c": jnp.asarray([1, 2], jnp.int32),
            "d": jnp.asarray([200], jnp.uint8),
        }


def test_flatten_is_one_vector_in_the_order_of_keys():
    env = Flatten(Mixed())
    _, time_step = env.reset(jax.random.key(0))
    expected = [0, 1, 2, -2] + [0, 1, 0] + [0, 1, 0, 0, 1] + [200]
    np.testing.assert_array_equal(time_step.observation, expected)
    assert env.observation_space.shape == (13,) and bool(env.observation_space.contains(time_step.observation))
    np.testing.assert_array_equal(env.observation_space.high, [2] * 4 + [1] * 8 + [255])


@pytest.mark.long
def test_hidden_entries_are_left_out():
    whole, env = jaxrl.make("gymnax:Pendulum-v1"), jaxrl.make("gymnax:Pendulum-v1", hide=(0, -1))
    key = jax.random.key(0)
    (state, shown), (hidden_state, hidden) = jax.jit(whole.reset)(key), jax.jit(env.reset)(key)
    action = jnp.asarray([1.5])
    for _ in range(2):
        np.testing.assert_array_equal(hidden.observation, shown.observation[1:2])
        (state, shown), (hidden_state, hidden) = (
            jax.jit(one.step)(at, action, key) for one, at in ((whole, state), (env, hidden_state))
        )
    assert env.observation_space.shape == (1,) and bool(env.observation_space.contains(hidden.observation))
    assert env.observation_space.high[0] == whole.observation_space.high[1]


def test_frame_stack_refuses_what_it_cannot_stack():
    with pytest.raises(ConfigError, match="must be a Box"):
        _ = FrameStack(Mixed()).observation_space


@pytest.mark.long
def test_all_wrappers_together_keep_the_contract():
    def wrapped(env):
        env = ActionRepeat(RescaleAction(StickyActions(EpisodeStatistics(env), 0.5)), 2)
        return ScaleReward(ClipReward(Flatten(FrameStack(ClipAction(env), 2))), 0.5)

    check_env(AutoReset(wrapped(TimeLimit(Counter(length=6), 4))), steps=20)
    check_env(wrapped(AutoReset(TimeLimit(Counter(length=6), 4))), steps=20)


def test_arguments_at_their_limits_and_trees_of_placeholders_are_taken():
    env = jaxrl.make("gymnax:CartPole-v1", auto_reset=None)
    for wrapper, arguments in (
        (StickyActions, {"probability": 0}),
        (StickyActions, {"probability": np.linspace(0.0, 1.0, 3)}),
        (TimeLimit, {"max_steps": 1}),
        (TimeLimit, {"max_steps": np.int64(5)}),
        (ClipReward, {"low": -np.inf, "high": np.inf}),
        (ScaleReward, {"scale": -1}),
        (PooledReset, {"slots": None}),
        (ActionRepeat, {"times": 1}),
    ):
        wrapped = wrapper(env, **arguments)
        for placeholder in (0, None, "x", True):
            tree = jax.tree.map(lambda _, placeholder=placeholder: placeholder, wrapped)
            assert type(tree) is wrapper
    limited = TimeLimit(env, 3)
    axes = with_parameters(limited, gravity=1.0)
    axes = jax.tree.map(lambda new, old: 0 if new != old else None, axes, limited)  # one leaf is mapped over
    many = with_parameters(limited, gravity=np.asarray([1.0, 9.8], np.float32))
    reset = jax.vmap(lambda env, key: env.reset(key)[1].observation, in_axes=(axes, None))
    assert reset(many, jax.random.key(0)).shape == (2, 4)


def test_make_refuses_what_is_no_wrapper_or_does_not_fit():
    for wrappers, message in (
        (Flatten, "must be a tuple of functions"),
        ("Flatten", "must be a tuple of functions"),
        ((1,), "must be a tuple of functions"),
        ((TimeLimit,), "wrapper TimeLimit cannot be applied to gymnax:CartPole-v1"),
        ((lambda env: None,), "returned None for gymnax:CartPole-v1"),
        ((RescaleAction,), "RescaleAction needs an action space of real numbers"),
        ((partial(Hide, entries=(7,)),), "use distinct indices from 0 to 3"),
    ):
        raises(ConfigError, message, jaxrl.make, "gymnax:CartPole-v1", wrappers=wrappers)
    for name, value in (("auto_reset", []), ("sticky_actions", np.nan), ("sticky_actions", "often")):
        raises(ConfigError, name, jaxrl.make, "gymnax:CartPole-v1", **{name: value})
    words = ["--env-params", "wrappers=Flatten"]
    assert main.main(["train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "16"] + words) == 2


def test_repeated_actions_discount_what_follows():
    """As the environment does step by step: 2 + 0.5 (2 + 0.5 x 2), and where it ends nothing follows."""
    env = ActionRepeat(Discounted(Counter(length=5), 0.5), 3)
    state, _ = env.reset(jax.random.key(0))
    state, one = env.step(state, jnp.float32(2.0), jax.random.key(1))
    assert (float(one.reward), float(one.discount)) == (3.5, 0.125)
    _, last = env.step(state, jnp.float32(2.0), jax.random.key(2))
    assert bool(last.terminated) and (float(last.reward), float(last.discount)) == (3.0, 0.0)
