"""The EnvPool adapter: rows, endings, types, seeds, asynchronous batches, lives, and misuse."""

import functools

import envpool
import jax
import numpy as np
import pytest
from helpers.programs import PPO
from helpers.refused import raises, refused

import jaxrl
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.host_types import AsyncEnvironment, WatchedEnvironment
from jaxrl.core.types import EnvSpec, Rollout
from jaxrl.envs.host import envpool as adapter
from jaxrl.envs.host.time_steps import Episodes, environment_seeds
from jaxrl.parallel import rollout as ro
from jaxrl.run.policies import evaluation


def make(name, **parameters):
    return jaxrl.make(f"envpool:{name}", num_threads=1, **parameters)


def random_actions(space, shape):
    rng = np.random.default_rng(0)
    if isinstance(space, spaces.Box):
        return rng.uniform(space.low, space.high, (*shape, *space.shape)).astype(space.dtype)
    return rng.integers(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n, size=(*shape, *space.shape))


def moments(recipe, num_envs, steps, seed=0, host=None):
    """The time steps `[1 + steps, num_envs]` of random actions."""
    host = host or recipe.build(num_envs, seed)
    actions = random_actions(recipe.action_space, (steps, num_envs))
    shown = [host.reset(), *(host.step(action) for action in actions)]
    host.close()
    return jax.tree.map(lambda *x: np.stack(x), *shown)


@pytest.mark.filterwarnings("ignore:.*precision lowered")  # of Gymnasium, on the bounds that EnvPool declares
def test_rows_are_those_of_the_pool_with_our_convention():
    recipe = make("CartPole-v1")
    shown = moments(recipe, 3, 80)
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=environment_seeds(0, 3))
    observation, _ = pool.reset()
    ended, returns = np.zeros(3, bool), np.zeros(3)
    np.testing.assert_array_equal(shown.first[0], True)
    np.testing.assert_array_equal(shown.observation[0], observation)
    for t, action in enumerate(random_actions(recipe.action_space, (80, 3)), 1):
        observation, reward, terminated, truncated, _ = pool.step(action)
        returns = np.where(ended, 0.0, returns + reward)
        np.testing.assert_array_equal(shown.observation[t], observation)
        np.testing.assert_array_equal(shown.reward[t], np.where(ended, 0.0, reward))
        np.testing.assert_array_equal(shown.terminated[t], terminated)
        np.testing.assert_array_equal(shown.truncated[t], truncated)
        np.testing.assert_array_equal(shown.first[t], ended)
        np.testing.assert_array_equal(shown.episode.returns[t], returns)
        np.testing.assert_array_equal(shown.episode.length[t], returns)  # CartPole gives 1 a step
        ended = terminated | truncated
    assert shown.last.sum() >= 6 and shown.episode.complete is None


def test_the_action_at_the_last_observation_changes_nothing():
    """Two pools whose actions differ only where they are ignored."""
    recipe = make("CartPole-v1")
    one, other = recipe.build(4, 0), recipe.build(4, 0)
    a, b = one.reset(), other.reset()
    ignored = 0
    for action in random_actions(recipe.action_space, (60, 4)):
        a, b = one.step(action), other.step(np.where(b.last, 1 - action, action))
        ignored += b.first.sum()
        np.testing.assert_array_equal(a.observation, b.observation)
    assert ignored >= 4


LIMITED = [
    "CartPole-v1",
    "LunarLander-v3",
    "Taxi-v3",
    "MiniGrid-Empty-8x8-v0",
    "HalfCheetah-v4",
    "WalkerWalk-v1",
    "Breakout-v5",
]


