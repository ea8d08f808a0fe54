"""Advantage actor-critic, the synchronous form of A3C (Mnih et al., 2016, arXiv:1602.01783)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxrl.algos import on_policy
from jaxrl.algos.base import algorithm, field_problems, network_problems, number, static
from jaxrl.algos.on_policy import PolicyCarry, PolicyState
from jaxrl.algos.optimizers import Optimizer, RMSProp
from jaxrl.algos.train_state import Variables, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    SEQUENCE_INPUTS,
    ActorOutput,
    ActorState,
    EnvSpec,
    Replicas,
    Rollout,
    Source,
    TimeStep,
    UpdateInfo,
    ValueNetwork,
)
from jaxrl.networks import ActorCritic


@algorithm
class A2C:
    """Advantage actor-critic: one policy-gradient step per rollout; recurrent when its network is."""

    learning_rate: Scalar = number(7e-4, above=0, help="learning rate (of the policy, if value_learning_rate is set)")
    value_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the value; None: learning_rate")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor")
    value_cost: Scalar = number(0.5, low=0, help="weight of the value loss")
    entropy_cost: Scalar | None = number(
        None, low=0, help="weight of the entropy bonus; None: 0.01 for discrete actions, 0 for continuous ones"
    )
    gae_lambda: Scalar = number(1.0, low=0, high=1, help="lambda of GAE; 1 gives n-step returns")
    max_grad_norm: Scalar | None = number(0.5, above=0, help="clip gradients to this norm; None: no clipping")
    observation_clip: Scalar = number(
        10.0, above=0, only_with="normalize_observation", help="clip of normalized observations"
    )
    reward_clip: Scalar = number(10.0, above=0, only_with="normalize_reward", help="clip of normalized rewards")
    rollout_length: int = static(5, low=1, help="steps per environment and batch; whole_episodes: longest episode")
    normalize_observation: bool | None = static(
        None,
        choices=(None, True, False),
        help="normalize observations by running mean and standard deviation; None: for continuous actions",
    )
    normalize_reward: bool | None = static(
        None,
        choices=(None, True, False),
        help="divide by the running standard deviation of the discounted return; None: for continuous actions",
    )
    whole_episodes: bool = static(False, help="each batch is one complete episode of every environment")
    joint_grad_norm: bool = static(
        False, help="clip policy and value by one norm even where their networks are separate; False: each by its own"
    )
    bootstrap_truncated: bool = static(True, help="bootstrap at time limits; False treats them as terminations")
    normalize_advantage: bool = static(False, help="standardize advantages per batch")
    optimizer: Optimizer = number(RMSProp())
    network: ValueNetwork = static(ActorCritic())

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, **on_policy.resolved(self, spec))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return field_problems(self) + network_problems("A2C.network", self.network, spec, SEQUENCE_INPUTS)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"rollout": on_policy.source(self, max_policy_lag=0)}

    def init(self, key: jax.Array, spec: EnvSpec) -> PolicyState:
        return on_policy.init(self, key, spec)

    def actor(self, state: PolicyState) -> ActorState:
        return on_policy.actor(state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> PolicyCarry:
        return on_policy.initial_carry(self, spec)

    def act(
        self,
        actor: ActorState,
        timestep: TimeStep,
        carry: PolicyCarry,
        key: jax.Array,
        *,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        return on_policy.act(self, actor, timestep, carry, key, spec=spec, explore=explore)

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        rollout: Rollout = batch["rollout"]
        statistics = on_policy.update_statistics(self, state.statistics, rollout, replicas)
        weight = rollout.rows.weight
        advantages, targets = on_policy.advantages(self, state.network.variables, rollout, self.gae_lambda, spec)
        if self.normalize_advantage:
            advantages = on_policy.standardized(advantages, weight, replicas)
        inputs = on_policy.batch_inputs(self, rollout)

        def loss(params):
            network = Variables(params, state.network.model_state)
            output, _, model_state = on_policy.unroll(self, network, inputs, rollout.carry.network, spec, train=True)
            log_prob = output.distribution.log_prob(rollout.rows.action)
            policy_loss = weighted_mean(-log_prob * advantages, weight, replicas)
            value_loss = weighted_mean(0.5 * jnp.square(targets - output.value), weight, replicas)
            entropy = weighted_mean(output.distribution.entropy(), weight, replicas)
            total = on_policy.whole_loss(self, policy_loss, value_loss, entropy)
            return total, ({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}, model_state)

        gradients, (metrics, model_state) = jax.grad(loss, has_aux=True)(state.network.params)
        network, sizes = on_policy.apply_gradients(self, state.network, gradients, replicas, model_state)
        metrics = replicas.mean(metrics) | sizes
        metrics |= {
            "learning_rate": jnp.asarray(self.learning_rate),
            "explained_variance": on_policy.explained_variance(targets, rollout.rows.extras["value"], weight, replicas),
        }
        new = state.replace(network=network, statistics=statistics, updates=state.updates + 1)
        return new, UpdateInfo(metrics)
