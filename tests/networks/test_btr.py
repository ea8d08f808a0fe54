"""Parts of Beyond the Rainbow: spectral normalization, adaptive pooling, implicit quantiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.config import decode, encode
from jaxrl.core.types import EnvSpec, NetworkInputs
from jaxrl.networks import ImpalaResNet, ImplicitQuantileValues, QNetwork
from jaxrl.networks.layers import SpectralConv
from jaxrl.networks.torsos import adaptive_max_pool

T, B, INPUTS, ACTIONS = 2, 3, 5, 4
IMAGES = EnvSpec("images", spaces.Box(0, 1, (10, 10, 2), np.bool_), spaces.Discrete(ACTIONS))
NETWORK = QNetwork(
    ImpalaResNet(channels=(4, 6), width=None, spectral=True, pool=3),
    head=ImplicitQuantileValues(quantiles=5, cosines=7, dueling=True, widths=(8,), noisy=True),
)


def numpy_pool(x, size):
    """As PyTorch defines it, pixel by pixel."""
    out = np.empty((x.shape[0], size, size, x.shape[3]), x.dtype)
    for i in range(size):
        for j in range(size):
            rows, columns = (
                slice(int(np.floor(n * length / size)), int(np.ceil((n + 1) * length / size)))
                for n, length in ((i, x.shape[1]), (j, x.shape[2]))
            )
            out[:, i, j] = x[:, rows, columns].max(axis=(1, 2))
    return out


@pytest.mark.parametrize(("height", "width"), [(11, 11), (6, 6), (7, 13), (2, 5)])
def test_adaptive_pooling_takes_the_largest_of_each_part(height, width):
    x = np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)
    np.testing.assert_array_equal(adaptive_max_pool(jnp.asarray(x), 6), numpy_pool(x, 6))


def test_a_spectral_kernel_has_a_largest_singular_value_of_1():
    """The power iteration converges to numpy's singular value, in training alone, and keeps what it came to."""
    module = SpectralConv(6, 3, nnx.Rngs(params=0))
    rng = np.random.default_rng(1)
    module.kernel[...] = jnp.asarray(rng.normal(size=(3, 3, 6, 6)) * np.array([3.0, 1, 1, 1, 1, 1]), jnp.float32)
    module.bias[...] = jnp.asarray(rng.normal(size=6), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 4, 4, 6)), jnp.float32)
    largest = np.linalg.svd(np.asarray(module.kernel[...]).reshape(-1, 6), compute_uv=False)[0]
    plain = jax.lax.conv(x.transpose(0, 3, 1, 2), module.kernel[...].transpose(3, 2, 0, 1), (1, 1), "SAME")
    plain = np.asarray(plain).transpose(0, 2, 3, 1)
    module.eval()
    before = module(x)
    np.testing.assert_array_equal(before, module(x))
    module.train()
    for _ in range(60):
        module(x)
    expected = plain / largest + np.asarray(module.bias[...])
    assert not np.allclose(before, expected, rtol=1e-2)
    np.testing.assert_allclose(module(x), expected, rtol=1e-4, atol=1e-5)
    module.eval()
    np.testing.assert_allclose(module(x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(module.left[...]), 1.0, rtol=1e-6)


def test_only_residual_convolutions_are_spectral():
    params, model_state = jax.eval_shape(lambda key: NETWORK.init(key, IMAGES), jax.random.key(0))
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(model_state)
    }
    blocks = {f"torso/torso/trunk/block_{i}_{name}/left" for i in (0, 1) for name in ("a0", "a1", "b0", "b1")}
    assert names == blocks
    assert params["head"]["embedding"]["kernel"].shape == (7, 6 * 3 * 3)


def test_implicit_quantiles_are_at_the_midpoints_or_at_fractions_of_their_own():
    """The numbers of the module in numpy, with and without keys."""
    head = ImplicitQuantileValues(quantiles=3, cosines=4)
    module = head.build(INPUTS, ACTIONS, nnx.Rngs(params=0))
    features, keys = jax.random.normal(jax.random.key(0), (T, B, INPUTS)), jax.random.split(jax.random.key(1), B)
    still, drawn = module(features, None, None), module(features, None, keys)
    np.testing.assert_allclose(still.fractions, np.broadcast_to([1 / 6, 1 / 2, 5 / 6], (T, B, 3)), rtol=1e-6)
    assert len(np.unique(drawn.fractions[0])) == B * 3 and (drawn.fractions[0] == drawn.fractions[1]).all()
    kernel, bias = np.asarray(module.embedding.kernel[...]), np.asarray(module.embedding.bias[...])
    output = module.values.advantage.output
    for got in (still, drawn):
        for t, b, n in np.ndindex(T, B, 3):
            cosines = np.cos(np.pi * np.arange(4) * got.fractions[t, b, n])
            joined = np.asarray(features)[t, b] * np.maximum(cosines @ kernel + bias, 0.0)
            expected = joined @ np.asarray(output.kernel[...]) + np.asarray(output.bias[...])
            np.testing.assert_allclose(got.quantiles[t, b, :, n], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_the_network_is_written_and_read_and_runs():
    assert decode(encode(NETWORK)) == NETWORK
    params, model_state = NETWORK.init(jax.random.key(0), IMAGES)
    # At first all singular values of a kernel are the same, and every vector is one of its singular vectors.
    params = jax.tree.map(lambda x: x * jax.random.uniform(jax.random.key(3), x.shape), params)
    inputs = NetworkInputs.of_transitions(jax.random.bernoulli(jax.random.key(1), 0.5, (B, 10, 10, 2)))
    keys = jax.random.split(jax.random.key(2), B)

    def run(train, key):
        return NETWORK.apply(params, inputs, (), spec=IMAGES, model_state=model_state, train=train, key=key)

    (still, _, same), (moved, _, after) = run(False, None), run(True, keys)
    assert still.quantiles.shape == (1, B, ACTIONS, 5) and same is model_state
    assert all(not np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (model_state, after)), strict=True))
    assert not np.allclose(still.quantiles, moved.quantiles)
    assert dataclasses.replace(NETWORK.torso, pool=None).build(IMAGES.observation_space, nnx.Rngs(0)).features == 54
