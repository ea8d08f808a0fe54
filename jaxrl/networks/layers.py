"""The layers that every network here is made of: dense and convolutional, orthogonal, with activations by name."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.errors import ConfigError, unknown
from jaxrl.networks.convolution import convolution

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "leaky_relu": jax.nn.leaky_relu,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "identity": lambda x: x,
}

HIDDEN_GAIN = math.sqrt(2.0)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """An activation by name.

    Raises:
      ConfigError: naming the close ones, if there is none of that name.
    """
    if name not in _ACTIVATIONS:
        raise unknown("activation", str(name), _ACTIVATIONS)
    return _ACTIVATIONS[name]


def freeze(description: Any, field: str) -> None:
    """Makes a list given for a field a tuple, so that the description is hashable however it was written."""
    if isinstance(getattr(description, field), list):
        object.__setattr__(description, field, tuple(getattr(description, field)))


def check_positive(label: str, sizes: int | tuple[int, ...]) -> None:
    """Raises a ConfigError unless every size is a whole number of at least 1."""
    for size in sizes if isinstance(sizes, tuple) else (sizes,):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{label}={sizes!r}: a size must be a whole number of at least 1, not {size!r}")


class Dense(nnx.Module):
    """An affine map of the last axis, `[..., inputs]` to `[..., outputs]`."""

    def __init__(self, inputs: int, outputs: int, gain: float, rngs: nnx.Rngs):
        initial = nnx.initializers.orthogonal(gain)
        self.kernel = nnx.Param(initial(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        # As one product of two matrices: with more leading axes, if only of size 1, the gradient of the kernel
        # contracts over several axes, which XLA does 1.7 times slower on a CPU.
        rows = x.reshape((-1, x.shape[-1])).astype(jnp.float32)
        return (rows @ self.kernel[...] + self.bias[...][None]).reshape((*x.shape[:-1], -1))


def dense(inputs: int, outputs: int, gain: float, rngs: nnx.Rngs) -> Dense:
    """A dense layer with an orthogonal kernel of the given gain (Saxe et al., 2014) and zero bias."""
    return Dense(inputs, outputs, gain, rngs)


def conv(inputs: int, outputs: int, kernel: int, stride: int, padding: str, rngs: nnx.Rngs) -> nnx.Conv:
    """A square convolution over `[N, H, W, C]` with an orthogonal kernel of gain sqrt(2) and zero bias."""
    check_positive("filters", outputs)
    check_positive("kernel", kernel)
    return nnx.Conv(
        inputs,
        outputs,
        (kernel, kernel),
        strides=stride,
        padding=padding,
        kernel_init=nnx.initializers.orthogonal(HIDDEN_GAIN),
        conv_general_dilated=_convolve,
        rngs=rngs,
    )


def _convolve(x, kernel, strides, padding, **others):
    """What `nnx.Conv` calls; `others` are what it calls the convolution of `conv` by anyway."""
    return convolution(x, kernel, strides, padding)


class DenseStack(nnx.Module):
    """Dense layers, each followed by layer normalisation if asked for, and the activation.

    Maps `[..., inputs]` to `[..., features]`.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], activation_name: str, layer_norm: bool, rngs: nnx.Rngs):
        check_positive("widths", widths)
        self.activation = activation(activation_name)
        self.depth = len(widths)
        self.layer_norm = layer_norm
        for i, width in enumerate(widths):
            setattr(self, f"layer_{i}", dense(inputs, width, HIDDEN_GAIN, rngs))
            if layer_norm:
                setattr(self, f"norm_{i}", nnx.LayerNorm(width, rngs=rngs))
            inputs = width
        self.features = inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = getattr(self, f"layer_{i}")(x)
            if self.layer_norm:
                x = getattr(self, f"norm_{i}")(x)
            x = self.activation(x)
        return x
