"""Distributions over actions: immutable pytrees with any leading batch axes.

Every leaf has the leading axes, so a distribution can be indexed, stacked and stored like any other tree. Sampling
takes one typed key per batch element, so a sample does not depend on how environments are grouped into batches.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core.types import PyTree

# The logit of a forbidden action. The action's probability is exactly 0 in float32, but sums and differences of a few
# such logits stay finite, unlike those of the most negative float.
FORBIDDEN = -1e30

_LOG_2 = math.log(2.0)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
# Up to this number of classes, the loop over classes in `_inverse_cdf` is unrolled, and XLA fuses it into one kernel;
# a cumulative sum takes several (64 classes, 2048 environments, 2 CPU cores: 0.3 instead of 1.0 ms).
_UNROLLED_CLASSES = 128


def _per_key(draw, keys: jax.Array) -> jax.Array:
    """Return `draw(key)` for each of the keys `[...]`, with the same leading axes."""
    drawn = jax.vmap(draw)(keys.reshape(-1))
    return drawn.reshape(keys.shape + drawn.shape[1:])


def _inverse_cdf(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the class [...] that `uniform` [...] in [0, 1) selects under `logits` [..., n], by the inverse CDF.

    A class of zero probability is never selected. Because of rounding, `uniform * total` may reach the last partial
    sum, and partial sums may not increase monotonically if they are computed in another order. So a class is selected
    only if its weight is positive.
    """
    if logits.shape[-1] > _UNROLLED_CLASSES:
        weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        cumulative = jnp.cumsum(weights, axis=-1)
        hit = (cumulative > (uniform * cumulative[..., -1])[..., None]) & (weights > 0.0)
        found = jnp.argmax(hit, axis=-1)
        return jnp.where(jnp.any(hit, axis=-1), found, jnp.argmax(weights, axis=-1)).astype(jnp.int32)
    classes = [logits[..., i] for i in range(logits.shape[-1])]
    largest = functools.reduce(jnp.maximum, classes)
    weights = [jnp.exp(x - largest) for x in classes]
    target = uniform * functools.reduce(jnp.add, weights)
    partial = jnp.zeros_like(target)
    chosen = jnp.zeros(target.shape, jnp.int32)
    passed = jnp.ones(target.shape, bool)  # whether every class so far was skipped
    for i, weight in enumerate(weights):
        chosen = jnp.where(passed & (weight > 0.0), jnp.int32(i), chosen)
        partial = partial + weight
        passed = passed & (partial <= target)
    return chosen


