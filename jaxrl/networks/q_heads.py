"""Heads of the DQN family, which map features to action values or distributions of returns.

Heads can be dueling and noisy. Noise is factorized and sampled for each element of a batch. Because the noise of a
kernel is an outer product, x (S * (e_in e_out^T)) = ((x * e_in) S) * e_out, this takes two more products but no
additional memory for kernels.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxrl.networks.heads import mask_values
from jaxrl.networks.layers import HIDDEN_GAIN, DenseStack, check_positive, dense

_AT_LEAST_0 = {"limits": {"low": 0}}


class CategoricalReturns(struct.PyTreeNode):
    """Distribution of returns over fixed atoms for every action; the algorithm defines the atoms' values."""

    logits: jax.Array  # [..., actions, atoms]
    mask: jax.Array | None = None  # [..., actions] bool, False where an action is forbidden
    smoothing: float = struct.field(pytree_node=False, default=0.0)  # smoothing of targets; see `CategoricalValues`
    features: jax.Array | None = None  # [..., features], the input of a self-predictive head
    prediction: jax.Array | None = None  # [..., actions, 1 + features], predicted reward and next features


class QuantileReturns(struct.PyTreeNode):
    """Quantiles of each action's return, at the fractions (2 i + 1) / 2 N for i = 0 .. N-1 or at sampled fractions."""

    quantiles: jax.Array  # [..., actions, N]
    mask: jax.Array | None = None  # [..., actions] bool, False where an action is forbidden
    fractions: jax.Array | None = None  # [..., N] in (0, 1), sampled fractions of implicit quantiles


