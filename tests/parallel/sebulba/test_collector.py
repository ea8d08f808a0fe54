"""Rollouts are written over earlier ones once those are learned from, and hold the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, assert_equal, plain
from helpers.served import ServedFromHost

import jaxrl
from jaxrl.core.types import env_spec
from jaxrl.parallel.host_rollout import HostSteps, complete
from jaxrl.parallel.sebulba.collector import Published, StepCollector

STEPS = HostSteps(env_spec(ENV), NUM_ENVS, NUM_ENVS, 8)


def collector():
    host = ServedFromHost(ENV).build(NUM_ENVS, 3, 0)
    return StepCollector(STEPS, host, jax.random.key(3), 0, jax.devices()[0])


def published(name):
    algo = jaxrl.schedules.resolve_schedules(ALGORITHMS[name], jnp.float32(0.0))
    return Published(algo, algo.actor(algo.init(jax.random.key(0), env_spec(ENV))), np.int32(0))


def places(rollout):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves((rollout.timesteps, rollout.action, rollout.extras))]


@pytest.mark.long
def test_a_rollout_is_written_over_an_earlier_one_once_it_is_learned_from():
    what, learned = published("recurrent_ppo"), []
    fresh, reusing = collector(), collector()
    expected = [plain(complete(fresh.collect(what, None))) for _ in range(4)]
    first = complete(reusing.collect(what, None))
    assert_equal(plain(first), expected[0])
    where = places(first.rollout)
    reusing.give_back(first.rollout, lambda: bool(learned))
    second = complete(reusing.collect(what, None))
    assert not first.rollout.action.is_deleted(), "it is being learned from"
    assert_equal(plain(second), expected[1])
    learned.append(True)
    third = complete(reusing.collect(what, None))
    assert places(third.rollout) == where and first.rollout.action.is_deleted()
    assert_equal(plain(third), expected[2])
    assert_equal(plain(complete(reusing.collect(what, None))), expected[3])


@pytest.mark.long
def test_what_an_algorithm_adds_to_a_complete_rollout_is_no_part_of_its_room():
    what = published("dqn")
    what = what.replace(algo=what.algo.replace(prioritized=what.algo.prioritized.replace(initial="td_error")))
    fresh, reusing = collector(), collector()
    expected = [plain(complete(fresh.collect(what, None))) for _ in range(2)]
    first = complete(reusing.collect(what, None))
    assert "priority" in first.rollout.extras
    reusing.give_back(first.rollout, lambda: True)
    assert_equal(plain(complete(reusing.collect(what, None))), expected[1])
    assert first.rollout.action.is_deleted()
