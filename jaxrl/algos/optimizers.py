"""Optimizers: functions from a learning rate to an `optax.GradientTransformation`.

The optimizers of this module are pytrees with their numbers as leaves, so these can be traced, swept and scheduled like
all other numbers. A custom function, such as `PPO(optimizer=optax.lion)`, is static; its learning rate is still traced.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import optax
from flax import struct
from optax.contrib import MuonDimensionNumbers, muon

from jaxrl.core import registry
from jaxrl.core.limits import problem
from jaxrl.core.types import Params

Number = float | jax.Array


@runtime_checkable
class Optimizer(Protocol):
    """Interface of optimizers: a function from a learning rate, which may be traced, to a gradient transformation.

    The function is called at every update, because the learning rate may have changed, so everything that persists
    between updates must be in the transformation's state. The state must not contain the initial learning rate, as that
    of `optax.inject_hyperparams` does: the rate would never change.
    """

    def __call__(self, learning_rate: Number, /) -> optax.GradientTransformation: ...


class Adam(struct.PyTreeNode):
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980).

    Args:
      b1, b2: decay of the running means of gradients and of their squares.
      eps: added to the root of the mean square, to avoid division by 0.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-5

    def __call__(self, learning_rate: Number) -> optax.GradientTransformation:
        return optax.adam(learning_rate, **vars(self))


class AdamW(struct.PyTreeNode):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101).

    Args:
      b1, b2: decay of the running means of gradients and of their squares.
      eps: added to the root of the mean square, to avoid division by 0.
      weight_decay: decay of every parameter, multiplied by the learning rate.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4

    def __call__(self, learning_rate: Number) -> optax.GradientTransformation:
        return optax.adamw(learning_rate, **vars(self))


class RMSProp(struct.PyTreeNode):
    """RMSProp: gradients divided by the root of a running mean of their squares.

    Args:
      decay: decay of the running mean.
      eps: added to avoid division by 0.
      eps_in_root: add `eps` inside the square root, as the published actor-critics do, or outside, as torch does.
    """

    decay: float = 0.99
    eps: float = 1e-5
    eps_in_root: bool = struct.field(pytree_node=False, default=True)

    def __call__(self, learning_rate: Number) -> optax.GradientTransformation:
        return optax.rmsprop(learning_rate, decay=self.decay, eps=self.eps, eps_in_sqrt=self.eps_in_root)


class RAdam(struct.PyTreeNode):
    """Rectified Adam (Liu et al., 2020, arXiv:1908.03265).

    Args:
      b1, b2: decay of the running means of gradients and of their squares.
      eps: added to the root of the mean square, to avoid division by 0.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __call__(self, learning_rate: Number) -> optax.GradientTransformation:
        return optax.radam(learning_rate, **vars(self))


class Muon(struct.PyTreeNode):
    """Muon (Jordan, 2024): orthogonalized momentum for the kernels of dense layers, Nesterov's Adam for the rest.

    With `consistent_rms=0.2` steps are as large as Adam's, whose learning rates then carry over (arXiv:2502.16982).

    Args:
      beta: decay of the momentum.
      eps: added to avoid division by 0.
      weight_decay: decay of the kernels, multiplied by the learning rate.
      consistent_rms: root mean square of every step; None: Muon's own scale.
      adam_b1, adam_b2: decay rates of Adam, for the other parameters.
      steps: number of Newton-Schulz iterations.
    """

    beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    consistent_rms: float | None = None
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    steps: int = struct.field(pytree_node=False, default=5)

    def __call__(self, learning_rate: Number) -> optax.GradientTransformation:
        return muon(
            learning_rate,
            ns_steps=self.steps,
            beta=self.beta,
            eps=self.eps,
            weight_decay=self.weight_decay,
            consistent_rms=self.consistent_rms,
            adam_b1=self.adam_b1,
            adam_b2=self.adam_b2,
            muon_weight_dimension_numbers=_dense_kernels,
        )


