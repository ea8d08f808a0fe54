"""Symlog and two-hot bins against numpy in float64, written from DreamerV3's equations 9 and 10."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax

from jaxrl.networks.two_hot import TwoHot, bins, symlog, two_hot

AT = np.sign(np.linspace(-20, 20, 255)) * np.expm1(np.abs(np.linspace(-20, 20, 255)))


def encoded(x):
    """The two-hot probabilities of a number, with a loop over bins."""
    found = np.zeros(255)
    if x <= AT[0] or x >= AT[-1]:
        found[0 if x <= AT[0] else -1] = 1.0
        return found
    for k in range(254):
        if AT[k] <= x < AT[k + 1]:
            found[k + 1] = (x - AT[k]) / (AT[k + 1] - AT[k])
            found[k] = 1.0 - found[k + 1]
    return found


def test_the_bins_are_even_under_symlog_and_symmetric():
    np.testing.assert_allclose(bins(255), AT, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(bins(255), -bins(255)[::-1])
    np.testing.assert_allclose(symlog(bins(255)), np.linspace(-20, 20, 255), atol=1e-5)


@given(st.floats(-1e6, 1e6, width=32))
def test_symlog(x):
    np.testing.assert_allclose(symlog(jnp.float32(x)), np.sign(x) * np.log1p(abs(np.float64(x))), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("x", [0.0, 1.0, -1.0, 0.3, -17.25, 1234.5, 3e8, -3e8, 1e12, -1e12])
def test_a_number_is_the_mean_of_its_two_bins(x):
    found = np.asarray(two_hot(jnp.float32(x), 255), np.float64)
    np.testing.assert_allclose(found, encoded(x), atol=1e-4)
    assert np.count_nonzero(found) <= 2 and abs(found.sum() - 1.0) < 1e-6
    within = np.clip(x, AT[0], AT[-1])
    np.testing.assert_allclose(found @ AT, within, rtol=1e-4, atol=1e-6)


def test_the_mean_of_equal_bins_is_0_and_that_of_others_numpys():
    assert (TwoHot(jnp.full((3, 255), 0.7)).mean() == 0.0).all(), "no rounding of the largest bins is left"
    logits = np.random.default_rng(0).normal(size=(2, 3, 255)) - 0.5 * np.abs(np.linspace(-20, 20, 255))
    wanted = softmax(logits, axis=-1) @ AT
    np.testing.assert_allclose(TwoHot(jnp.asarray(logits, jnp.float32)).mean(), wanted, rtol=1e-4)


def test_the_loss_is_the_cross_entropy_and_targets_have_no_gradient():
    logits = np.random.default_rng(1).normal(size=(4, 255))
    target = np.asarray([0.0, -2.5, 70.0, 1e4])
    wanted = [-encoded(x) @ row for x, row in zip(target, log_softmax(logits, axis=-1), strict=True)]
    distribution, target = TwoHot(jnp.asarray(logits, jnp.float32)), jnp.asarray(target, jnp.float32)
    np.testing.assert_allclose(distribution.loss(target), wanted, rtol=1e-5)
    assert not jax.grad(lambda x: jnp.sum(distribution.loss(x)))(target).any()
