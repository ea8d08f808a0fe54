"""Relative entropy pathwise policy optimization (Voelcker et al., 2025, arXiv:2507.11019).

A critic of action values is learned from lambda-returns with entropy, on rollouts of the newest policy. The policy
follows the gradient of that critic while its KL divergence from the policy before the update is within a limit.
Expectations over discrete actions are exact.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import minibatches, off_policy, on_policy, q_learning, returns, soft_policies, train_state
from jaxrl.algos.base import algorithm, changed, number
from jaxrl.algos.fields import SupportFields
from jaxrl.algos.histories import Observations
from jaxrl.algos.kl_limits import step_log
from jaxrl.algos.minibatches import MinibatchFields
from jaxrl.algos.on_policy import PolicyCarry, RolloutFields, Statistics
from jaxrl.algos.optimizers import clipped
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.temperature import Temperature, TemperatureFields
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    EnvSpec,
    Network,
    Replicas,
    Source,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import ActionValues, Actor, CategoricalValues, Critic, SelfPredictiveValues

_HEADS = (SelfPredictiveValues, CategoricalValues, ActionValues)
# Number of time steps evaluated at once for the targets, or one step of all environments if that is more.
_AT_ONCE = 1024


class REPPOState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    critic: TrainState
    log_temperature: TrainState  # a float32 scalar; all fields are () if the temperature is fixed
    log_penalty: TrainState  # a float32 scalar: log of the divergence's weight
    statistics: Statistics
    updates: jax.Array  # int32, the version of the actor state


@algorithm
class REPPO(RolloutFields, MinibatchFields, TemperatureFields, SupportFields):
    """Relative entropy pathwise policy optimization: on-policy ascent of a critic's gradient within a KL limit."""

    normalize_reward: bool | None = changed(True)
    temperature: Temperature = changed(Temperature(initial=0.01, target=-0.5))
    v_min: Scalar = changed(-20.0)
    v_max: Scalar = changed(20.0)
    return_lambda: Scalar = number(0.95, low=0, high=1, help="lambda of the returns; 0 gives one-step targets")
    kl_limit: Scalar = number(
        0.1, above=0, help="limit of the KL divergence from the policy before the update, in nats"
    )
    initial_penalty: Scalar = number(0.01, above=0, help="initial weight of the KL divergence above the limit")
    prediction_cost: Scalar = number(
        1.0,
        low=0,
        only_with="critic.head=selfpredictivevalues",
        help="weight of the critic's auxiliary loss of predicting rewards and next features",
    )
    epochs: int = changed(8)
    policy: Network = changed(Actor(widths=(256, 256), activation="silu", normalization="layer"))
    critic: Critic = changed(
        Critic(widths=(256, 256), activation="silu", normalization="layer", ensemble=1, head=_HEADS[0](widths=(256,)))
    )

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, **self.resolved_networks(spec), **self.resolved_normalization(spec))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = self.actor_critic_problems(spec, stochastic=True, discrete=True, heads=_HEADS)
        return problems + self.minibatch_problems(num_envs, shards)

    @property
    def experience(self) -> Mapping[str, Source]:
        # The limit is relative to the policy before the update; returns from one update earlier are slightly stale.
        return {"rollout": self.rollouts(max_policy_lag=1, unit=self.minibatches)}

    def init(self, key: jax.Array, spec: EnvSpec) -> REPPOState:
        policy_key, critic_key = jax.random.split(key)
        log_penalty = jnp.log(jnp.asarray(self.initial_penalty, jnp.float32))
        return REPPOState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self._clipped(self.policy_optimizer)),
            critic=train_state.create(*self.critic.init(critic_key, spec), self._clipped(self.critic_optimizer)),
            log_temperature=self.temperature.init(self.temperature_optimizer),
            log_penalty=train_state.create(log_penalty, (), self.temperature_optimizer),
            statistics=self.init_statistics(spec),
            updates=jnp.int32(0),
        )

    def actor(self, state: REPPOState) -> ActorState:
        policy = state.policy
        return ActorState(policy.params, state.statistics, policy.model_state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> PolicyCarry:
        return self.first_carry(self.policy, spec)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: PolicyCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        timestep = self.preprocess(timestep)
        inputs = on_policy.network_inputs(timestep, actor.statistics, self.observation_clip)
        policy = train_state.Variables(actor.params, actor.model_state)
        inputs = Observations(inputs.observation, inputs.action_mask)
        distribution = inputs.policy_output(self.policy, policy, spec)[0]
        discounted = on_policy.discounted_return(timestep, carry, self.gamma)
        carry = carry.replace(discounted_return=discounted)
        if not explore:
            return ActorOutput(distribution.mode(), carry)
        action, log_prob = distribution.sample_and_log_prob(key)
        extras = {"log_prob": log_prob + soft_policies.log_half_range(spec.action_space)}  # density over [-1, 1]
        if self.normalize_reward:
            extras["discounted_return"] = discounted
        return ActorOutput(action, carry, extras)

    def update(
        self, state: REPPOState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[REPPOState, UpdateInfo]:
        statistics, rollout = self.prepare(state.statistics, batch, replicas)
        # Rewards are scaled by statistics that include this batch: unscaled, the first batch would be outside the
        # support.
        rollout = rollout.replace(statistics=rollout.statistics.replace(reward=statistics.reward))
        value_key, shuffle_key, step_key = jax.random.split(key, 3)
        data = self._data(state, rollout, value_key, spec, replicas)
        divided = self.divided(data, (), shuffle_key, replicas)

        def step(learned, drawn):
            keys = q_learning.transition_keys(drawn[1], drawn[0].shape[0], replicas)
            return self._step(learned, minibatches.take_rows(divided.data, drawn[0]), keys, spec, replicas)

        learned = state.policy, state.critic, state.log_temperature, state.log_penalty
        step_keys = jax.random.split(step_key, divided.indices.shape[0])
        learned, metrics = minibatches.steps_over_minibatches(step, learned, (divided.indices, step_keys))
        return REPPOState(*learned, statistics, state.updates + 1), UpdateInfo(replicas.mean(metrics))

    def _data(self, state, rollout, key, spec, replicas) -> TransitionBatch:
        """Return the rows [T, B] with targets and next features, computed by the networks before the update."""
        rows = rollout.rows
        inputs = on_policy.network_inputs(rollout.timesteps, rollout.statistics, self.observation_clip)
        policy, critic = state.policy.variables, state.critic.variables
        length, envs = rows.weight.shape
        env_keys = q_learning.transition_keys(key, envs, replicas)

        def of_timestep(x):
            """Return the policy, its soft value, and the critic's features of one sampled action, all [B, ...]."""
            number, seen = x
            keys = jax.vmap(lambda k: jax.random.fold_in(k, number))(env_keys)
            distribution = seen.policy_output(self.policy, policy, spec)[0]
            value, log_prob, output = self._value(critic, distribution, seen, keys, spec)
            return distribution, value - temperature * log_prob, getattr(output, "features", None)

        temperature = self.temperature.weight(state.log_temperature)
        observations = Observations(inputs.observation, inputs.action_mask)
        moments = jnp.arange(length + 1, dtype=jnp.int32), observations
        distribution, values, features = jax.lax.map(of_timestep, moments, batch_size=max(1, _AT_ONCE // envs))
        # Rewards include the entropy of each row's action: subtracting it from the observation's return results in the
        # action's return.
        bonus = -temperature * rows.extras["log_prob"]
        segment = self.valued(rollout, values[:-1], values[-1])
        reward, segment = segment.rewards, segment.replace(rewards=segment.rewards + bonus)
        target = returns.lambda_returns(segment, self.gamma, self.return_lambda) - bonus
        extras = {"target": target, "policy": jax.tree.map(lambda x: x[:-1], distribution), "active": rollout.active}
        if features is not None:
            extras["next_features"] = jnp.moveaxis(features, 1, 2)[1:]  # [T, B, ensemble, features]
        return TransitionBatch(
            observation=jax.tree.map(lambda x: x[:-1], observations),
            action=rows.action,
            rewards=reward[..., None],
            steps=jnp.ones_like(rows.weight, jnp.int32),
            bootstrap=~rows.terminated,
            next_observation=(),
            weight=rows.weight,
            action_mask=jax.tree.map(lambda x: x[:-1], inputs.action_mask),
            extras=extras,
        )

    def _step(self, learned, rows: TransitionBatch, key, spec, replicas):
        """Take steps of the critic, then of the policy, temperature and penalty, on a minibatch [batch, ...]."""
        policy, critic, log_temperature, log_penalty = learned
        target = rows.extras["target"][:, None]
        target = Returns(target, jnp.ones_like(target))

        def mean(x):
            return weighted_mean(x, rows.weight, replicas)

        def critic_loss(variables):
            action = None if isinstance(spec.action_space, spaces.Discrete) else rows.action
            output, model_state = rows.observation.critic_output(self.critic, variables, action, spec, train=True)
            loss, fit = off_policy.output_loss(output, rows, target, spec, replicas, **self.support)
            if "next_features" not in rows.extras:
                return loss, (fit.metrics, model_state)
            features = rows.extras["next_features"]
            error = q_learning.prediction_error(output.prediction, rows.action, rows.rewards[:, 0], features)
            wrong = mean(jnp.where(rows.bootstrap, error, 0.0))
            return loss + self.prediction_cost * wrong, (fit.metrics | {"prediction_loss": wrong}, model_state)

        found = train_state.gradient(critic_loss, critic)
        critic, _, metrics = found.step(self._clipped(self.critic_optimizer), replicas)
        temperature, penalty = self.temperature.weight(log_temperature), jnp.exp(log_penalty.params)
        rows = rows.replace(weight=on_policy.acting(rows.weight, rows.extras["active"]))

        def policy_loss(variables):
            distribution, model_state = rows.observation.policy_output(self.policy, variables, spec, train=True)
            value, log_prob, _ = self._value(critic.variables, distribution, rows.observation, key, spec)
            divergence = rows.extras["policy"].kl(distribution)
            # Rows above the limit only pull the policy back towards the old one.
            loss = mean(jnp.where(divergence < self.kl_limit, temperature * log_prob - value, penalty * divergence))
            return loss, ((loss, log_prob, divergence), model_state)

        found = train_state.gradient(policy_loss, policy)
        policy, _, (loss, log_prob, divergence) = found.step(self._clipped(self.policy_optimizer), replicas)
        log_temperature = self.temperature.step(
            log_temperature, self.temperature_optimizer, rows, log_prob, spec, replicas
        )
        # The loss is log(penalty) times (limit - divergence).
        slack = self.kl_limit - mean(divergence)
        log_penalty = step_log(log_penalty, slack, self.temperature_optimizer, replicas)
        metrics |= {"policy_loss": loss, "entropy": mean(-log_prob), "kl": mean(divergence)}
        metrics |= {"temperature": jnp.asarray(temperature, jnp.float32), "penalty": penalty}
        return (policy, critic, log_temperature, log_penalty), metrics

    def _value(self, critic, *inputs):
        return soft_policies.value_and_log_prob(self.critic, critic, *inputs, **self.support)

    def _clipped(self, optimizer):
        return clipped(optimizer, self.max_grad_norm)
