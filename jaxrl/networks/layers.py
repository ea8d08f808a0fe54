"""Layers shared by all networks: dense, convolutional and normalization layers, dropout, and activations by name."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.shared_batch import mean_over_batch
from jaxrl.networks.convolution import convolution
from jaxrl.networks.unit import UnitDense

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
    """Return the activation function with this name.

    Raises:
      ConfigError: there is no activation with this name; the message suggests similar names.
    """
    if name not in _ACTIVATIONS:
        raise unknown("activation", str(name), _ACTIVATIONS)
    return _ACTIVATIONS[name]


def check_positive(label: str, sizes: int | tuple[int, ...]) -> None:
    """Raise a ConfigError unless all sizes are integers of at least 1."""
    for size in sizes if isinstance(sizes, tuple) else (sizes,):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{label}={sizes!r}: a size must be a whole number of at least 1, not {size!r}")


def check_finite(label: str, number: float) -> None:
    """Raise a ConfigError unless a number is finite."""
    if not math.isfinite(number):
        raise ConfigError(f"{label}={number!r} must be a finite number")


def check_range(label: str, ends: tuple[float, float]) -> None:
    """Raise a ConfigError unless `ends` are two finite numbers in increasing order."""
    numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
    if not numbers or ends[0] >= ends[1]:
        raise ConfigError(
            f"{label}={ends!r:.80} must be two finite numbers, the smaller one first, such as (-10.0, 2.0)"
        )


DTYPES = ("float32", "bfloat16")


def compute_dtype(name: str) -> jnp.dtype:
    """Return the compute dtype with this name; parameters are always float32.

    Raises:
      ConfigError: the name is not one of `DTYPES`.
    """
    if name not in DTYPES:
        raise unknown("dtype", str(name), DTYPES)
    return jnp.dtype(name)


class Dense(nnx.Module):
    """Affine layer from `[..., inputs]` to `[..., outputs]`, computed and returned in `dtype`."""

    def __init__(self, inputs: int, outputs: int, gain: float, rngs: nnx.Rngs, dtype: str = "float32"):
        self.dtype = compute_dtype(dtype)
        initial = nnx.initializers.orthogonal(gain)
        self.kernel = nnx.Param(initial(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        # The leading axes are merged, so that this is a product of two matrices. With more axes, even of size 1, the
        # gradient of the kernel contracts over several axes, which is 1.7 times slower with XLA on a CPU.
        rows, kernel, bias = (a.astype(self.dtype) for a in (x, self.kernel[...], self.bias[...]))
        return (rows.reshape((-1, x.shape[-1])) @ kernel + bias[None]).reshape((*x.shape[:-1], -1))


def dense(inputs: int, outputs: int, gain: float | None, rngs: nnx.Rngs, dtype: str = "float32") -> Dense | UnitDense:
    """Create a dense layer, initialized with an orthogonal kernel of gain `gain` (Saxe et al., 2014) and zero bias.

    With `gain=None`, the layer is a float32 `UnitDense`: the columns of its kernel have unit norm, also while training.
    """
    return UnitDense(inputs, outputs, rngs, bias=True) if gain is None else Dense(inputs, outputs, gain, rngs, dtype)


def conv(
    inputs: int, outputs: int, kernel: int, stride: int, padding: str, rngs: nnx.Rngs, dtype: str = "float32"
) -> nnx.Conv:
    """Create a convolution of `[N, H, W, C]`, initialized with an orthogonal kernel of gain sqrt(2) and zero bias.

    `kernel` is both the height and the width of the kernel.
    """
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


class SpectralConv(nnx.Module):
    """Convolution with spectral normalization: the kernel is divided by its largest singular value.

    The stride is 1, and inputs and outputs have equal shapes. The kernel is treated as a matrix of all other axes by
    the output channels. Each call in training performs one step of the power iteration (Miyato et al., 2018,
    arXiv:1802.05957, algorithm 1); the current vector is the model state.
    """

    def __init__(self, features: int, kernel: int, rngs: nnx.Rngs, dtype: str = "float32"):
        check_positive("filters", features)
        initial, shape = nnx.initializers.orthogonal(HIDDEN_GAIN), (kernel, kernel, features, features)
        self.kernel = nnx.Param(initial(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.dtype = compute_dtype(dtype)
        self.use_running_average = False  # set by `eval()` of a module
        direction = jax.random.normal(rngs.params(), (features,), jnp.float32)
        self.left = nnx.BatchStat(direction / jnp.linalg.norm(direction))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.kernel[...], self.bias[...]
        matrix, left = kernel.reshape(-1, kernel.shape[-1]), self.left[...]
        right = _unit(jax.lax.stop_gradient(matrix) @ left)
        if not self.use_running_average:
            left = _unit(right @ jax.lax.stop_gradient(matrix))
            self.left[...] = left
        kernel = kernel / (right @ matrix @ left)
        x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
        return convolution(x, kernel, (1, 1), "SAME") + jnp.expand_dims(bias, (0, 1, 2))


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x), 1e-12)


def _convolve(x, kernel, strides, padding, **others):
    """Call `convolution` with the arguments that `nnx.Conv` passes; `others` are constant and ignored."""
    return convolution(x, kernel, strides, padding)


OVER_BATCH = ("batch", "batch_renorm")  # normalizations that use batch statistics
NORMALIZATIONS = ("layer", "rms", *OVER_BATCH)


def normalization(name: str, features: int, rngs: nnx.Rngs) -> nnx.Module:
    """Create a normalization layer for the last axis, with a learned scale and offset.

    Batch statistics are computed over the rows of all devices, without rows of weight 0 (see
    `jaxrl.core.shared_batch`).

    Args:
      name: the kind of normalization:
        "layer" normalizes each vector separately (Ba et al., 2016);
        "rms" does the same without subtracting the mean and without an offset (Zhang and Sennrich, 2019);
        "batch" normalizes each feature over all leading axes in training, and by running statistics otherwise (Ioffe
        and Szegedy, 2015);
        "batch_renorm" is `BatchRenorm`.
      features: number of features.
      rngs: random number generators for the initial parameters.

    Raises:
      ConfigError: there is no normalization with this name.
    """
    if name == "layer":
        return nnx.LayerNorm(features, rngs=rngs)
    if name == "rms":
        return nnx.RMSNorm(features, rngs=rngs)
    if name == "batch":
        return BatchNorm(features, epsilon=1e-5)
    if name == "batch_renorm":
        return BatchRenorm(features)
    raise unknown("normalization", str(name), NORMALIZATIONS)


class BatchNorm(nnx.Module):
    """Batch normalization of the last axis, with statistics over the batch's rows on all devices.

    Rows of weight 0 are left out (see `jaxrl.core.shared_batch`).

    Args:
      features: size of the last axis.
      epsilon: number added to variances.
      momentum: decay rate of the running statistics.
      unit: whether scale and bias are normalized together, as in `jaxrl.networks.unit`.
    """

    def __init__(self, features: int, *, epsilon: float, momentum: float = 0.99, unit: bool = False):
        self.epsilon, self.momentum, self.prefix = epsilon, momentum, "unit_" if unit else ""
        self.use_running_average = False  # set by `eval()` of a module
        setattr(self, f"{self.prefix}scale", nnx.Param(jnp.ones((features,), jnp.float32)))
        setattr(self, f"{self.prefix}bias", nnx.Param(jnp.zeros((features,), jnp.float32)))
        self.mean = nnx.BatchStat(jnp.zeros((features,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            mean = mean_over_batch(x)
            var = mean_over_batch(jnp.square(x - self._wide(mean, x)))
            for running, new in ((self.mean, mean), (self.var, var)):
                running[...] = self.momentum * running[...] + (1.0 - self.momentum) * jax.lax.stop_gradient(new)
        scale, bias = (getattr(self, f"{self.prefix}{name}")[...] for name in ("scale", "bias"))
        factor = scale * jax.lax.rsqrt(var + self.epsilon)
        return (x - self._wide(mean, x)) * self._wide(factor, x) + self._wide(bias, x)

    def _wide(self, vector: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))


class BatchRenorm(nnx.Module):
    """Batch renormalization (Ioffe, 2017, arXiv:1702.03275) of the last axis, with a learned scale and offset.

    In training, a feature is normalized by the mean and deviation of the batch, and then corrected, within limits,
    towards the result with running statistics. Otherwise, it is normalized by the running statistics. Training batches
    update the running statistics. There is no correction in the first `warm_up` batches, when the running statistics
    are still close to their initial values.

    Args:
      features: size of the last axis.
      momentum: decay rate of the running statistics.
      epsilon: number added to variances.
      r_max: maximum of the correction factor, the ratio of the batch's deviation to the running deviation; the minimum
        is 1 / r_max.
      d_max: maximum of the correction offset, the difference between the means in units of the running deviation.
      warm_up: number of training batches before the correction begins.
    """

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warm_up: int = 100_000,
    ):
        self.momentum, self.epsilon, self.r_max, self.d_max, self.warm_up = momentum, epsilon, r_max, d_max, warm_up
        self.use_running_average = False  # set by `eval()` of a module
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((features,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((features,), jnp.float32))
        self.batches = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - 1))
        mean, var, scale, bias = (jnp.expand_dims(v[...], axes) for v in (self.mean, self.var, self.scale, self.bias))
        deviation = jnp.sqrt(var + self.epsilon)
        if self.use_running_average:
            return (x - mean) / deviation * scale + bias
        batch_mean = jnp.expand_dims(mean_over_batch(x), axes)
        batch_var = jnp.expand_dims(mean_over_batch(jnp.square(x - batch_mean)), axes)
        batch_deviation = jnp.sqrt(batch_var + self.epsilon)
        warm = self.batches[...] >= self.warm_up
        r = jnp.where(warm, jnp.clip(batch_deviation / deviation, 1.0 / self.r_max, self.r_max), 1.0)
        d = jnp.where(warm, jnp.clip((batch_mean - mean) / deviation, -self.d_max, self.d_max), 0.0)
        r, d = jax.lax.stop_gradient((r, d))
        for running, new in ((self.mean, batch_mean), (self.var, batch_var)):
            running[...] = self.momentum * running[...] + (1.0 - self.momentum) * jax.lax.stop_gradient(new).ravel()
        self.batches[...] = self.batches[...] + 1
        return ((x - batch_mean) / batch_deviation * r + d) * scale + bias


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Apply dropout (Srivastava et al., 2014) to `x`, `[..., B, features]`.

    Each feature is set to 0 with probability `rate`; the others are divided by 1 - rate. With one key per row, `[B]`,
    the result does not depend on the assignment of rows to devices.
    """
    shape = (*x.shape[:-2], x.shape[-1])
    mask = jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, shape), out_axes=x.ndim - 2)(key)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros_like(x))


