"""Layers whose weights have unit norm, initially and after every gradient step, because each step calls `project`.

Only the direction of a weight vector is learned, so a gradient step rotates the vector by an angle that does not shrink
during training (Lyle et al., 2024, arXiv:2407.01800; Lee et al., 2025, arXiv:2502.15280). A layer declares such
parameters by the names `unit_kernel`, and `unit_scale` with `unit_bias`, so code that takes gradient steps needs no
special case for these layers.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core.types import Params

_LEAST = 1e-8  # lower bound of norms, to avoid division by 0


def project(params: Params) -> Params:
    """Rescale the parameters of unit-norm layers to unit norm; return other parameters unchanged.

    Each column of a `unit_kernel` is rescaled to norm 1. A `unit_scale` of d features, concatenated with `unit_bias` if
    there is one, is rescaled to norm sqrt(d).
    """
    if not isinstance(params, dict):
        return params
    projected = {name: project(value) for name, value in params.items()}
    if "unit_kernel" in params:
        projected["unit_kernel"] = _of_norm(1.0, -2, params["unit_kernel"])[0]
    names = [name for name in ("unit_scale", "unit_bias") if name in params]
    if names:
        size = math.sqrt(params[names[0]].shape[-1])
        projected |= zip(names, _of_norm(size, -1, *(params[name] for name in names)), strict=True)
    return projected


def _of_norm(norm: float, axis: int, *arrays: jax.Array) -> list[jax.Array]:
    square = sum(jnp.sum(jnp.square(x), axis=axis, keepdims=True) for x in arrays)
    return [x * (norm / jnp.maximum(jnp.sqrt(square), _LEAST)) for x in arrays]


class UnitDense(nnx.Module):
    """Linear layer from `[..., inputs]` to `[..., outputs]`, whose kernel has columns of unit norm."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = False):
        kernel = nnx.initializers.orthogonal()(rngs.params(), (inputs, outputs), jnp.float32)
        self.unit_kernel = nnx.Param(project({"unit_kernel": kernel})["unit_kernel"])
        self.biased = bias
        if bias:
            self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape((-1, x.shape[-1])) @ self.unit_kernel[...]  # merged leading axes: see `layers.Dense`
        rows = rows + self.bias[...][None] if self.biased else rows
        return rows.reshape((*x.shape[:-1], -1))


class UnitRMSNorm(nnx.Module):
    """RMS normalization of the last axis (Zhang and Sennrich, 2019, arXiv:1910.07467) with a scale of unit norm."""

    def __init__(self, features: int, *, epsilon: float = 1e-6):
        self.epsilon = epsilon
        self.unit_scale = nnx.Param(jnp.ones((features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.unit_scale[...], tuple(range(x.ndim - 1)))
        return x * jax.lax.rsqrt(square + self.epsilon) * scale


def unit_vectors(x: jax.Array) -> jax.Array:
    """Divide vectors `[..., n]` by their norms; zero vectors are unchanged and have a gradient of 0."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), _LEAST**2))
