"""Policies of soft actor-critics: their gradient step on value and entropy.

Equations of Haarnoja et al. (2018, arXiv:1812.05905). Expectations over discrete actions are exact (Christodoulou,
2019, arXiv:1910.07207).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.algos import off_policy, q_learning, soft_critics, train_state
from jaxrl.algos.base import field_group, part
from jaxrl.algos.fields import ActorCriticFields
from jaxrl.algos.optimizers import Number
from jaxrl.algos.soft_critics import NextActions
from jaxrl.algos.temperature import Temperature
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec, Network, PyTree, Replicas, TransitionBatch
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


def next_actions(
    network: Network, policy: Variables, batch: TransitionBatch, key: jax.Array, spec: EnvSpec
) -> NextActions:
    """Return a policy's actions at the next observations of transitions, sampled with keys [batch]."""
    seen = batch.next_observation, spec, batch.next_action_mask
    distribution = off_policy.evaluate_policy(network, policy, *seen)
    return NextActions(distribution, *action_and_log_prob(distribution, key, spec))


def value_and_log_prob(
    network: Critic,
    critic: Variables,
    distribution: Categorical | TanhGaussian,
    observation: PyTree,
    mask: jax.Array | None,
    key: jax.Array,
    spec: EnvSpec,
    *,
    v_min: Number = 0.0,
    v_max: Number = 0.0,
    over_critics: Callable[..., jax.Array] = jnp.min,
    drop: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the smallest critic's value of the policy's action, the action's log-probability, and the critics' output.

    Value and log-probability are [batch], for a box action sampled with keys [batch], or as expectations over all
    discrete actions. `v_min` and `v_max` are the ends of the support of a categorical head; `over_critics` replaces the
    minimum over axis 0; `drop` are keys [batch] for the critics' dropout.
    """
    action, log_prob = action_and_log_prob(distribution, key, spec)
    output = off_policy.evaluate_critic(network, critic, observation, action, spec, mask, drop)
    values = over_critics(q_learning.action_values(output, v_min, v_max), axis=0)
    if isinstance(distribution, Categorical):
        return off_policy.expected_value(distribution, values), log_prob, output
    return values[:, 0], log_prob, output


@field_group
class SoftPolicyFields(ActorCriticFields):
    """Policy with a weight of its entropy, and critics."""

    temperature: Temperature = part(
        Temperature,
        default=Temperature(),
        was={
            "temperature": "initial",
            "learn_temperature": "learned",
            "temperature_learning_rate": "learning_rate",
            "target_entropy": "target",
            "target_entropy_fraction": "target_fraction",
        },
        help="weight of the policy's entropy (alpha), fixed or learned",
    )

    @property
    def temperature_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the temperature."""
        rate = self.temperature.learning_rate
        return self.optimizer(self.learning_rate if rate is None else rate)

    def policy_step(
        self,
        policy: TrainState,
        critic: TrainState,
        batch: TransitionBatch,
        temperature: Number,
        key: jax.Array,
        spec: EnvSpec,
        replicas: Replicas,
        *,
        value_of: Callable[[Any, jax.Array], jax.Array] = lambda distribution, value: value,
        joint: bool = False,
        **options: Any,
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        """Take a gradient step of the policy that increases the smallest critic's value and the entropy (equation 9).

        Args:
          policy, critic: training states of the policy and the critics.
          batch: normalized transitions.
          temperature: weight of the entropy.
          key: keys [batch].
          spec: the environment's spec.
          replicas: as passed to `update`.
          value_of: a function `value_of(distribution, value) -> value` of the policy's distributions and the values
            [batch], whose result replaces the values.
          joint: whether to pass observations and next observations through the policy as one batch; the loss uses only
            the observations.
          options: keyword arguments of `value_and_log_prob`.

        Returns:
          The policy after the step, this device's loss before it, and the log-probabilities [batch] of the actions.
        """
        observation, mask = seen = batch.observation, batch.action_mask
        if joint:
            seen = soft_critics.both_ends(seen, (batch.next_observation, batch.next_action_mask))

        def loss(variables):
            with soft_critics.rows_that_count(batch, 1 + joint):
                distribution, model_state = off_policy.train_policy(self.policy, variables, seen[0], spec, seen[1])
            distribution = jax.tree.map(lambda x: x[: batch.weight.shape[0]], distribution)
            value, log_prob, _ = value_and_log_prob(
                self.critic, critic.variables, distribution, observation, mask, key, spec, **options
            )
            value = value_of(distribution, value)
            loss = weighted_mean(temperature * log_prob - value, batch.weight, replicas)
            return loss, ((loss, log_prob), model_state)

        policy, _, (before, log_prob) = train_state.gradient(loss, policy).step(self.policy_optimizer, replicas)
        return policy, before, log_prob


def log_half_range(space: spaces.Space) -> float:
    """Return the logarithm of a box's volume relative to the volume of [-1, 1]^n; 0 for discrete actions."""
    if not isinstance(space, spaces.Box):
        return 0.0
    return float(np.sum(np.log(0.5 * (space.high.astype(np.float64) - space.low))))
