"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), with a learned or a fixed temperature.

Expectations over discrete actions are exact (Christodoulou, 2019, arXiv:1910.07207). Trained on demonstrations
without rewards, it is SQIL (Reddy et al., 2019, arXiv:1905.11108).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import combined_replay, normalization, off_policy, q_learning, soft_policies, train_state
from jaxrl.algos.acting import ActingCarry, Noise, StochasticActing
from jaxrl.algos.base import algorithm, changed, number, part, static
from jaxrl.algos.fields import DistributionFields, SequenceFields
from jaxrl.algos.off_policy import DropoutKeys, LearnerState
from jaxrl.algos.pessimism import Pessimism
from jaxrl.algos.resets import Resets, after_reset
from jaxrl.algos.reward_scale import RETURN, ReturnScale, RewardScale
from jaxrl.algos.temperature import TemperatureFields
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import Dataset, Source
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    EnvSpec,
    Metrics,
    ModelState,
    Replicas,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import ActionValues, Categorical, CategoricalValues, QuantileValues, TanhGaussian

_HEADS = (ActionValues, CategoricalValues, QuantileValues)


class SACState(LearnerState):
    """State of the learner."""

    log_temperature: TrainState  # a float32 scalar; all fields are () if the temperature is fixed
    return_scale: ReturnScale | tuple[()]  # () if rewards are not scaled
    policy_metrics: Metrics | tuple[()]  # of the policy's last step; () if the policy takes a step at every update


