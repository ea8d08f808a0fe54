"""V-MPO's equations: which half of the rows is learned from, its weights, and the same over all devices.

A whole update against numpy is in `test_whole_updates.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers.on_policy import SPEC, T, collect, learner, moments, updated
from helpers.refused import raises
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.algos import vmpo
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.spaces import Box, Dict
from jaxrl.networks import GRU, MLP, ActorCritic, Categorical, DiagonalGaussian, Joint, TanhGaussian
from jaxrl.parallel.replicas import SingleReplica

ONE = SingleReplica()
ALGO = jaxrl.VMPO(rollout_length=T, entropy_cost=0.0, network=ActorCritic(MLP((8,))), epochs=1, minibatches=1)
FLOATS = st.floats(-1e6, 1e6, width=32)


@given(st.lists(st.tuples(FLOATS, st.booleans()), min_size=8, max_size=8))
def test_the_better_half_is_that_from_the_median_on(rows):
    advantages, weight = (np.array(x) for x in zip(*rows, strict=True))
    advantages = advantages.astype(np.float32) + np.float32(0.0)  # no negative zero, which sorts before zero
    found = np.asarray(jax.jit(vmpo.better_half, static_argnums=2)(jnp.asarray(advantages), jnp.asarray(weight), ONE))
    counted = np.sort(advantages[weight])[::-1]
    wanted = (len(counted) + 1) // 2
    least = counted[wanted - 1] if wanted else np.inf
    np.testing.assert_array_equal(found, weight & (advantages >= least))


@given(st.lists(FLOATS, min_size=8, max_size=8), st.floats(1e-2, 1e3))
def test_the_temperatures_slope_is_that_of_its_dual(advantages, temperature):
    x = np.array(advantages, np.float32)
    x, chosen = x / np.maximum(np.abs(x).max(), 1e-3), np.arange(8) % 2 == 0
    weights, kl = vmpo.advantage_weights(jnp.asarray(x), jnp.asarray(chosen), jnp.float32(temperature), ONE)
    exact = np.where(chosen, np.exp((x.astype(np.float64) - x[chosen].max()) / temperature), 0.0)
    np.testing.assert_allclose(weights, exact, rtol=1e-3, atol=1e-6)
    psi = exact / exact.sum()
    assert float(kl) == pytest.approx(np.sum(psi[psi > 0] * np.log(4 * psi[psi > 0])), abs=1e-4)


def test_nothing_that_counts_is_no_nan():
    weights, kl = vmpo.advantage_weights(jnp.ones(4), jnp.zeros(4, bool), jnp.float32(1.0), ONE)
    assert not weights.any() and np.isfinite(float(kl))


def made(algo, scale=1.0, seed=0):
    state, timesteps = learner(algo, seed), moments()
    actor = resolve_schedules(algo, jnp.float32(0)).actor(state)
    timesteps = timesteps.replace(reward=timesteps.reward * scale)
    return state, collect(algo, actor, timesteps, jax.random.key(3))


@pytest.mark.long
def test_recurrent_networks_learn_by_environments():
    algo = ALGO.replace(network=ActorCritic(MLP((8,)), core=GRU(4), shared=True), minibatches=2, epochs=2)
    state, rollout = made(algo)
    new, info = updated(algo, state, rollout)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((new, info)))
    assert float(info.metrics["policy_loss"]) > 0.0


def test_batches_suit_the_actions():
    box = dataclasses.replace(SPEC, action_space=Box(-1.0, 1.0, (2,)))
    for spec, length, count in ((SPEC, 64, 4), (box, 128, 8)):
        found = jaxrl.VMPO().resolve(spec, 4)
        assert (found.rollout_length, found.minibatches) == (length, count)
        given = jaxrl.VMPO(rollout_length=20).resolve(spec, 1)
        assert (given.rollout_length, given.minibatches) == (20, 4)
        assert jaxrl.VMPO(minibatches=2).resolve(spec, 4).minibatches == 2
        recurrent = jaxrl.VMPO(network=ActorCritic(core=GRU(8))).resolve(spec, 4)
        assert (recurrent.rollout_length, recurrent.minibatches) == (64, 4)
        assert recurrent.validate(spec, 4, 1) == []


def test_the_entropy_bonus_suits_actions_and_observations():
    discrete, box, image = SPEC.action_space, Box(-1.0, 1.0, (2,)), Box(0.0, 1.0, (10, 10, 4))
    parts = Dict({"vector": SPEC.observation_space, "image": image})
    for action, observation, cost in (
        (discrete, SPEC.observation_space, 0.0),
        (discrete, image, 0.15),
        (discrete, parts, 0.15),
        (Dict({"a": discrete, "b": discrete}), image, 0.15),
        (Dict({"a": discrete, "b": box}), image, 0.0),
        (box, image, 0.0),
    ):
        spec = dataclasses.replace(SPEC, action_space=action, observation_space=observation)
        assert jaxrl.VMPO().resolve(spec, 4).entropy_cost == cost
        for fixed in (0.0, 0.5):
            assert jaxrl.VMPO(entropy_cost=fixed).resolve(spec, 4).entropy_cost == fixed


@pytest.mark.long
@pytest.mark.parametrize("field", ["minibatches", "entropy_cost"])
def test_what_is_open_is_not_guessed(field):
    state, rollout = made(ALGO)
    raises(ConfigError, rf"{field} is not set", updated, ALGO.replace(**{field: None}), state, rollout)


def test_the_limits_are_on_all_parts_together():
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def joint():
        chosen = Joint((Categorical(drawn(2, 3)), TanhGaussian(drawn(2, 1), drawn(2, 1), (-1.0,), (1.0,))))
        return Joint({"a": DiagonalGaussian(drawn(2, 2), drawn(2, 2)), "b": chosen})

    old, new = joint(), joint()
    found = vmpo.divergences(old, new)
    wanted = {"mean": 0.0, "std": 0.0}
    for before, now in ((old.parts["a"], new.parts["a"]), (old.parts["b"].parts[1], new.parts["b"].parts[1])):
        apart, ratio = np.square(before.mean - now.mean), np.exp(2 * (before.log_std - now.log_std))
        wanted["mean"] += (0.5 * apart * np.exp(-2 * before.log_std)).sum(-1)
        wanted["std"] += (0.5 * (ratio - 1.0) - (before.log_std - now.log_std)).sum(-1)
    one, other = old.parts["b"].parts[0], new.parts["b"].parts[0]
    wanted["mean"] += scipy.stats.entropy(*(np.exp(np.asarray(x.logits)) for x in (one, other)), axis=-1)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    assert set(vmpo.divergences(Joint((one,)), Joint((other,)))) == {"mean"}
