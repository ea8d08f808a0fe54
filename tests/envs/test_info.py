"""What environments tell beside the reward: from suites to the metrics of training, episode by episode."""

import json

import gymnax
import host_probes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments.classic_control.cartpole import CartPole
from helpers.played import played
from helpers.programs import ENV, PPO
from helpers.refused import raises
from helpers.served import ServedFromHost

import jaxrl
from jaxrl.core import episode_info, spaces
from jaxrl.core.errors import ConfigError, EnvironmentContractError, EnvironmentFailedError
from jaxrl.envs import check_env
from jaxrl.envs.configs import from_config, to_config
from jaxrl.envs.episode import restart, transition
from jaxrl.envs.host.time_steps import Episodes
from jaxrl.envs.wrappers import EpisodeStatistics

COUNTING = f"gymnasium:{host_probes.__name__}:Counting-v0"


@struct.dataclass
class Telling:
    """Tells the number of each step, and another thing if `wrong`; episodes are 3 or 5 steps long."""

    wrong: bool = struct.field(pytree_node=False, default=False)
    name = "tests:Telling"
    observation_space, action_space, resets = spaces.Box(0, 9, (1,)), spaces.Discrete(2), False

    def reset(self, key):
        length = jnp.where(jax.random.bernoulli(key), jnp.int32(3), jnp.int32(5))
        return (jnp.int32(0), length), restart(jnp.zeros(1), info=("step", "square"))

    def step(self, state, action, key):
        now, length = state[0] + 1, state[1]
        info = {"step": now, "square": now**2} | ({"more": now} if self.wrong else {})
        end = now >= length
        return (now, length), transition(now.astype(jnp.float32).reshape(1), jnp.float32(1), end, False, info=info)


def metrics(env, topology=None):
    topology = topology or jaxrl.Anakin(num_envs=8)
    result = jaxrl.train(PPO, env, total_steps=256, topology=topology, evaluation_episodes=1, progress=False)
    return [row for row in result.metrics if row.get("train/episodes")]


# --- JAX -------------------------------------------------------------------------------------------------------------


def test_an_environment_that_tells_nothing_has_nothing_in_its_program():
    _, time_step = ENV.reset(jax.random.key(0))
    assert time_step.info is None and time_step.episode.info is None


@pytest.mark.long
def test_sums_are_over_the_episode_and_begin_anew():
    steps = played(jaxrl.envs.prepared(Telling()), jnp.int32(0), jax.random.key(0), 40)
    total = 0.0
    for told, so_far, first in zip(steps.info["step"], steps.episode.info["step"], steps.first, strict=True):
        total = 0.0 if first else total + told
        assert so_far == total and not (first and told)
    assert steps.first.sum() >= 6


@pytest.mark.long
def test_metrics_are_means_over_steps_and_then_over_episodes():
    rows = metrics(Telling())
    assert rows
    for row in rows:
        short = (5 - row["train/length_mean"]) / 2  # the share of episodes of 3 steps
        assert row["train/info/step"] == pytest.approx(2 * short + 3 * (1 - short))
        assert row["train/info/square"] == pytest.approx(14 / 3 * short + 11 * (1 - short))


def test_the_contract_is_checked():
    check_env(Telling(), steps=20)
    raises(EnvironmentContractError, r"\['more'\]: reset returns", check_env, Telling(wrong=True), steps=0)


def test_gymnax_environments_tell_their_scalars_but_the_discount():
    class Pole(CartPole):
        def step_env(self, key, state, action, params):
            observation, state, reward, terminated, info = super().step_env(key, state, action, params)
            info |= {"angle": jnp.abs(state.theta), "picture": observation}
            return observation, state, reward, terminated, info

    gymnax.registration.register("TellingPole-v0", Pole)
    try:
        env = jaxrl.make("gymnax:TellingPole-v0", auto_reset=None)
        state, time_step = env.reset(jax.random.key(0))
        assert time_step.info == {"angle": 0}
        state, time_step = env.step(state, jnp.int32(1), jax.random.key(1))
        assert time_step.info == {"angle": abs(time_step.observation[2])}
        assert time_step.info["angle"].dtype == jnp.float32
    finally:
        gymnax.registered_envs.remove("TellingPole-v0")
        del gymnax.registration._registry["TellingPole-v0"]


@pytest.mark.long
def test_brax_tells_the_parts_of_its_reward():
    pytest.importorskip("brax")
    env = EpisodeStatistics(jaxrl.make("brax:reacher", backend="spring", auto_reset=None))
    steps = played(env, jnp.float32([0.5, -1.0]), jax.random.key(0), 3)
    first, steps = (jax.tree.map(lambda x, rows=rows: x[rows], steps) for rows in (0, slice(1, None)))
    assert first.info == {"reward_ctrl": 0, "reward_dist": 0} == first.episode.info
    np.testing.assert_allclose(steps.info["reward_ctrl"], [-1.25] * 3, rtol=1e-5)
    np.testing.assert_allclose(steps.info["reward_ctrl"] + steps.info["reward_dist"], steps.reward, rtol=1e-5)
    np.testing.assert_allclose(steps.episode.info["reward_dist"], np.cumsum(steps.info["reward_dist"]), rtol=1e-5)


