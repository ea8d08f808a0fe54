"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), with a learned or a fixed temperature.

For discrete actions, expectations over them are exact (Christodoulou, 2019, arXiv:1910.07207). Trained on
demonstrations without rewards, it is SQIL (Reddy et al., 2019, arXiv:1905.11108).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import imitation, off_policy, soft_critics, soft_policies, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, static
from jaxrl.algos.fields import CombinedReplayFields, ResetFields, SequenceFields, TemperatureFields
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.scaled_rewards import RETURN, ReturnScale, ScaledRewardActing
from jaxrl.algos.soft_critics import SoftCriticFields
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core.types import (
    EnvSpec,
    Metrics,
    Replicas,
    Source,
    UpdateInfo,
)
from jaxrl.networks import (
    ActionValues,
    CategoricalValues,
    QuantileValues,
)

_HEADS = (ActionValues, CategoricalValues, QuantileValues)


class SACState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    critic: TrainState
    log_temperature: TrainState  # a float32 scalar; all () if the temperature is fixed
    statistics: Statistics
    updates: jax.Array  # int32
    return_scale: ReturnScale | tuple[()]  # () if rewards are not scaled
    policy_metrics: Metrics | tuple[()]  # of the policy's last step; () if it takes one at every update


@algorithm
class SAC(ScaledRewardActing, SequenceFields, CombinedReplayFields, ResetFields, SoftCriticFields, TemperatureFields):
    """Soft actor-critic: a stochastic policy that maximizes reward and entropy, with two critics; uniform replay."""

    random_correlation: float | None = changed(0.9, before=None)
    imitate: bool = static(
        False, help="SQIL: half of each batch is demonstrations with reward 1; all other transitions have reward 0"
    )

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(
            self,
            **self.resolved_networks(spec),
            rollout_length=self.steps_per_update_with_memory(num_envs),
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        name = type(self).__name__
        parts: dict[str, Any] = {"discrete": True, "heads": _HEADS, "memory": True, "dropout": True}
        networks = off_policy.problems(name, self.policy, self.critic, spec, stochastic=True, **parts)
        problems = field_problems(self) + networks
        if self.imitate and (self.newest or self.view or self.normalize_reward):
            what = f"newest={self.newest}, view={self.view} and normalize_reward={self.normalize_reward}"
            problems.append(
                f"{name}.imitate=True does not support views or reward normalization; {what} must be 0, None and False"
            )
        if self.imitate and self.recurrent:
            problems.append(f"{name}.imitate=True learns from single transitions; use networks without a core")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        replay = self.source_with_memory()
        if self.normalize_reward:
            replay = dataclasses.replace(replay, extras=(RETURN,))
        return imitation.sources(replay) if self.imitate else self.combined_sources(replay)

    def init(self, key: jax.Array, spec: EnvSpec) -> SACState:
        policy_key, critic_key = jax.random.split(key)
        none_yet = {"policy_loss": jnp.float32(0.0), "entropy": jnp.float32(0.0)}
        target = self.tau is not None
        return SACState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer, target=target),
            log_temperature=soft_policies.initial_temperature(self),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
            return_scale=self.initial_scale(),
            policy_metrics=none_yet if self.policy_delay > 1 else (),
        )

    def update(
        self, state: SACState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[SACState, UpdateInfo]:
        if self.imitate:
            batch = {"replay": imitation.rewarded(batch, replicas)}
        statistics, replay = off_policy.learning_batch(self, state.statistics, batch, replicas, n_step=self.n_step)
        return_scale, replay = self.scaled(state.return_scale, replay, replicas)
        *drop, policy_drop = soft_critics.dropout_keys(self.critic, key, replay, replicas)
        next_key, own_key = (off_policy.transition_keys(k, replay, replicas) for k in jax.random.split(key))
        temperature = soft_policies.temperature_of(self, state.log_temperature)
        following = soft_policies.next_actions(self.policy, state.policy.variables, replay, next_key, spec)
        critic, fit = soft_critics.critic_step(
            self, state.critic, replay, following, temperature, key, drop, spec, replicas
        )

        def policy_and_temperature(policy, log_temperature, _):
            policy, loss, log_prob = soft_policies.policy_step(
                self,
                policy,
                critic,
                replay,
                temperature,
                own_key,
                spec,
                replicas,
                joint=self.joint_policy,
                over_critics={"min": jnp.min, "mean": jnp.mean}[self.policy_value],
                drop=policy_drop,
                **self.support,
            )
            log_temperature = soft_policies.temperature_step(self, log_temperature, replay, log_prob, spec, replicas)
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
        return self.after_reset(new, key, spec), UpdateInfo(
            replicas.mean(fit.metrics) | metrics | {"temperature": temperature}
        )
