"""Parallelized Q-networks: Q-learning without replay or target network (Gallici et al., 2024, arXiv:2407.04811)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxrl.algos import returns, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, network_problems, number, static
from jaxrl.algos.minibatches import MinibatchFields, steps_over_minibatches
from jaxrl.algos.optimizers import Optimizer, RAdam
from jaxrl.algos.q_learning import QLearningFields, QState
from jaxrl.algos.train_state import Variables, weighted_mean
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import (
    SEQUENCE_INPUTS,
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


@algorithm
class PQN(MinibatchFields, QLearningFields):
    """Parallelized Q-networks: Q(lambda) on rollouts, with layer normalization and no replay or target network."""

    epsilon: Scalar = changed(Linear(1.0, 0.05, 0.5))
    random_persistence: float | None = changed(  # ty: ignore[incompatible-attribute-override]  # a number, once resolved
        None,
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
        problems = field_problems(self) + self.minibatch_problems(num_envs, shards)
        problems += network_problems("PQN.network", self.network, spec, SEQUENCE_INPUTS, discrete=True)
        if isinstance(self.network, QNetwork):
            head = self.network.head
            if not isinstance(head, ActionValues) or head.noisy:
                problems.append(f"PQN needs expected values without noise, not {head!r}; use ActionValues(), or DQN")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        # The learner computes the targets; actions from one update earlier are equally exploratory, and Q(lambda) has
        # no off-policy correction.
        return {"rollout": Rollouts(self.rollout_length, max_policy_lag=1)}

    def update(
        self, state: QState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[QState, UpdateInfo]:
        rollout: Rollout = batch["rollout"]
        rows = rollout.rows
        data = {
            "inputs": NetworkInputs.of_timesteps(rollout.timesteps[:-1]),
            "action": rows.action,
            "target": self._targets(state.network.variables, rollout, spec),
            "weight": rows.weight,
        }
        divided = self.divided(data, rollout.carry.network, key, replicas)

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
            found = train_state.gradient(loss, network, *divided.take(indices))
            network, norm, metrics = found.step(self.transformation, replicas)
            return network, metrics | {"gradient_norm": norm}

        network, metrics = steps_over_minibatches(step, state.network, divided.indices)
        metrics = replicas.mean(metrics)
        metrics |= {"epsilon": jnp.asarray(self.epsilon), "learning_rate": jnp.asarray(self.learning_rate)}
        return QState(network, state.updates + 1), UpdateInfo(metrics)

    def _targets(self, network: Variables, rollout: Rollout, spec: EnvSpec) -> jax.Array:
        """Return Q(lambda) returns [T, B], computed with the parameters before the update."""

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
        # Do not use the actors' final carry, which may be from older parameters.
        _, bootstrap_values = best_values(carry, rollout.final[None])
        segment = returns.Segment.of_rows(rollout.rows, values.reshape(length, envs), bootstrap_values[0])
        return returns.lambda_returns(segment, self.gamma, self.return_lambda)
