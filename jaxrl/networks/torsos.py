"""Torsos: configurations of modules that map observations to features.

A torso is a frozen, hashable configuration. `build(space, rngs)` creates a `flax.nnx` module that maps observations
with any number of leading axes to features `[..., features]`; the module's attribute `features` is the number of
features. The module converts observations to float32: uint8 is scaled to [0, 1], categorical integers are one-hot
encoded, and other arrays are cast.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.networks.convolution import in_slices, patch_bytes
from jaxrl.networks.layers import (
    OVER_BATCH,
    DenseStack,
    SpectralConv,
    activation,
    check_positive,
    conv,
    normalization,
)
from jaxrl.networks.two_hot import symlog


class Encoder(Protocol):
    """Module built by a torso, which maps observations `[..., *shape]` to `[..., features]`."""

    @property
    def features(self) -> int: ...
    def __call__(self, observation: Any, /) -> jax.Array: ...


class Torso(Protocol):
    """Frozen, hashable configuration of a module that maps observations to features."""

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        """Create the `flax.nnx` module.

        Raises:
          ConfigError: the torso does not fit the space.
        """
        ...


# --- observations as numbers ---------------------------------------------------------------------------------------


def to_float(x: jax.Array, space: spaces.Box) -> jax.Array:
    """Convert elements of a box to float32, scaling uint8 to [0, 1] by the space's largest bound (255 for pixels).

    Elements of other dtypes are only cast: for a uint8 space, such elements have already been normalized.
    """
    if x.dtype == jnp.uint8:
        return x.astype(jnp.float32) * jnp.float32(1.0 / max(int(space.high.max(initial=1)), 1))
    return x.astype(jnp.float32)


def flat_size(space: spaces.Space) -> int:
    """Return the size of the vector that `flatten` returns for an element of the space."""
    if isinstance(space, spaces.Composite):
        return sum(map(flat_size, spaces.leaves(space)))
    if isinstance(space, spaces.Discrete):
        return space.n
    if isinstance(space, spaces.MultiDiscrete):
        return sum(space.nvec)
    return math.prod(spaces.expect(space, spaces.Box).shape)


def flatten(x: Any, space: spaces.Space) -> jax.Array:
    """Convert elements `[..., *shape]` of a space to float32 vectors `[..., n]`.

    Boxes are flattened, categories are one-hot encoded, and the parts of a dictionary or a tuple are concatenated.
    """
    if isinstance(space, spaces.Composite):
        return jnp.concatenate([flatten(x[key], child) for key, child in space.items], axis=-1)
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(x, space.n, dtype=jnp.float32)
    if isinstance(space, spaces.MultiDiscrete):
        parts = [jax.nn.one_hot(x[..., i], n, dtype=jnp.float32) for i, n in enumerate(space.nvec)]
        return jnp.concatenate(parts, axis=-1)
    box = spaces.expect(space, spaces.Box)
    leading = x.shape[: x.ndim - len(box.shape)]
    return to_float(x, box).reshape((*leading, math.prod(box.shape)))


def stretched(x: jax.Array, space: spaces.Space) -> jax.Array:
    """Divide numbers whose bounds are within (-1, 1) by the larger magnitude of the bounds; keep other numbers."""
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or not space.bounded:
        return x
    largest = np.maximum(np.abs(space.low), np.abs(space.high)).astype(np.float32)
    small = (largest > 0) & (largest < 1)
    if not small.any():
        return x
    scale = np.where(small, largest, np.float32(1.0))
    return x.astype(jnp.float32) / scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)


# --- vectors -------------------------------------------------------------------------------------------------------


class FlatTorso(nnx.Module):
    """Module that converts observations to vectors `[..., n]` and passes them to `layers`.

    `layers` has an attribute `features`, the size of its outputs. `stretch` and `symlog` are as in `MLP`, and are
    applied in this order.
    """

    def __init__(self, space: spaces.Space, layers: Any, *, stretch: bool = False, symlog: bool = False):
        self.space = space
        self.dense = layers
        self.features = layers.features
        self.stretch = stretch
        self.symlog = symlog

    def __call__(self, observation: Any) -> jax.Array:
        if self.stretch:
            observation = stretched(observation, self.space)
        vector = flatten(observation, self.space)
        return self.dense(symlog(vector) if self.symlog else vector)


def vector_size(torso: Torso, space: spaces.Space) -> int:
    """Return the size of the vectors that a torso of dense layers reads from observations of `space`.

    Raises:
      ConfigError: the torso cannot read observations of this space.
    """
    name = type(torso).__name__
    if isinstance(space, spaces.Dict):
        raise ConfigError(
            f"{name} cannot read a dictionary observation ({', '.join(space.spaces)}); use torso=None or DictEncoder"
        )
    if isinstance(space, spaces.Tuple):
        raise ConfigError(
            f"{name} cannot read the observation {space}; use a Dict, or flatten it with wrappers.Flatten"
        )
    size = flat_size(space)
    if size == 0:
        raise ConfigError(f"{name} cannot read the empty observation {space}; exclude it with DictEncoder")
    return size


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers, applied to the flattened observation.

    Args:
      widths: widths of the layers; without layers, the features are the flattened observation.
      activation: function after every layer, by name.
      normalization: "layer", "rms", "batch" or "batch_renorm" before every activation; None: no normalization.
      dtype: compute dtype of layers and activations, "float32" or "bfloat16"; parameters, normalizations and features
        are always float32.
      stretch: whether to divide each number whose bounds are within (-1, 1) by the larger magnitude of the bounds,
        because newly initialized layers respond little to small inputs. Do not use it for normalized observations.
      symlog: whether to replace each input x by sign(x) ln(1 + |x|), so that large inputs do not saturate the layers,
        as in Dreamer (Hafner et al., 2023, arXiv:2301.04104). Unlike `normalize_observation`, it needs no statistics.
    """

    widths: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    normalization: str | None = None
    dtype: str = "float32"
    stretch: bool = False
    symlog: bool = False

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        size = vector_size(self, space)
        stack = DenseStack(size, self.widths, self.activation, self.normalization, rngs, self.dtype)
        return FlatTorso(space, stack, stretch=self.stretch, symlog=self.symlog)


