"""MuJoCo Playground: true last observations, time limits, physical parts, and its own domain randomization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises
from helpers.suite_samples import needs

import jaxrl
from jaxrl.core.errors import ConfigError
from jaxrl.envs.suite import foreign_rules

pytestmark = [needs("playground"), pytest.mark.long]
LIMIT = 6
TASK = "playground:CartpoleBalance"


@pytest.fixture(scope="module")
def library():
    from mujoco_playground import registry

    return registry


@pytest.fixture(scope="module")
def cartpole(library):
    """The library's own environment and its compiled step."""
    env = library.load("CartpoleBalance", config_overrides={"impl": "jax"})
    with foreign_rules():
        yield env, jax.jit(env.reset), jax.jit(env.step)


def actions(count):
    return np.random.default_rng(0).uniform(-1.0, 1.0, (count, 1)).astype(np.float32)


def first_key(key):
    """The key of the library's reset."""
    return jax.random.key_data(jax.random.split(key)[0])


def test_a_time_limit_truncates_and_the_last_observation_is_shown(cartpole):
    _, reset, step = cartpole
    env = jaxrl.make(TASK, episode_length=LIMIT, auto_reset=None)
    key = jax.random.key(3)
    with foreign_rules():
        theirs = [reset(first_key(key))]
        for action in actions(LIMIT):
            theirs.append(step(theirs[-1], action))
    state, first = jax.jit(env.reset)(key)
    ours, one_step = [first], jax.jit(env.step)
    for action in actions(LIMIT):
        state, now = one_step(state, action, key)
        ours.append(now)
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.observation, its.obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mine.reward, its.reward, rtol=1e-5, atol=1e-6)
    assert [bool(one.truncated) for one in ours] == [False] * LIMIT + [True]
    assert not any(one.terminated for one in ours)
    assert float(ours[-1].info["reward/upright"]) == pytest.approx(
        float(theirs[-1].metrics["reward/upright"]), rel=1e-5
    )


@pytest.fixture(scope="module")
def leaving(library):
    """A task that ends where the cart leaves the middle, or where its physics diverges; registered with Playground."""
    from mujoco_playground._src.dm_control_suite import cartpole

    class Leaving(cartpole.Balance):
        def step(self, state, action):
            after = super().step(state, action)
            lost = jnp.abs(after.data.qpos[0]) > 0.12
            diverged = action[0] > 0.999
            obs = jnp.where(diverged, jnp.nan, after.obs)
            reward = jnp.where(diverged, jnp.nan, after.reward)
            return after.replace(obs=obs, reward=reward, done=jnp.float32(lost | diverged))

    def make(config, config_overrides):
        return Leaving(swing_up=False, sparse=False, config=config, config_overrides=config_overrides)

    suite = library.dm_control_suite
    suite.register_environment("CartpoleLeaving", make, cartpole.default_config)
    yield "playground:CartpoleLeaving"
    del suite._envs["CartpoleLeaving"], suite._cfgs["CartpoleLeaving"]


def test_a_termination_shows_what_it_led_to_and_the_next_step_begins_anew(leaving):
    from jaxrl.envs.suites.playground import names

    assert leaving.partition(":")[2] in names()
    env = jaxrl.make(leaving)
    state, first = jax.jit(env.reset)(jax.random.key(0))
    step, push, seen = jax.jit(env.step), np.float32([0.99]), [first]
    for number in range(200):
        state, now = step(state, push, jax.random.key(number))
        seen.append(now)
        if seen[-2].terminated:
            break
    last, following = seen[-2:]
    assert abs(float(last.observation[0])) > 0.12 and not last.truncated
    assert abs(float(following.observation[0])) < 0.1 + 1e-6 and following.first
    assert all(abs(float(one.observation[0])) <= 0.12 for one in seen[:-2])


def test_physics_that_diverges_ends_the_episode_and_shows_no_nan(leaving):
    env = jaxrl.make(leaving, auto_reset=None)
    step, key = jax.jit(env.step), jax.random.key(0)
    state, first = jax.jit(env.reset)(key)
    state, before = step(state, np.float32([0.0]), key)
    _, after = step(state, np.float32([1.0]), key)
    assert after.terminated and after.reward == 0.0
    np.testing.assert_array_equal(after.observation, before.observation)
    assert np.isfinite(first.observation).all()


def test_parts_of_the_model_are_parameters():
    def fall(gravity):
        env = jaxrl.make(TASK, system={"opt.gravity": [0.0, 0.0, gravity]}, auto_reset=None)
        state, first = env.reset(jax.random.key(0))
        last = jax.lax.scan(lambda s, _: env.step(s, jnp.zeros(1), jax.random.key(0)), state, None, 30)[1]
        return float(abs(last.observation[-1, 2] - first.observation[2]))

    assert fall(-9.81) > 2 * fall(-1.0) > 0.0


def test_its_own_randomizer_draws_anew_for_each_episode(library, monkeypatch, cartpole):
    """As the library calls it, with a batch of keys, whose axes it names; here with a batch of one."""

    def randomizer(model, keys):
        mass = jax.vmap(lambda key: model.body_mass * jax.random.uniform(key, minval=0.5, maxval=2.0))(keys)
        gravity = jax.vmap(lambda key: model.opt.gravity * jax.random.uniform(key, minval=0.5, maxval=2.0))(keys)
        parts = {"body_mass": mass, "opt.gravity": gravity}
        axes = jax.tree.map(lambda x: None, model).tree_replace(dict.fromkeys(parts, 0))
        return model.tree_replace(parts), axes

    monkeypatch.setitem(library.locomotion._randomizer, "CartpoleBalance", randomizer)
    env = jaxrl.make(TASK, randomize=True, auto_reset=None)
    masses = []
    for seed in range(3):
        key = jax.random.key(seed)
        state, _ = env.reset(key)
        own = jax.random.key_data(jax.random.split(key)[1])
        with foreign_rules():
            model, _ = randomizer(cartpole[0].mjx_model, own[None])
        np.testing.assert_array_equal(state.env.drawn["body_mass"], model.body_mass[0])
        assert set(state.env.drawn) == {"body_mass", "opt.gravity"}
        masses.append(float(state.env.drawn["body_mass"][1]))
    assert len(set(masses)) == 3


def test_tasks_whose_robots_are_missing_are_not_listed(library, monkeypatch, tmp_path):
    from jaxrl.envs.suites import playground

    monkeypatch.setattr(playground.mjx_env, "MENAGERIE_PATH", tmp_path / "nothing")
    missing = "playground:Go1JoystickFlatTerrain"
    raises(ConfigError, "needs MuJoCo Menagerie, which jaxrl does not download; run python -c", jaxrl.make, missing)
    assert missing not in jaxrl.environments()
    names = {name for name in playground.names() if name != "CartpoleLeaving"}
    assert names >= {"CartpoleBalance", "HumanoidRun"} and len(names) == 25
