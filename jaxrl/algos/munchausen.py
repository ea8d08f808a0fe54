"""Munchausen reinforcement learning (Vieillard et al., 2020, arXiv:2007.14430): the scaled log-policy as a reward."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.base import number, part_class
from jaxrl.algos.q_learning import Returns
from jaxrl.core.schedules import Scalar
from jaxrl.networks.q_heads import QuantileReturns


@part_class
class Munchausen:
    """Munchausen targets: soft values, and the scaled log-policy added to the reward."""

    scale: Scalar = number(0.9, low=0, high=1, help="weight of the log-policy in the reward (alpha)")
    temperature: Scalar = number(0.03, above=0, help="softmax temperature (tau)")
    clip: Scalar = number(-1.0, high=0, help="lower bound of the log-policy term")

    def bonus(self, values: jax.Array, action: jax.Array) -> jax.Array:
        """Return alpha times tau log pi(a|o) clipped to [clip, 0], [batch] (equation 5).

        Args:
          values: the target network's values of the action's observation, [batch, actions].
          action: int32 [batch].
        """
        log_policy = jnp.take_along_axis(scaled_log_policy(values, self.temperature), action[:, None], axis=-1)[:, 0]
        return self.scale * jnp.clip(log_policy, self.clip, 0.0)

    def soft_returns(self, output: Any, values: jax.Array) -> Returns:
        """Return sum_a pi(a) (Z(a) - tau log pi(a)) for each atom of values or quantiles.

        Args:
          output: the target network's output for the next observation; values or `QuantileReturns`.
          values: expected returns [batch, actions] of the output.
        """
        log_policy = scaled_log_policy(values, self.temperature)
        policy = jnp.exp(log_policy / self.temperature)
        atoms = output.quantiles if isinstance(output, QuantileReturns) else values[..., None]
        # `where`, not just the product: a forbidden action has probability 0 and an infinite logarithm.
        each = jnp.where(policy[..., None] > 0.0, policy[..., None] * (atoms - log_policy[..., None]), 0.0)
        atoms = jnp.sum(each, axis=1)
        return Returns(atoms, jnp.full_like(atoms, 1.0 / atoms.shape[-1]))


def scaled_log_policy(values: jax.Array, temperature: Scalar) -> jax.Array:
    """Return tau log softmax(q / tau), stable for a small tau (appendix B.1).

    Args:
      values: q [batch, actions]; for forbidden actions, the most negative finite number.
      temperature: tau, more than 0.

    Returns:
      [batch, actions]; for forbidden actions, -inf or nearly so.
    """
    advantage = values - jnp.max(values, axis=-1, keepdims=True)
    return advantage - temperature * jax.nn.logsumexp(advantage / temperature, axis=-1, keepdims=True)
