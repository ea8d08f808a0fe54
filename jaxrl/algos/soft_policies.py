"""Entropy-regularized values and targets of soft actor-critics.

Equations of Haarnoja et al. (2018, arXiv:1812.05905). Expectations over discrete actions are exact (Christodoulou,
2019, arXiv:1910.07207).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.optimizers import Number
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec, TransitionBatch
from jaxrl.networks import Categorical, Critic, TanhGaussian


def action_and_log_prob(
    distribution: Categorical | TanhGaussian, key: jax.Array, spec: EnvSpec
) -> tuple[jax.Array | None, jax.Array]:
    """Sample box actions [batch, n] with keys [batch]; return them and their log-densities [batch] over [-1, 1].

    Densities over [-1, 1] do not depend on the units of the actions. For discrete actions, return None, as
    expectations use all of them, and the negative entropy.
    """
    if isinstance(distribution, Categorical):
        return None, -distribution.entropy()
    action, log_prob = distribution.sample_and_log_prob(key)
    return action, log_prob + log_half_range(spec.action_space)


def value_and_log_prob(
    network: Critic,
    critic: Variables,
    distribution: Categorical | TanhGaussian,
    inputs: off_policy.Inputs,
    key: jax.Array,
    spec: EnvSpec,
    *,
    v_min: Number = 0.0,
    v_max: Number = 0.0,
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the smallest critic's value of the policy's action, the action's log-probability, and the critics' output.

    Value and log-probability are [batch], for a box action sampled with keys [batch], or as expectations over all
    discrete actions. `v_min` and `v_max` are the ends of the support of a categorical head.
    """
    action, log_prob = action_and_log_prob(distribution, key, spec)
    output = inputs.critic_output(network, critic, action, spec)[0]
    values = jnp.min(q_learning.action_values(output, v_min, v_max), axis=0)
    return policy_value(distribution, values), log_prob, output


def policy_value(distribution: Categorical | TanhGaussian, values: jax.Array) -> jax.Array:
    """Return a policy's value [batch], for values [batch, actions] of its one action, or of all discrete actions."""
    return off_policy.expected_value(distribution, values) if isinstance(distribution, Categorical) else values[:, 0]


def soft_target(
    batch: TransitionBatch, returns: Returns, policy: Categorical | TanhGaussian, cost: jax.Array, gamma: Number
) -> Returns:
    """Return the critics' target for each transition, [batch, K]; no gradient.

    For discrete actions, the target is only the expected return.

    Args:
      batch: transitions.
      returns: the returns of each action at the next observation, [batch, actions, K].
      policy: the policy's distributions at the next observations.
      cost: the temperature times the log-probability [batch] of the policy's action.
      gamma: discount.
    """
    if isinstance(policy, Categorical):
        values = jnp.sum(returns.atoms * returns.probabilities, axis=-1)
        atoms = off_policy.expected_value(policy, values)[:, None]
        returns = Returns(atoms, jnp.ones_like(atoms))
    else:
        returns = jax.tree.map(lambda x: x[:, 0], returns)
    returns = returns.replace(atoms=returns.atoms - cost[:, None])
    return q_learning.n_step_returns(batch.rewards, batch.steps, batch.bootstrap, returns, gamma)


def log_half_range(space: spaces.Space) -> float:
    """Return the logarithm of a box's volume relative to the volume of [-1, 1]^n; 0 for discrete actions."""
    if not isinstance(space, spaces.Box):
        return 0.0
    return float(np.sum(np.log(0.5 * (space.high.astype(np.float64) - space.low))))