@algorithm
class SAC(StochasticActing, SequenceFields, DistributionFields, TemperatureFields):
    """Soft actor-critic: a stochastic policy that maximizes reward and entropy, with two critics; uniform replay."""

    # Of older configurations: a field that selected another class, and values of removed fields that change nothing.
    variants = {"joint_batch": "algorithm:crossq"}
    removed = {"joint_batch": False, "joint_policy": False, "newest": 0}

    tau: Scalar | None = number(
        0.005,
        above=0,
        high=1,
        help="soft update coefficient of the target networks (Polyak averaging); None: no target networks",
    )
    policy_delay: int = static(1, low=1, help="critic updates per update of the policy")
    pessimism: Pessimism = part(
        Pessimism,
        default=Pessimism(),
        was={
            "target_value": "target",
            "policy_value": "policy",
            "target_critics": "sampled",
            "dropped_quantiles": "dropped_quantiles",
        },
        switch="target_value",
        help="reduction of the critics' values to one",
    )
    noise: Noise = changed(Noise(random_correlation=0.9))
    reward_scale: RewardScale | None = part(
        RewardScale,
        was={"largest_return": "largest_return"},
        switch="normalize_reward",
        only_with="not imitate",
        help="divide rewards by the running deviation of discounted returns; None: as they are",
    )
    resets: Resets | None = part(
        Resets, was={"reset_at": "at"}, switch="reset_at", help="resets of networks and optimizers; None: never"
    )
    imitate: bool = static(
        False, help="SQIL: half of each batch is demonstrations with reward 1; all other transitions have reward 0"
    )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        name = type(self).__name__
        problems = self.actor_critic_problems(spec, stochastic=True, discrete=True, heads=_HEADS, dropout=True)
        if self.imitate and self.recurrent:
            problems.append(f"{name}.imitate=True learns from single transitions; use networks without a core")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        replay = self.source_with_memory()
        if self.reward_scale is not None:
            replay = dataclasses.replace(replay, extras=(RETURN,))
        if not self.imitate:
            return self.combined_sources(replay)
        half = replay.batch_size // 2
        own = dataclasses.replace(replay, batch_size=replay.batch_size - half)
        return {"replay": own, "demonstrations": Dataset(half, n_step=replay.n_step)}

    def init(self, key: jax.Array, spec: EnvSpec) -> SACState:
        none_yet = {"policy_loss": jnp.float32(0.0), "entropy": jnp.float32(0.0)}
        return SACState(
            **self.learner(*jax.random.split(key), spec, critic_target=self.tau is not None),
            log_temperature=self.temperature.init(self.temperature_optimizer),
            return_scale=() if self.reward_scale is None else self.reward_scale.init(),
            policy_metrics=none_yet if self.policy_delay > 1 else (),
        )

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> ActingCarry:
        carry = super().initial_carry(spec, env_index, num_envs)
        return carry if self.reward_scale is None else carry.replace(discounted_return=jnp.float32(0.0))

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: ActingCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        output = super().act(actor, timestep, carry, key, spec=spec, explore=explore)
        if isinstance(carry.discounted_return, tuple):
            return output
        discounted = normalization.discounted_return(carry.discounted_return, timestep, self.gamma)
        carry = output.carry.replace(discounted_return=discounted)
        return output.replace(carry=carry, extras={RETURN: discounted})

    def update(
        self, state: SACState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[SACState, UpdateInfo]:
        if self.imitate:
            batch = {"replay": rewarded(batch, replicas)}
        statistics, replay = self.learning_batch(state, batch, replicas)
        return_scale: Any = state.return_scale
        if self.reward_scale is not None:
            return_scale, replay = self.reward_scale.scaled(return_scale, replay, self.gamma, replicas)
        drop, policy_drop = off_policy.dropout_keys(self.critic, key, replay, replicas)
        next_key, own_key = (replay.observation.keys(k, replicas) for k in jax.random.split(key))
        temperature = self.temperature.weight(state.log_temperature)
        next_policy = replay.next_observation.policy_output(self.policy, state.policy.variables, spec)[0]
        next_action, next_log_prob = soft_policies.action_and_log_prob(next_policy, next_key, spec)
        outputs = self.critic_outputs(state.critic, replay, next_action, drop, spec)

        def critic_loss(variables):  # equations 5 and 6
            output, there, model_state = outputs(variables)
            returns = self.pessimism.returns(there, key, **self.support)
            cost = temperature * next_log_prob
            target = soft_policies.soft_target(replay, returns, next_policy, cost, self.gamma)
            loss, fit = off_policy.output_loss(output, replay, target, spec, replicas, **self.loss_options)
            return loss, (fit, model_state)

        found = train_state.gradient(critic_loss, state.critic)
        critic, _, fit = found.step(self.critic_optimizer, replicas)

        def policy_loss(variables):  # equation 9
            distribution, model_state = self.train_policy(variables, replay, spec)
            action, log_prob = soft_policies.action_and_log_prob(distribution, own_key, spec)
            output, _ = replay.observation.critic_output(self.critic, critic.variables, action, spec, policy_drop)
            values = self.pessimism.value(q_learning.action_values(output, self.v_min, self.v_max))
            value = soft_policies.policy_value(distribution, values)
            loss = weighted_mean(temperature * log_prob - value, replay.weight, replicas)
            return loss, ((loss, log_prob), model_state)

        def policy_and_temperature(policy, log_temperature, _):
            found = train_state.gradient(policy_loss, policy)
            policy, _, (loss, log_prob) = found.step(self.policy_optimizer, replicas)
            log_temperature = self.temperature.step(
                log_temperature, self.temperature_optimizer, replay, log_prob, spec, replicas
            )
            metrics = {"policy_loss": loss, "entropy": weighted_mean(-log_prob, replay.weight, replicas)}
            return policy, log_temperature, replicas.mean(metrics)

        updates, learned = state.updates + 1, (state.policy, state.log_temperature, state.policy_metrics)
        if self.policy_delay == 1:
            policy, log_temperature, metrics = policy_and_temperature(*learned)
        else:
            due = updates % self.policy_delay == 0
            learned = jax.lax.cond(due, policy_and_temperature, lambda *same: same, *learned)
            policy, log_temperature, metrics = learned
        new = SACState(
            policy=policy,
            critic=critic if self.tau is None else train_state.polyak_update(critic, self.tau),
            log_temperature=log_temperature,
            statistics=statistics,
            updates=updates,
            return_scale=return_scale,
            policy_metrics=metrics if self.policy_delay > 1 else (),
        )
        return after_reset(self.resets, self.init, new, key, spec), UpdateInfo(
            replicas.mean(fit.metrics) | metrics | {"temperature": temperature}
        )

    def critic_outputs(
        self,
        critic: TrainState,
        batch: TransitionBatch,
        next_action: jax.Array | None,
        drop: DropoutKeys,
        spec: EnvSpec,
    ) -> Callable[[Variables], tuple[Any, Any, ModelState]]:
        """Return a function of the critics' variables: their outputs at both ends of transitions, and the model state.

        The outputs are those for the actions that were taken, and those for the targets, without gradient.

        Args:
          critic: training state of the ensemble before the step.
          batch: normalized transitions.
          next_action: the policy's actions [batch, n] at the next observations; None if they are discrete.
          drop: keys [batch] for dropout in the targets and in the loss; None: no dropout.
          spec: the environment's spec.
        """
        slow = critic.variables if self.tau is None else critic.target_variables
        there = batch.next_observation.critic_output(self.critic, slow, next_action, spec, drop[0])[0]
        action = None if next_action is None else batch.action

        def outputs(variables):
            with batch.observation.rows_that_count(batch.weight):
                output, model_state = batch.observation.critic_output(
                    self.critic, variables, action, spec, drop[1], train=True
                )
            return output, there, model_state

        return outputs

    def train_policy(
        self, policy: Variables, batch: TransitionBatch, spec: EnvSpec
    ) -> tuple[TanhGaussian | Categorical, ModelState]:
        """Return the policy's distributions [batch] at the observations, in training mode, and the model state."""
        with batch.observation.rows_that_count(batch.weight):
            return batch.observation.policy_output(self.policy, policy, spec, train=True)


def rewarded(batch: Mapping[str, Any], replicas: Replicas) -> TransitionBatch:
    """Join replay and demonstrations, with reward 1 for steps of demonstrations and 0 otherwise (SQIL, algorithm 1)."""
    own, expert = batch["replay"], batch["demonstrations"]
    if expert.rewards.shape[1] > 1 and expert.bootstrap.dtype != bool:
        raise ConfigError(
            f"imitate=True with n_step={expert.rewards.shape[1]}: the dataset has discounts within episodes, and an "
            "n-step transition stores only their product, not one per reward; use n_step=1"
        )
    taken = jnp.arange(expert.rewards.shape[1], dtype=jnp.int32)[None] < expert.steps[:, None]
    own = own.replace(rewards=jnp.zeros_like(own.rewards))
    expert = expert.replace(rewards=taken.astype(expert.rewards.dtype))
    # Sampling statistics are kept per source.
    return combined_replay.concatenate_by_shard(
        own.replace(sample_info=None), expert.replace(sample_info=None), replicas=replicas
    )
