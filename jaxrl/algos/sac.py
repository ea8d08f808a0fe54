"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), with a learnt or a fixed temperature.

Where actions are discrete, expectations over them are exact (Christodoulou, 2019, arXiv:1910.07207).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.actor_critic import OffPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import weighted_mean
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec, PyTree, Replicas, TransitionBatch, UpdateInfo


@struct.dataclass
class SACState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    log_temperature: Learnt  # a float32 scalar; () throughout where the temperature is fixed
    updates: jax.Array  # int32


@algorithm
class SAC(OffPolicyActorCritic):
    """A stochastic policy for reward and entropy, from a uniform replay, with the smaller of two critics."""

    temperature_learning_rate: Scalar | None = number(
        None, above=0, help="step size of the temperature's logarithm; None: the critics'"
    )
    temperature: Scalar = number(1.0, above=0, help="weight of the entropy; where it is learnt, at the start")
    learn_temperature: bool = static(True, help="move the temperature towards the target entropy")
    target_entropy: Scalar = number(-1.0, high=0.69, help="for each dimension of a box in [-1, 1], in nats")
    target_entropy_share: Scalar = number(
        0.89, above=0, below=1, help="discrete actions: the target entropy, as a share of the largest"
    )

    def init(self, key: jax.Array, spec: EnvSpec) -> SACState:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=False)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        log_temperature = jnp.log(jnp.asarray(self.temperature, jnp.float32)) if self.learn_temperature else ()
        return SACState(policy, critic, off_policy.begin(self, log_temperature, target=False), jnp.int32(0))

    def update(
        self, state: PyTree, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PyTree, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_key, key = (q_learning.transition_keys(k, replay.weight.shape[0], replicas) for k in jax.random.split(key))
        temperature = self.temperature
        if self.learn_temperature:
            temperature = jnp.exp(state.log_temperature.params)
        state, critic_metrics = self._learn_values(state, replay, temperature, next_key, spec, replicas)
        state, policy_metrics = self._learn_policy(state, replay, temperature, key, spec, replicas)
        metrics = replicas.mean(critic_metrics | policy_metrics) | {"temperature": temperature}
        critic = off_policy.follow(state.critic, self.tau)
        return state.replace(critic=critic, updates=state.updates + 1), UpdateInfo(metrics)

    def _learn_values(self, state, replay, temperature, key, spec, replicas):
        """The state with critics a step on, and their metrics; keys [batch]."""
        value, log_prob = self._followed(
            state.policy.params,
            state.critic.target_params,
            replay.next_observation,
            replay.next_action_mask,
            key,
            spec,
        )
        target = off_policy.expected_target(self, replay, value - temperature * log_prob)
        critic, metrics, _ = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)
        return state.replace(critic=critic), metrics

    def _learn_policy(self, state, replay, temperature, key, spec, replicas):
        """The state with the policy and the temperature a step on, and their metrics; keys [batch]."""

        def policy_loss(params):
            value, log_prob = self._policy_value(params, state, replay, key, spec)
            loss = weighted_mean(temperature * log_prob - value, replay.weight, replicas)
            return loss, (loss, log_prob)

        gradients, (loss, log_prob) = jax.grad(policy_loss, has_aux=True)(state.policy.params)
        policy = off_policy.step(self, state.policy, gradients, off_policy.policy_rate(self), replicas)

        log_temperature, entropy = state.log_temperature, weighted_mean(-log_prob, replay.weight, replicas)
        if self.learn_temperature:
            missing = weighted_mean(log_prob + self._wanted_entropy(replay, spec), replay.weight, replicas)
            rate = self.temperature_learning_rate
            # The loss is -log(alpha) times what entropy is missing: log_prob is a sample, and has no gradient here.
            log_temperature = off_policy.step(
                self, log_temperature, -missing, self.learning_rate if rate is None else rate, replicas
            )
        metrics = {"policy_loss": loss, "entropy": entropy}
        return state.replace(policy=policy, log_temperature=log_temperature), metrics

    def _policy_value(self, params, state, replay, key, spec):
        """What the policy shall raise, and the log-probability of what it does, both [batch]."""
        return self._followed(params, state.critic.params, replay.observation, replay.action_mask, key, spec)

    def _followed(self, policy, critic, observation, mask, key, spec):
        """The smallest critic's value and the log-probability of what the policy does, both [batch].

        Of an action sampled with keys [batch] from a box; expectations over all actions where they are discrete. The
        log-density is over actions in [-1, 1]: units should not matter.
        """
        distribution = off_policy.evaluate_policy(self, policy, observation, spec, mask)
        if isinstance(spec.action_space, spaces.Discrete):
            output = off_policy.evaluate_critic(self, critic, observation, None, spec, mask)
            probability = jnp.exp(distribution.log_probs())
            # A forbidden action has probability 0, and the most negative finite number for a value.
            values = jnp.where(probability > 0.0, jnp.min(output, axis=0), 0.0)
            return jnp.sum(probability * values, axis=-1), -distribution.entropy()
        action, log_prob = distribution.sample_and_log_prob(key)
        output = off_policy.evaluate_critic(self, critic, observation, action, spec)
        return jnp.min(output, axis=0)[:, 0], log_prob + log_half_range(spec.action_space)

    def _wanted_entropy(self, replay, spec):
        """What the temperature aims at for each transition's observation [batch]."""
        if not isinstance(spec.action_space, spaces.Discrete):
            return jnp.full_like(replay.weight, self.target_entropy * spec.action_space.shape[0], jnp.float32)
        allowed = spec.action_space.n
        if replay.action_mask is not None:
            allowed = jnp.maximum(jnp.sum(replay.action_mask, axis=-1), 1)
        return jnp.broadcast_to(self.target_entropy_share * jnp.log(jnp.float32(allowed)), replay.weight.shape)


def log_half_range(space: spaces.Box) -> float:
    """The logarithm of the volume of a box, in which each side of [-1, 1] counts 1."""
    return float(np.sum(np.log(0.5 * (space.high.astype(np.float64) - space.low))))
