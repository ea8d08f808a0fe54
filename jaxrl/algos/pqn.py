"""Parallelized Q-networks: Q-learning without replay or target network (Gallici et al., 2024, arXiv:2407.04811)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import on_policy, q_learning, returns, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, network_problems, number, static, unresolved
from jaxrl.algos.fields import MinibatchFields, QLearningFields
from jaxrl.algos.minibatches import minibatch_problems, steps_over_minibatches
from jaxrl.algos.optimizers import Optimizer, RAdam, clipped
from jaxrl.algos.q_learning import QCarry
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import (
    SEQUENCE_INPUTS,
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    NetworkInputs,
    Replicas,
    Rollout,
    Rollouts,
    Source,
    TimeStep,
    UpdateInfo,
)
from jaxrl.networks import MLP, ActionValues, QNetwork, resolve_network
from jaxrl.networks.torsos import has_images

# The default torso for vectors; images get the usual CNN, with layer normalization too.
_VECTORS = MLP((128, 128), activation="relu", normalization="layer")
# Number of observations evaluated at once for the targets, or one step of all environments if that is more: a
# convolution over 32,768 images takes 130 MB.
_AT_ONCE = 1024


class PQNState(struct.PyTreeNode):
    """State of the learner."""

    network: TrainState
    updates: jax.Array  # int32


@algorithm
class PQN(MinibatchFields, QLearningFields):
    """Parallelized Q-networks: Q(lambda) on rollouts, with layer normalization and no replay or target network."""

    epsilon: Scalar = changed(Linear(1.0, 0.05, 0.5))
    random_persistence: float | None = changed(
        None,
        before=0.0,
        help="probability that a random action is repeated at the next step; None: 0.95, or 0 for images",
    )
    learning_rate: Scalar = number(Linear(4e-4, 0.0), above=0, help="learning rate")
    return_lambda: Scalar = number(0.65, low=0, high=1, help="lambda of Q(lambda); 0 gives one-step targets")
    rollout_length: int = static(64, low=1, help="steps per environment and batch")
    optimizer: Optimizer = changed(RAdam())

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        persistence = self.random_persistence
        if persistence is None:
            persistence = 0.0 if has_images(spec.observation_space) else 0.95
        network = resolve_network(self.network, spec, _VECTORS)
        return dataclasses.replace(self, network=network, random_persistence=persistence)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = field_problems(self) + self._minibatch_problems(num_envs, shards)
        if not isinstance(spec.action_space, spaces.Discrete):
            problems.append(
                f"PQN needs a Discrete action space, but {spec.name} has {spec.action_space!r}; use PPO or A2C"
            )
        else:
            problems += network_problems("PQN.network", self.network, spec, SEQUENCE_INPUTS)
        if isinstance(self.network, QNetwork):
            head = self.network.head
            if not isinstance(head, ActionValues) or head.noisy:
                problems.append(f"PQN needs expected values without noise, not {head!r}; use ActionValues(), or DQN")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        # Targets are computed by the learner; actions from one update earlier are as exploratory, and lambda is not
        # corrected.
        return {"rollout": Rollouts(self.rollout_length, max_policy_lag=1)}

    @property
    def _persistence(self) -> float:
        if self.random_persistence is None:
            raise unresolved(self, "random_persistence")
        return self.random_persistence

    def _minibatch_problems(self, num_envs: int, shards: int) -> list[str]:
        by = on_policy.minibatch_unit(self.network)
        return minibatch_problems(
            rows=self.rollout_length, num_envs=num_envs, shards=shards, count=self.minibatches, by=by
        )

    def init(self, key: jax.Array, spec: EnvSpec) -> PQNState:
        return PQNState(train_state.create(*self.network.init(key, spec), self._transformation()), jnp.int32(0))

    def actor(self, state: PQNState) -> ActorState:
        return q_learning.actor(state.network, self.epsilon, self.ladder_exponent if self.ladder else None)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> QCarry:
        return q_learning.initial_carry(self.network, spec, env_index, num_envs, self._persistence)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: QCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x: x[None], timestep))
        values, network, _ = self.network.apply(
            actor.params, inputs, carry.network, spec=spec, model_state=actor.model_state, train=False
        )
        action = jnp.argmax(values[0], axis=-1).astype(jnp.int32)
        carry = carry.replace(network=network)
        if explore:
            action, carry = q_learning.explore(
                actor, action, timestep, carry, key, spec=spec, persistence=self._persistence
            )
        return ActorOutput(action, carry)

    def update(
        self, state: PQNState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PQNState, UpdateInfo]:
        rollout: Rollout = batch["rollout"]
        rows = rollout.rows
        data = {
            "inputs": NetworkInputs.of_timesteps(rollout.timesteps[:-1]),
            "action": rows.action,
            "target": self._targets(state.network.variables, rollout, spec),
            "weight": rows.weight,
        }
        by = on_policy.minibatch_unit(self.network)
        divided = on_policy.split_into_minibatches(
            data, rollout.carry.network, key, replicas, by=by, epochs=self.epochs, count=self.minibatches
        )

        def loss(network, minibatch, carry):
            values, _, model_state = self.network.apply(
                network.params, minibatch["inputs"], carry, spec=spec, model_state=network.model_state, train=True
            )
            chosen = jnp.take_along_axis(values, minibatch["action"][..., None], axis=-1)[..., 0]
            error, weight = minibatch["target"] - chosen, minibatch["weight"]
            loss = weighted_mean(0.5 * jnp.square(error), weight, replicas)
            metrics = {
                "loss": loss,
                "q_value": weighted_mean(chosen, weight, replicas),
                "td_error": weighted_mean(jnp.abs(error), weight, replicas),
            }
            return loss, (metrics, model_state)

        def step(network, indices):
            network, norm, metrics = train_state.gradient_step(
                loss, network, self._transformation(), replicas, *divided.take(indices)
            )
            return network, metrics | {"gradient_norm": norm}

        network, metrics = steps_over_minibatches(step, state.network, divided.indices)
        metrics = replicas.mean(metrics)
        metrics |= {"epsilon": jnp.asarray(self.epsilon), "learning_rate": jnp.asarray(self.learning_rate)}
        return PQNState(network, state.updates + 1), UpdateInfo(metrics)

    def _transformation(self) -> optax.GradientTransformation:
        return clipped(self.optimizer(self.learning_rate), self.max_grad_norm)

    def _targets(self, network: Variables, rollout: Rollout, spec: EnvSpec) -> jax.Array:
        """Return Q(lambda) returns [T, B] by the parameters before the update."""

        def best_values(carry: Carry, timesteps: TimeStep) -> tuple[Carry, jax.Array]:
            values, carry, _ = self.network.apply(
                network.params,
                NetworkInputs.of_timesteps(timesteps),
                carry,
                spec=spec,
                model_state=network.model_state,
                train=False,
            )
            return carry, jnp.max(values, axis=-1)

        length, envs = rollout.rows.reward.shape
        steps = max(n for n in range(1, length + 1) if length % n == 0 and (n == 1 or n * envs <= _AT_ONCE))
        slices = jax.tree.map(lambda x: x.reshape(length // steps, steps, *x.shape[1:]), rollout.timesteps[:-1])
        carry, values = jax.lax.scan(best_values, rollout.carry.network, slices)
        # Not the actors' final carry, which may be from older parameters.
        _, bootstrap_values = best_values(carry, rollout.final[None])
        segment = returns.Segment.of_rows(rollout.rows, values.reshape(length, envs), bootstrap_values[0])
        return returns.lambda_returns(segment, self.gamma, self.return_lambda)