@pytest.mark.parametrize("name", LIMITED)
def test_time_limits_truncate(name):
    shown = moments(make(name, max_episode_steps=3), 2, 8)
    np.testing.assert_array_equal(np.flatnonzero(shown.truncated[:, 0]), [3, 7])
    np.testing.assert_array_equal(np.flatnonzero(shown.first[:, 0]), [0, 4, 8])
    np.testing.assert_array_equal(shown.episode.length[:, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0])
    assert not shown.terminated.any()
    np.testing.assert_array_equal(shown.reward[shown.first], 0.0)  # dm_control gives a reward of its reset


@pytest.mark.parametrize("name", ["CoinrunEasy-v0", "Snake-v1", "Catch-v0", "Play2048-v1"])
def test_a_limit_that_the_pool_would_not_keep_is_refused(name):
    refused(lambda: make(name, max_episode_steps=3), "does not accept max_episode_steps")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "observation", "action"),
    [
        ("Pendulum-v1", spaces.Box([-1, -1, -8], [1, 1, 8], (3,)), spaces.Box(-2.0, 2.0, (1,))),
        ("Taxi-v3", spaces.Discrete(500), spaces.Discrete(6)),
        # No bounds, where EnvPool declares the smallest positive float as the lower one.
        ("LunarLander-v3", spaces.Box(-np.inf, np.inf, (8,)), spaces.Discrete(4)),
        # float64 in EnvPool
        (
            "CartpoleBalance-v1",
            spaces.Dict({"position": spaces.Box(-np.inf, np.inf, (3,)), "velocity": spaces.Box(-np.inf, np.inf, (2,))}),
            spaces.Box(-1.0, 1.0, (1,)),
        ),
        ("CoinrunEasy-v0", spaces.Box(0, 255, (3, 64, 64), np.uint8), spaces.Discrete(15)),
        (
            "RubiksCube-v0",
            spaces.Dict({"cube": spaces.Box(0, 5, (6, 3, 3), np.int8), "step_count": spaces.Discrete(201)}),
            spaces.MultiDiscrete((6, 1, 3)),
        ),
    ],
)
def test_spaces_and_types(name, observation, action):
    recipe = make(name)
    assert (recipe.observation_space, recipe.action_space) == (observation, action)
    jaxrl.check_env(recipe, steps=5)


def test_actions_beyond_the_bounds_are_clipped():
    recipe = make("Pendulum-v1")
    one, other = recipe.build(1, 0), recipe.build(1, 0)
    np.testing.assert_array_equal(one.reset().observation, other.reset().observation)
    for wild, tame in ((50.0, 2.0), (-2.5, -2.0)):
        a, b = one.step(np.full((1, 1), wild)), other.step(np.full((1, 1), tame))
        np.testing.assert_array_equal(a.observation, b.observation)
        np.testing.assert_array_equal(a.reward, b.reward)


def test_seeds():
    recipe = make("CartPole-v1")
    first = lambda num_envs, seed: recipe.build(num_envs, seed).reset().observation  # noqa: E731
    np.testing.assert_array_equal(first(4, 0), first(4, 0))
    np.testing.assert_array_equal(first(4, 0)[:2], first(2, 0))
    # No environment of one run is any of the next: EnvPool would make them the same but for one.
    both = np.concatenate([first(4, 0), first(4, 1)])
    assert len(np.unique(both, axis=0)) == 8


# --- asynchronous batches ----------------------------------------------------------------------------------------


def test_asynchronous_misuse_is_told_rather_than_waited_for():
    host = make("CartPole-v1").build_async(4, 2, 0)
    assert isinstance(host, AsyncEnvironment) and isinstance(host, WatchedEnvironment)
    assert host.doing == "" and host.failures == 0
    for call in (host.reset, lambda: host.step(np.zeros(4))):
        raises(RuntimeError, "asynchronous.*use async_reset", call)
    raises(RuntimeError, "before it was reset", host.send, np.zeros(2), np.arange(2))
    host.async_reset()
    assert host.doing == "envpool:CartPole-v1 is stepping environments [0, 1, 2, 3]"
    raises(RuntimeError, "receive them before the reset", host.async_reset)
    raises(RuntimeError, "before sending them", host.send, np.zeros(2), np.arange(2))
    ids, _ = host.recv()
    for wrong in ([0, 4], [-1, 0], [ids[0], ids[0]]):
        raises(ValueError, "environment", host.send, np.zeros(2), wrong)
    raises(ValueError, "shape", host.send, np.zeros(3), ids)
    host.recv()
    raises(RuntimeError, "2 environments, but only 0 are busy", host.recv)
    for num_envs, batch_size in ((4, 5), (4, 0), (0, 0)):
        raises(ConfigError, "1 <= batch_size <= num_envs", make("CartPole-v1").build_async, num_envs, batch_size, 0)


