"""NAVIX through its adapter, against the library's own step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import suite_samples

from jaxrl.envs.drawings import drawing_of
from jaxrl.envs.suite import foreign_rules

pytestmark = [suite_samples.needs("navix"), pytest.mark.long]
raw = functools.partial(suite_samples.raw, "navix")
RIGHT, FORWARD = 1, 2
OBSERVATIONS = [f"{kind}{view}" for kind in ("categorical", "rgb", "symbolic") for view in ("", "_first_person")]
TO_THE_GOAL = (FORWARD, FORWARD, RIGHT, FORWARD, FORWARD)  # of Empty-5x5


@pytest.mark.parametrize(("limit", "ends"), [(3, "truncated"), (5, "terminated"), (9, "terminated")])
def test_the_last_observation_is_the_true_one(limit, ends):
    """An end on the very step of the limit is an end."""
    import navix

    settings = {"max_steps": limit, "penalty_coeff": 0.9}
    own = navix.make("Navix-Empty-5x5-v0", disable_autoreset=True, **settings)
    env = raw("Navix-Empty-5x5-v0", **settings)
    step = jax.jit(env.step)
    state, shown = jax.jit(env.reset)(jax.random.key(0))
    with foreign_rules():
        mine = own.reset(jax.random.key(0))
        own_step = jax.jit(own.step)
        for number, action in enumerate(TO_THE_GOAL[:limit], 1):
            state, shown = step(state, jnp.asarray(action), jax.random.key(number))
            mine = own_step(mine, jnp.asarray(action))
            np.testing.assert_array_equal(shown.observation, mine.observation)
            np.testing.assert_allclose(shown.reward, mine.reward, rtol=1e-6)
            assert bool(shown.terminated | shown.truncated) == bool(mine.is_done()) == (number == min(limit, 5))
    assert bool(getattr(shown, ends)) and not (shown.terminated & shown.truncated)
    assert bool(mine.is_termination()) == (ends == "terminated")
    if ends == "terminated":
        np.testing.assert_allclose(shown.reward, 1.0 - 0.9 * 5 / limit, rtol=1e-6)


def test_what_moves_by_itself_moves_as_in_the_library():
    """NAVIX keeps its randomness in its state: that of a reset decides the episode."""
    import navix

    own, env = navix.make("Navix-Dynamic-Obstacles-8x8-v0"), raw("Navix-Dynamic-Obstacles-8x8-v0")
    state, shown = jax.jit(env.reset)(jax.random.key(0))
    step, seen = jax.jit(env.step), set()
    with foreign_rules():
        mine = jax.jit(own.reset)(jax.random.key(0))
        own_step = jax.jit(own.step)
        for number in range(6):
            np.testing.assert_array_equal(shown.observation, mine.observation)
            seen.add(np.asarray(shown.observation).tobytes())
            if mine.is_done():
                break
            state, shown = step(state, jnp.asarray(RIGHT), jax.random.key(number))
            mine = own_step(mine, jnp.asarray(RIGHT))
    assert len(seen) == 6


def test_the_background_of_pictures_is_kept_only_for_pictures():
    plain, pictures = (raw("Navix-Empty-5x5-v0", observation=kind) for kind in ("symbolic", "rgb"))
    sizes = [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(env.reset, jax.random.key(0))[0]))
        for env in (plain, pictures)
    ]
    assert sizes[1] - sizes[0] >= 5 * 5 * 8 * 8 * 3 and sizes[0] < 1_000
    assert pictures.observation_space.shape == (40, 40, 3) and pictures.observation_space.dtype == np.uint8


def test_pictures_are_the_librarys():
    import navix

    env = raw("Navix-DoorKey-5x5-v0")
    state, first = jax.jit(env.reset)(jax.random.key(0))
    drawing = drawing_of(env, env.observation_space)
    view = np.asarray(drawing.view(env, state, first))
    own = navix.make("Navix-DoorKey-5x5-v0", observation_fn=navix.observations.rgb)
    with foreign_rules():
        np.testing.assert_array_equal(view, own.reset(jax.random.key(0)).observation)
    assert drawing.draw(view).shape == (240, 240, 3)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_every_observation_is_within_its_space(observation):
    env = raw("Navix-DoorKey-5x5-v0", observation=observation)
    _, first = jax.jit(env.reset)(jax.random.key(0))
    assert env.observation_space.contains(first.observation)
    assert first.observation.dtype == (np.int32 if "categorical" in observation else np.uint8)
