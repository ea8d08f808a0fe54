"""How likely the actions of data are: against scipy, at the bounds too, and as a density that adds up to 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BOX, SPEC
from scipy import stats

from jaxrl.algos import regression
from jaxrl.networks.distributions import Categorical, TanhGaussian

log_likelihood = jax.jit(regression.log_likelihood)
MEAN, STD = np.float32([0.3, -0.5]), np.float32([0.6, 1.7])
LOW, HIGH = tuple(BOX.low.tolist()), tuple(BOX.high.tolist())


def policy(mean=MEAN, std=STD, batch=1):
    shape = (batch, 2)
    return TanhGaussian(jnp.broadcast_to(mean, shape), jnp.log(jnp.broadcast_to(std, shape)), LOW, HIGH)


def in_box(unit):
    return jnp.asarray(BOX.low + (BOX.high - BOX.low) * (np.asarray(unit) + 1) / 2, jnp.float32)


def test_inside_it_is_the_density_of_actions_in_units_of_half_the_range():
    unit = np.random.default_rng(0).uniform(-0.99, 0.99, (32, 2))
    wanted = (stats.norm.logpdf(np.arctanh(unit), MEAN, STD) - np.log(1 - unit**2)).sum(axis=1)
    found = log_likelihood(policy(batch=32), in_box(unit))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    whole = policy(batch=32).log_prob(in_box(unit)) + np.log(2.0) + np.log(5.0)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [-1.0, 1.0])
@pytest.mark.parametrize("beyond", [0.0, 0.5])
def test_at_a_bound_and_beyond_it_is_how_likely_the_edge_is(side, beyond):
    edge = np.arctanh(1 - regression.EDGE)
    chance = stats.norm.cdf(-edge, MEAN[0], STD[0]) if side < 0 else stats.norm.sf(edge, MEAN[0], STD[0])
    other = stats.norm.logpdf(np.arctanh(0.2), MEAN[1], STD[1]) - np.log(1 - 0.2**2)
    found = log_likelihood(policy(), in_box([[side * (1 + beyond), 0.2]]))
    assert float(found[0]) == pytest.approx(np.log(chance / regression.EDGE) + other, rel=1e-3)


def test_it_adds_up_to_one():
    cells = 20_000  # ten of them at each edge
    unit = (np.arange(cells) + 0.5) * (2 / cells) - 1
    actions = in_box(np.stack([unit, np.zeros_like(unit)], axis=1))
    for mean, std in ((0.3, 0.6), (3.0, 1.0), (-6.0, 0.5)):  # the last is nearly always at the bound
        found = log_likelihood(policy(np.float32([mean, 0.0]), np.float32([std, 1.0]), cells), actions)
        alone = np.asarray(found, np.float64) - stats.norm.logpdf(0.0)
        assert np.exp(alone).sum() * (2 / cells) == pytest.approx(1.0, abs=1e-3)


def test_actions_at_the_bounds_have_finite_gradients_that_point_outwards_and_fade():
    def likelihood(mean, log_std, action):
        return jnp.sum(log_likelihood(TanhGaussian(mean, log_std, LOW, HIGH), action))

    slopes = jax.jit(jax.value_and_grad(likelihood, argnums=(0, 1)))
    high = in_box([[1.0, 1.0]])
    felt = []
    for mean in (-20.0, 0.0, 3.0, 8.0, 20.0):
        for log_std in (-20.0, 0.0, 2.0):
            value, gradients = slopes(jnp.full((1, 2), mean), jnp.full((1, 2), log_std), high)
            assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)
            assert (np.asarray(gradients[0]) >= 0).all()
            if log_std == 0.0:
                felt.append(float(gradients[0][0, 0]))
    assert felt == sorted(felt, reverse=True) and felt[0] > 1.0 and felt[-1] < 1e-6


def test_discrete_actions_have_their_own():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    action = jnp.asarray([0, 2, 1, 1], jnp.int32)
    found = log_likelihood(Categorical(logits), action)
    wanted = np.asarray(logits) - np.log(np.exp(np.asarray(logits)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, wanted[np.arange(4), np.asarray(action)], rtol=1e-5)


def test_distances_are_in_units_of_half_the_range():
    a, b = in_box([[0.0, 0.5]]), in_box([[1.0, 0.5]])
    assert float(regression.squared_distance(a, b, SPEC)[0]) == pytest.approx(0.5)
