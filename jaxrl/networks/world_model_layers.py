"""Layers of world models: dense and block-diagonal layers with RMS normalization and SiLU, and image layers.

The layers follow the published code of DreamerV3 (github.com/danijar/dreamerv3), except for the orthogonal
initialization of convolutions.
"""

import math
from typing import TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core import spaces
from jaxrl.networks.layers import conv
from jaxrl.networks.torsos import image_space, to_float

_EPSILON = 1e-4  # epsilon of RMS normalizations
_SMALLEST = 4  # images are halved only while height and width are above this size


def is_image(space: spaces.Space) -> TypeGuard[spaces.Box]:
    """Return whether arrays of a space are processed by convolutions.

    The space must be a box with three axes, and have an unsigned integer dtype, dtype bool, or bounds within [0, 1].
    """
    if not isinstance(space, spaces.Box) or len(space.shape) != 3:
        return False
    return space.dtype.kind in "ub" or bool(space.bounded and (space.low >= 0).all() and (space.high <= 1).all())


def image(x: jax.Array, space: spaces.Box) -> jax.Array:
    """Convert images `[..., *shape]` to float32 in [0, 1] with channels last."""
    return jnp.moveaxis(to_float(x, space), -3, -1) if image_space("", space)[2] else to_float(x, space)


class Layer(nnx.Module):
    """Affine layer, with a block-diagonal kernel if `blocks` > 1, and with RMS normalization and SiLU if `hidden`."""

    def __init__(
        self, inputs: int, outputs: int, rngs: nnx.Rngs, *, blocks: int = 1, scale: float = 1.0, hidden: bool = True
    ):
        initial = nnx.initializers.zeros
        if scale:
            initial = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
        shape = (blocks, inputs // blocks, outputs // blocks)[blocks == 1 :]
        self.kernel = nnx.Param(initial(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))
        self.norm = nnx.RMSNorm(outputs, epsilon=_EPSILON, rngs=rngs) if hidden else None

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, leading = self.kernel[...], x.shape[:-1]
        x = x.reshape((math.prod(leading), *kernel.shape[:-1]))
        y = x @ kernel if kernel.ndim == 2 else jnp.einsum("nki,kio->nko", x, kernel)
        y = y.reshape((*leading, self.bias.shape[0])) + jnp.expand_dims(self.bias[...], range(len(leading)))
        return y if self.norm is None else jax.nn.silu(self.norm(y))


class Stack(nnx.Module):
    """Hidden layers, and an output layer if `outputs` is not None; `scale` multiplies its initial weights."""

    def __init__(self, inputs: int, units: int, depth: int, outputs: int | None, rngs: nnx.Rngs, scale: float = 1.0):
        self.depth = depth
        self.features = units if outputs is None else outputs
        for i in range(depth):
            setattr(self, f"layer_{i}", Layer(units if i else inputs, units, rngs))
        self.output = None if outputs is None else Layer(units, outputs, rngs, scale=scale, hidden=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = getattr(self, f"layer_{i}")(x)
        return x if self.output is None else self.output(x)


def _shapes(space: spaces.Box, depths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the (height, width, channels) of an image before and after each halving.

    `depths` are the numbers of channels after each halving.
    """
    shapes = [image_space("WorldModel", space)[1]]
    for depth in depths:
        height, width, _ = shapes[-1]
        if min(height, width) > _SMALLEST:
            shapes.append((-(-height // 2), -(-width // 2), depth))
    return shapes


class ImageEncoder(nnx.Module):
    """Module that maps images to features `[..., features]`, with convolutions and max pooling that halves images.

    Args:
      space: the image space.
      depths: number of channels after each halving.
      kernel: height and width of the kernels.
      rngs: random number generators for the initial parameters.
    """

    def __init__(self, space: spaces.Box, depths: tuple[int, ...], kernel: int, rngs: nnx.Rngs):
        self.space, shapes = space, _shapes(space, depths)
        self.halvings, self.features = len(shapes) - 1, math.prod(shapes[-1])
        for i, ((_, _, inputs), (_, _, outputs)) in enumerate(zip(shapes, shapes[1:], strict=False)):
            setattr(self, f"conv_{i}", conv(inputs, outputs, kernel, 1, "SAME", rngs))
            setattr(self, f"norm_{i}", nnx.RMSNorm(outputs, epsilon=_EPSILON, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = image(x, self.space) - 0.5
        leading = x.shape[:-3]
        x = x.reshape((math.prod(leading), *x.shape[-3:]))
        for i in range(self.halvings):
            x = nnx.max_pool(getattr(self, f"conv_{i}")(x), (2, 2), (2, 2), "SAME")
            x = jax.nn.silu(getattr(self, f"norm_{i}")(x))
        return x.reshape((*leading, self.features))


class ImageDecoder(nnx.Module):
    """Module that maps states to images `[..., height, width, channels]` in [0, 1], mirroring the encoder.

    Args:
      deter, latents: sizes of the deterministic and the stochastic part of a state.
      units: half the width of the layer that reads the stochastic part.
      blocks: number of blocks of the weights that read the deterministic part; 1 is used if the number of channels is
        not divisible by it.
      space, depths, kernel, rngs: as in `ImageEncoder`.
    """

    def __init__(
        self,
        deter: int,
        latents: int,
        units: int,
        blocks: int,
        space: spaces.Box,
        depths: tuple[int, ...],
        kernel: int,
        rngs: nnx.Rngs,
    ):
        self.shapes = _shapes(space, depths)
        size, channels = math.prod(self.shapes[-1]), self.shapes[-1][2]
        self.blocks = blocks if channels % blocks == 0 else 1
        self.of_deter = Layer(deter, size, rngs, blocks=self.blocks, hidden=False)
        self.of_stoch = Stack(latents, 2 * units, 1, size, rngs)
        self.norm = nnx.RMSNorm(channels, epsilon=_EPSILON, rngs=rngs)
        for i, ((_, _, outputs), (_, _, inputs)) in enumerate(zip(self.shapes, self.shapes[1:], strict=False)):
            setattr(self, f"conv_{i}", conv(inputs, outputs, kernel, 1, "SAME", rngs))
            if i:
                setattr(self, f"norm_{i}", nnx.RMSNorm(outputs, epsilon=_EPSILON, rngs=rngs))

    def __call__(self, deter: jax.Array, stoch: jax.Array) -> jax.Array:
        """Return the images of states with parts `[..., deter]` and `[..., latents]`."""
        leading, (height, width, channels) = deter.shape[:-1], self.shapes[-1]
        deter, stoch = (x.reshape((math.prod(leading), x.shape[-1])) for x in (deter, stoch))
        blocks = self.of_deter(deter).reshape((-1, self.blocks, height, width, channels // self.blocks))
        x = jnp.moveaxis(blocks, 1, -2).reshape((-1, height, width, channels))
        x = jax.nn.silu(self.norm(x + self.of_stoch(stoch).reshape(x.shape)))
        for i, (height, width, _) in reversed(list(enumerate(self.shapes[:-1]))):
            x = getattr(self, f"conv_{i}")(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)[:, :height, :width])
            x = jax.nn.silu(getattr(self, f"norm_{i}")(x)) if i else x
        return jax.nn.sigmoid(x).reshape((*leading, *x.shape[1:]))
