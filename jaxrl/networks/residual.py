"""Torsos of normalized and residual dense layers, for stable training of large networks from a replay buffer.

The inputs are vectors: observations if used as a torso, features and actions if used as the trunk of a `Critic`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core import spaces
from jaxrl.networks.layers import HIDDEN_GAIN, BatchNorm, check_finite, check_positive, dense
from jaxrl.networks.torsos import Encoder, FlatTorso, vector_size
from jaxrl.networks.unit import UnitDense, UnitRMSNorm, unit_vectors


@dataclasses.dataclass(frozen=True)
class UnitMLP:
    """Network of XQC: dense layers with weights of unit norm, and batch normalization before each ReLU.

    The inputs are batch-normalized, too (Palenicek et al., 2025, arXiv:2509.25174).

    Args:
      widths: widths of the layers.
    """

    widths: tuple[int, ...] = (512, 512, 512, 512)

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        return FlatTorso(space, _UnitMLP(vector_size(self, space), self.widths, rngs))


class _UnitMLP(nnx.Module):
    def __init__(self, inputs: int, widths: tuple[int, ...], rngs: nnx.Rngs):
        check_positive("widths", widths)
        self.depth = len(widths)
        self.norm_inputs = BatchNorm(inputs, epsilon=1e-3)
        for i, width in enumerate(widths):
            setattr(self, f"layer_{i}", UnitDense(inputs, width, rngs))
            setattr(self, f"norm_{i}", BatchNorm(width, epsilon=1e-3))
            inputs = width
        self.features = inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm_inputs(x)
        for i in range(self.depth):
            x = jax.nn.relu(getattr(self, f"norm_{i}")(getattr(self, f"layer_{i}")(x)))
        return x


@dataclasses.dataclass(frozen=True)
class InvertedResidual:
    """Network of FlashSAC: inverted residual blocks with batch normalization, and weights of unit norm.

    Batch normalization of the inputs and a dense layer are followed by residual blocks and an RMS normalization. A
    block has a dense layer to `expansion * width` features and a dense layer back to `width`, each followed by batch
    normalization and a ReLU (arXiv:2604.04539).

    Args:
      width: number of features between blocks.
      blocks: number of blocks.
      expansion: width of a block's inner layer, as a multiple of `width`.
    """

    width: int = 256
    blocks: int = 2
    expansion: int = 4

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        return FlatTorso(space, _InvertedResidual(self, vector_size(self, space), rngs))


class _InvertedResidual(nnx.Module):
    def __init__(self, torso: InvertedResidual, inputs: int, rngs: nnx.Rngs):
        check_positive("width, blocks and expansion", (torso.width, torso.blocks, torso.expansion))
        self.depth, self.features = torso.blocks, torso.width
        wide = torso.expansion * torso.width
        self.norm_inputs = BatchNorm(inputs, epsilon=1e-5, unit=True)
        self.inputs = UnitDense(inputs, torso.width, rngs)
        for i in range(torso.blocks):
            for part, (size, outputs) in enumerate(((torso.width, wide), (wide, torso.width))):
                setattr(self, f"layer_{i}_{part}", UnitDense(size, outputs, rngs))
                setattr(self, f"norm_{i}_{part}", BatchNorm(outputs, epsilon=1e-5, unit=True))
        self.norm_features = UnitRMSNorm(torso.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inputs(self.norm_inputs(x))
        for i in range(self.depth):
            inner = x
            for part in range(2):
                layer, norm = (getattr(self, f"{name}_{i}_{part}") for name in ("layer", "norm"))
                inner = jax.nn.relu(norm(layer(inner)))
            x = x + inner
        return self.norm_features(x)


@dataclasses.dataclass(frozen=True)
class SimBa:
    """Residual blocks that begin with layer normalization (Lee et al., 2024, arXiv:2410.09754).

    A dense layer is followed by blocks x + dense(ReLU(dense(norm(x)))) and a final layer normalization. Observations
    should be normalized (`normalize_observation=True`).

    Args:
      width: number of features between blocks.
      blocks: number of blocks.
      expansion: width of a block's inner layer, as a multiple of `width`.
    """

    width: int = 512
    blocks: int = 2
    expansion: int = 4

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        return FlatTorso(space, _SimBa(self, vector_size(self, space), rngs))


class _SimBa(nnx.Module):
    def __init__(self, torso: SimBa, inputs: int, rngs: nnx.Rngs):
        check_positive("width, blocks and expansion", (torso.width, torso.blocks, torso.expansion))
        self.depth, self.features = torso.blocks, torso.width
        self.inputs = dense(inputs, torso.width, 1.0, rngs)
        for i in range(torso.blocks):
            setattr(self, f"norm_{i}", nnx.LayerNorm(torso.width, rngs=rngs))
            setattr(self, f"wide_{i}", dense(torso.width, torso.expansion * torso.width, HIDDEN_GAIN, rngs))
            setattr(self, f"back_{i}", dense(torso.expansion * torso.width, torso.width, HIDDEN_GAIN, rngs))
        self.norm_features = nnx.LayerNorm(torso.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inputs(x)
        for i in range(self.depth):
            norm, wide, back = (getattr(self, f"{name}_{i}") for name in ("norm", "wide", "back"))
            x = x + back(jax.nn.relu(wide(norm(x))))
        return self.norm_features(x)


@dataclasses.dataclass(frozen=True)
class BroNet:
    """Residual blocks with layer normalization after each dense layer (Nauman et al., 2024, arXiv:2405.16158).

    The first layer is ReLU(norm(dense(x))), followed by blocks x + norm(dense(ReLU(norm(dense(x))))).

    Args:
      width: width of all layers.
      blocks: number of blocks.
    """

    width: int = 512
    blocks: int = 2

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        return FlatTorso(space, _BroNet(self, vector_size(self, space), rngs))


class _BroNet(nnx.Module):
    def __init__(self, torso: BroNet, inputs: int, rngs: nnx.Rngs):
        check_positive("width and blocks", (torso.width, torso.blocks))
        self.depth, self.features = 1 + 2 * torso.blocks, torso.width
        for i in range(self.depth):
            setattr(self, f"layer_{i}", dense(inputs if i == 0 else torso.width, torso.width, HIDDEN_GAIN, rngs))
            setattr(self, f"norm_{i}", nnx.LayerNorm(torso.width, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        def normed(i: int, x: jax.Array) -> jax.Array:
            return getattr(self, f"norm_{i}")(getattr(self, f"layer_{i}")(x))

        x = jax.nn.relu(normed(0, x))
        for i in range(1, self.depth, 2):
            x = x + normed(i + 1, jax.nn.relu(normed(i, x)))
        return x


@dataclasses.dataclass(frozen=True)
class SimBaV2:
    """Residual blocks with features on the unit sphere and weights of unit norm (Lee et al., 2025, arXiv:2502.15280).

    A constant is appended to the inputs, which are divided by their norm; a scaled dense layer and a division by the
    norm map them to the sphere. Each block moves the features towards the output of its two dense layers, and divides
    them by their norm again. The last layer is a dense layer, which in the paper is the first layer of each head.
    Observations should be normalized (`normalize_observation=True`).

    Args:
      width: number of features.
      blocks: number of blocks.
      expansion: width of a block's inner layer, as a multiple of `width`.
      shift: constant appended to the inputs.
    """

    width: int = 512
    blocks: int = 2
    expansion: int = 4
    shift: float = 3.0

    def build(self, space: spaces.Space, rngs: nnx.Rngs) -> Encoder:
        return FlatTorso(space, _SimBaV2(self, vector_size(self, space), rngs))


class _Scaler(nnx.Module):
    """Learned factor per feature, initially `initial`; its parameter has the initial value `scale` (section 4.2)."""

    def __init__(self, features: int, initial: float, scale: float):
        self.factor = nnx.Param(jnp.full((features,), scale, jnp.float32))
        self.forward = initial / scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.expand_dims(self.forward * self.factor[...], tuple(range(x.ndim - 1)))


class _SimBaV2(nnx.Module):
    def __init__(self, torso: SimBaV2, inputs: int, rngs: nnx.Rngs):
        check_positive("width, blocks and expansion", (torso.width, torso.blocks, torso.expansion))
        check_finite("shift", torso.shift)
        width, wide = torso.width, torso.expansion * torso.width
        self.depth, self.features, self.shift = torso.blocks, width, torso.shift
        first, inner = math.sqrt(2.0 / width), math.sqrt(2.0 / wide)
        self.inputs = UnitDense(inputs + 1, width, rngs)
        self.scale_inputs = _Scaler(width, first, first)
        for i in range(torso.blocks):
            setattr(self, f"wide_{i}", UnitDense(width, wide, rngs))
            setattr(self, f"scale_{i}", _Scaler(wide, inner, inner))
            setattr(self, f"back_{i}", UnitDense(wide, width, rngs))
            setattr(self, f"step_{i}", _Scaler(width, 1.0 / (torso.blocks + 1), 1.0 / math.sqrt(width)))
        self.outputs = UnitDense(width, width, rngs)
        self.scale_outputs = _Scaler(width, 1.0, 1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), self.shift, x.dtype)], axis=-1)
        x = unit_vectors(self.scale_inputs(self.inputs(unit_vectors(x))))
        for i in range(self.depth):
            wide, scale, back, step = (getattr(self, f"{name}_{i}") for name in ("wide", "scale", "back", "step"))
            goal = unit_vectors(back(jax.nn.relu(scale(wide(x)))))
            x = unit_vectors(x + step(goal - x))
        return self.scale_outputs(self.outputs(x))
