"""KL limits on policy updates with learned Lagrange multipliers, as in MPO and V-MPO."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxrl.algos import train_state
from jaxrl.algos.base import Part, field_group, number, part, part_class, static
from jaxrl.algos.optimizers import Number, Optimizer
from jaxrl.algos.train_state import TrainState, apply_gradients
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Metrics, Params, Replicas
from jaxrl.networks.distributions import DiagonalGaussian

LEAST_DUAL = -18.0  # before the softplus or the exponential, which map it to 1.5e-8


@part_class
class KLLimits(Part):
    """KL limits of policy updates; temperature and multipliers are learned."""

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
    learning_rate: Scalar = number(1e-2, above=0, help="learning rate of the temperature and the KL multipliers")

    def duals(self, optimizer: Optimizer, spec: EnvSpec, shape: tuple[int, ...] = ()) -> TrainState:
        """Return the initial training state of the temperature [] and the multipliers [*shape], before the softplus.

        The multipliers are "mean", and for continuous actions "std".
        """
        multipliers = {"mean": self.alpha_mean}
        if spaces.is_continuous(spec.action_space):
            multipliers["std"] = self.alpha_std
        duals = {name: jnp.full(shape, inverse_softplus(alpha)) for name, alpha in multipliers.items()}
        duals["temperature"] = inverse_softplus(self.temperature)
        return train_state.create(duals, (), optimizer(self.learning_rate))

    def lagrangian(self, divergences: dict[str, jax.Array], duals: dict[str, jax.Array]) -> tuple[Number, Metrics]:
        """Return the Lagrangian of `divergences <= limits`, summed over all limits, and metrics.

        Its terms are alpha kl, with a gradient for the policy, and alpha (epsilon - kl), with a gradient for alpha.
        Gradient descent lowers the policy's weighted KL, and raises alpha where kl exceeds epsilon.

        Args:
          divergences: KL divergences [*shape], keyed by the name of their limit.
          duals: the temperature and the multipliers, after the softplus.
        """
        stop, limits = jax.lax.stop_gradient, {"mean": self.epsilon_mean, "std": self.epsilon_std}
        total, metrics = 0.0, {"temperature": duals["temperature"]}
        for name, kl in divergences.items():
            alpha = duals[name]
            total += jnp.sum(stop(alpha) * kl + alpha * (limits[name] - stop(kl)))
            metrics |= {f"kl_{name}": jnp.mean(kl), f"alpha_{name}": jnp.mean(alpha)}
        return total, metrics

    def step(self, duals: TrainState, gradients: Params, optimizer: Optimizer, replicas: Replicas) -> TrainState:
        """Take a gradient step of the duals, and clip them so that their softplus stays above 0."""
        duals, _ = apply_gradients(duals, gradients, optimizer(self.learning_rate), replicas)
        return duals.replace(params=jax.tree.map(lambda x: jnp.maximum(x, LEAST_DUAL), duals.params))


@part_class
class MPOLimits(KLLimits):
    """KL limits of MPO."""

    per_dimension: bool = static(
        True,
        only_with="critic",
        help="continuous actions: limit the KL divergence per action dimension instead of in total",
    )


@field_group
class KLLimitFields:
    """KL limits of policy updates."""

    kl_limits: KLLimits = part(
        KLLimits,
        default=KLLimits(),
        was={field.name: field.name for field in dataclasses.fields(MPOLimits) if field.name != "learning_rate"}
        | {"dual_learning_rate": "learning_rate"},
        switch="epsilon",
        help="KL limits of policy updates",
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


def step_log(
    log: TrainState, gradient: jax.Array, optimizer: optax.GradientTransformation, replicas: Replicas
) -> TrainState:
    """Take a gradient step of a multiplier's logarithm, and clip it to [-18, 18].

    Far outside this range, the multiplier would be 0 or infinite in float32, and returning would take as many steps as
    leaving it.
    """
    log, _ = apply_gradients(log, gradient, optimizer, replicas)
    return log.replace(params=jnp.clip(log.params, LEAST_DUAL, -LEAST_DUAL))