# --- images --------------------------------------------------------------------------------------------------------


def has_images(space: spaces.Space) -> bool:
    """Return whether a space is an image (height, width, channels), or a dictionary that contains one."""
    if isinstance(space, spaces.Dict):
        return any(has_images(child) for _, child in space.items)
    return isinstance(space, spaces.Box) and len(space.shape) == 3


def has_grids(space: spaces.Space) -> bool:
    """Return whether a space is a 10 x 10 image, as in MinAtar."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.shape[:2] == (10, 10)


def image_space(name: str, space: spaces.Space) -> tuple[spaces.Box, tuple[int, int, int], bool]:
    """Check that a space is an image; return it, its (height, width, channels), and whether channels come first.

    Channels come first in EnvPool, for example; the first axis is the channels if it is the shortest. `name` is the
    torso's name, for the error message.

    Raises:
      ConfigError: the space is not a box with three axes.
    """
    if not isinstance(space, spaces.Box) or len(space.shape) != 3:
        what = "a dictionary" if isinstance(space, spaces.Dict) else "a tuple"
        if not isinstance(space, spaces.Composite):
            what = f"{type(space).__name__} of shape {space.shape}"
        raise ConfigError(f"{name} needs images of shape (height, width, channels), not {what}; use MLP or torso=None")
    a, b, c = space.shape
    if a < b and a < c:
        return space, (b, c, a), True
    return space, (a, b, c), False


class _ImageTorso(nnx.Module):
    """Module that passes images, as float32 `[N, H, W, C]`, to `trunk`, and its flattened outputs to dense layers."""

    def __init__(
        self,
        space: spaces.Box,
        channels_first: bool,
        trunk: "_ConvStack | _ResidualStack",
        dense: DenseStack,
        normalization_name: str | None,
        spectral: bool = False,
    ):
        # Do not process slices of the batch: batch normalization needs all images, and the power iteration of spectral
        # normalization must run once per batch.
        self.whole = normalization_name in OVER_BATCH or spectral
        self.space = space
        self.channels_first = channels_first
        self.trunk = trunk
        self.dense = dense
        self.features = dense.features

    def __call__(self, observation: jax.Array) -> jax.Array:
        leading = observation.shape[:-3]
        images = observation.reshape((math.prod(leading), *observation.shape[-3:]))
        features = self._features(images) if self.whole else in_slices(self._features, images, self.trunk.patch_bytes)
        return features.reshape((*leading, self.features))

    def _features(self, images: jax.Array) -> jax.Array:
        x = to_float(images, self.space)
        if self.channels_first:
            x = jnp.moveaxis(x, 1, 3)
        x = self.trunk(x)
        return self.dense(x.reshape((x.shape[0], math.prod(x.shape[1:]))))


class _ConvStack(nnx.Module):
    """Convolutions, each followed by an optional normalization of the channels and an activation."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        layers: tuple[tuple[int, int, int], ...],
        activation_name: str,
        normalization_name: str | None,
        rngs: nnx.Rngs,
        dtype: str,
    ):
        height, width, inputs = shape
        self.activation = activation(activation_name)
        self.depth = len(layers)
        self.patch_bytes = 0  # per image, in the largest convolution
        self.normalized = normalization_name is not None
        for i, (outputs, kernel, stride) in enumerate(layers):
            check_positive(f"{name}'s kernel", kernel)
            if min(height, width) < kernel:
                raise ConfigError(
                    f"{name}: images of {shape[0]}x{shape[1]} are too small: convolution {i + 1} has a "
                    f"{kernel}x{kernel} kernel, but inputs of {height}x{width}; use MinAtarCNN, MLP or torso=None"
                )
            setattr(self, f"conv_{i}", conv(inputs, outputs, kernel, stride, "VALID", rngs, dtype))
            if normalization_name is not None:
                setattr(self, f"norm_{i}", normalization(normalization_name, outputs, rngs))
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            self.patch_bytes = max(self.patch_bytes, patch_bytes(height, width, kernel, inputs))
            inputs = outputs
        self.size = height * width * inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = getattr(self, f"conv_{i}")(x)
            if self.normalized:
                x = getattr(self, f"norm_{i}")(x.astype(jnp.float32))
            x = self.activation(x)
        return x


