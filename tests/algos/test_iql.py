"""IQL: the meaning of its expectile. Its update: `test_oracles.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from jaxrl.algos import iql


def expectile(sample, tau):
    """Where the weighted deviations above and below are equal, by bisection."""
    excess = lambda m: tau * np.clip(sample - m, 0, None).mean() - (1 - tau) * np.clip(m - sample, 0, None).mean()  # noqa: E731
    return optimize.bisect(excess, sample.min(), sample.max())


def test_the_loss_is_least_at_the_expectile():
    sample = np.random.default_rng(0).gamma(2.0, size=200)
    slope = jax.jit(jax.grad(lambda m, tau: jnp.mean(iql.expectile_loss(jnp.asarray(sample, jnp.float32) - m, tau))))
    found = []
    for tau in (0.1, 0.5, 0.7, 0.9, 0.99):
        best = expectile(sample, tau)
        assert float(slope(jnp.float32(best), tau)) == pytest.approx(0.0, abs=1e-5)
        found.append(best)
    assert found[1] == pytest.approx(sample.mean()) and found == sorted(found)
    assert 0.5 * sample.max() < found[-1] < sample.max()


def test_an_expectile_of_a_half_is_half_the_squared_error():
    error = jnp.linspace(-3, 3, 13)
    np.testing.assert_allclose(iql.expectile_loss(error, 0.5), 0.5 * np.square(error), rtol=1e-6)
    np.testing.assert_allclose(iql.expectile_loss(error, 0.9), iql.expectile_loss(-error, 1 - 0.9)[...], rtol=1e-5)
