"""The gymnax adapter: spaces, endings, parameters, types."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.played import played
from helpers.programs import all_finite
from helpers.refused import refused

import jaxrl
from jaxrl import envs
from jaxrl.envs import gymnax as adapter


def rollout_range(env):
    """Lowest and highest value of every element of the observations of random rollouts; one compile an environment."""
    batch, steps = 8, 250

    @jax.jit
    def run(key):
        key_reset, key_steps = jax.random.split(key)
        state, first = jax.vmap(env.reset)(jax.random.split(key_reset, batch))

        def one(carry, key):
            (state, low, high), keys = carry, jax.random.split(key, batch)
            state, time_step = jax.vmap(env.step)(state, jax.vmap(env.action_space.sample)(keys), keys)
            return (state, jnp.minimum(low, time_step.observation), jnp.maximum(high, time_step.observation)), None

        start = (state, first.observation, first.observation)
        (_, low, high), _ = jax.lax.scan(one, start, jax.random.split(key_steps, steps))
        return low.min(axis=0), high.max(axis=0)

    return jax.device_get(run(jax.random.key(0)))


def declared_and_true(name):
    env, params = adapter.GymnaxEnvironment.foreign_of(name)
    with envs.suite.foreign_rules():
        declared = adapter.convert(env.observation_space(params))
        raw = jax.eval_shape(env.reset_env, jax.random.key(0), params)[0]
    return declared, adapter.spaces_of(name, env, params)["observation_space"], raw


QUICK = ("CartPole-v1", "Catch-bsuite", "Breakout-MinAtar")
# One space was corrected for a rounding that a compiler makes only where it optimizes.
ROUNDED = "UmbrellaChain-bsuite"
MARKS = {name: [] if name in QUICK else [pytest.mark.long] for name in adapter.names()}
MARKS[ROUNDED].append(pytest.mark.exact)
NAMES = [pytest.param(name, marks=marks) for name, marks in MARKS.items()]


@pytest.mark.parametrize("name", NAMES)
def test_observations_lie_in_the_corrected_space_and_every_correction_is_needed(name):
    declared, true, raw = declared_and_true(name)
    env = envs.make(f"gymnax:{name}")
    envs.check_env(env, steps=0)
    low, high = rollout_range(env)
    assert raw.shape == true.shape and raw.dtype == true.dtype
    assert low.shape == true.shape and low.dtype == true.dtype
    assert bool(true.contains(low)) and bool(true.contains(high))
    fits = raw.dtype == declared.dtype and bool(declared.contains(low)) and bool(declared.contains(high))
    # That bandit's space is right at its defaults, and corrected for other parameters.
    assert fits == (name not in adapter.WRONG_OBSERVATION_SPACES.keys() - {"BernoulliBandit-misc"})


def test_only_environments_that_download_are_left_out():
    assert set(adapter.names()) | set(adapter.NEEDS_DOWNLOAD) == set(gymnax.registered_envs)
    refused(lambda: envs.make("gymnax:MNISTBandit-bsuite"), "needs a download")


@pytest.mark.long
def test_a_time_limit_truncates_and_a_fall_terminates():
    env = envs.make("gymnax:CartPole-v1", max_steps_in_episode=7)
    limited = played(env, jnp.arange(16, dtype=jnp.int32) % 2, jax.random.key(0), 16)
    np.testing.assert_array_equal(np.flatnonzero(limited.truncated), [7, 15])
    np.testing.assert_array_equal(np.flatnonzero(limited.first), [0, 8, 16])
    assert not limited.terminated.any()
    assert limited.episode.returns[7] == 7 and limited.episode.length[7] == 7
    fragile = played(envs.make("gymnax:CartPole-v1", theta_threshold_radians=0.0), jnp.int32(1), jax.random.key(0), 2)
    assert fragile.terminated[1] and not fragile.truncated[1] and fragile.first[2]


@pytest.mark.long
def test_termination_wins_over_truncation():
    # The deep sea ends at its bottom, on the very step of its time limit.
    steps = played(envs.make("gymnax:DeepSea-bsuite", auto_reset=None), jnp.int32(0), jax.random.key(0), 8)
    assert steps.terminated[8] and not steps.truncated[8]


@pytest.mark.long
def test_parameters_are_leaves_and_can_be_mapped_over():
    gravities = jnp.asarray([5.0, 9.8, 20.0])

    @jax.jit
    def fall(env):
        state, _ = env.reset(jax.random.key(0))
        for _ in range(3):
            state, time_step = env.step(state, jnp.int32(1), jax.random.key(1))
        return time_step.observation

    mapped = jax.vmap(lambda g: fall(envs.make("gymnax:CartPole-v1", gravity=g)))(gravities)
    alone = [fall(envs.make("gymnax:CartPole-v1", gravity=float(g))) for g in gravities]
    np.testing.assert_allclose(mapped, jnp.stack(alone), rtol=1e-5)
    assert len({float(x[3]) for x in mapped}) == 3
    batched = jax.vmap(fall)(
        envs.make("gymnax:CartPole-v1", **{f: jnp.full(3, getattr(gymnax.make("CartPole-v1")[1], f)) for f in FIELDS})
    )
    np.testing.assert_allclose(batched, jnp.broadcast_to(alone[1], (3, 4)), rtol=1e-5)


FIELDS = [*gymnax.make("CartPole-v1")[1].__dataclass_fields__]


@pytest.mark.long
def test_two_makes_share_one_compiled_program():
    reset = jax.jit(lambda env, key: env.reset(key)[1].observation)
    for gravity in (9.8, 12.0, 3):
        reset(envs.make("gymnax:MemoryChain-bsuite", num_bits=2, memory_length=int(gravity)), jax.random.key(0))
    assert reset._cache_size() == 1
    assert reset(envs.make("gymnax:MemoryChain-bsuite", num_bits=4), jax.random.key(0)).shape == (6,)


def test_spaces_follow_the_numbers_given():
    env = envs.make("gymnax:CartPole-v1", x_threshold=5.0)
    assert env.observation_space.high[0] == 10.0
    env = envs.make("gymnax:MetaMaze-misc", punishment=-3.0, max_steps_in_episode=50)
    np.testing.assert_array_equal(env.observation_space.low[-2:], [-3, 0])
    np.testing.assert_array_equal(env.observation_space.high[-2:], [10, 50])


def test_impala_learns_in_minatar():
    """100k steps of Breakout bring four seeds to 5.5; untrained they are at 0.5 to 1.6."""
    result = jaxrl.train(
        jaxrl.IMPALA(learning_rate=3e-3),
        "gymnax:Breakout-MinAtar",
        total_steps=100_000,
        num_envs=32,
        seed=0,
        evaluate_every=0,
        evaluation_episodes=64,
        progress=False,
    )
    assert result.stopped == "finished" and all_finite(result.state.learner)
    assert result.evaluation.return_mean >= 4.0
