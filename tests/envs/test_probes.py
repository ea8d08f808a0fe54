"""The probe environments have the values that they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.played import played
from helpers.refused import raises

from jaxrl import envs
from jaxrl.core.errors import ConfigError
from jaxrl.envs.probes import BEST_ACTION, names

GAMMA = 0.9


def values(steps):
    """Discounted returns at every row up to the end, bootstrapping a truncation from r / (1 - gamma), a fixed point."""
    value, result = np.nan, np.full(len(steps.first), np.nan)
    for t in reversed(range(len(steps.first))):
        if steps.terminated[t]:
            value = 0.0
        elif steps.truncated[t]:
            value = 1.0 / (1.0 - GAMMA)
        else:
            result[t] = value
        value = float(steps.reward[t]) + GAMMA * value if not steps.first[t] else np.nan
    return result


@pytest.mark.parametrize("continuous", [False, True])
def test_values(continuous):
    best = jnp.full((1,), BEST_ACTION) if continuous else jnp.int32(0)
    truth = {
        "Constant": lambda o: np.ones_like(o),
        "RewardIsObservation": lambda o: o,
        "TwoStepDiscount": lambda o: np.where(o == 0, GAMMA, 1.0),
        "ActionReward": lambda o: np.ones_like(o),
        "Truncated": lambda o: np.full_like(o, 1.0 / (1.0 - GAMMA)),
    }
    assert set(truth) == set(names())
    before = played._cache_size()
    for name, value in truth.items():
        env = envs.make(f"probe:{name}", continuous=continuous)
        steps = played(env, best, jax.random.key(2), 40)
        got, observation = values(steps), np.asarray(steps.observation)[:, 0]
        known = ~np.isnan(got)
        assert known.sum() > 10
        np.testing.assert_allclose(got[known], value(observation[known]), rtol=1e-5)
        assert bool(steps.truncated.any()) == (name == "Truncated")
        assert bool(steps.terminated.any()) == (name != "Truncated")
    assert played._cache_size() == before + 1, "the probes must share one program"
    steps = played(envs.make("probe:RewardIsObservation"), best, jax.random.key(2), 40)
    assert set(np.unique(steps.observation)) == {-1, 1}


def test_the_wrong_action_is_worse():
    steps = played(envs.make("probe:ActionReward"), jnp.int32(1), jax.random.key(0), 40)
    assert steps.reward[1] == -1
    steps = played(envs.make("probe:ActionReward", continuous=True), jnp.full((1,), -0.5), jax.random.key(0), 40)
    assert steps.reward[1] == 0


def test_no_part_of_a_composite_action_earns_anything_alone():
    env = envs.make("probe:ActionReward", composite=True)

    def reward(amount=BEST_ACTION, one=1, two=(1, 2)):
        action = {"amount": jnp.full((1,), amount), "choice": (jnp.int32(one), jnp.asarray(two, jnp.int32))}
        assert env.action_space.contains(action)
        return float(played(env, action, jax.random.key(0), 40).reward[1])

    assert reward() == 1.0
    assert reward(amount=0.0) == 0.75 and reward(amount=-1.0) == reward(one=0) == reward(two=(0, 2)) == 0.0
    assert reward(two=(1, 1)) == 0.0


@pytest.mark.long
def test_contract():
    for kinds in ({}, {"continuous": True}, {"composite": True}):
        envs.check_env(envs.make("probe:Truncated", **kinds), steps=20)
    raises(ConfigError, "continuous=True or composite=", envs.make, "probe:Truncated", continuous=True, composite=True)