# --- Atari -------------------------------------------------------------------------------------------------------


@functools.cache
def invaders(preset):
    """Moments of random play, and what the pool itself said of each: unmodified rewards, lives, and game ends."""
    recipe = make("SpaceInvaders-v5", preset=preset, max_episode_steps=400)
    host = recipe.build(2, 0)
    recv, told = host._pool.recv, []

    def listening():
        result = recv()
        told.append({key: result[4][key].copy() for key in ("reward", "lives", "terminated", "elapsed_step")})
        return result

    host._pool.recv = listening
    shown = moments(recipe, 2, 900, host=host)
    return recipe, shown, {key: np.stack([moment[key] for moment in told]) for key in told[0]}


@pytest.mark.long
def test_a_lost_life_ends_an_episode_and_not_the_game():
    recipe, shown, told = invaders("classic")
    lost = np.diff(told["lives"], axis=0, prepend=told["lives"][:1]) < 0
    over, limit = told["terminated"] > 0, told["elapsed_step"] >= 400
    np.testing.assert_array_equal(shown.terminated, (lost & ~limit) | (over & shown.last))
    np.testing.assert_array_equal(shown.episode.complete, (over | shown.truncated) & shown.last)
    only_life = shown.terminated & ~shown.episode.complete
    assert only_life.sum() >= 4 and shown.episode.complete.sum() >= 2
    np.testing.assert_array_equal(shown.first[1:], shown.last[:-1])
    # Returns are the game's, of rewards as they are, and go on over a lost life.
    returns, lengths, life_returns, life_lengths = np.zeros((4, 2))
    fresh = np.ones(2, bool)
    for t in range(len(shown.reward)):
        gained = np.where(shown.first[t], 0.0, told["reward"][t])
        returns = np.where(fresh, 0.0, returns + gained)
        lengths = np.where(fresh, 0, lengths + ~shown.first[t])
        np.testing.assert_array_equal(shown.episode.returns[t], returns)
        np.testing.assert_array_equal(shown.episode.length[t], lengths)
        life_returns = np.where(shown.first[t], 0.0, life_returns + gained)
        life_lengths = np.where(shown.first[t], 0, life_lengths + 1)
        np.testing.assert_array_equal(shown.episode.life.returns[t], life_returns)
        np.testing.assert_array_equal(shown.episode.life.length[t], life_lengths)
        fresh = shown.episode.complete[t]
    assert set(np.unique(shown.reward)) == {0.0, 1.0} and told["reward"].max() >= 5


@pytest.mark.long
def test_frames_are_stacked_as_a_replay_that_keeps_each_once_makes_them_again():
    shown = moments(make("Breakout-v5"), 2, 250)
    assert shown.first[1:].any()
    for environment in range(2):
        start = 0
        for t in range(250):
            start = t if shown.first[t, environment] else start
            frames = [shown.observation[max(start, t - back), environment, -1] for back in (3, 2, 1, 0)]
            np.testing.assert_array_equal(shown.observation[t, environment], np.stack(frames))


