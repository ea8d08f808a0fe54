"""Optimisers whose numbers are leaves, hence traced and swept like every other number; the rules are optax's."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.types import Params, PyTree, Replicas


@struct.dataclass
class Adam:
    """Adam (Kingma and Ba, 2015)."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-5

    def rule(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)


@struct.dataclass
class RMSProp:
    """RMSProp; with `eps` inside the square root, as the published actor-critics use it, or outside, as torch does."""

    decay: float = 0.99
    eps: float = 1e-5
    eps_in_root: bool = struct.field(pytree_node=False, default=True)

    def rule(self) -> optax.GradientTransformation:
        return optax.scale_by_rms(decay=self.decay, eps=self.eps, eps_in_sqrt=self.eps_in_root)


@struct.dataclass
class RAdam:
    """Rectified Adam (Liu et al., 2020)."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def rule(self) -> optax.GradientTransformation:
        return optax.scale_by_radam(b1=self.b1, b2=self.b2, eps=self.eps)


Optimiser = Adam | RMSProp | RAdam


def descend(
    optimiser: Optimiser,
    params: Params,
    gradients: Params,
    state: PyTree,
    *,
    learning_rate: Any,
    max_grad_norm: Any | None,
    replicas: Replicas,
) -> tuple[Params, PyTree, jax.Array]:
    """One step down the gradient, averaged over replicas and clipped by its global norm.

    Args:
      optimiser: the rule.
      params, gradients: trees of the same structure; gradients are this device's.
      state: what `optimiser.rule().init(params)` gave, or the step before.
      learning_rate: a scalar, or a dict of scalars by the first key of `params` (None there: that of "policy").
      max_grad_norm: the largest global norm, or None.
      replicas: over which gradients (never losses) are averaged.

    Returns:
      New parameters, new optimiser state, and the global norm before clipping.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax mixes weak and strong types
        gradients = replicas.mean(gradients)
        norm = optax.tree.norm(gradients)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * scale, gradients)
        updates, state = optimiser.rule().update(gradients, state, params)
        if not isinstance(learning_rate, dict):
            params = jax.tree.map(lambda p, u: (p - learning_rate * u).astype(p.dtype), params, updates)
            return params, state, norm
        steps: Any = updates
        new = {}
        for part, subtree in params.items():
            rate = learning_rate.get(part, learning_rate["policy"])
            new[part] = jax.tree.map(lambda p, u, rate=rate: (p - rate * u).astype(p.dtype), subtree, steps[part])
        return new, state, norm


def weighted_mean(x: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """Mean of `x` over the entries that count, as this device's share of the mean over all replicas.

    The denominator is averaged over replicas, so that averaging the gradients of this gives the gradient of the
    global mean even where devices hold different numbers of rows that count.

    Args:
      x: values, any shape.
      weight: bool or float, the same shape.
      replicas: as handed to `update`.
    """
    # `where` and not the product alone: what does not count may be infinite, as the error of a forbidden action is.
    weight = weight.astype(x.dtype)
    return jnp.sum(jnp.where(weight != 0.0, x * weight, 0.0)) / jnp.maximum(replicas.mean(jnp.sum(weight)), 1e-8)
