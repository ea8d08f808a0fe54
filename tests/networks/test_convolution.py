"""The convolution is JAX's, its gradients too, of a form that CPUs are quick at; many images are computed in slices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxrl.core import spaces
from jaxrl.networks import ImpalaResNet, MinAtarCNN, NatureCNN
from jaxrl.networks import convolution as convolutions
from jaxrl.networks.convolution import FORM, convolution, in_slices, patch_bytes

CASES = [
    ((12, 12), (8, 8), (4, 4), "VALID"),
    ((11, 9), (4, 3), (2, 3), "VALID"),  # rows and columns that no stride reaches
    ((10, 7), (3, 3), (1, 1), "SAME"),
    ((9, 8), (4, 4), (3, 2), "SAME"),
    ((5, 6), (2, 3), (2, 1), ((1, 2), (0, 3))),
    ((6, 6), (1, 1), (2, 2), "VALID"),
]


def of(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def jax_convolution(x, kernel, strides, padding):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=FORM)


@pytest.mark.long
@pytest.mark.parametrize(("size", "window", "strides", "padding"), CASES)
def test_it_is_the_convolution_of_jax_and_so_are_its_gradients(size, window, strides, padding):
    x, kernel = of((3, *size, 2), 0), of((*window, 2, 5), 1)
    expected, pull = jax.vjp(lambda x, kernel: jax_convolution(x, kernel, strides, padding), x, kernel)
    found, ours = jax.vjp(lambda x, kernel: convolution(x, kernel, strides, padding), x, kernel)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    gradient = of(expected.shape, 2)
    for mine, other in zip(ours(gradient), pull(gradient), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


@pytest.mark.long
def test_it_can_be_mapped_over_networks():
    x, kernels = of((4, 6, 6, 2), 0), of((3, 3, 3, 2, 5), 1)

    def loss(kernel):
        return jnp.sum(jnp.sin(convolution(x, kernel, (1, 1), "VALID")))

    together = jax.vmap(jax.grad(loss))(kernels)
    np.testing.assert_allclose(together, jnp.stack([jax.grad(loss)(kernel) for kernel in kernels]), atol=1e-4)


def test_within_a_loop_all_are_of_the_quick_form():
    x, kernels = of((4, 12, 12, 2), 0), (of((4, 4, 2, 3), 1), of((3, 3, 3, 5), 2))

    def forms(convolution):
        def loss(kernels):
            first = jnp.tanh(convolution(x, kernels[0], (2, 2), "VALID"))
            return jnp.sum(jnp.tanh(convolution(first, kernels[1], (1, 1), "VALID")))

        def learn(kernels, _):
            return jax.tree.map(lambda k, g: k - 0.1 * g, kernels, jax.grad(loss)(kernels)), None

        program = jax.jit(lambda kernels: lax.scan(learn, kernels, None, length=3)[0]).lower(kernels).compile()
        return set(re.findall(r" convolution\(.*dim_labels=(\S+),", program.as_text()))

    quick = "b01f_01io->b01f"
    assert forms(convolution) == {quick}
    assert forms(jax_convolution) != {quick}, "XLA does it by itself now: convolution.py can go"


GRIDS, IMAGES = spaces.Box(0, 1, (10, 10, 4), np.bool_), spaces.Box(0, 255, (3, 36, 40), np.uint8)  # channels first
TORSOS = [
    (MinAtarCNN(2, 3, 4, normalization="layer"), GRIDS, 4 * 8 * 8 * 3 * 3 * 4),
    (NatureCNN((2, 2, 2), 4), IMAGES, 4 * 8 * 9 * 8 * 8 * 3),
    (ImpalaResNet((2, 3), 4), IMAGES, 4 * 36 * 40 * 3 * 3 * 3),
]


def loss_of(torso, space, count):
    """A loss of a torso's features, its parameters, and observations for it."""
    built = torso.build(space, nnx.Rngs(0))
    built.eval()  # nothing but the features comes of it
    graph, params, rest = nnx.split(built, nnx.Param, ...)
    x = np.random.default_rng(0).integers(0, 2 if space is GRIDS else 256, (2, count // 2, *space.shape))

    def loss(params, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, params, rest)(x)))

    return built, loss, params, jnp.asarray(x, space.dtype)


@pytest.mark.long
@pytest.mark.parametrize(("torso", "space", "of_an_image"), TORSOS)
def test_many_images_are_computed_in_slices_with_the_same_features_and_gradients(
    torso, space, of_an_image, monkeypatch
):
    built, loss, params, x = loss_of(torso, space, 24)
    assert built.trunk.patch_bytes == of_an_image
    whole = jax.jit(jax.value_and_grad(loss))(params, x)
    assert "scan" not in str(jax.make_jaxpr(loss)(params, x))
    monkeypatch.setattr(convolutions, "_MANY_BYTES", 24 * of_an_image - 1)
    monkeypatch.setattr(convolutions, "_FEWEST", 1)
    monkeypatch.setattr(convolutions, "_SLICE_BYTES", 7 * of_an_image)  # 6 divides 24
    _, loss, params, x = loss_of(torso, space, 24)  # another function: JAX remembers what it traced
    assert re.search(r"scan\[.*length=4", str(jax.make_jaxpr(loss)(params, x)), re.DOTALL)
    sliced = jax.jit(jax.value_and_grad(loss))(params, x)

    def assert_close(a, b):
        largest = float(np.abs(a).max())  # sums of large terms round by their size, and differently on each processor
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 + 1e-5 * largest)

    jax.tree.map(assert_close, whole, sliced)


@pytest.mark.long
def test_what_is_normalized_over_a_batch_is_computed_whole(monkeypatch):
    monkeypatch.setattr(convolutions, "_MANY_BYTES", 0)
    _, loss, params, x = loss_of(MinAtarCNN(2, 3, 4, normalization="batch"), GRIDS, 24)
    assert "scan" not in str(jax.make_jaxpr(loss)(params, x))


@pytest.mark.parametrize(("count", "slices"), [(4096, 8), (3927, 7), (3640, None), (4099, None)])
def test_slices_have_a_size_that_divides_the_images_and_is_not_too_small(count, slices):
    """Of MinAtar's, at most 910 fit; 4,099 is a prime number."""
    of_an_image = patch_bytes(8, 8, 3, 4)
    x = jax.ShapeDtypeStruct((count, 10, 10, 4), jnp.float32)
    program = str(jax.make_jaxpr(lambda x: in_slices(lambda x: x.reshape(len(x), -1), x, of_an_image))(x))
    found = re.search(r"scan\[.*?length=(\d+)", program, re.DOTALL)
    assert (found and int(found[1])) == slices


@pytest.mark.long
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator computes all images at once")
def test_a_gradient_of_many_images_takes_the_memory_of_a_slice(monkeypatch):
    def memory():
        _, loss, params, _ = loss_of(NatureCNN((8, 8, 8), 4), IMAGES, 2)
        x = jax.ShapeDtypeStruct((1, 1024, *IMAGES.shape), jnp.uint8)
        return jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    in_slices_of_128 = memory()
    monkeypatch.setattr(convolutions, "_MANY_BYTES", 2**40)
    assert 4 * in_slices_of_128 < memory()