def _total(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


class Categorical(struct.PyTreeNode):
    """Categorical distribution over n classes; actions are int32 `[...]`.

    Attributes:
      logits: unnormalized log-probabilities, `[..., n]`, finite.
    """

    logits: jax.Array

    @classmethod
    def masked(cls, logits: jax.Array, mask: jax.Array | None) -> "Categorical":
        """Return the distribution of `logits` over the allowed classes, where `mask` `[..., n]` is True.

        Forbidden classes have probability exactly 0, are never sampled, and contribute 0 to the entropy and to
        gradients. If a mask forbids all classes, they are equally likely, to avoid NaNs. None allows all classes.
        """
        return cls(logits if mask is None else jnp.where(mask, logits, jnp.asarray(FORBIDDEN, logits.dtype)))

    def sample(self, keys: jax.Array) -> jax.Array:
        """Sample actions `[...]` with keys `[...]`; each action uses one uniform number."""
        return self.of_uniform(_per_key(lambda key: jax.random.uniform(key, (), self.logits.dtype), keys))

    def of_uniform(self, uniform: jax.Array) -> jax.Array:
        """Return the actions `[...]` that uniform numbers `[...]` in [0, 1) select by the inverse CDF."""
        return _inverse_cdf(self.logits, uniform)

    def mixed(self, fraction: float | jax.Array) -> "Categorical":
        """Return the mixture of this distribution and the uniform distribution, whose weight is `fraction`."""
        probability = (1.0 - fraction) * jax.nn.softmax(self.logits, axis=-1) + fraction / self.logits.shape[-1]
        return Categorical(jnp.log(probability))

    def sample_and_log_prob(self, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sample actions `[...]` with keys `[...]` and return them with their log-probabilities `[...]`."""
        action = self.sample(keys)
        return action, self.log_prob(action)

    def mode(self) -> jax.Array:
        """Return the most likely class `[...]`; among equally likely classes, the first."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_probs(self) -> jax.Array:
        """Return normalized log-probabilities `[..., n]`."""
        return jax.nn.log_softmax(self.logits, axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-probability `[...]` of classes `[...]`."""
        # A comparison and a sum, because the gradient of a gather is a scatter, which is several times slower on CPUs.
        classes = jnp.arange(self.logits.shape[-1], dtype=jnp.int32)
        chosen = jnp.expand_dims(action.astype(jnp.int32), -1) == jnp.expand_dims(classes, range(action.ndim))
        return jnp.sum(jnp.where(chosen, self.log_probs(), 0.0), axis=-1)

    def entropy(self) -> jax.Array:
        """Return the entropy `[...]` in nats."""
        log_probs = self.log_probs()
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, other: "Categorical") -> jax.Array:
        """Return KL(self || other) `[...]` in nats; finite even where `other` forbids a class that `self` allows."""
        log_probs = self.log_probs()
        return jnp.sum(jnp.exp(log_probs) * (log_probs - other.log_probs()), axis=-1)


class MultiCategorical(struct.PyTreeNode):
    """Independent categorical distributions; actions are int32 `[..., k]`, where k is `len(nvec)`.

    Attributes:
      logits: concatenated logits of all components, `[..., sum(nvec)]`.
      nvec: number of classes of each component; static.
    """

    logits: jax.Array
    nvec: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def masked(cls, logits: jax.Array, nvec: tuple[int, ...], mask: jax.Array | None) -> "MultiCategorical":
        """Return the distribution over classes where `mask` `[..., sum(nvec)]` is True; see `Categorical.masked`."""
        return cls(Categorical.masked(logits, mask).logits, nvec)

    @property
    def components(self) -> list[Categorical]:
        """The categorical distribution of each component."""
        ends = np.cumsum(self.nvec)[:-1].tolist()
        return [Categorical(part) for part in jnp.split(self.logits, ends, axis=-1)]

    def sample(self, keys: jax.Array) -> jax.Array:
        """Sample actions `[..., k]` with keys `[...]`; each component uses one uniform number."""
        uniform = _per_key(lambda key: jax.random.uniform(key, (len(self.nvec),), self.logits.dtype), keys)
        drawn = [_inverse_cdf(part.logits, uniform[..., i]) for i, part in enumerate(self.components)]
        return jnp.stack(drawn, axis=-1)

    def mode(self) -> jax.Array:
        """Return the most likely class of each component, `[..., k]`."""
        return jnp.stack([part.mode() for part in self.components], axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-probability `[...]` of actions `[..., k]`."""
        return _total([part.log_prob(action[..., i]) for i, part in enumerate(self.components)])

    def entropy(self) -> jax.Array:
        """Return the entropy `[...]` in nats, the sum over components."""
        return _total([part.entropy() for part in self.components])

    def kl(self, other: "MultiCategorical") -> jax.Array:
        """Return KL(self || other) `[...]` in nats, the sum over components."""
        return _total([mine.kl(theirs) for mine, theirs in zip(self.components, other.components, strict=True)])


class DiagonalGaussian(struct.PyTreeNode):
    """Independent Gaussian distributions over R^n; actions are unbounded, float32 `[..., n]`.

    Attributes:
      mean, log_std: means and log standard deviations, `[..., n]`.
    """

    mean: jax.Array
    log_std: jax.Array

    def sample(self, keys: jax.Array) -> jax.Array:
        """Sample actions `[..., n]` with keys `[...]`."""
        noise = _per_key(lambda key: jax.random.normal(key, self.mean.shape[-1:], self.mean.dtype), keys)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """Return the mean, `[..., n]`."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-density `[...]` of actions `[..., n]`."""
        scaled = (action - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * jnp.square(scaled) + self.log_std + _LOG_SQRT_2PI, axis=-1)

    def entropy(self) -> jax.Array:
        """Return the differential entropy `[...]` in nats."""
        return jnp.sum(self.log_std + (0.5 + _LOG_SQRT_2PI), axis=-1)

    def kl(self, other: "DiagonalGaussian") -> jax.Array:
        """Return KL(self || other) `[...]` in nats."""
        log_ratio = self.log_std - other.log_std
        distance = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        return 0.5 * jnp.sum(jnp.exp(2.0 * log_ratio) + distance - 1.0 - 2.0 * log_ratio, axis=-1)


# Gauss-Hermite nodes and weights for expectations under a standard normal.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(8)
_QUADRATURE = tuple(zip(_NODES.tolist(), (_WEIGHTS / _WEIGHTS.sum()).tolist(), strict=True))


def _log_tanh_slope(x: jax.Array) -> jax.Array:
    """Return log(1 - tanh(x)^2), without the cancellation that would make it -inf for |x| >= 9 in float32."""
    return 2.0 * (_LOG_2 - x - jax.nn.softplus(-2.0 * x))


class TanhGaussian(struct.PyTreeNode):
    """Independent Gaussians, squashed by tanh into a box (Haarnoja et al., 2018); actions are float32 `[..., n]`.

    Densities refer to the actions in the units of the box, not rescaled to [-1, 1].

    Attributes:
      mean, log_std: means and log standard deviations of the Gaussians before tanh, `[..., n]`.
      low, high: the bounds of the box, n floats each; static.
    """

    mean: jax.Array
    log_std: jax.Array
    low: tuple[float, ...] = struct.field(pytree_node=False)
    high: tuple[float, ...] = struct.field(pytree_node=False)

    @property
    def base(self) -> DiagonalGaussian:
        """The Gaussian before the tanh."""
        return DiagonalGaussian(self.mean, self.log_std)

    def _bounds(self, ndim: int) -> tuple[jax.Array, jax.Array]:
        low, high = (jnp.asarray(bound, self.mean.dtype) for bound in (self.low, self.high))
        shape = (1,) * (ndim - 1) + (-1,)
        return low.reshape(shape), high.reshape(shape)

    def _squash(self, x: jax.Array) -> jax.Array:
        low, high = self._bounds(x.ndim)
        return jnp.clip(low + (high - low) * (0.5 * (jnp.tanh(x) + 1.0)), low, high)

    def _log_scale(self) -> float:
        return sum(math.log(0.5 * (high - low)) for low, high in zip(self.low, self.high, strict=True))

    def _log_prob_of(self, x: jax.Array) -> jax.Array:
        return self.base.log_prob(x) - jnp.sum(_log_tanh_slope(x), axis=-1) - self._log_scale()

    def sample(self, keys: jax.Array) -> jax.Array:
        """Sample actions `[..., n]` within the bounds, with keys `[...]`."""
        return self._squash(self.base.sample(keys))

    def of_noise(self, noise: jax.Array) -> jax.Array:
        """Return the actions `[..., n]` for standard normal noise `[..., n]` (the reparametrization of `sample`)."""
        return self._squash(self.mean + jnp.exp(self.log_std) * noise)

    def sample_and_log_prob(self, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sample actions `[..., n]` with keys `[...]` and return them with their exact log-density `[...]`.

        Actions and densities are differentiable.
        """
        x = self.base.sample(keys)
        return self._squash(x), self._log_prob_of(x)

    def mode(self) -> jax.Array:
        """Return the squashed mean of the Gaussian, `[..., n]`, which is the median; commonly used in evaluation."""
        return self._squash(self.mean)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-density `[...]` of actions `[..., n]`.

        The argument of the inverse tanh is clipped to one float inside the bounds (|x| = 8.3). So the result is exact
        within the bounds, and finite on and outside them, where the action does not determine x. `sample_and_log_prob`
        is always exact.
        """
        low, high = self._bounds(action.ndim)
        limit = 1.0 - float(jnp.finfo(self.mean.dtype).eps)
        squashed = jnp.clip((action - low) / (0.5 * (high - low)) - 1.0, -limit, limit)
        return self._log_prob_of(jnp.arctanh(squashed))

    def entropy(self) -> jax.Array:
        """Return the differential entropy `[...]` in nats, computed by quadrature because it has no closed form.

        The entropy is that of the Gaussian plus E[log |d action / d x|]. The expectation is computed with 8
        Gauss-Hermite nodes per dimension; the error is below 1e-3 nats for standard deviations up to 1, 0.03 at 2, and
        0.2 at 4. The result is deterministic and differentiable; the usual estimates use one sample, or only the mean.
        """
        std = jnp.exp(self.log_std)
        slope = sum(weight * _log_tanh_slope(self.mean + std * node) for node, weight in _QUADRATURE)
        return self.base.entropy() + jnp.sum(slope, axis=-1) + self._log_scale()

    def kl(self, other: "TanhGaussian") -> jax.Array:
        """Return KL(self || other) `[...]` in nats, which equals the KL of the Gaussians: both have the same bounds."""
        return self.base.kl(other.base)


class Joint(struct.PyTreeNode):
    """Joint distribution of an action that is a dictionary or a tuple, with independent parts.

    The log-probability, entropy and KL are sums over the parts.

    Attributes:
      parts: the distribution of each part, a dictionary or a tuple; a part can be a `Joint` itself.
    """

    parts: "dict[Any, Distribution] | tuple[Distribution, ...]"

    def _each(self) -> list[tuple[Any, Any]]:
        """Return pairs (key, distribution) in the order of an action's leaves."""
        return sorted(self.parts.items()) if isinstance(self.parts, dict) else list(enumerate(self.parts))

    @property
    def leaves(self) -> "list[Distribution]":
        """The distribution of each array of an action, in the order of the action's leaves."""
        return [leaf for _, part in self._each() for leaf in (part.leaves if isinstance(part, Joint) else [part])]

    def _tree(self, of_part: "Callable[[int, Distribution], Any]") -> PyTree:
        """Return `of_part(number, part)` for every part, in the structure of an action."""
        found = {key: of_part(number, part) for number, (key, part) in enumerate(self._each())}
        return found if isinstance(self.parts, dict) else tuple(found.values())

    def sample(self, keys: jax.Array) -> PyTree:
        """Sample actions `[..., *shape]` with keys `[...]`, which are split so that each part has its own key."""
        each = _per_key(lambda key: jax.random.split(key, len(self.parts)), keys)
        return self._tree(lambda number, part: part.sample(each[..., number]))

    def mode(self) -> PyTree:
        """Return the mode of every part."""
        return self._tree(lambda _, part: part.mode())

    def log_prob(self, action: PyTree) -> jax.Array:
        """Return the log-probability `[...]` of actions, summed over parts; a log-density if a part is continuous."""
        return _total([part.log_prob(action[key]) for key, part in self._each()])

    def entropy(self) -> jax.Array:
        """Return the entropy `[...]` in nats, the sum over parts."""
        return _total([part.entropy() for _, part in self._each()])

    def kl(self, other: "Joint") -> jax.Array:
        """Return KL(self || other) `[...]` in nats, the sum over parts; both must have the same parts."""
        pairs = zip(self._each(), other._each(), strict=True)
        return _total([mine.kl(theirs) for (_, mine), (_, theirs) in pairs])


Distribution = Categorical | MultiCategorical | DiagonalGaussian | TanhGaussian | Joint
