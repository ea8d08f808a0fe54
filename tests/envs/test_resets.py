"""Pooled resets: the same episodes as exact ones, hence unbiased, while fewer resets are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.played import played

from jaxrl import envs
from jaxrl.envs import AutoReset, PooledReset
from jaxrl.envs.gymnax import make as make_raw


@pytest.mark.long
def test_pooled_resets_are_the_exact_ones_bit_for_bit():
    raw = make_raw("CartPole-v1", max_steps_in_episode=15)
    exact, pooled = (played(env, None, jax.random.key(0), 60, 20) for env in (AutoReset(raw), PooledReset(raw, 3)))
    assert exact.first.sum() > 60 and exact.truncated.any()
    jax.tree.map(np.testing.assert_array_equal, exact, pooled)


@pytest.mark.long
def test_pooled_resets_under_two_vmaps_and_over_parameters():
    """An inner map over environments of different gravity (each is reset with its own), an outer one over seeds."""

    def one(wrapper, gravity, key):
        env = make_raw("Pendulum-v1", max_steps_in_episode=3)
        env = wrapper(env.replace(params=env.params.replace(g=gravity)))
        state, _ = env.reset(key)
        action = jnp.zeros((1,))
        return jax.lax.scan(lambda state, key: env.step(state, action, key), state, jax.random.split(key, 9))[1]

    def seeds(wrapper):
        gravity = jnp.linspace(1.0, 20.0, 11)
        keys = jax.random.split(jax.random.key(0), (2, 11))
        return jax.jit(jax.vmap(jax.vmap(lambda g, key: one(wrapper, g, key)), in_axes=(None, 0)))(gravity, keys)

    exact, pooled = seeds(AutoReset), seeds(PooledReset)
    assert exact.first[..., 3].all() and exact.first[..., 7].all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), exact, pooled)


def test_pooled_reset_of_one_environment():
    env = envs.make("gymnax:CartPole-v1", auto_reset="pooled", max_steps_in_episode=2)
    assert isinstance(env, PooledReset)
    steps = played(env, jnp.int32(0), jax.random.key(0), 4)
    assert np.flatnonzero(steps.truncated).tolist() == [2] and np.flatnonzero(steps.first).tolist() == [0, 3]
