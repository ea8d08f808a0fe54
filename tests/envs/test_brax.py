"""The brax adapter: endings, parameters, and what brax can run. One compile, since brax's are long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises

from jaxrl import envs
from jaxrl.core.errors import ConfigError
from jaxrl.envs import brax as adapter

pytest.importorskip("brax")


@pytest.mark.long
def test_a_time_limit_truncates_a_fall_terminates_and_the_system_can_be_mapped_over():
    env = envs.make("brax:inverted_pendulum", backend="spring", episode_length=12, auto_reset="pooled")
    gravity = jnp.asarray([[0.0, 0.0, -9.81], [0.0, 0.0, -9.81], [0.0, 0.0, 0.0]])
    push = jnp.asarray([[0.0], [1.0], [0.0]])

    @jax.jit
    def run(gravity, push, key):
        def one_environment(gravity, push, key):
            env = envs.make(
                "brax:inverted_pendulum", backend="spring", episode_length=12, system={"opt.gravity": gravity}
            )
            state, _ = env.reset(key)
            return jax.lax.scan(lambda state, key: env.step(state, push, key), state, jax.random.split(key, 26))[1]

        return jax.vmap(one_environment)(gravity, push, jax.random.split(key, 3))

    steps = run(gravity, push, jax.random.key(0))
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated[0]), [11, 24])
    np.testing.assert_array_equal(np.flatnonzero(steps.first[0]), [12, 25])
    assert not steps.terminated[0].any() and steps.episode.length[0, 11] == 12
    assert steps.terminated[1].any() and not (steps.terminated & steps.truncated).any()
    fell = int(np.flatnonzero(steps.terminated[1])[0])
    assert fell < 11 and steps.first[1, fell + 1] and abs(steps.observation[1, fell, 1]) > 0.2
    assert not np.allclose(steps.observation[0, :11], steps.observation[2, :11])
    # Resets are random, where brax's own auto-reset returns to one cached state.
    assert not np.allclose(steps.observation[0, 12], steps.observation[0, 25])
    assert env.observation_space.shape == (4,) and env.action_space.shape == (1,)


@pytest.mark.long
def test_types_are_stable_from_reset_to_step():
    # Without auto-reset, whose own trace of a brax reset is long.
    for name, backend in (("reacher", "spring"), ("inverted_pendulum", "mjx")):
        envs.check_env(envs.make(f"brax:{name}", backend=backend, auto_reset=None), steps=0)


def test_names_are_braxs():
    import brax.envs

    assert set(adapter.NAMES) == set(brax.envs._envs)
    assert "swimmer" not in adapter.names()


@pytest.mark.parametrize(("name", "backend"), adapter.BROKEN)
def test_every_exception_is_needed(name, backend):
    import brax.envs

    raises(ConfigError, "does not run", envs.make, f"brax:{name}", backend=backend)
    with pytest.raises((TypeError, ValueError)):
        env = brax.envs.get_environment(name, backend=backend)
        state = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), np.uint32))
        jax.eval_shape(env.step, state, jax.ShapeDtypeStruct((env.action_size,), np.float32))


@pytest.mark.long
def test_two_makes_share_their_static_parts():
    def made():
        return envs.make("brax:inverted_pendulum", backend="spring", system={"opt.gravity": [0.0, 0.0, -1.0]})

    assert jax.tree.structure(made()) == jax.tree.structure(made())
