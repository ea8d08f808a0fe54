"""Adaptive KL penalty of PPO (Schulman et al., 2017, section 4), with BatchPPO's hinge (Hafner et al., 2017)."""

import jax
import jax.numpy as jnp

from jaxrl.algos.base import Part, number, part_class
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Replicas


@part_class
class KLPenalty(Part):
    """Penalty on the KL divergence from the acting policy to the new one; its weight adapts to a target divergence."""

    target: Scalar = number(0.01, above=0, help="KL divergence to which the weight is adapted")
    cutoff_cost: Scalar = number(1000.0, low=0, help="weight of max(0, KL - 2 target)^2")
    initial: Scalar = number(1.0, above=0, help="initial weight of the KL divergence")

    def init(self, key: jax.Array, spec: EnvSpec) -> jax.Array:
        """Return the initial weight."""
        return jnp.asarray(self.initial, jnp.float32)

    def loss(self, weight: jax.Array, divergence: jax.Array, replicas: Replicas) -> jax.Array:
        """Return `weight * KL + cutoff_cost * max(0, KL - 2 * target)^2`, with the gradient of this device's share.

        This is equation 8 with the hinge of BatchPPO, whose `cutoff_cost` is 1000.

        Args:
          weight: the current weight.
          divergence: this device's share of the mean divergence.
          replicas: as passed to `update`.
        """
        # The hinge applies to the global value; each device contributes the gradient of its own share.
        everywhere = jax.lax.stop_gradient(replicas.mean(divergence) - divergence) + divergence
        excess = jnp.maximum(everywhere - 2.0 * self.target, 0.0)
        return weight * everywhere + self.cutoff_cost * jnp.square(excess)

    def adapted(self, weight: jax.Array, divergence: jax.Array) -> jax.Array:
        """Return the next weight: 1.5 times the last if the KL is above 1.3 targets, 1 / 1.5 if below 0.7 targets.

        The weight is limited to between 1/1000 and 1000 times `initial`; it recovers from a limit in 18 batches.
        Without limits, it would underflow to 0 permanently after 216 batches of low KL in float32. TF-Agents limits it
        too, to at least 1e-15 (85 batches).
        """
        raised = jnp.where(divergence > 1.3 * self.target, weight * 1.5, weight)
        adapted = jnp.where(divergence < 0.7 * self.target, weight / 1.5, raised)
        return jnp.clip(adapted, self.initial / 1000, self.initial * 1000)