REDUCED = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min, "last": lambda values: values[-1]}
NAMES = ("told", *(f"told:{name}" for name in REDUCED if name != "mean"))


def by_hand(values, name):
    """The number of an episode whose steps told these values."""
    return REDUCED[episode_info.parts(name)[1]](np.asarray(values))


def test_what_is_made_of_an_episode_is_in_the_name():
    assert episode_info.parts("told:max") == ("told", "max") and episode_info.parts("told") == ("told", "mean")
    assert episode_info.parts("a:told:last") == ("a:told", "last") and episode_info.parts("a:b") == ("a:b", "mean")
    assert episode_info.reports(NAMES) == ("told",) * 5


@struct.dataclass
class Wandering:
    """Tells the same uneven numbers, all below 0, under every name; episodes are 4 steps long."""

    name = "tests:Wandering"
    observation_space, action_space, resets = spaces.Box(0, 9, (1,)), spaces.Discrete(2), False
    told = (-3.0, -1.0, -5.0, -2.0)

    def reset(self, key):
        return jnp.int32(0), restart(jnp.zeros(1), info=NAMES)

    def step(self, state, action, key):
        told = jnp.float32(self.told)[state]
        end = state == 3
        return state + 1, transition(jnp.zeros(1), jnp.float32(1), end, False, info=dict.fromkeys(NAMES, told))


@pytest.mark.long
@pytest.mark.parametrize("topology", ["anakin", "sebulba"])
def test_reductions_reach_the_metrics(topology):
    env = jaxrl.envs.prepared(Wandering())
    if topology == "sebulba":
        rows = metrics(ServedFromHost(env), jaxrl.Sebulba(num_envs=8, lockstep=True))
    else:
        rows = metrics(Wandering())
    assert rows
    for row in rows:
        found = {name: row[f"train/info/{name}"] for name in NAMES}
        assert found == pytest.approx({name: by_hand(Wandering.told, name) for name in NAMES})


@pytest.mark.parametrize("games", [False, True])
def test_reductions_on_the_host_are_a_plain_loop(games):
    rng, episodes = np.random.default_rng(0), Episodes(3, games, NAMES)
    values, compared = [[] for _ in range(3)], 0
    whole = np.ones(3, bool)  # the next row begins a game
    for _ in range(60):
        told, last, over = rng.normal(size=3) - 1, rng.random(3) < 0.3, rng.random(3) < 0.5
        shown = episodes.follow(
            slice(None),
            np.zeros((3, 1)),
            np.ones(3, np.float32),
            last,
            np.zeros(3, bool),
            complete=over if games else None,
            info={"told": told},
        )
        for index in range(3):
            if whole[index]:
                values[index] = []
            elif not shown.first[index]:
                values[index].append(told[index])
            if values[index]:
                compared += 1
                for name in NAMES:
                    kept, length = shown.episode.info[name][index], shown.episode.length[index]
                    expected = by_hand(values[index], name)
                    np.testing.assert_allclose(episode_info.of_episode(name, kept, length, np), expected, rtol=1e-5)
        whole = last & (over | (not games))
    assert compared > 80


# --- on the host -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_numbers_of_gymnasiums_info_become_metrics(workers):
    env = jaxrl.make(COUNTING, workers=workers, info=("step", "step:last"))
    check_env(env, steps=10)
    rows = metrics(env, jaxrl.Sebulba(num_envs=8))
    assert rows and all((row["train/info/step"], row["train/info/step:last"]) == (2.0, 3.0) for row in rows)  # 1, 2, 3
    assert not any("info" in name for row in metrics(jaxrl.make(COUNTING), jaxrl.Sebulba(num_envs=8)) for name in row)


@pytest.mark.parametrize("name, words", [("stp", r"missing; info has \['kind', 'step'\]"), ("kind", "is 'probe'")])
def test_info_without_such_a_number_ends_the_run_and_says_what_there_is(name, words):
    host = jaxrl.make(COUNTING, info=(name,)).build(2, 0)
    host.reset()
    raises(EnvironmentFailedError, f"info='{name}': .*{words}", host.step, np.zeros(2, np.int32))


def test_envpool_tells_what_was_asked_for():
    pytest.importorskip("envpool")
    told = ("reward_run", "reward_ctrl", "x_position:last")
    recipe = jaxrl.make("envpool:HalfCheetah-v4", info=told, max_episode_steps=5)
    assert from_config(json.loads(json.dumps(to_config(recipe)))) == recipe and recipe.info == told
    host = recipe.build(2, 0)
    shown = [host.reset(), *(host.step(np.full((2, 6), 0.5, np.float32)) for _ in range(7))]
    host.close()
    for timestep in shown:
        now, so_far = timestep.info, timestep.episode.info
        np.testing.assert_allclose(now["reward_run"] + now["reward_ctrl"], timestep.reward, atol=1e-5)
        np.testing.assert_allclose(so_far["reward_run"] + so_far["reward_ctrl"], timestep.episode.returns, atol=1e-4)
        np.testing.assert_array_equal(so_far["x_position:last"], now["x_position:last"])
    for wrong in ("reward_rum", "reward_rum:max"):
        raises(ConfigError, "did you mean 'reward_run'", jaxrl.make, "envpool:HalfCheetah-v4", info=(wrong,))
