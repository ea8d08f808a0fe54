"""The convolution is JAX's, its gradients too, and within a loop they are of the form that CPUs are quick at."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl.networks.convolution import FORM, convolution

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


@pytest.mark.parametrize(("size", "window", "strides", "padding"), CASES)
def test_it_is_the_convolution_of_jax_and_so_are_its_gradients(size, window, strides, padding):
    x, kernel = of((3, *size, 2), 0), of((*window, 2, 5), 1)
    expected, pull = jax.vjp(lambda x, kernel: jax_convolution(x, kernel, strides, padding), x, kernel)
    found, ours = jax.vjp(lambda x, kernel: convolution(x, kernel, strides, padding), x, kernel)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    gradient = of(expected.shape, 2)
    for mine, other in zip(ours(gradient), pull(gradient), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


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