class QHead(Protocol):
    """Frozen, hashable configuration of the head of a Q-network."""

    @property
    def noisy(self) -> bool:
        """True if the head's layers sample parameter noise from keys."""
        ...

    def build(self, inputs: int, actions: int, rngs: nnx.Rngs) -> nnx.Module:
        """Create the module, which is called as `module(features, mask, key)` and returns the output.

        Features are `[T, B, inputs]`; the mask is `[T, B, actions]` or None; `key` is an array of keys `[B]` or None.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ActionValues:
    """Head whose output is the expected return of each action, `[..., actions]`.

    Args:
      dueling: whether values are V + A - mean A, with separate outputs V and A (Wang et al., 2016, equation 9).
      widths: widths of separate ReLU layers before each output (512 in the dueling paper).
      gain: gain of the output layers' orthogonal initialization; None: weights of unit norm (`unit.UnitDense`).
      noisy: whether the parameters of the head's layers have learned noise (Fortunato et al., 2018, arXiv:1706.10295).
      sigma: initial scale of the noise, sigma_0 in the paper.
    """

    dueling: bool = False
    widths: tuple[int, ...] = ()
    gain: float | None = 1.0
    noisy: bool = False
    sigma: float = 0.5

    def build(self, inputs: int, actions: int, rngs: nnx.Rngs) -> nnx.Module:
        return _HeadModule(self, inputs, actions, 1, _expected, rngs)


@dataclasses.dataclass(frozen=True)
class CategoricalValues:
    """Head of C51: a categorical distribution of each action's return, `CategoricalReturns` (Bellemare et al., 2017).

    Args:
      atoms: number of atoms; the algorithm defines the range of their values.
      dueling, widths, gain, noisy, sigma: as in `ActionValues`; dueling applies to the logits (Hessel et al., 2018).
      smoothing: standard deviation of the normal distribution that replaces each return of a target, in units of the
        atom spacing; HL-Gauss (Imani and White, 2018; Farebrother et al., 2024, arXiv:2403.03950) uses 0.75. With 0, a
        return is split between its two neighboring atoms.
    """

    atoms: int = 51
    dueling: bool = False
    widths: tuple[int, ...] = ()
    gain: float | None = 1.0
    noisy: bool = False
    sigma: float = 0.5
    smoothing: float = dataclasses.field(default=0.0, metadata=_AT_LEAST_0)

    def build(self, inputs: int, actions: int, rngs: nnx.Rngs) -> nnx.Module:
        check_positive("atoms", self.atoms)
        return _HeadModule(self, inputs, actions, self.atoms, CategoricalReturns, rngs)


@dataclasses.dataclass(frozen=True)
class SelfPredictiveValues:
    """Head like `CategoricalValues` that also predicts the reward and the next features (REPPO's auxiliary task).

    Values and prediction have separate dense layers, which read the features of the network. The output is a
    `CategoricalReturns` that contains the prediction.

    Args:
      atoms, gain, smoothing: as in `CategoricalValues`.
      widths: widths of the dense layers before each output.
      activation: function after each dense layer, by name.
      normalization: "layer", "rms", "batch" or "batch_renorm" before each activation; None: no normalization.
    """

    atoms: int = 151
    widths: tuple[int, ...] = (512,)
    activation: str = "silu"
    normalization: str | None = "layer"
    gain: float = 0.01
    smoothing: float = dataclasses.field(default=0.75, metadata=_AT_LEAST_0)

    @property
    def noisy(self) -> bool:
        return False

    def build(self, inputs: int, actions: int, rngs: nnx.Rngs) -> nnx.Module:
        check_positive("atoms", self.atoms)
        return _SelfPredictiveModule(self, inputs, actions, rngs)


@dataclasses.dataclass(frozen=True)
class QuantileValues:
    """Head of QR-DQN: quantiles of each action's return, `QuantileReturns` (Dabney et al., 2018, arXiv:1710.10044).

    Args:
      quantiles: number of quantiles.
      dueling, widths, gain, noisy, sigma: as in `ActionValues`; dueling applies to each quantile.
    """

    quantiles: int = 51
    dueling: bool = False
    widths: tuple[int, ...] = ()
    gain: float | None = 1.0
    noisy: bool = False
    sigma: float = 0.5

    def build(self, inputs: int, actions: int, rngs: nnx.Rngs) -> nnx.Module:
        check_positive("quantiles", self.quantiles)
        return _HeadModule(self, inputs, actions, self.quantiles, QuantileReturns, rngs)


@dataclasses.dataclass(frozen=True)
class ImplicitQuantileValues:
    """Head of IQN: quantiles of each action's return at sampled fractions (Dabney et al., 2018, arXiv:1806.06923).

    Features are multiplied by an embedding of each fraction. If keys are passed, fractions are sampled for each element
    of a batch; otherwise, they are the midpoints of `quantiles` equal intervals.

    Args:
      quantiles: number of fractions, for acting, learning and targets.
      cosines: number of inputs cos(pi i fraction), i = 0 .. cosines - 1, of the embedding, which is a dense ReLU layer
        (equation 4).
      dueling, widths, gain, noisy, sigma: as in `ActionValues`; dueling applies to each quantile.
    """

    quantiles: int = 8
    cosines: int = 64
    dueling: bool = False
    widths: tuple[int, ...] = ()
    gain: float = 1.0
    noisy: bool = False
    sigma: float = 0.5

    def build(self, inputs: int, actions: int, rngs: nnx.Rngs) -> nnx.Module:
        check_positive("quantiles", self.quantiles)
        check_positive("cosines", self.cosines)
        return _ImplicitModule(self, inputs, actions, rngs)


# --- modules -------------------------------------------------------------------------------------------------------


class NoisyDense(nnx.Module):
    """Affine layer with factorized Gaussian noise on its parameters (Fortunato et al., 2018).

    The layer maps features `[T, B, inputs]` and keys `[B]` to `[T, B, outputs]`; without keys, there is no noise. The
    means of the parameters are initialized orthogonally, as in `dense`, and the scales of the noise to
    sigma / sqrt(inputs) (equation 11).
    """

    def __init__(self, inputs: int, outputs: int, gain: float | None, sigma: float, rngs: nnx.Rngs):
        scale = sigma / math.sqrt(inputs)
        self.mean = dense(inputs, outputs, gain, rngs)
        self.kernel_scale = nnx.Param(jnp.full((inputs, outputs), scale, jnp.float32))
        self.bias_scale = nnx.Param(jnp.full((outputs,), scale, jnp.float32))

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        outputs = self.mean(x)
        if key is None:
            return outputs
        sizes = self.kernel_scale[...].shape
        draws = jax.vmap(lambda k: jax.random.normal(k, (sum(sizes),), jnp.float32))(key)
        noise = jnp.sign(draws) * jnp.sqrt(jnp.abs(draws))
        inwards, outwards = noise[None, :, : sizes[0]], noise[None, :, sizes[0] :]
        return outputs + (jnp.matmul(x * inwards, self.kernel_scale[...]) + self.bias_scale[...][None, None]) * outwards


class _Stream(nnx.Module):
    """ReLU layers followed by an output layer; all of them are noisy if the head is noisy."""

    def __init__(self, head: Any, inputs: int, outputs: int, rngs: nnx.Rngs):
        check_positive("widths", head.widths)
        self.noisy = head.noisy
        self.depth = len(head.widths)
        for i, width in enumerate(head.widths):
            setattr(self, f"hidden_{i}", _layer(head, inputs, width, HIDDEN_GAIN, rngs))
            inputs = width
        self.output = _layer(head, inputs, outputs, head.gain, rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        for i in range(self.depth):
            x = jax.nn.relu(self._through(getattr(self, f"hidden_{i}"), x, key, i))
        return self._through(self.output, x, key, self.depth)

    def _through(self, layer, x, key, number):
        return layer(x, _folded(key, number)) if self.noisy else layer(x)


def _layer(head, inputs, outputs, gain, rngs):
    return NoisyDense(inputs, outputs, gain, head.sigma, rngs) if head.noisy else dense(inputs, outputs, gain, rngs)


class _HeadModule(nnx.Module):
    """Module that computes `size` numbers for every action and returns `finish(numbers, mask)`.

    If the head is dueling, each number is V + A - mean A.
    """

    def __init__(self, head: Any, inputs: int, actions: int, size: int, finish: Callable, rngs: nnx.Rngs):
        self.dueling = head.dueling
        self.shape = (actions, size)
        self.finish = finish
        self.smoothing = getattr(head, "smoothing", 0.0)
        self.advantage = _Stream(head, inputs, actions * size, rngs)
        if head.dueling:
            self.state_value = _Stream(head, inputs, size, rngs)

    def __call__(self, features: jax.Array, mask: jax.Array | None, key: jax.Array | None) -> Any:
        values = self.advantage(features, _folded(key, 0))
        values = values.reshape((*values.shape[:-1], *self.shape))
        if self.dueling:
            state_value = jnp.expand_dims(self.state_value(features, _folded(key, 1)), -2)
            values = state_value + (values - jnp.mean(values, axis=-2, keepdims=True))
        output = self.finish(values, mask)
        return output.replace(smoothing=self.smoothing) if self.smoothing else output


class _ImplicitModule(nnx.Module):
    def __init__(self, head: ImplicitQuantileValues, inputs: int, actions: int, rngs: nnx.Rngs):
        self.quantiles, self.cosines = head.quantiles, head.cosines
        self.embedding = dense(head.cosines, inputs, HIDDEN_GAIN, rngs)
        self.values = _HeadModule(head, inputs, actions, 1, lambda values, mask: values[..., 0], rngs)

    def __call__(self, features: jax.Array, mask: jax.Array | None, key: jax.Array | None) -> QuantileReturns:
        time, batch = features.shape[:2]
        if key is None:
            levels = (jnp.arange(self.quantiles, dtype=jnp.float32) + 0.5) / self.quantiles
            levels = jnp.broadcast_to(levels[:, None], (self.quantiles, batch))
        else:
            draw = jax.vmap(lambda k: jax.random.uniform(k, (self.quantiles,), jnp.float32), out_axes=1)
            levels = draw(_folded(key, 2))
        angles = jnp.pi * levels[..., None] * jnp.expand_dims(jnp.arange(self.cosines, dtype=jnp.float32), (0, 1))
        joined = features[:, None] * jax.nn.relu(self.embedding(jnp.cos(angles)))[None]
        # Quantiles are merged into the time axis, so that an element of the batch has the same noise for all of them.
        values = self.values(joined.reshape(-1, batch, features.shape[-1]), None, key)
        values = jnp.moveaxis(values.reshape(time, self.quantiles, batch, -1), 1, 3)
        return QuantileReturns(values, mask, jnp.broadcast_to(levels.T[None], (time, batch, self.quantiles)))


class _SelfPredictiveModule(nnx.Module):
    def __init__(self, head: SelfPredictiveValues, inputs: int, actions: int, rngs: nnx.Rngs):
        def branch(size, gain):
            hidden = DenseStack(inputs, head.widths, head.activation, head.normalization, rngs)
            return hidden, dense(hidden.features, actions * size, gain, rngs)

        self.smoothing = head.smoothing
        self.shapes = (actions, head.atoms), (actions, 1 + inputs)
        self.hidden, self.output = branch(head.atoms, head.gain)
        self.prediction_hidden, self.prediction_output = branch(1 + inputs, 1.0)

    def __call__(self, features: jax.Array, mask: jax.Array | None, key: jax.Array | None) -> CategoricalReturns:
        logits, prediction = (
            layer(hidden(features)).reshape((*features.shape[:-1], *shape))
            for hidden, layer, shape in (
                (self.hidden, self.output, self.shapes[0]),
                (self.prediction_hidden, self.prediction_output, self.shapes[1]),
            )
        )
        return CategoricalReturns(logits, mask, self.smoothing, features, prediction)


def _expected(values, mask):
    return mask_values(values[..., 0], mask)


def _folded(key, number):
    """Derive the keys [B] of one part of the head from `key`; return None if `key` is None."""
    return None if key is None else jax.vmap(lambda k: jax.random.fold_in(k, number))(key)