def _build_cnn(
    torso: "MinAtarCNN | NatureCNN | ImpalaCNN",
    space: spaces.Space,
    layers: tuple[tuple[int, int, int], ...],
    rngs: nnx.Rngs,
) -> Encoder:
    name = type(torso).__name__
    images, shape, channels_first = image_space(name, space)
    trunk = _ConvStack(name, shape, layers, torso.activation, torso.normalization, rngs, torso.dtype)
    stack = DenseStack(trunk.size, (torso.width,), torso.activation, torso.normalization, rngs, torso.dtype)
    return _ImageTorso(images, channels_first, trunk, stack, torso.normalization)


@dataclasses.dataclass(frozen=True)
class MinAtarCNN:
    """One small convolution and a dense layer, for 10 x 10 images (Young and Tian, 2019, arXiv:1903.03176).

    Args:
      filters, kernel: number of filters and kernel size of the convolution, whose stride is 1.
      width: width of the dense layer.
      activation: function after both layers, by name.
      normalization: "layer" (over each pixel's channels, and over the dense layer), "batch" or "batch_renorm" before
        every activation; None: no normalization.
      dtype: as in `MLP`.
    """

    filters: int = 16
    kernel: int = 3
    width: int = 128
    activation: str = "relu"
    normalization: str | None = None
    dtype: str = "float32"

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        layers = ((self.filters, self.kernel, 1),)
        return _build_cnn(self, space, layers, rngs)


@dataclasses.dataclass(frozen=True)
class NatureCNN:
    """Three convolutions and a dense layer (Mnih et al., 2015), for 84 x 84 images, channels first or last.

    Args:
      filters: number of filters of each convolution; the kernel sizes are 8, 4, 3, and the strides 4, 2, 1.
      width: width of the dense layer.
      activation: function after every layer, by name.
      normalization: as in `MinAtarCNN`.
      dtype: as in `MLP`.
    """

    filters: tuple[int, int, int] = (32, 64, 64)
    width: int = 512
    activation: str = "relu"
    normalization: str | None = None
    dtype: str = "float32"

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        layers = tuple(zip(self.filters, (8, 4, 3), (4, 2, 1), strict=True))
        return _build_cnn(self, space, layers, rngs)


