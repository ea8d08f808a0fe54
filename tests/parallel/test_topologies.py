"""One algorithm, one seed, one run: whatever it runs on."""

import functools

import jax
import numpy as np
import pytest
from algorithms import ALGORITHMS, ENVIRONMENTS, FROM_DATA
from helpers import programs
from helpers.discounted import Discounted
from helpers.programs import ENV, NUM_ENVS, all_finite, anakin, assert_equal, plain, started
from helpers.served import ServedFromHost
from helpers.tiers import one_quick

import jaxrl

pytestmark = pytest.mark.exact

UPDATES = 10
KINDS = [*programs.ALGORITHMS]
# In an environment that discounts by itself.
DISCOUNTED = {f"discounted_{name}": ALGORITHMS[name] for name in (*KINDS, "r2d2", "dreamer")}
RUNS = ALGORITHMS | DISCOUNTED
# Rollouts, transitions, sequences and extras.
DEVICE_KINDS = ["alphazero", "muzero", "crossq", "dreamer", "flashsac", "whole_episodes", "rnd", "btr"]


@functools.cache
def run(name, topology, host=False, seed=3):
    """The state after some updates, and the report of all of them, as numpy."""
    algo, env = RUNS[name], Discounted(ENV, 0.7) if name in DISCOUNTED else ENVIRONMENTS[name]
    env = ServedFromHost(env) if host else env
    iterations = UPDATES + ("replay" in algo.experience)  # whose first iteration only fills it
    with started(topology, algo, env, seed) as (program, state):
        before = plain(state.learner)
        steps_per_env = 2 * iterations * program.steps_per_iteration(algo) // program.layout.num_envs
        state, report = plain(program.chunk(algo, env, state, iterations, steps_per_env))
        assert report.iterations == UPDATES
        assert report.episodes.count > 20, "no episode boundary was met"
        assert all_finite(state.learner)
        after = zip(*map(jax.tree.leaves, (before, state.learner)), strict=True)
        assert not all(np.array_equal(a, b) for a, b in after), "it learns"
        return state, report


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    one_quick(
        [name for name in RUNS if name not in ("alphazero", *FROM_DATA)],
        "ppo",
    ),
)
def test_host_lockstep_is_the_compiled_run(name):
    state, report = run(name, anakin())
    on_host, host_report = run(
        name, jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, actors=1 if name in KINDS else 2, lockstep=True), host=True
    )
    assert_equal(state.replace(env_state=()), on_host, 1e-5)
    assert host_report.actors["policy_lag"] == 0
    assert_equal(report, host_report.replace(actors={}), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    one_quick(
        [*KINDS, *DEVICE_KINDS, "composite", "reppo", "vmpo", *DISCOUNTED],
    ),
)
def test_four_devices_are_one(name):
    one, one_report = run(name, anakin())
    four, four_report = run(name, anakin(devices=4))
    assert_equal(one, four, 1e-5)
    assert_equal(one_report, four_report, 1e-5)


@pytest.mark.long
def test_the_comparison_can_fail():
    one, _ = run("ppo", anakin())
    other, _ = run("ppo", anakin(), seed=4)
    with pytest.raises(AssertionError):
        assert_equal(one, other, 1e-5)


@pytest.mark.long
def test_devices_share_the_environments():
    algo = programs.DQN
    program = anakin(devices=4).bind(algo, ENV)
    state = program.start(algo, ENV, 0)
    for _ in range(2):
        assert all(len(x.addressable_shards) == 4 for x in jax.tree.leaves(state))
        assert state.timestep.observation.addressable_shards[0].data.shape == (2, 4)
        for stored in jax.tree.leaves(state.buffers["replay"].ring.rows):
            assert stored.addressable_shards[0].data.size == stored.size // 4, "each device holds its own rows"
        params = jax.tree.leaves(state.learner.network.params)[0]
        assert params.addressable_shards[0].data.shape == params.shape
        state, _ = program.chunk(algo, ENV, state, 1, 100)
