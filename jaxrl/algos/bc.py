"""Behavioural cloning (Pomerleau, 1989): a policy fitted to the actions of data, whatever came of them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, regression
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import Adam, Optimiser, weighted_mean
from jaxrl.networks import Actor
from jaxrl.schedules import Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    Dataset,
    EnvSpec,
    Replicas,
    Source,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class BCState:
    """All that the learner is."""

    policy: Learnt
    updates: jax.Array  # int32


@algorithm
class BC:
    """Supervised learning of actions, from a dataset alone."""

    learning_rate: Scalar = number(1e-4, above=0, help="step size")
    batch_size: int = static(256, low=1, help="transitions an update")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    policy: Actor = static(Actor())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems, space = field_problems(self), spec.action_space
        bounded = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.bounded
        if not (bounded and (space.low < space.high).all()) and not isinstance(space, spaces.Discrete):
            problems.append(
                f"BC needs a bounded Box of actions, shape (n,), or a Discrete space, but {spec.name} has {space!r}"
            )
        if isinstance(space, spaces.Discrete) and not self.policy.stochastic:
            problems.append(f"BC.policy={self.policy!r} gives actions of a Box, not of {space!r}; use stochastic=True")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": Dataset(self.batch_size)}

    def init(self, key: jax.Array, spec: EnvSpec) -> BCState:
        return BCState(off_policy.begin(self, self.policy.init(key, spec), target=False), jnp.int32(0))

    def actor(self, state: BCState) -> ActorState:
        return ActorState(state.policy.params)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        output = off_policy.evaluate_policy(self, actor.params, timestep.observation, spec, timestep.action_mask)
        if not self.policy.stochastic:
            return ActorOutput(output, carry)
        return ActorOutput(output.sample(key) if explore else output.mode(), carry)

    def update(
        self, state: BCState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[BCState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]

        def loss(params):
            output = off_policy.evaluate_policy(self, params, replay.observation, spec, replay.action_mask)
            if self.policy.stochastic:
                losses = -regression.log_likelihood(output, replay.action)
                best = output.mode()
            else:
                losses = regression.squared_distance(output, replay.action, spec)
                best = output
            loss = weighted_mean(losses, replay.weight, replicas)
            if isinstance(spec.action_space, spaces.Discrete):
                told = {"accuracy": (best == replay.action).astype(jnp.float32)}
            else:
                told = {"squared_distance": regression.squared_distance(best, replay.action, spec)}
            return loss, {"policy_loss": loss} | {k: weighted_mean(v, replay.weight, replicas) for k, v in told.items()}

        gradients, metrics = jax.grad(loss, has_aux=True)(state.policy.params)
        policy = off_policy.step(self, state.policy, gradients, self.learning_rate, replicas)
        return BCState(policy, state.updates + 1), UpdateInfo(replicas.mean(metrics))
