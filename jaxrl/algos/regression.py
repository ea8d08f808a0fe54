"""Functions for fitting a policy to a dataset's actions: their likelihood, their values, and the gradient step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.algos import train_state
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec, Metrics, Network, Replicas, TransitionBatch
from jaxrl.networks import Critic, Distribution, TanhGaussian, to_unit

EDGE = 1e-3  # in units of half the box's range; actions closer to a bound count as at the bound


def log_likelihood(distribution: Distribution, action: jax.Array) -> jax.Array:
    """Return the log-likelihood [batch] of a dataset's actions, finite and with a gradient everywhere.

    A squashed Gaussian has no density at a bound, which is infinitely far out before the tanh. An action within `EDGE`
    of a bound is therefore a censored observation: its density is the mean density there, P(within EDGE) / EDGE, as
    in Acme beyond 0.999. This moves the policy to the bound, but not beyond it. Densities are over actions in [-1, 1],
    so that units do not matter.

    Args:
      distribution: the policy's distribution over actions, with leaves [batch, ...].
      action: discrete actions [batch], or box actions [batch, n].
    """
    if not isinstance(distribution, TanhGaussian):
        return distribution.log_prob(action)
    low, high = (jnp.asarray(bound, jnp.float32)[None] for bound in (distribution.low, distribution.high))
    unit = (action - low) / (0.5 * (high - low)) - 1.0
    limit = 1.0 - EDGE
    inner = jnp.clip(unit, -limit, limit)
    mean, std = distribution.mean, jnp.exp(distribution.log_std)
    edge, normal = float(np.arctanh(limit)), jax.scipy.stats.norm
    inside = normal.logpdf(jnp.arctanh(inner), mean, std) - jnp.log1p(-jnp.square(inner))
    below = normal.logcdf((-edge - mean) / std) - float(np.log(EDGE))
    above = normal.logcdf((mean - edge) / std) - float(np.log(EDGE))
    return jnp.sum(jnp.where(unit <= -limit, below, jnp.where(unit >= limit, above, inside)), axis=-1)


def squared_distance(action: jax.Array, other: jax.Array, spec: EnvSpec) -> jax.Array:
    """Return the mean squared difference [...] between actions [..., n], in units of half the box's range."""
    box = spaces.expect(spec.action_space, spaces.Box)
    return jnp.mean(jnp.square(to_unit(action, box) - to_unit(other, box)), axis=-1)


def taken_values(network: Critic, critic: Variables, batch: TransitionBatch, spec: EnvSpec) -> jax.Array:
    """Return the smallest critic's values [batch] of the actions that were taken."""
    discrete = isinstance(spec.action_space, spaces.Discrete)
    taken = None if discrete else batch.action
    output = batch.observation.critic_output(network, critic, taken, spec)[0]
    values = jnp.min(output, axis=0)
    return jnp.take_along_axis(values, batch.action[:, None], axis=-1)[:, 0] if discrete else values[:, 0]


def policy_step(
    network: Network,
    policy: TrainState,
    transformation: optax.GradientTransformation,
    batch: TransitionBatch,
    weights: jax.Array,
    spec: EnvSpec,
    replicas: Replicas,
) -> tuple[TrainState, Metrics]:
    """Take a gradient step of the policy that increases the weighted log-likelihood of the actions that were taken.

    Args:
      network, policy: the policy's network and training state.
      transformation: the optimizer with its learning rate.
      batch: transitions.
      weights: weights of the transitions, [batch], without gradient.
      spec, replicas: as passed to `update`.

    Returns:
      The policy after the step, and this device's share of metrics.
    """

    def loss(variables):
        distribution, model_state = batch.observation.policy_output(network, variables, spec, train=True)
        likelihood = log_likelihood(distribution, batch.action)
        loss = weighted_mean(-jax.lax.stop_gradient(weights) * likelihood, batch.weight, replicas)
        metrics = {
            "policy_loss": loss,
            "log_likelihood": weighted_mean(likelihood, batch.weight, replicas),
            "advantage_weight": weighted_mean(weights, batch.weight, replicas),
        }
        return loss, (metrics, model_state)

    policy, _, metrics = train_state.gradient(loss, policy).step(transformation, replicas)
    return policy, metrics
