"""Domain randomization: environments of one run whose physics differ."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import assert_equal

import jaxrl
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.envs import RandomParameters, parameters, with_parameters
from jaxrl.networks import MLP, ActorCritic

ENVS = 4


@jaxrl.register
def lengths(key):
    return {"length": jax.random.uniform(key, minval=0.25, maxval=1.0)}


def made(**options):
    return jaxrl.make("gymnax:CartPole-v1", wrappers=(partial(RandomParameters, draw=lengths, **options),))


def drawn(state):
    while not hasattr(state, "parameters"):
        state = state.env
    return np.asarray(state.parameters["length"])


def played(env, steps=60):
    """The lengths [steps + 1, ENVS], the time steps, and the states."""
    state, time_step = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), ENVS))

    def step(carry, key):
        state, _ = carry
        action = jnp.zeros(ENVS, jnp.int32)
        after = jax.vmap(env.step)(state, action, jax.random.split(key, ENVS))
        return after, after

    _, (states, time_steps) = jax.jit(lambda *x: jax.lax.scan(step, *x))(
        (state, time_step), jax.random.split(jax.random.key(1), steps)
    )
    return np.concatenate([drawn(state)[None], drawn(states)]), time_steps


@pytest.mark.long
def test_each_episode_draws_its_own():
    lengths, time_steps = played(made())
    assert len(set(lengths[0])) == ENVS and ((lengths >= 0.25) & (lengths <= 1.0)).all()
    first = np.asarray(time_steps.first)
    assert first.sum() > ENVS
    np.testing.assert_array_equal(lengths[1:] != lengths[:-1], first)


def test_an_environment_may_keep_its_own():
    lengths, time_steps = played(made(per="environment"))
    assert len(set(lengths[0])) == ENVS and np.asarray(time_steps.first).any()
    np.testing.assert_array_equal(lengths, np.broadcast_to(lengths[:1], lengths.shape))


def test_the_dynamics_are_those_of_the_parameters():
    """Step by step those of an environment that was made so, whose reset has the key that is left after the draw."""
    random, usual = made(), jaxrl.make("gymnax:CartPole-v1")
    reset_key, step_key = jax.random.split(jax.random.key(5))
    state, _ = random.reset(reset_key)
    fixed = with_parameters(usual, length=drawn(state))
    left = jax.random.split(reset_key)[1]
    (same, _), (other, _) = fixed.reset(left), usual.reset(left)
    for _ in range(5):
        state, found = random.step(state, jnp.int32(1), step_key)
        same, expected = fixed.step(same, jnp.int32(1), step_key)
        other, default = usual.step(other, jnp.int32(1), step_key)
        np.testing.assert_allclose(found.observation, expected.observation, rtol=1e-6)
    assert np.abs(np.asarray(found.observation) - np.asarray(default.observation)).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draw": 3}, "draw=3"),
        ({"draw": lengths, "per": "day"}, "per='day'"),
        ({"draw": lambda key: jax.random.uniform(key)}, "return a dictionary"),
        ({"draw": lambda key: {"lenght": jax.random.uniform(key)}}, "length"),
        ({"draw": lambda key: {"length": jax.random.uniform(key, (2,))}}, "length"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_compiles(options, words):
    with pytest.raises((ConfigError, EnvironmentContractError), match=words):
        env = jaxrl.make("gymnax:CartPole-v1", wrappers=(partial(RandomParameters, **options),))
        jaxrl.train(jaxrl.PPO(), env, total_steps=1024, progress=False)


def test_it_is_found_in_files_by_the_name_of_the_function():
    env = made(per="environment")
    again = jaxrl.envs.configs.from_config(jaxrl.envs.configs.to_config(env))
    assert again == env and "length" in parameters(again)


def trained(total_steps, devices=1, **settings):
    algo = jaxrl.PPO(
        rollout_length=32, minibatches=4, epochs=4, learning_rate=3e-3, network=ActorCritic(torso=MLP((32,)))
    )
    topology = jaxrl.Anakin(num_envs=16, devices=devices, shards=4)
    return jaxrl.train(
        algo, made(), total_steps=total_steps, topology=topology, evaluate_every=0, progress=False, **settings
    )


@pytest.mark.long
@pytest.mark.exact
def test_ppo_learns_on_physics_that_differ_and_resumes_bit_for_bit(tmp_path):
    whole = trained(65_536)
    assert whole.evaluation.return_mean > 195
    trained(32_768, run_dir=tmp_path)
    assert_equal(whole.state, trained(65_536, run_dir=tmp_path).state)


@pytest.mark.long
@pytest.mark.exact
def test_four_devices_draw_what_one_does():
    one, four = trained(2_048), trained(2_048, devices=4)
    np.testing.assert_array_equal(drawn(one.state.env_state), drawn(four.state.env_state))
    assert_equal(one.state.learner, four.state.learner, 1e-5)