class DenseStack(nnx.Module):
    """Dense layers from `[..., inputs]` to `[..., features]`, each followed by normalization, if any, and activation.

    Layers and activations are computed in `dtype`; the outputs of normalizations and the features are float32. With
    `normalize_inputs`, the inputs of each layer and the features are normalized instead, that is, after the
    activations. If keys are passed, dropout is applied to the outputs of each layer, before the normalization and the
    activation, as in DroQ's critics.
    """

    def __init__(
        self,
        inputs: int,
        widths: tuple[int, ...],
        activation_name: str,
        normalization_name: str | None,
        rngs: nnx.Rngs,
        dtype: str = "float32",
        *,
        normalize_inputs: bool = False,
        dropout: float = 0.0,
    ):
        check_positive("widths", widths)
        compute_dtype(dtype)
        self.activation = activation(activation_name)
        self.depth = len(widths)
        self.normalized = normalization_name is not None
        self.normalize_inputs = normalize_inputs and self.normalized
        self.dropout = dropout
        for i, width in enumerate(widths):
            setattr(self, f"layer_{i}", dense(inputs, width, HIDDEN_GAIN, rngs, dtype))
            if normalization_name is not None:
                normalized = inputs if normalize_inputs else width
                setattr(self, f"norm_{i}", normalization(normalization_name, normalized, rngs))
            inputs = width
        self.features = inputs
        if normalization_name is not None and normalize_inputs:
            self.norm_features = normalization(normalization_name, inputs, rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        for i in range(self.depth):
            if self.normalize_inputs:
                x = getattr(self, f"norm_{i}")(x.astype(jnp.float32))
            x = getattr(self, f"layer_{i}")(x)
            if self.dropout and key is not None:
                x = dropped(x, self.dropout, jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(key))
            if self.normalized and not self.normalize_inputs:
                x = getattr(self, f"norm_{i}")(x.astype(jnp.float32))
            x = self.activation(x)
        x = x.astype(jnp.float32)
        return self.norm_features(x) if self.normalize_inputs else x


class DeepHead(nnx.Module):
    """Dense layers followed by an output layer or a head, which receives any further arguments."""

    def __init__(self, hidden: DenseStack, output: nnx.Module):
        self.hidden = hidden
        self.output = output

    def __call__(self, features: jax.Array, *others: Any) -> Any:
        return self.output(self.hidden(features), *others)
