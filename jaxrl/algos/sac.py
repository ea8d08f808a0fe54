"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), with a learnt or a fixed temperature."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import Adam, Optimiser, weighted_mean
from jaxrl.networks import BoundedPolicy, Critic
from jaxrl.schedules import Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    Replicas,
    Source,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class SACState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    log_temperature: Learnt  # a float32 scalar; () throughout where the temperature is fixed
    updates: jax.Array  # int32


@algorithm
class SAC:
    """A stochastic policy for reward and entropy, from a uniform replay, with the smaller of two critics."""

    learning_rate: Scalar = number(3e-4, above=0, help="step size of the critics")
    policy_learning_rate: Scalar | None = number(None, above=0, help="step size of the policy; None: the critics'")
    temperature_learning_rate: Scalar | None = number(
        None, above=0, help="step size of the temperature's logarithm; None: the critics'"
    )
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    tau: Scalar = number(0.005, above=0, high=1, help="share of the new parameters at each target update")
    temperature: Scalar = number(1.0, above=0, help="weight of the entropy; where it is learnt, at the start")
    learn_temperature: bool = static(True, help="move the temperature towards the target entropy")
    target_entropy: Scalar = number(-1.0, high=0.69, help="for each dimension of the action in [-1, 1], in nats")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update, of random actions")
    batch_size: int = static(256, low=1, help="transitions an update")
    rollout_length: int = static(1, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    policy: Network = static(BoundedPolicy())
    critic: Critic = static(Critic())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return off_policy.problems(self, spec, stochastic=True)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": off_policy.replay(self)}

    def init(self, key: jax.Array, spec: EnvSpec) -> SACState:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=False)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        log_temperature = jnp.log(jnp.asarray(self.temperature, jnp.float32)) if self.learn_temperature else ()
        return SACState(policy, critic, off_policy.begin(self, log_temperature, target=False), jnp.int32(0))

    def actor(self, state: SACState) -> ActorState:
        return off_policy.actor(state.policy, state.updates)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        distribution = off_policy.evaluate_policy(self, actor.params, timestep.observation, spec)
        if not explore:
            return ActorOutput(distribution.mode(), carry)
        action = distribution.sample(key)
        return ActorOutput(off_policy.random_at_first(action, key, actor, spec.action_space), carry)

    def update(
        self, state: SACState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[SACState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_key, key = jax.random.split(key)
        temperature = self.temperature
        if self.learn_temperature:
            temperature = jnp.exp(state.log_temperature.params)

        next_action, next_log_prob = self._sample(
            state.policy.params, replay.next_observation, next_key, spec, replicas
        )
        target = off_policy.target(self, state.critic, replay, next_action, -temperature * next_log_prob, spec)
        critic, metrics = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)

        def policy_loss(params):
            action, log_prob = self._sample(params, replay.observation, key, spec, replicas)
            values = off_policy.evaluate_critic(self, critic.params, replay.observation, action, spec)
            loss = weighted_mean(temperature * log_prob - jnp.min(values, axis=0), replay.weight, replicas)
            return loss, (loss, log_prob)

        gradients, (loss, log_prob) = jax.grad(policy_loss, has_aux=True)(state.policy.params)
        policy = off_policy.step(self, state.policy, gradients, off_policy.policy_rate(self), replicas)

        log_temperature, entropy = state.log_temperature, weighted_mean(-log_prob, replay.weight, replicas)
        if self.learn_temperature:
            missing = weighted_mean(
                log_prob + self.target_entropy * spec.action_space.shape[0], replay.weight, replicas
            )
            rate = self.temperature_learning_rate
            # The loss is -log(alpha) times what entropy is missing: log_prob is a sample, and has no gradient here.
            log_temperature = off_policy.step(
                self, log_temperature, -missing, self.learning_rate if rate is None else rate, replicas
            )
        metrics |= {"policy_loss": loss, "entropy": entropy}
        metrics = replicas.mean(metrics) | {"temperature": temperature}
        critic = off_policy.follow(critic, self.tau)
        return SACState(policy, critic, log_temperature, state.updates + 1), UpdateInfo(metrics)

    def _sample(self, params, observation, key, spec, replicas):
        """Actions [batch, n], and their log-density [batch] over actions in [-1, 1]: units should not matter."""
        distribution = off_policy.evaluate_policy(self, params, observation, spec)
        keys = off_policy.batch_keys(key, jax.tree.leaves(observation)[0].shape[0], replicas)
        action, log_prob = distribution.sample_and_log_prob(keys)
        return action, log_prob + log_half_range(spec.action_space)


def log_half_range(space: spaces.Box) -> float:
    """The logarithm of the volume of a box, in which each side of [-1, 1] counts 1."""
    return float(np.sum(np.log(0.5 * (space.high.astype(np.float64) - space.low))))