@dataclasses.dataclass(frozen=True)
class ImpalaCNN:
    """Shallow network of IMPALA (Espeholt et al., 2018, figure 3 left), as in Mnih et al. (2013).

    Args:
      filters: number of filters of each convolution; the kernel sizes are 8, 4, and the strides 4, 2.
      width: width of the dense layer.
      activation: function after every layer, by name.
      normalization: as in `MinAtarCNN`.
      dtype: as in `MLP`.
    """

    filters: tuple[int, int] = (16, 32)
    width: int = 256
    activation: str = "relu"
    normalization: str | None = None
    dtype: str = "float32"

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        layers = tuple(zip(self.filters, (8, 4), (4, 2), strict=True))
        return _build_cnn(self, space, layers, rngs)


class _ResidualStack(nnx.Module):
    """Sections, one per channel count, of a convolution, max pooling that halves the image, and two residual blocks."""

    def __init__(self, torso: "ImpalaResNet", shape: tuple[int, int, int], rngs: nnx.Rngs):
        height, width, inputs = shape
        channels, normalization_name, dtype = torso.channels, torso.normalization, torso.dtype
        self.depth = len(channels)
        self.pool = torso.pool
        self.normalized = normalization_name is not None
        self.patch_bytes = 0
        for i, outputs in enumerate(channels):
            setattr(self, f"conv_{i}", conv(inputs, outputs, 3, 1, "SAME", rngs, dtype))
            of_blocks = patch_bytes(-(-height // 2), -(-width // 2), 3, outputs)
            self.patch_bytes = max(self.patch_bytes, patch_bytes(height, width, 3, inputs), of_blocks)
            for name in ("a0", "a1", "b0", "b1"):
                plain = partial(conv, outputs, outputs, 3, 1, "SAME")
                make = partial(SpectralConv, outputs, 3) if torso.spectral else plain
                setattr(self, f"block_{i}_{name}", make(rngs, dtype))
                if normalization_name is not None:
                    setattr(self, f"norm_{i}_{name}", normalization(normalization_name, outputs, rngs))
            height, width, inputs = -(-height // 2), -(-width // 2), outputs
        if normalization_name is not None:
            self.norm = normalization(normalization_name, inputs, rngs)
        if torso.pool is not None:
            check_positive("ImpalaResNet.pool", torso.pool)
            height = width = torso.pool
        self.size = height * width * inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = nnx.max_pool(getattr(self, f"conv_{i}")(x), (3, 3), strides=(2, 2), padding="SAME")
            for block in "ab":
                inner = x
                for name in (f"{i}_{block}0", f"{i}_{block}1"):
                    inner = getattr(self, f"block_{name}")(self._activated(inner, f"norm_{name}"))
                x = x + inner
        return self._activated(x if self.pool is None else adaptive_max_pool(x, self.pool), "norm")

    def _activated(self, x: jax.Array, name: str) -> jax.Array:
        return jax.nn.relu(getattr(self, name)(x.astype(jnp.float32)) if self.normalized else x)


def adaptive_max_pool(x: jax.Array, size: int) -> jax.Array:
    """Pool images [N, H, W, C] to [N, size, size, C] by the maxima of parts, which overlap by at most one pixel.

    Part i consists of the pixels from floor(i H / size) to ceil((i + 1) H / size) - 1; in images smaller than `size`,
    several parts contain the same pixel.
    """
    for axis in (1, 2):
        length = x.shape[axis]
        ends = [(i * length // size, -((i + 1) * length // -size)) for i in range(size)]
        parts = [jnp.max(jax.lax.slice_in_dim(x, *end, axis=axis), axis=axis) for end in ends]
        x = jnp.stack(parts, axis=axis)
    return x


@dataclasses.dataclass(frozen=True)
class ImpalaResNet:
    """Deep residual network of IMPALA (Espeholt et al., 2018, figure 3 right), with ReLU activations.

    Args:
      channels: number of channels of each section; every section halves the image.
      width: width of the dense layer; None: no dense layer, so that the features are the flattened outputs of the
        convolutions.
      normalization: as in `MinAtarCNN`; residual blocks also normalize their inputs, before the first activation.
      dtype: as in `MLP`.
      spectral: whether the kernels of residual blocks have a largest singular value of 1 (Miyato et al., 2018).
      pool: height and width to which adaptive max pooling reduces the final images; None: no adaptive pooling.
    """

    channels: tuple[int, ...] = (16, 32, 32)
    width: int | None = 256
    normalization: str | None = None
    dtype: str = "float32"
    spectral: bool = False
    pool: int | None = None

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        images, shape, channels_first = image_space("ImpalaResNet", space)
        trunk = _ResidualStack(self, shape, rngs)
        widths = () if self.width is None else (self.width,)
        stack = DenseStack(trunk.size, widths, "relu", self.normalization, rngs, self.dtype)
        return _ImageTorso(images, channels_first, trunk, stack, self.normalization, self.spectral)


# --- dictionaries --------------------------------------------------------------------------------------------------


class _DictModule(nnx.Module):
    def __init__(self, encoders: dict[str, Encoder]):
        self.keys = tuple(encoders)
        for key, encoder in encoders.items():
            setattr(self, f"encode_{key}", encoder)
        self.features = sum(encoder.features for encoder in encoders.values())

    def __call__(self, observation: Mapping[str, Any]) -> jax.Array:
        parts = [getattr(self, f"encode_{key}")(observation[key]) for key in self.keys]
        return jnp.concatenate(parts, axis=-1)


@dataclasses.dataclass(frozen=True, init=False)
class DictEncoder:
    """Separate encoders for the keys of a dictionary observation; features are concatenated in sorted order of keys.

    Args:
      encoders: a dictionary with a torso for every key of the space, or None for a key to ignore; stored as sorted
        `items`.
    """

    items: tuple[tuple[str, Torso | None], ...]

    def __init__(self, encoders: Mapping[str, Torso | None]):
        torsos = [x for x in encoders.values() if x is not None] if isinstance(encoders, Mapping) else [encoders]
        if not isinstance(encoders, Mapping) or not all(hasattr(type(x), "build") for x in torsos):
            raise ConfigError(f"DictEncoder({encoders!r:.80}) must have a torso or None for each key: {{'x': MLP()}}")
        object.__setattr__(self, "items", tuple(sorted(dict(encoders).items(), key=lambda item: item[0])))

    def __repr__(self) -> str:
        return f"DictEncoder({dict(self.items)})"

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        if not isinstance(space, spaces.Dict):
            raise ConfigError(f"DictEncoder needs a dictionary observation, not {space}; use torso=None")
        encoders = dict(self.items)
        problems = [str(unknown("observation key", key, space.spaces)) for key in encoders if key not in space.spaces]
        problems += [
            f"DictEncoder has no encoder for the observation key {key!r}; add one, or {key!r}: None to exclude it"
            for key in space.spaces
            if key not in encoders
        ]
        if not problems and all(torso is None for torso in encoders.values()):
            problems = ["DictEncoder excludes every key; encode at least one"]
        if problems:
            raise ConfigError(problems)
        return _DictModule(
            {key: torso.build(space.spaces[key], rngs) for key, torso in self.items if torso is not None}
        )


# --- the choice ----------------------------------------------------------------------------------------------------


def default_torso(space: spaces.Space, vectors: MLP = MLP()) -> Torso:  # noqa: B008  frozen
    """Return the default torso of a space.

    The torso is `NatureCNN()` for images of at least 36 x 36 pixels, the smallest that it supports; `MinAtarCNN()` for
    images of at least 3 x 3; a `DictEncoder` of default torsos for dictionaries, whose empty entries are ignored; and
    `vectors` for everything else. CNNs have the normalization of `vectors`.
    """
    if isinstance(space, spaces.Dict):
        return DictEncoder(
            {key: default_torso(child, vectors) if flat_size(child) else None for key, child in space.items}
        )
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        _, (height, width, _), _ = image_space("", space)
        if min(height, width) >= 36:
            return NatureCNN(normalization=vectors.normalization)
        if min(height, width) >= 3:
            return MinAtarCNN(normalization=vectors.normalization)
    return vectors
