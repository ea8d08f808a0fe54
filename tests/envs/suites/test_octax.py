"""The adapter of Octax: it shows what Octax shows, and truncates at its time limit."""

import functools

import jax
import numpy as np
import pytest
from helpers import suite_samples
from helpers.legal_play import play

import jaxrl
from jaxrl.envs.suite import foreign_rules

pytestmark = suite_samples.needs("octax")

COUNT, LIMIT = 8, 30
raw = functools.partial(suite_samples.raw, "octax")


@pytest.mark.long
def test_every_step_is_octaxs_and_last_ones_are_ends_or_time_limits():
    from octax.environments import create_environment

    env = raw("brix", max_num_steps_per_episodes=LIMIT, frame_skip=3)
    first, following, actions = jax.device_get(play(env, jax.random.key(0), COUNT, LIMIT))
    with foreign_rules():
        theirs, _ = create_environment("brix", max_num_steps_per_episodes=LIMIT, frame_skip=3)

    @jax.jit
    def run(keys, actions):
        state, screens, _ = jax.vmap(theirs.reset)(keys)

        def one(state, action):
            state, *after = jax.vmap(theirs.step)(state, action)
            return state, after

        return screens, jax.lax.scan(one, state, actions)[1]

    with foreign_rules():
        keys = jax.random.split(jax.random.split(jax.random.key(0))[0], COUNT)
        screens, (observation, reward, terminated, truncated, info) = jax.device_get(run(keys, actions))
    np.testing.assert_array_equal(screens, first.observation)
    last = terminated | truncated
    alive = np.cumsum(last, axis=0) - last == 0
    np.testing.assert_array_equal(observation[alive], following.observation[alive])
    np.testing.assert_array_equal(reward[alive], following.reward[alive])
    np.testing.assert_array_equal(info["score"][alive], following.info["score"][alive])
    np.testing.assert_array_equal(terminated[alive], following.terminated[alive])
    np.testing.assert_array_equal((truncated & ~terminated)[alive], following.truncated[alive])
    assert (following.terminated & alive).any() and (following.truncated & alive).any()


def test_names_have_levels_and_parameters_are_checked():
    names = suite_samples.adapter("octax").names()
    assert {"brix", "cavern1", "space_flight10", "target_shooter3"} <= set(names) and len(names) == 37
    assert raw("pong", frame_skip=2).observation_space.shape == (2, 64, 32)
    assert raw("pong").action_space == jaxrl.spaces.Discrete(3)  # two keys, or none
