"""Heads of the DQN family: shapes, dueling, masks, and the noise of noisy layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.refused import raises

from jaxrl.networks import ActionValues, CategoricalReturns, CategoricalValues, QuantileReturns, QuantileValues
from jaxrl.networks.q_heads import NoisyDense

T, B, INPUTS, ACTIONS = 2, 3, 5, 4
HEADS = {"values": ActionValues, "categorical": CategoricalValues, "quantile": QuantileValues}


def features(seed=0):
    return jax.random.normal(jax.random.key(seed), (T, B, INPUTS))


def keys(seed=0):
    return jax.random.split(jax.random.key(seed), B)


def numbers(output):
    """The output's numbers, [T, B, actions, size]."""
    if isinstance(output, CategoricalReturns):
        return output.logits
    return output.quantiles if isinstance(output, QuantileReturns) else output[..., None]


@pytest.mark.long
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_every_head_builds_in_every_form(name, dueling, noisy):
    head = HEADS[name](dueling=dueling, noisy=noisy, widths=[6])
    assert {head: 1}[head] == 1
    module = head.build(INPUTS, ACTIONS, nnx.Rngs(params=jax.random.key(0)))
    got = numbers(module(features(), None, keys()))
    assert got.shape == (T, B, ACTIONS, {"values": 1, "categorical": 51, "quantile": 51}[name])
    quiet, louder = (np.asarray(numbers(module(features(), None, key))) for key in (None, keys(1)))
    assert np.allclose(quiet, louder) != noisy and np.allclose(got, louder) != noisy


@pytest.mark.long
def test_a_dueling_distribution_is_value_plus_centerd_advantage():
    module = QuantileValues(7, dueling=True).build(INPUTS, ACTIONS, nnx.Rngs(params=jax.random.key(0)))
    got = module(features(), None, None).quantiles
    value, advantage = module.state_value(features(), None), module.advantage(features(), None)
    advantage = advantage.reshape(T, B, ACTIONS, 7)
    expected = value[:, :, None] + advantage - advantage.mean(axis=2, keepdims=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_noise_is_factorized_and_an_elements_own():
    layer = NoisyDense(INPUTS, 2, 1.0, 0.5, nnx.Rngs(params=jax.random.key(0)))
    x, key = features(), keys()
    got = np.asarray(layer(x, key))
    for b in range(B):
        draws = np.asarray(jax.random.normal(key[b], (INPUTS + 2,)))
        noise = np.sign(draws) * np.sqrt(np.abs(draws))
        inwards, outwards = noise[:INPUTS], noise[INPUTS:]
        scale = 0.5 / np.sqrt(INPUTS)
        kernel = np.asarray(layer.mean.kernel[...]) + scale * np.outer(inwards, outwards)
        np.testing.assert_allclose(got[:, b], np.asarray(x)[:, b] @ kernel + scale * outwards, rtol=1e-4, atol=1e-5)


def test_masks_come_with_the_output():
    mask = jnp.broadcast_to(jnp.asarray([True, False, True, True]), (T, B, ACTIONS))
    rngs = nnx.Rngs(params=jax.random.key(0))
    values = ActionValues().build(INPUTS, ACTIONS, rngs)(features(), mask, None)
    assert (np.asarray(values)[..., 1] < -1e30).all()
    np.testing.assert_array_equal(CategoricalValues(3).build(INPUTS, ACTIONS, rngs)(features(), mask, None).mask, mask)


@pytest.mark.long
def test_sizes_are_checked():
    for head, word in (
        (CategoricalValues(0), "atoms"),
        (QuantileValues(0), "quantiles"),
        (ActionValues(widths=(0,)), "widths"),
    ):
        raises(ValueError, word, head.build, INPUTS, ACTIONS, nnx.Rngs(params=jax.random.key(0)))
