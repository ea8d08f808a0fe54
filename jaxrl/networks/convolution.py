"""Convolutions that are fast on CPUs, for gradients within loops and for large numbers of images.

XLA's CPU backend rewrites convolutions into the form of its fast kernels, but not within loops. Networks are trained
within a scan, where the gradient with respect to the kernel has another form and ran 17 times slower (JAX 0.11.2). On
CPUs, this module therefore computes the gradients in the fast form; on other platforms, it uses JAX's gradients.

XLA computes a convolution as a matrix product with the patches of all images, which it first stores in memory. Above
32 MB, the C library returns this memory to the system each time, and allocating it again, page by page, takes longer
than the product. On CPUs, large numbers of images are therefore processed in slices.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
from jax import lax

FORM = ("NHWC", "HWIO", "NHWC")
Pads = tuple[tuple[int, int], ...]
_MANY_BYTES = 32 * 2**20  # of patches; glibc requests blocks of this size from the system each time (mallopt(3))
_SLICE_BYTES = 8 * 2**20  # 16 MB is up to a seventh faster, but uses memory that no estimate includes
_FEWEST = 8  # minimum number of images per slice


def convolution(x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: str | Pads) -> jax.Array:
    """Compute a two-dimensional convolution like `jax.lax.conv_general_dilated`; only reverse-mode differentiable.

    Args:
      x: images, [N, H, W, C].
      kernel: the kernel, [h, w, C, features].
      strides: strides along the height and the width.
      padding: "SAME", "VALID", or pairs (before, after) for the height and the width.

    Returns:
      The convolved images, [N, H', W', features].
    """
    if isinstance(padding, str):
        padding = tuple(lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding))
    return _convolution(x, kernel, tuple(strides), tuple(padding))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolution(x, kernel, strides, padding):
    return _plain(x, kernel, strides, padding)


def _plain(x, kernel, strides, padding, **dilations):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=FORM, **dilations)


def _forward(x, kernel, strides, padding):
    return _plain(x, kernel, strides, padding), (x, kernel)


def _backward(strides, padding, held, gradient):
    x, kernel = held

    def by_x(x, kernel, gradient):
        return jax.vjp(lambda x: _plain(x, kernel, strides, padding), x)[1](gradient)[0]

    def by_kernel(x, kernel, gradient):
        return jax.vjp(lambda kernel: _plain(x, kernel, strides, padding), kernel)[1](gradient)[0]

    arguments = (x, kernel, gradient)
    return (
        lax.platform_dependent(*arguments, cpu=partial(_by_x, strides, padding), default=by_x),
        lax.platform_dependent(*arguments, cpu=partial(_by_kernel, strides, padding), default=by_kernel),
    )


_convolution.defvjp(_forward, _backward)


def _by_x(strides, padding, x, kernel, gradient):
    """Return the gradient with respect to `x`: dilate `gradient` by the strides, convolve with the flipped kernel."""
    turned = _unfused(kernel[::-1, ::-1].swapaxes(2, 3))
    pads = []
    for size, width, steps, stride, (before, _) in _axes(x, kernel, gradient, strides, padding):
        first = width - 1 - before
        pads.append((first, size + before - (steps - 1) * stride - 1))
    return _plain(gradient, turned, (1, 1), pads, lhs_dilation=strides)


def _by_kernel(strides, padding, x, kernel, gradient):
    """Return the gradient with respect to the kernel: `x` convolved with the dilated `gradient`, summed over images."""
    examples_last, spread = _unfused((x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3)))
    pads = []
    for size, width, steps, stride, (before, _) in _axes(x, kernel, gradient, strides, padding):
        pads.append((before, width + (steps - 1) * stride - size - before))
    return _plain(examples_last, spread, (1, 1), pads, rhs_dilation=strides).transpose(1, 2, 0, 3)


def _axes(x, kernel, gradient, strides, padding):
    return zip(x.shape[1:3], kernel.shape[:2], gradient.shape[1:3], strides, padding, strict=True)


def _unfused(tree):
    """Prevent XLA from fusing a transposition into the convolution, which would change its layout."""
    return lax.optimization_barrier(tree)


def patch_bytes(height: int, width: int, kernel: int, channels: int) -> int:
    """Return the size in bytes of the patches of an image that a convolution reads.

    Args:
      height, width: size of the convolution's output.
      kernel: height and width of the kernel.
      channels: number of input channels.
    """
    return 4 * height * width * kernel * kernel * channels


def in_slices(function: Callable[[jax.Array], jax.Array], images: jax.Array, most_patch_bytes: int) -> jax.Array:
    """Return `function(images)`; on a CPU, process the images in slices if their patches need too much memory.

    The gradient recomputes each slice, which is faster than storing the intermediate values of all slices.

    Args:
      function: a function of images [n, ...] that processes each image independently.
      images: the images, [N, ...].
      most_patch_bytes: `patch_bytes` of the largest convolution.

    Returns:
      The features, [N, features].
    """
    count = images.shape[0]
    if not isinstance(count, int) or count * most_patch_bytes <= _MANY_BYTES:  # a symbol in exports
        return function(images)
    most = max(_SLICE_BYTES // most_patch_bytes, _FEWEST)
    size = max(n for n in range(1, most + 1) if count % n == 0)
    if 4 * size < most:  # the number of images has no suitable divisor
        return function(images)

    def sliced(images):
        parts = images.reshape(count // size, size, *images.shape[1:])
        features = lax.map(jax.checkpoint(function), parts)
        return features.reshape(count, math.prod(features.shape[2:]))

    return lax.platform_dependent(images, cpu=sliced, default=function)