class LaProp(struct.PyTreeNode):
    """LaProp (Ziyin et al., 2020, arXiv:2002.04839) after adaptive clipping, as in DreamerV3.

    Gradients are first divided by the root of their mean square, then averaged: momentum averages normalized steps.

    Args:
      b1, b2: decay of the running means of normalized gradients and of squared gradients.
      eps: added to the root of the mean square, to avoid division by 0.
      clip: maximum norm of an array's gradient as a fraction of the array's own norm (`clip_by_array_norm`); None: no
        clipping.
      warm_up: updates over which the learning rate grows linearly from 0.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-20
    clip: float | None = 0.3
    warm_up: float = 0.0

    def __call__(self, learning_rate: Number) -> optax.GradientTransformation:
        def rate(count):
            return jnp.where(count < self.warm_up, count / jnp.maximum(self.warm_up, 1.0), 1.0) * learning_rate

        return optax.chain(
            optax.identity() if self.clip is None else clip_by_array_norm(self.clip),
            optax.scale_by_rms(self.b2, eps=self.eps, eps_in_sqrt=False, bias_correction=True),
            optax.ema(self.b1, debias=True),
            optax.scale_by_learning_rate(rate),
        )


_SMALL = 2**14  # elements; copying this many takes no longer than starting a kernel

OPTIMIZERS = (Adam, AdamW, RMSProp, RAdam, Muon, LaProp)
registry.add("optimizer", *OPTIMIZERS)


def clipped(transformation: optax.GradientTransformation, max_grad_norm: Number | None) -> optax.GradientTransformation:
    """Return `transformation` after clipping gradients to a global norm of at most `max_grad_norm`; None: no limit."""
    if max_grad_norm is None:
        return transformation
    return optax.chain(clip_by_norm(max_grad_norm), transformation)


def clip_by_norm(max_norm: Number) -> optax.GradientTransformation:
    """Scale gradients down to a global norm of at most `max_norm`, as `optax.clip_by_global_norm` does.

    All leaves are multiplied by one factor. optax divides every leaf if the norm is too large, and XLA compiles each
    division to a separate kernel: 12 of the 148 in a minibatch of PPO, or 5 percent of its time on a CPU if minibatches
    are small. A multiplication is fused into the optimizer's kernels.
    """

    def update(updates, state, params=None):
        factor = clip_factor(global_norm(updates), max_norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clip_by_array_norm(fraction: Number, least: float = 1e-3) -> optax.GradientTransformation:
    """Clip each array's gradient to a norm of `fraction` times the array's own norm, which counts as at least `least`.

    This is adaptive gradient clipping (Brock et al., 2021, arXiv:2102.06171, equation 3) of whole arrays, as in
    DreamerV3; `optax.adaptive_grad_clip` uses the norms of each output of a layer.
    """

    def update(updates, state, params=None):
        def clip(gradient, parameter):
            norm, size = (jnp.linalg.norm(x.reshape(-1)) for x in (gradient, parameter))
            return gradient * clip_factor(norm, fraction * jnp.maximum(size, least)).astype(gradient.dtype)

        return jax.tree.map(clip, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: Params) -> jax.Array:
    """Return the global norm, the root of the sum of all squares, as `optax.tree.norm` does.

    Small leaves are concatenated and summed as one vector: separately, each would take two kernels.
    """
    small, large = [], []
    for leaf in jax.tree.leaves(tree):
        (small if leaf.size <= _SMALL else large).append(leaf)
    parts = [jnp.concatenate([leaf.reshape(-1) for leaf in small])] if small else []
    return optax.tree.norm([*parts, *large])


def clip_factor(norm: jax.Array, max_norm: Number) -> jax.Array:
    """Return the scalar factor that clips gradients of global norm `norm` to `max_norm`; 1 if no clipping is needed."""
    return jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def optimizer_problems(label: str, optimizer: Any) -> list[str]:
    """Explain why `optimizer`, the value of the field `label`, is not an optimizer; empty if it is one."""
    named = jax.tree_util.tree_leaves_with_path(optimizer) if isinstance(optimizer, OPTIMIZERS) else []
    numbers = [(path, leaf) for path, leaf in named if not isinstance(leaf, jax.core.Tracer)]
    if found := [(path, leaf, what) for path, leaf in numbers if (what := problem(leaf))]:
        return [f"{label}{jax.tree_util.keystr(path)}={leaf!r:.80} {what}" for path, leaf, what in found]
    if callable(optimizer) and isinstance(optimizer(1e-3), optax.GradientTransformation):
        return []
    return [
        f"{label}={optimizer!r} must be a function of the learning rate that returns an optax.GradientTransformation: "
        "Adam(), optax.lion, or lambda learning_rate: optax.chain(...)"
    ]


def _dense_kernels(params: Params) -> Params:
    """Return the matrix axes of the kernels of dense layers, also in ensembles; None for other parameters."""

    def axes(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return MuonDimensionNumbers(-2, -1) if name == "kernel" and jnp.ndim(leaf) in (2, 3) else None

    return jax.tree_util.tree_map_with_path(axes, params)
