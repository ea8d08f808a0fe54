"""Behavioral cloning's update against its losses, written out once more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, BOX, DETERMINISTIC, SPEC, assert_stepped, transitions
from helpers.offline import (
    BC,
    BEST,
    CHOICE,
    MOST,
    assert_weights_count,
    choices,
    density,
    initial,
    learned,
    policy_output,
    updated,
)
from scipy import stats

from jaxrl.core.sources import Dataset
from jaxrl.core.types import TimeStep

KEY = jax.random.key(0)


def in_units(action):
    low, high = jnp.asarray(BOX.low)[None], jnp.asarray(BOX.high)[None]
    return 2 * (action - low) / (high - low) - 1


@pytest.mark.long
def test_an_update_of_a_gaussian_is_a_step_up_the_likelihood_and_bounds_are_finite():
    state, batch = initial(BC), transitions()
    batch = batch.replace(action=batch.action.at[0].set(jnp.asarray(BOX.high)))
    new, info = updated(BC, state, batch, KEY)

    def loss(params):
        policy = policy_output(BC, params, batch.observation)
        mean, std = policy.mean, jnp.exp(policy.log_std)
        inner = density(jnp.arctanh(jnp.clip(in_units(batch.action), -0.999, 0.999)), mean, std)
        outer = jnp.sum(jnp.log(0.5 * jax.scipy.special.erfc((3.8002 - mean[:1]) / std[:1] / np.sqrt(2)) / 1e-3))
        return -jnp.mean(inner.at[0].set(outer)[: BATCH - 1])

    wanted, gradients = jax.jit(jax.value_and_grad(loss))(state.policy.params)
    assert float(info.metrics["policy_loss"]) == pytest.approx(float(wanted), rel=1e-3)
    assert_stepped(state.policy.params, new.policy.params, gradients, 1e-4)
    assert int(new.updates) == 1


@pytest.mark.long
def test_an_update_of_a_deterministic_policy_is_a_step_down_the_squared_error():
    algo = BC.replace(policy=DETERMINISTIC["policy"])
    state, batch = initial(algo), transitions()
    new, info = updated(algo, state, batch, KEY)

    def loss(params):
        error = in_units(policy_output(algo, params, batch.observation)) - in_units(batch.action)
        return jnp.mean(jnp.square(error)[: BATCH - 1])

    wanted, gradients = jax.jit(jax.value_and_grad(loss))(state.policy.params)
    for name in ("policy_loss", "squared_distance"):
        assert float(info.metrics[name]) == pytest.approx(float(wanted), rel=1e-4)
    assert_stepped(state.policy.params, new.policy.params, gradients, 1e-4)


@pytest.mark.long
def test_discrete_actions_have_the_cross_entropy_over_what_is_allowed():
    state, batch = initial(BC, CHOICE), choices()
    new, info = updated(BC, state, batch, KEY, CHOICE)

    def loss(params):
        logits = policy_output(BC, params, batch.observation, CHOICE).logits
        allowed = jnp.where(batch.action_mask, jnp.exp(logits), 0.0)
        chosen = allowed[jnp.arange(BATCH), batch.action] / jnp.sum(allowed, axis=1)
        return -jnp.mean(jnp.log(chosen)[: BATCH - 1])

    wanted, gradients = jax.jit(jax.value_and_grad(loss))(state.policy.params)
    assert float(info.metrics["policy_loss"]) == pytest.approx(float(wanted), rel=1e-4)
    assert_stepped(state.policy.params, new.policy.params, gradients, 1e-4)
    logits = np.where(batch.action_mask, policy_output(BC, state.policy.params, batch.observation, CHOICE).logits, -9e9)
    right = (logits.argmax(axis=1) == np.asarray(batch.action))[: BATCH - 1]
    assert float(info.metrics["accuracy"]) == pytest.approx(right.mean())


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


@pytest.mark.long
def test_rows_of_no_weight_teach_nothing():
    assert_weights_count(BC)
