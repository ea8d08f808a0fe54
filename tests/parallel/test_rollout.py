"""The loop that acts, and its twin for environments on the host, against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import ALGORITHMS, ENV, assert_equal, plain

from jaxrl.core import keys
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from jaxrl.envs.host.jax_host import ServedFromHost
from jaxrl.parallel import host_rollout
from jaxrl.parallel import rollout as ro

T, B, TOTAL = 20, 4, 6  # the environments here are the last of a run's
SPEC, INDEX, KEY = env_spec(ENV), np.arange(2, 6, dtype=np.int32), jax.random.key(3)


@functools.cache
def prepared(name):
    algo = resolve_schedules(ALGORITHMS[name], jnp.float32(0.0))
    return algo, jax.jit(lambda key: algo.actor(algo.init(key, SPEC)))(jax.random.key(1))


def step_keys():
    return tuple(
        keys.tick_keys(roots(KEY, INDEX), jnp.uint32(0), T) for roots in (keys.environment_keys, keys.policy_keys)
    )


@functools.cache
def unrolled(name, explore):
    algo, actor = prepared(name)

    @jax.jit
    def run(algo, actor):
        acting = ro.begin(algo, ENV, keys.environment_keys(KEY, INDEX), INDEX, spec=SPEC, num_envs=TOTAL)
        return ro.unroll(algo, actor, ENV, acting, step_keys(), spec=SPEC, explore=explore)

    return plain(run(algo, actor))


@pytest.mark.parametrize(("name", "explore"), [("recurrent_ppo", True), ("dqn", False)])
def test_unroll_is_a_plain_loop(name, explore):
    algo, actor = prepared(name)
    acting, rollout = unrolled(name, explore)
    env_keys, act_keys = step_keys()
    state, timestep = jax.vmap(ENV.reset)(keys.reset_keys(keys.environment_keys(KEY, INDEX)))
    carry = jax.vmap(lambda index: algo.initial_carry(SPEC, index, TOTAL))(INDEX)
    assert_equal(rollout.carry, carry)
    act = jax.jit(functools.partial(algo.act, spec=SPEC, explore=explore))
    step, action = jax.jit(jax.vmap(ENV.step)), np.zeros(B, np.int32)
    ended = 0
    for t in range(T):
        timestep = timestep.replace(previous_action=jnp.where(timestep.first, 0, action))
        assert_equal(timestep, jax.tree.map(lambda x, t=t: x[t], rollout.timesteps), 1e-5)
        output = act(actor, timestep, carry, act_keys[t])
        action, carry = output.action, output.carry
        assert_equal(action, rollout.action[t])
        assert_equal(output.extras, jax.tree.map(lambda x, t=t: x[t], rollout.extras), 1e-5)
        state, timestep = step(state, action, env_keys[t])
        ended += int(timestep.last.sum())
    timestep = timestep.replace(previous_action=jnp.where(timestep.first, 0, action))
    assert_equal(timestep, rollout.final, 1e-5)
    assert_equal((state, timestep, carry), (acting.env_state, acting.timestep, acting.carry), 1e-5)
    assert_equal(carry, rollout.final_carry, 1e-5)
    assert ended > 2, "no end of an episode was met"


@pytest.mark.parametrize(("name", "explore"), [("recurrent_ppo", True), ("dqn", False)])
def test_the_twin_on_the_host_gives_the_same_rollout_in_stretches(name, explore):
    algo, actor = prepared(name)
    _, whole = unrolled(name, explore)
    host = ServedFromHost(ENV).build(B, 3, 2)
    steps = host_rollout.HostSteps(SPEC, TOTAL, B, T // 2, explore)
    acting = steps.begin(algo, host.reset(), KEY, INDEX)
    for start in (0, T // 2):
        stretch = host_rollout.unroll(steps, algo, actor, acting, host_rollout.in_this_thread(host.step))
        rollout = plain(host_rollout.complete(stretch))
        assert acting.steps_per_env == start + T // 2
        expected = jax.tree.map(lambda x, start=start: x[start : start + T // 2 + 1], whole.timesteps)
        assert_equal(rollout.timesteps, expected, 1e-5)
        assert_equal(rollout.action, whole.action[start : start + T // 2])
    assert_equal(rollout.final_carry, whole.final_carry, 1e-5)
    assert acting.tick(2**32 - T + 1) == 1, "the number of a step wraps as keys are folded with it"
