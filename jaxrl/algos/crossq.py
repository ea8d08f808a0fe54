"""CrossQ (Bhatt et al., 2024, arXiv:1902.05605v4): soft actor-critic with batch normalization, without targets.

Both ends of a transition pass through the critics as one batch, so that batch normalization sees the actions of the
data and of the policy alike; that is what makes target networks unnecessary. Where actions are discrete, expectations
over them are exact, as in SAC.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy, sac, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, field_problems, static
from jaxrl.algos.fields import NStepFields, ReplayFields, TemperatureFields
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.shared_batch import weighted_rows
from jaxrl.core.types import EnvSpec, Metrics, Network, Replicas, Source, UpdateInfo
from jaxrl.networks import Actor, Categorical, Critic


class CrossQState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    critic: TrainState
    log_temperature: TrainState  # a float32 scalar; () throughout where the temperature is fixed
    statistics: Statistics
    updates: jax.Array  # int32
    policy_metrics: Metrics  # of the policy's last step: most updates have none


@algorithm
class CrossQ(StochasticActing, ReplayFields, NStepFields, TemperatureFields):
    """SAC without target networks: wide critics with batch renormalization see both ends of a transition at once."""

    learning_rate: Scalar = changed(1e-3)
    min_size: int = changed(5_000)
    policy_delay: int = static(3, low=1, help="critic updates per update of the policy and the temperature")
    optimizer: Optimizer = changed(Adam(b1=0.5, eps=1e-8))
    policy: Network = changed(Actor(normalization="batch_renorm", normalize_inputs=True))
    critic: Critic = changed(Critic(widths=(2048, 2048), normalization="batch_renorm", normalize_inputs=True))

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, **self.resolved_networks(spec), rollout_length=self.steps_per_update(num_envs))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        networks = off_policy.problems("CrossQ", self.policy, self.critic, spec, stochastic=True, discrete=True)
        return field_problems(self) + networks

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": self.source(n_step=self.n_step)}

    def init(self, key: jax.Array, spec: EnvSpec) -> CrossQState:
        policy_key, critic_key = jax.random.split(key)
        return CrossQState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer),
            log_temperature=sac.initial_temperature(self),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
            policy_metrics={"policy_loss": jnp.float32(0.0), "entropy": jnp.float32(0.0)},
        )

    def update(
        self, state: CrossQState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[CrossQState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas)
        next_key, key = (off_policy.transition_keys(k, replay, replicas) for k in jax.random.split(key))
        temperature = sac.temperature_of(self, state.log_temperature)

        # The policy acts by its running statistics.
        next_observation, next_mask = replay.next_observation, replay.next_action_mask
        policy = off_policy.evaluate_policy(self.policy, state.policy.variables, next_observation, spec, next_mask)
        action, next_action, next_log_prob = None, None, 0.0
        if isinstance(policy, Categorical):
            next_log_prob = -policy.entropy()
        else:
            action, (next_action, next_log_prob) = replay.action, policy.sample_and_log_prob(next_key)
            next_log_prob += sac.log_half_range(spec.action_space)
        ends = (replay.observation, action, replay.action_mask), (next_observation, next_action, next_mask)
        both = jax.tree.map(lambda *x: jnp.concatenate(x), *ends)

        def critic_loss(params):
            """Return SAC's loss of one pass in training mode, without gradient through the next actions' values."""
            variables, (observation, action, mask) = state.critic.variables.replace(params=params), both
            with weighted_rows(jnp.concatenate([replay.weight, replay.weight])):
                output, model_state = off_policy.train_critic(self.critic, variables, observation, action, spec, mask)
            values, next_values = jnp.split(output, 2, axis=1)
            value = jnp.min(next_values, axis=0)
            value = off_policy.expected_value(policy, value) if action is None else value[:, 0]
            target = off_policy.expected_target(replay, value - temperature * next_log_prob, self.gamma)
            return off_policy.output_loss(values, model_state, replay, target, spec, replicas)

        gradients, fit = jax.grad(critic_loss, has_aux=True)(state.critic.params)
        critic, _ = train_state.apply_gradients(
            state.critic, gradients, self.critic_optimizer, replicas, fit.model_state
        )

        def policy_step(policy, log_temperature, _):
            """Take SAC's steps of policy and temperature, with the critics' running statistics."""
            with weighted_rows(replay.weight):
                policy, loss, log_prob = sac.policy_step(self, policy, critic, replay, temperature, key, spec, replicas)
            log_temperature = sac.temperature_step(self, log_temperature, replay, log_prob, spec, replicas)
            metrics = {"policy_loss": loss, "entropy": weighted_mean(-log_prob, replay.weight, replicas)}
            return policy, log_temperature, replicas.mean(metrics)

        updates = state.updates + 1
        learned = state.policy, state.log_temperature, state.policy_metrics
        due = updates % self.policy_delay == 0
        new_policy, log_temperature, metrics = jax.lax.cond(due, policy_step, lambda *same: same, *learned)
        new = CrossQState(new_policy, critic, log_temperature, statistics, updates, metrics)
        return new, UpdateInfo(replicas.mean(fit.metrics) | metrics | {"temperature": temperature})
