"""The loop that acts, and its twin for environments on the host, against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_policy
from helpers.programs import ALGORITHMS, ENV, assert_equal, plain
from helpers.served import ServedFromHost
from helpers.tiers import one_quick

import jaxrl
from jaxrl.core import keys
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Episode, Rollout, env_spec
from jaxrl.networks import MLP, ActorCritic
from jaxrl.parallel import host_rollout
from jaxrl.parallel import rollout as ro
from jaxrl.run.policies.policy import Policy

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


@pytest.mark.long
@pytest.mark.parametrize(("name", "explore"), one_quick([("recurrent_ppo", True), ("dqn", False)], ("dqn", False)))
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


@pytest.mark.long
@pytest.mark.parametrize(("name", "explore"), one_quick([("recurrent_ppo", True), ("dqn", False)], ("dqn", False)))
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


# --- actions beyond a box ------------------------------------------------------------------------------------------

BOXED = jaxrl.make("probe:ActionReward", continuous=True)  # actions within [-2, 2]; episodes of one step
BOXED_SPEC = env_spec(BOXED)
WIDE = resolve_schedules(
    jaxrl.PPO(network=ActorCritic(MLP((4,)), initial_log_std=1.5, previous_action=True)).resolve(BOXED_SPEC, TOTAL),
    jnp.float32(0.0),
)


@functools.cache
def wide_rollout():
    @jax.jit
    def run():
        actor = WIDE.actor(WIDE.init(jax.random.key(1), BOXED_SPEC))
        acting = ro.begin(WIDE, BOXED, keys.environment_keys(KEY, INDEX), INDEX, spec=BOXED_SPEC, num_envs=TOTAL)
        return actor, ro.unroll(WIDE, actor, BOXED, acting, step_keys(), spec=BOXED_SPEC, explore=True)[1]

    actor, rollout = run()
    return actor, plain(rollout)


@pytest.mark.long
def test_environments_get_actions_within_their_box_and_the_algorithm_keeps_its_sample():
    """Before, the probe charged the raw action: a reward of 1 - (a - 0.5)^2 for an a beyond 2."""
    _, rollout = wide_rollout()
    rows = rollout.rows
    sampled, weight = rows.action[..., 0], rows.weight
    assert (np.abs(sampled[weight]) > 2.0).mean() > 0.3, "a deviation of 4.5 leaves the box often"
    taken = np.clip(sampled, -2.0, 2.0)
    np.testing.assert_allclose(rows.reward[weight], 1.0 - np.square(taken - 0.5)[weight], rtol=1e-5)
    following = rollout.timesteps.replace(observation=())[1:]
    np.testing.assert_array_equal(following.previous_action[..., 0], np.where(following.first, 0.0, taken))
    distribution = rows.extras["distribution"]
    np.testing.assert_allclose(rows.extras["log_prob"], distribution.log_prob(rows.action), rtol=1e-5)
    for kept in (ro.executed(rows, BOXED_SPEC), ro.bare(rows, BOXED_SPEC)):
        np.testing.assert_array_equal(kept.action[..., 0], taken)


@pytest.mark.long
def test_host_environments_get_the_same_actions():
    actor, whole = wide_rollout()
    host, given = ServedFromHost(BOXED).build(B, 3, 2), []
    steps = host_rollout.HostSteps(BOXED_SPEC, TOTAL, B, T)
    acting = steps.begin(WIDE, host.reset(), KEY, INDEX)

    def step(action):
        given.append(action)
        return host.step(action)

    rollout = plain(
        host_rollout.complete(host_rollout.unroll(steps, WIDE, actor, acting, host_rollout.in_this_thread(step)))
    )
    assert_equal(rollout.timesteps, whole.timesteps, 1e-5)
    assert_equal(rollout.action, whole.action, 1e-5)
    np.testing.assert_allclose(np.stack(given), np.clip(whole.action, -2.0, 2.0), rtol=1e-5)


def test_a_policy_gives_actions_within_the_box():
    actor, _ = wide_rollout()
    action, memory = Policy(WIDE, actor, BOXED_SPEC)(np.zeros((64, 1), np.float32), key=jax.random.key(0))
    assert np.abs(action).max() == 2.0
    np.testing.assert_array_equal(memory.previous_action, action)


@pytest.mark.parametrize("whole", [False, True])
def test_sums_are_those_of_the_episodes_that_ended(whole):
    """Of whole episodes, a column after its own does not count."""
    timesteps, rng = on_policy.moments(), np.random.default_rng(0)
    returns = jnp.asarray(rng.normal(3.0, 2.0, timesteps.first.shape), jnp.float32)
    lengths = jnp.asarray(rng.integers(1, 99, timesteps.first.shape), jnp.int32)
    timesteps = timesteps.replace(episode=Episode(returns, lengths, complete=timesteps.last if whole else None))
    rollout = Rollout(timesteps, (), {}, (), (), whole_episodes=whole)
    found = jax.device_get(jax.jit(ro.episode_sums)(rollout)).metrics()
    ended = np.asarray(timesteps.last[1:])
    if whole:
        ended = ended & (np.cumsum(np.asarray(timesteps.first[1:]), axis=0) == 0)
    chosen = np.asarray(returns, np.float64)[1:][ended]
    assert int(found["episodes"]) == ended.sum() > 3
    np.testing.assert_allclose(found["return_mean"], chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["return_std"], chosen.std(), rtol=1e-5)
    np.testing.assert_allclose(found["length_mean"], np.asarray(lengths)[1:][ended].mean(), rtol=1e-5)


def test_environments_by_default_are_one_for_transitions_and_eight_otherwise():
    for algo, least in ((jaxrl.DQN(), 1), (jaxrl.R2D2(), 8), (jaxrl.PPO(), 8)):
        assert [ro.default_num_envs(algo, multiple) for multiple in (1, 3)] == [least, -(-least // 3) * 3]
        assert ro.default_num_envs(algo, 1, agents=2) == 2 * least
