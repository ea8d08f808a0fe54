"""Categorical encoding of numbers of any scale by symlog and two-hot bins (Hafner et al., 2025, arXiv:2301.04104)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

_LARGEST = 20.0  # symlog of the last bin
_VECTOR = 128  # number of floats, a multiple of the width of the processor's vector registers


def symlog(x: jax.Array) -> jax.Array:
    """Return sign(x) log(1 + |x|), which is approximately x for small x and logarithmic for large x."""
    # A sum over positive and negative x, whose gradients at 0 add up to 1; at 0, sign(x) and |x| have gradients of 0.
    return jnp.log1p(jnp.maximum(x, 0.0)) - jnp.log1p(jnp.maximum(-x, 0.0))


def bins(count: int) -> jax.Array:
    """Return `count` (odd) numbers from 1 - exp(20) to exp(20) - 1, evenly spaced under `symlog`."""
    half = -np.expm1(np.linspace(_LARGEST, 0.0, count // 2 + 1)).astype(np.float32)
    return jnp.asarray(np.concatenate([half, -half[:-1][::-1]]))


def two_hot(x: jax.Array, count: int) -> jax.Array:
    """Encode each number [...] as probabilities [..., count] of its two neighboring bins, with the number as the mean.

    Numbers outside the range of the bins are assigned to the first or last bin.
    """
    at = bins(count)
    x = jnp.clip(x, at[0], at[-1])
    passed = jnp.expand_dims(at, range(x.ndim)) <= x[..., None]
    below = jnp.clip(jnp.sum(passed, axis=-1, dtype=jnp.int32) - 1, 0, count - 2)
    fraction = ((x - at[below]) / (at[below + 1] - at[below]))[..., None]
    lower, upper = (jax.nn.one_hot(index, count, dtype=x.dtype) for index in (below, below + 1))
    return (1.0 - fraction) * lower + fraction * upper


class TwoHot(struct.PyTreeNode):
    """Distribution over `bins`, whose mean is the predicted number.

    Attributes:
      logits: unnormalized log-probabilities, `[..., bins]`; the number of bins is odd.
    """

    logits: jax.Array

    def mean(self) -> jax.Array:
        """Return the mean `[...]`; exactly 0 if all bins are equally likely."""
        count, top = self.logits.shape[-1], jnp.max(self.logits, axis=-1, keepdims=True)
        middle = count // 2
        # The outermost bins are -5e8 and 5e8, which only cancel if equal logits give equal probabilities. So the
        # negative and the positive bins are padded to rows of whole vector registers, for which the processor computes
        # exponentials with the same instructions.
        ends = jnp.stack([self.logits[..., :middle][..., ::-1], self.logits[..., middle + 1 :]], axis=-2)
        fill = [(0, 0)] * (ends.ndim - 1) + [(0, -middle % _VECTOR)]
        odds = jnp.exp(jnp.pad(ends - top[..., None], fill, constant_values=-jnp.inf))
        total = jnp.sum(odds, axis=(-2, -1)) + jnp.exp(self.logits[..., middle] - top[..., 0])
        upper = jnp.expand_dims(jnp.pad(bins(count)[middle + 1 :], fill[-1:]), range(top.ndim - 1))
        return jnp.sum((odds[..., 1, :] - odds[..., 0, :]) * upper, axis=-1) / total

    def loss(self, target: jax.Array) -> jax.Array:
        """Return the cross-entropy `[...]` with the two-hot encoding of `target` `[...]`; no gradient flows to it."""
        target = jax.lax.stop_gradient(two_hot(target, self.logits.shape[-1]))
        return -jnp.sum(target * jax.nn.log_softmax(self.logits, axis=-1), axis=-1)
