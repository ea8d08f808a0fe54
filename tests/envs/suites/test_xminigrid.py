"""XLand-MiniGrid through its adapter, against the library's own step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import suite_samples
from helpers.refused import raises

import jaxrl
from jaxrl.core.errors import ConfigError
from jaxrl.envs.suite import foreign_rules

pytestmark = [suite_samples.needs("xminigrid"), pytest.mark.long]
raw = functools.partial(suite_samples.raw, "xminigrid")
FORWARD, RIGHT = 0, 1
TO_THE_GOAL = (FORWARD, FORWARD, RIGHT, FORWARD, FORWARD)  # of Empty-5x5


@pytest.mark.parametrize(("limit", "ends"), [(3, "truncated"), (5, "terminated"), (9, "terminated")])
def test_the_last_observation_is_the_true_one(limit, ends):
    """An end on the very step of the limit is an end."""
    import xminigrid

    own, params = xminigrid.make("MiniGrid-Empty-5x5", max_steps=limit)
    env = raw("MiniGrid-Empty-5x5", max_steps=limit)
    step = jax.jit(env.step)
    state, shown = jax.jit(env.reset)(jax.random.key(0))
    with foreign_rules():
        mine = own.reset(params, jax.random.key(0))
        own_step = jax.jit(lambda mine, action: own.step(params, mine, action))
        for number, action in enumerate(TO_THE_GOAL[:limit], 1):
            state, shown = step(state, jnp.asarray(action), jax.random.key(number))
            mine = own_step(mine, jnp.asarray(action))
            np.testing.assert_array_equal(shown.observation, mine.observation)
            np.testing.assert_allclose(shown.reward, mine.reward, rtol=1e-6)
            assert bool(shown.terminated | shown.truncated) == bool(mine.last()) == (number == min(limit, 5))
    assert bool(getattr(shown, ends)) and not (shown.terminated & shown.truncated)
    assert (mine.discount == 0) == (ends == "terminated")
    assert shown.observation.dtype == np.uint8 and env.observation_space.contains(shown.observation)


def test_a_limit_that_was_lowered_within_an_episode_still_cuts_it():
    env = raw("MiniGrid-Empty-5x5", max_steps=9)
    state, _ = env.reset(jax.random.key(0))
    for _ in range(3):
        state, shown = env.step(state, jnp.asarray(RIGHT), jax.random.key(0))
    assert not shown.truncated
    lower = jaxrl.envs.with_parameters(env, max_steps=2)
    assert lower.step(state, jnp.asarray(RIGHT), jax.random.key(0))[1].truncated


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder for files of tasks, empty, and no way to download one."""
    from xminigrid import benchmarks

    from jaxrl.envs import suite

    monkeypatch.setattr(benchmarks, "DATA_PATH", str(tmp_path))
    monkeypatch.setattr(benchmarks, "_download_from_hf", lambda *_: pytest.fail("a download"))
    yield tmp_path
    suite._made.cache_clear()


def test_without_its_tasks_xland_is_refused_in_one_line(tasks):
    with pytest.raises(ConfigError) as caught:
        raw("XLand-MiniGrid-R1-9x9")
    (line,) = caught.value.problems
    assert "trivial-21k" in line and "load_benchmark" in line and "\n" not in line
    raises(ConfigError, "did you mean 'trivial-21k'", raw, "XLand-MiniGrid-R1-9x9", benchmark="trivial-20k")
    assert not any("XLand" in name for name in type(raw("MiniGrid-Empty-5x5")).names())


def test_xland_draws_a_task_an_episode_or_keeps_one(tasks):
    from xminigrid import benchmarks
    from xminigrid.core.constants import TILES_REGISTRY, Colors, Tiles
    from xminigrid.core.goals import AgentHoldGoal
    from xminigrid.core.rules import EmptyRule

    balls = [TILES_REGISTRY[Tiles.BALL, color] for color in (Colors.RED, Colors.GREEN, Colors.BLUE)]
    goals = jnp.stack([AgentHoldGoal(tile=ball).encode() for ball in balls])
    rules = jnp.broadcast_to(EmptyRule().encode(), (3, 1, *EmptyRule().encode().shape))
    file = {"goals": goals, "rules": rules, "init_tiles": jnp.stack(balls)[:, None], "num_rules": jnp.zeros(3, int)}
    benchmarks.save_bz2_pickle(file, str(tasks / "trivial_21k"))
    env = raw("XLand-MiniGrid-R1-9x9")
    assert "XLand-MiniGrid-R1-9x9" in env.names()
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 32))
    assert len(np.unique(states.goal_encoding, axis=0)) == 3
    one = raw("XLand-MiniGrid-R1-9x9", ruleset=1)
    states, _ = jax.jit(jax.vmap(one.reset))(jax.random.split(jax.random.key(0), 32))
    assert (np.asarray(states.goal_encoding) == np.asarray(goals[1])).all()
    raises(ConfigError, "ruleset=3 must be at least -1 and at most 2", raw, "XLand-MiniGrid-R1-9x9", ruleset=3)
    jaxrl.check_env(one, steps=10)
