"""Distributions over actions: frozen pytrees, batched over any leading axes.

Every leaf carries the leading axes, so a distribution may be indexed, stacked and stored like any other tree.
Sampling takes one typed key for each element, hence a sample does not depend on how environments are grouped.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# What the logit of a forbidden action becomes. Its probability is exactly 0 in float32, yet sums and differences of a
# few such numbers stay finite, which those of the most negative float do not.
FORBIDDEN = -1e30

_LOG_2 = math.log(2.0)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_UNROLLED_CLASSES = 32  # below, the cumulative sum is written out: it fuses, where XLA's own would be many kernels


def _per_key(draw, keys: jax.Array) -> jax.Array:
    """`draw(key)` of every key; keys of any shape."""
    drawn = jax.vmap(draw)(keys.reshape(-1))
    return drawn.reshape(keys.shape + drawn.shape[1:])


def _inverse_cdf(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index [...] that `uniform` [...] in [0, 1) falls on, never one of zero probability; logits [..., n].

    Rounding could leave `uniform * total` at or beyond the last partial sum, or the partial sums uneven where they
    are computed in another order; so a class is only ever chosen if its own weight is positive.
    """
    classes = logits.shape[-1]
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    if classes > _UNROLLED_CLASSES:
        cumulative = jnp.cumsum(weights, axis=-1)
        hit = (cumulative > (uniform * cumulative[..., -1])[..., None]) & (weights > 0.0)
        found = jnp.argmax(hit, axis=-1)
        return jnp.where(jnp.any(hit, axis=-1), found, jnp.argmax(weights, axis=-1)).astype(jnp.int32)
    total = jnp.sum(weights, axis=-1)
    target = uniform * total
    partial = jnp.zeros_like(target)
    chosen = jnp.zeros(target.shape, jnp.int32)
    passed = jnp.ones(target.shape, bool)  # whether every class so far with a weight was passed over
    for i in range(classes):
        weight = weights[..., i]
        chosen = jnp.where(passed & (weight > 0.0), jnp.int32(i), chosen)
        partial = partial + weight
        passed = passed & (partial <= target)
    return chosen


@struct.dataclass
class Categorical:
    """One of n classes; actions int32 `[...]`.

    Attributes:
      logits: unnormalised log-probabilities, `[..., n]`, finite.
    """

    logits: jax.Array

    @classmethod
    def masked(cls, logits: jax.Array, mask: jax.Array | None) -> "Categorical":
        """With only the classes where `mask` `[..., n]` is True; None allows all.

        Forbidden classes have probability exactly 0, are never sampled, and add 0 to the entropy and to gradients.
        Where a mask forbids everything, all classes are equally likely, so that nothing becomes NaN.
        """
        return cls(logits if mask is None else jnp.where(mask, logits, jnp.asarray(FORBIDDEN, logits.dtype)))

    def sample(self, keys: jax.Array) -> jax.Array:
        """Actions `[...]`, from one uniform number each; keys `[...]`."""
        uniform = _per_key(lambda key: jax.random.uniform(key, (), self.logits.dtype), keys)
        return _inverse_cdf(self.logits, uniform)

    def mode(self) -> jax.Array:
        """The most likely class `[...]`, the first of several."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_probs(self) -> jax.Array:
        """Normalised log-probabilities `[..., n]`."""
        return jax.nn.log_softmax(self.logits, axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability `[...]` of classes `[...]`."""
        # A comparison and a sum rather than a gather, whose gradient is a scatter: several times slower on CPU.
        classes = jnp.arange(self.logits.shape[-1], dtype=jnp.int32)
        chosen = jnp.expand_dims(action.astype(jnp.int32), -1) == jnp.expand_dims(classes, range(action.ndim))
        return jnp.sum(jnp.where(chosen, self.log_probs(), 0.0), axis=-1)

    def entropy(self) -> jax.Array:
        """Entropy `[...]` in nats."""
        log_probs = self.log_probs()
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, other: "Categorical") -> jax.Array:
        """KL(self || other) `[...]` in nats; huge but finite where `other` forbids what `self` does not."""
        log_probs = self.log_probs()
        return jnp.sum(jnp.exp(log_probs) * (log_probs - other.log_probs()), axis=-1)


@struct.dataclass
class MultiCategorical:
    """Several independent categoricals; actions int32 `[..., len(nvec)]`.

    Attributes:
      logits: those of all components one after the other, `[..., sum(nvec)]`.
      nvec: how many classes each component has; static.
    """

    logits: jax.Array
    nvec: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def masked(cls, logits: jax.Array, nvec: tuple[int, ...], mask: jax.Array | None) -> "MultiCategorical":
        """With only the classes where `mask` `[..., sum(nvec)]` is True; None allows all. See `Categorical.masked`."""
        return cls(Categorical.masked(logits, mask).logits, nvec)

    @property
    def components(self) -> list[Categorical]:
        """The categorical of each component."""
        ends = np.cumsum(self.nvec)[:-1].tolist()
        return [Categorical(part) for part in jnp.split(self.logits, ends, axis=-1)]

    def sample(self, keys: jax.Array) -> jax.Array:
        """Actions `[..., k]`, from one uniform number for each component; keys `[...]`."""
        uniform = _per_key(lambda key: jax.random.uniform(key, (len(self.nvec),), self.logits.dtype), keys)
        drawn = [_inverse_cdf(part.logits, uniform[..., i]) for i, part in enumerate(self.components)]
        return jnp.stack(drawn, axis=-1)

    def mode(self) -> jax.Array:
        """The most likely class of each component, `[..., k]`."""
        return jnp.stack([part.mode() for part in self.components], axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability `[...]` of actions `[..., k]`."""
        return sum(part.log_prob(action[..., i]) for i, part in enumerate(self.components))

    def entropy(self) -> jax.Array:
        """Entropy `[...]` in nats, the sum over components."""
        return sum(part.entropy() for part in self.components)

    def kl(self, other: "MultiCategorical") -> jax.Array:
        """KL(self || other) `[...]` in nats, the sum over components."""
        return sum(mine.kl(theirs) for mine, theirs in zip(self.components, other.components, strict=True))


@struct.dataclass
class DiagonalGaussian:
    """Independent Gaussians over R^n; actions float32 `[..., n]`, unbounded.

    Attributes:
      mean, log_std: `[..., n]`.
    """

    mean: jax.Array
    log_std: jax.Array

    def sample(self, keys: jax.Array) -> jax.Array:
        """Actions `[..., n]`; keys `[...]`."""
        noise = _per_key(lambda key: jax.random.normal(key, self.mean.shape[-1:], self.mean.dtype), keys)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """The mean, `[..., n]`."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-density `[...]` of actions `[..., n]`."""
        scaled = (action - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * jnp.square(scaled) + self.log_std + _LOG_SQRT_2PI, axis=-1)

    def entropy(self) -> jax.Array:
        """Differential entropy `[...]` in nats."""
        return jnp.sum(self.log_std + (0.5 + _LOG_SQRT_2PI), axis=-1)

    def kl(self, other: "DiagonalGaussian") -> jax.Array:
        """KL(self || other) `[...]` in nats."""
        log_ratio = self.log_std - other.log_std
        distance = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        return 0.5 * jnp.sum(jnp.exp(2.0 * log_ratio) + distance - 1.0 - 2.0 * log_ratio, axis=-1)
