"""The layers that every network here is made of: dense and convolutional, orthogonal, with activations by name."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.core.errors import ConfigError, unknown
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
    """Make a field a tuple, so that the description is hashable whether a tuple, a list or an array was written.

    Raises:
      ConfigError: the value is not a sequence, and None only where that is the default.
    """
    value, name = getattr(description, field), f"{type(description).__name__}.{field}"
    if value is None and getattr(type(description), field) is None:
        return
    if not isinstance(value, tuple | list | range) and np.ndim(value) != 1:
        raise ConfigError(f"{name}={value!r:.80} must be a tuple or a list, such as {(value,)!r:.80}")
    object.__setattr__(description, field, tuple(x.item() if isinstance(x, np.generic) else x for x in value))


def check_positive(label: str, sizes: int | tuple[int, ...]) -> None:
    """Raises a ConfigError unless every size is a whole number of at least 1."""
    for size in sizes if isinstance(sizes, tuple) else (sizes,):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{label}={sizes!r}: a size must be a whole number of at least 1, not {size!r}")


DTYPES = ("float32", "bfloat16")


def compute_dtype(name: str) -> jnp.dtype:
    """What a layer computes in, by name; parameters are float32 in either.

    Raises:
      ConfigError: it is none of `DTYPES`.
    """
    if name not in DTYPES:
        raise unknown("dtype", str(name), DTYPES)
    return jnp.dtype(name)


class Dense(nnx.Module):
    """An affine map of the last axis, `[..., inputs]` to `[..., outputs]`, computed and given in `dtype`."""

    def __init__(self, inputs: int, outputs: int, gain: float, rngs: nnx.Rngs, dtype: str = "float32"):
        self.dtype = compute_dtype(dtype)
        initial = nnx.initializers.orthogonal(gain)
        self.kernel = nnx.Param(initial(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        # As one product of two matrices: with more leading axes, if only of size 1, the gradient of the kernel
        # contracts over several axes, which XLA does 1.7 times slower on a CPU.
        rows, kernel, bias = (a.astype(self.dtype) for a in (x, self.kernel[...], self.bias[...]))
        return (rows.reshape((-1, x.shape[-1])) @ kernel + bias[None]).reshape((*x.shape[:-1], -1))


def dense(inputs: int, outputs: int, gain: float, rngs: nnx.Rngs, dtype: str = "float32") -> Dense:
    """A dense layer with an orthogonal kernel of the given gain (Saxe et al., 2014) and zero bias."""
    return Dense(inputs, outputs, gain, rngs, dtype)


def conv(
    inputs: int, outputs: int, kernel: int, stride: int, padding: str, rngs: nnx.Rngs, dtype: str = "float32"
) -> nnx.Conv:
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
        dtype=compute_dtype(dtype),
        rngs=rngs,
    )


def _convolve(x, kernel, strides, padding, **others):
    """What `nnx.Conv` calls; `others` are what it calls the convolution of `conv` by anyway."""
    return convolution(x, kernel, strides, padding)


NORMALIZATIONS = ("layer", "batch")


def normalization(name: str, features: int, rngs: nnx.Rngs) -> nnx.Module:
    """A normalization of the last axis, with a scale and an offset that are learned.

    Args:
      name: "layer" (Ba et al., 2016), of each vector by itself; "batch" (Ioffe and Szegedy, 2015), of each feature
        over all leading axes while training, and by running statistics otherwise. Every device normalizes with the
        statistics of its own part of a batch; the running ones are averaged over devices.
      features: how many there are.
      rngs: for the initial parameters.

    Raises:
      ConfigError: there is no normalization of that name.
    """
    if name == "layer":
        return nnx.LayerNorm(features, rngs=rngs)
    if name == "batch":
        return nnx.BatchNorm(features, rngs=rngs)
    raise unknown("normalization", str(name), NORMALIZATIONS)


class DenseStack(nnx.Module):
    """Dense layers, each followed by a normalization if asked for, and the activation.

    Maps `[..., inputs]` to `[..., features]`. Layers and activations compute in `dtype`; what normalizations give, and
    the features, are float32.
    """

    def __init__(
        self,
        inputs: int,
        widths: tuple[int, ...],
        activation_name: str,
        normalization_name: str | None,
        rngs: nnx.Rngs,
        dtype: str = "float32",
    ):
        check_positive("widths", widths)
        compute_dtype(dtype)
        self.activation = activation(activation_name)
        self.depth = len(widths)
        self.normalized = normalization_name is not None
        for i, width in enumerate(widths):
            setattr(self, f"layer_{i}", dense(inputs, width, HIDDEN_GAIN, rngs, dtype))
            if normalization_name is not None:
                setattr(self, f"norm_{i}", normalization(normalization_name, width, rngs))
            inputs = width
        self.features = inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = getattr(self, f"layer_{i}")(x)
            if self.normalized:
                x = getattr(self, f"norm_{i}")(x.astype(jnp.float32))
            x = self.activation(x)
        return x.astype(jnp.float32)
