"""Behavioral cloning (Pomerleau, 1989): a policy fitted to the actions of a dataset, regardless of rewards."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy, regression, train_state
from jaxrl.algos.acting import policy_output
from jaxrl.algos.base import action_problems, algorithm, field_problems, network_problems, number, static
from jaxrl.algos.fields import NormalizationFields
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    TRANSITION_INPUTS,
    ActorOutput,
    ActorState,
    Carry,
    Dataset,
    EnvSpec,
    Replicas,
    Source,
    TimeStep,
    UpdateInfo,
)
from jaxrl.networks import Actor, resolve_network


class BCState(struct.PyTreeNode):
    """State of the learner."""

    policy: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class BC(NormalizationFields):
    """Behavioral cloning: supervised learning of the actions in a dataset."""

    learning_rate: Scalar = number(1e-4, above=0, help="learning rate")
    batch_size: int = static(256, low=1, help="transitions per update")
    optimizer: Optimizer = number(Adam(eps=1e-8))
    policy: Actor = static(Actor())

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, policy=resolve_network(self.policy, spec))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems, space = field_problems(self) + action_problems("BC", spec, box=True, discrete=True), spec.action_space
        if isinstance(space, spaces.Discrete) and not self.policy.stochastic:
            problems.append(f"BC.policy={self.policy!r} needs a Box, not {space!r}; use stochastic=True")
        return problems or network_problems("BC.policy", self.policy, spec, TRANSITION_INPUTS)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": Dataset(self.batch_size)}

    def init(self, key: jax.Array, spec: EnvSpec) -> BCState:
        return BCState(
            policy=train_state.create(*self.policy.init(key, spec), self.optimizer(self.learning_rate)),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def actor(self, state: BCState) -> ActorState:
        return ActorState(state.policy.params, state.statistics, state.policy.model_state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        output, _ = policy_output(self.policy, actor, timestep, (), self.observation_clip, spec)
        if not self.policy.stochastic:
            return ActorOutput(output, carry)
        return ActorOutput(output.sample(key) if explore else output.mode(), carry)

    def update(
        self, state: BCState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[BCState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(state.statistics, batch, self.observation_clip, replicas)

        def loss(variables):
            output, model_state = replay.observation.policy_output(self.policy, variables, spec, train=True)
            if self.policy.stochastic:
                losses = -regression.log_likelihood(output, replay.action)
                best = output.mode()
            else:
                losses = regression.squared_distance(output, replay.action, spec)
                best = output
            loss = weighted_mean(losses, replay.weight, replicas)
            if isinstance(spec.action_space, spaces.Discrete):
                scores = {"accuracy": (best == replay.action).astype(jnp.float32)}
            else:
                scores = {"squared_distance": regression.squared_distance(best, replay.action, spec)}
            metrics = {name: weighted_mean(x, replay.weight, replicas) for name, x in scores.items()}
            return loss, (metrics | {"policy_loss": loss}, model_state)

        found = train_state.gradient(loss, state.policy)
        policy, _, metrics = found.step(self.optimizer(self.learning_rate), replicas)
        return BCState(policy, statistics, state.updates + 1), UpdateInfo(replicas.mean(metrics))