@pytest.mark.long
def test_returns_are_counted_where_games_end():
    _, shown, _ = invaders("classic")
    sums = ro.episode_sums(Rollout(shown, None, {}, carry=(), final_carry=()))
    complete = shown.episode.complete[1:]
    assert int(sums.count) == complete.sum() < shown.last[1:].sum()
    np.testing.assert_allclose(sums.returns, shown.episode.returns[1:][complete].sum())
    np.testing.assert_allclose(sums.length, shown.episode.length[1:][complete].sum())
    told, last = jax.device_get(sums + sums).metrics(), shown.last[1:]
    lives = shown.episode.life.returns[1:][last]
    assert told["lives"] == 2 * last.sum() and told["life_return_mean"] == pytest.approx(lives.mean())
    assert told["life_return_std"] == pytest.approx(lives.std(), rel=1e-4)
    assert told["life_length_mean"] == pytest.approx(shown.episode.life.length[1:][last].mean())
    assert told["life_return_mean"] < told["return_mean"]


class TwoLives:
    """A recipe of games of two lives, of two steps each; every step gives 1."""

    name, observation_space, action_space = "probe:TwoLives", spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2)

    def build(self, num_envs, seed, first_env=0):
        self.num_envs, self._episodes, self._rows = num_envs, Episodes(num_envs, games=True), -1
        return self

    def reset(self):
        return self.step(None)

    def step(self, actions):
        self._rows += 1
        last, over = self._rows % 3 == 2, self._rows % 6 == 5
        full = lambda x: np.full(self.num_envs, x)  # noqa: E731
        observation = np.zeros((self.num_envs, 1), np.float32)
        return self._episodes.follow(slice(None), observation, full(1.0), full(last), full(False), complete=full(over))

    def close(self):
        pass


@pytest.mark.long
def test_evaluations_play_whole_games():
    recipe = TwoLives()
    spec = EnvSpec(recipe.name, recipe.observation_space, recipe.action_space)
    state = PPO.init(jax.random.key(0), spec)
    result = evaluation.evaluate(PPO, PPO.actor(state), recipe, spec, episodes=6, num_envs=3)
    np.testing.assert_array_equal(result.returns, 4.0)
    np.testing.assert_array_equal(result.lengths, 4)


@pytest.mark.long
def test_presets():
    classic, machado = make("Pong-v5", preset="classic"), make("Pong-v5", preset="machado")
    assert classic.action_space.n == 6 and machado.action_space.n == 18
    assert classic.observation_space == machado.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert classic.games and not machado.games and not make("Pong-v5").games
    # What is given comes before the preset, and all of it reaches EnvPool.
    recipe = make("Pong-v5", preset="machado", repeat_action_probability=0.5, stack_num=2)
    used = recipe.build(1, 0)._pool.config
    assert recipe.observation_space.shape == (2, 84, 84)
    expected = {**adapter.PRESETS["machado"], "repeat_action_probability": 0.5, "stack_num": 2}
    assert {key: used[key] for key in expected} == expected
    _, shown, _ = invaders("machado")
    assert shown.episode.complete is None and shown.episode.life is None and shown.last.sum() <= 4


# --- names and options -------------------------------------------------------------------------------------------


def test_every_name_is_a_task_and_the_rest_is_refused_with_a_reason():
    known = adapter.names()
    assert len(known) > 1500 and set(known) < set(envpool.list_all_envs())
    assert {"Pong-v5", "CartPole-v1", "Ant-v4", "WalkerWalk-v1", "CoinrunEasy-v0", "Taxi-v3"} <= set(known)
    refused(lambda: make("Craftax-Classic-Symbolic-AutoReset-v1"), "Craftax-Classic-Symbolic-v1")
    for name in ("MyoHandAirplaneFixed-v0", "MyoSuite/MyoHandAirplaneFixed-v0"):
        raises(ConfigError, "after its first step", make, name)
    assert {"MyoHandAirplaneFly-v0", "myoHandPoseFixed-v0"} <= set(known)
    refused(lambda: make("MarlGrid-3AgentEmpty9x9-v0"), "3 agents")
