"""Critic regularised regression (Wang et al., 2020, arXiv:2006.15134)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, q_learning, regression
from jaxrl.algos.actor_critic import OffPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.networks import Critic
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec, Replicas, TransitionBatch, UpdateInfo


@struct.dataclass
class CRRState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    updates: jax.Array  # int32


@algorithm
class CRR(OffPolicyActorCritic):
    """A policy fitted to the data's actions, above all to those that the critic thinks better than the policy's own."""

    tau: Scalar = number(1.0, above=0, high=1, help="share of the new parameters at each target update")
    target_period: int = static(100, low=1, help="updates between two target updates")
    weighting: str = static("exp", choices=("exp", "indicator", "constant"), help="of an action, by its advantage")
    baseline: str = static("mean", choices=("mean", "max"), help="what an action is better than: the policy's values")
    samples: int = static(4, low=1, help="actions of a box that stand for the policy in the baseline")
    temperature: Scalar = number(1.0, above=0, help="exp: an action weighs exp of its advantage over this")
    max_weight: Scalar = number(20.0, above=0, help="exp: largest weight of an action")
    critic: Critic = static(Critic(ensemble=1))

    def init(self, key: jax.Array, spec: EnvSpec) -> CRRState:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=True)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        return CRRState(policy, critic, jnp.int32(0))

    def update(
        self, state: CRRState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[CRRState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_key, key = (q_learning.transition_keys(k, replay.weight.shape[0], replicas) for k in jax.random.split(key))
        policy, critic = state.policy, state.critic
        following = (replay.next_observation, replay.next_action_mask, next_key)
        value = self._policy_value(policy.target_params, critic.target_params, *following, 1, "mean", spec)
        target = off_policy.expected_target(self, replay, value)
        weights = self._weights(policy.params, critic.params, replay, key, spec)
        critic, metrics, _ = off_policy.fit_critic(self, critic, replay, target, spec, replicas)
        policy, told = regression.fit_policy(self, policy, replay, weights, spec, replicas)
        updates = state.updates + 1
        share = jnp.where(updates % self.target_period == 0, self.tau, 0.0)
        learnt = CRRState(off_policy.follow(policy, share), off_policy.follow(critic, share), updates)
        return learnt, UpdateInfo(replicas.mean(metrics | told))

    def _weights(self, policy, critic, replay, key, spec):
        """How much each transition's action counts, [batch]: equations 2 to 4."""
        if self.weighting == "constant":
            return jnp.ones(replay.weight.shape, jnp.float32)
        here = (replay.observation, replay.action_mask, key)
        baseline = self._policy_value(policy, critic, *here, self.samples, self.baseline, spec)
        advantage = regression.taken_values(self, critic, replay, spec) - baseline
        if self.weighting == "indicator":
            return (advantage > 0.0).astype(jnp.float32)
        return jnp.minimum(jnp.exp(advantage / self.temperature), self.max_weight)

    def _policy_value(self, policy, critic, observation, mask, key, samples, reduction, spec):
        """The mean or largest value [batch] of what the policy does, by the smallest critic.

        Of actions sampled with keys [batch] from a box; of all that are allowed where they are discrete.
        """
        distribution = off_policy.evaluate_policy(self, policy, observation, spec, mask)
        if isinstance(spec.action_space, spaces.Discrete):
            values = jnp.min(off_policy.evaluate_critic(self, critic, observation, None, spec, mask), axis=0)
            if reduction == "max":
                return jnp.max(values, axis=-1)
            probability = jnp.exp(distribution.log_probs())
            # A forbidden action has probability 0, and the most negative finite number for a value.
            return jnp.sum(jnp.where(probability > 0.0, probability * values, 0.0), axis=-1)
        keys = jax.vmap(lambda k: jax.random.split(k, samples), out_axes=1)(key)
        actions = jax.vmap(distribution.sample)(keys)
        # Mapped over the actions alone, so that an observation is encoded once.
        each = jax.vmap(lambda x: jnp.min(off_policy.evaluate_critic(self, critic, observation, x, spec), axis=0))
        values = each(actions)[..., 0]
        return jnp.max(values, axis=0) if reduction == "max" else jnp.mean(values, axis=0)
