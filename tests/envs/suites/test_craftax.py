"""Craftax through its adapter, against Craftax's own step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import suite_samples

from jaxrl.envs.suite import foreign_rules

pytestmark = [suite_samples.needs("craftax"), pytest.mark.long]
raw = functools.partial(suite_samples.raw, "craftax")
SYMBOLIC = ("Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1")
LIMIT = 4


def starving(name, state):
    """The state of a player who dies at the next step, or of one who wins it: Craftax's two ends."""
    if "Classic" in name:
        return state.replace(
            player_health=jnp.asarray(1), player_food=jnp.asarray(0), player_recover=jnp.asarray(-14.9)
        )
    return state.replace(boss_progress=state.boss_progress * 0 + 8)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_the_last_observation_is_the_true_one_and_only_the_limit_truncates(name):
    """Craftax's own rule says `done` of both."""
    from craftax.craftax_env import make_craftax_env_from_name

    env, own = raw(name, max_timesteps=LIMIT), make_craftax_env_from_name(name, auto_reset=False)
    params = own.default_params.replace(max_timesteps=LIMIT)
    step = jax.jit(env.step)
    with foreign_rules():
        own_step = jax.jit(own.step_env)
        keys = jax.random.split(jax.random.key(1), LIMIT + 1)
        state, first = jax.jit(env.reset)(keys[-1])
        np.testing.assert_array_equal(first.observation, own.get_obs(state))
        # Both from the same state: to the limit; and from the step before it to an end, on the limit and before it.
        for number in range(LIMIT):
            for end in (False, True):
                before = starving(name, state) if end else state
                after, shown = step(before, jnp.asarray(5), keys[number])
                observation, mine, reward, done, info = own_step(keys[number], before, jnp.asarray(5), params)
                np.testing.assert_allclose(shown.observation, observation, rtol=1e-6)
                np.testing.assert_allclose(shown.reward, reward, rtol=1e-6)
                assert bool(shown.terminated | shown.truncated) == bool(done) == (end or number == LIMIT - 1)
                assert bool(shown.terminated) == end
                assert shown.info["achievements:last"] == mine.achievements.sum()
                for label in ("collect_wood", "eat_cow"):
                    own_label = info[f"Achievements/{label}"]
                    assert not done or shown.info[f"achievement_{label}:last"] * 100 == own_label
            state = step(state, jnp.asarray(5), keys[number])[0]


def test_pixels_are_bytes_of_craftax_pictures():
    from craftax.craftax_env import make_craftax_env_from_name

    env = raw("Craftax-Classic-Pixels-v1")
    own = make_craftax_env_from_name("Craftax-Classic-Pixels-v1", auto_reset=False)
    state, first = jax.jit(env.reset)(jax.random.key(3))
    with foreign_rules():
        shown = own.get_obs(state)
    assert first.observation.dtype == np.uint8 and first.observation.max() > 200
    np.testing.assert_allclose(np.asarray(first.observation) / 255.0, shown, atol=0.5 / 255 + 1e-6)


def test_parameters_are_numbers_and_sizes():
    env = raw("Craftax-Classic-Symbolic-v1", day_length=10, always_diamond=False, map_size=[32, 32])
    assert jax.eval_shape(env.reset, jax.random.key(0))[0].map.shape == (32, 32)
    assert env.parameters["day_length"] == 10 and env.parameters["map_size"] == (32, 32)
