"""Behavioral cloning: how it acts, and what it does with bad data. Its update: `test_oracles.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, BOX, DETERMINISTIC, SPEC
from helpers.offline import (
    BC,
    BEST,
    CHOICE,
    MOST,
    initial,
    learned,
    policy_output,
)
from scipy import stats

from jaxrl.core.sources import Dataset
from jaxrl.core.types import TimeStep


def in_units(action):
    low, high = jnp.asarray(BOX.low)[None], jnp.asarray(BOX.high)[None]
    return 2 * (action - low) / (high - low) - 1


@pytest.mark.long
def test_it_acts_by_its_best_action_and_samples_if_asked():
    state, keys = initial(BC), jax.random.split(jax.random.key(1), 512)
    flags = jnp.zeros(512, bool)
    moments = TimeStep(jnp.ones((512, 3)), jnp.zeros(512), flags, flags, flags)
    policy = policy_output(BC, state.policy.params, moments.observation)

    def act(algo, state, explore):
        return np.asarray(algo.act(algo.actor(state), moments, (), keys, spec=SPEC, explore=explore).action)

    np.testing.assert_allclose(act(BC, state, False), policy.mode(), rtol=1e-6)
    x = np.arctanh(np.clip(in_units(act(BC, state, True)), -1 + 1e-6, 1 - 1e-6))
    for i in range(2):
        chance = stats.kstest(x[:, i], stats.norm(policy.mean[0, i], np.exp(policy.log_std[0, i])).cdf).pvalue
        assert chance > 1e-3
    certain = BC.replace(policy=DETERMINISTIC["policy"])
    state = initial(certain)
    np.testing.assert_array_equal(act(certain, state, True), act(certain, state, False))


def test_it_asks_for_a_dataset_alone():
    assert BC.experience == {"replay": Dataset(BATCH)}
    assert BC.replace(batch_size=8).experience != BC.experience


@pytest.mark.long
def test_it_does_what_was_done_most_whatever_came_of_it():
    algo = BC.replace(learning_rate=1e-2)
    cloned = learned(algo)[0]
    np.testing.assert_allclose(cloned, 0.75 * MOST + 0.25 * BEST, atol=0.1)
    assert np.linalg.norm(cloned - BEST) > 0.9
    assert (learned(algo, CHOICE) == 0).all()
