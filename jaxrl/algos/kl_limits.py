"""KL limits on policy updates with learned Lagrange multipliers, as in MPO and V-MPO."""

import jax
import jax.numpy as jnp
import optax

from jaxrl.algos.base import field_group, number
from jaxrl.algos.train_state import TrainState, apply_gradients
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import Replicas
from jaxrl.networks.distributions import DiagonalGaussian

LEAST_DUAL = -18.0  # before the softplus or the exponential, which map it to 1.5e-8


@field_group
class KLFields:
    """KL limits of policy updates, and initial values of their multipliers (MPO, V-MPO)."""

    dual_learning_rate: Scalar = number(1e-2, above=0, help="learning rate of the temperature and the KL multipliers")
    epsilon: Scalar = number(0.1, above=0, help="KL limit of the improved policy, in nats")
    epsilon_mean: Scalar = number(
        2.5e-3, above=0, help="KL limit of the policy's mean, or of a discrete policy, in nats"
    )
    epsilon_std: Scalar = number(1e-4, above=0, help="continuous actions: KL limit of the standard deviation, in nats")
    temperature: Scalar = number(1.0, above=0, help="initial temperature of the improved policy")
    alpha_mean: Scalar = number(1.0, above=0, help="initial weight of the KL divergence of the mean")
    alpha_std: Scalar = number(
        10.0, above=0, help="continuous actions: initial weight of the KL divergence of the standard deviation"
    )


def inverse_softplus(x: Scalar) -> jax.Array:
    """Return y such that its softplus, log(1 + exp(y)), is x > 0; float32."""
    x = jnp.asarray(x, jnp.float32)
    return x + jnp.log(-jnp.expm1(-x))


def decoupled_kl(old: DiagonalGaussian, new: DiagonalGaussian) -> tuple[jax.Array, jax.Array]:
    """Return KL(old || new) per dimension, [..., n] in nats, if only the mean and if only the deviation changed."""
    mean, std, new_mean, new_std = (x[..., None] for x in (old.mean, old.log_std, new.mean, new.log_std))
    before = DiagonalGaussian(mean, std)
    return before.kl(DiagonalGaussian(new_mean, std)), before.kl(DiagonalGaussian(mean, new_std))


def lagrangian_loss(kl: jax.Array, alpha: jax.Array, epsilon: Scalar) -> jax.Array:
    """Return the Lagrangian [k] of kl <= epsilon, for kl and alpha [k].

    Its terms are alpha kl, with a gradient for the policy, and alpha (epsilon - kl), with a gradient for alpha.

    Gradient descent on this loss lowers the policy's weighted KL, and raises alpha where kl exceeds epsilon.
    """
    return jax.lax.stop_gradient(alpha) * kl + alpha * (epsilon - jax.lax.stop_gradient(kl))


def step_log(
    log: TrainState, gradient: jax.Array, optimizer: optax.GradientTransformation, replicas: Replicas
) -> TrainState:
    """Take a gradient step of a multiplier's logarithm, and clip it to [-18, 18].

    Far outside this range, the multiplier would be 0 or infinite in float32, and returning would take as many steps as
    leaving it.
    """
    log, _ = apply_gradients(log, gradient, optimizer, replicas)
    return log.replace(params=jnp.clip(log.params, LEAST_DUAL, -LEAST_DUAL))


def clip_duals(duals: TrainState) -> TrainState:
    """Clip multipliers so that their softplus stays above 0."""
    return duals.replace(params=jax.tree.map(lambda x: jnp.maximum(x, LEAST_DUAL), duals.params))
