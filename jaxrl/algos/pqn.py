"""Parallelised Q-networks: Q-learning without replay or target network (Gallici et al., 2024, arXiv:2407.04811)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import policy_gradient, q_learning, returns
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.optimisers import Optimiser, RAdam, descend, weighted_mean
from jaxrl.algos.q_learning import QCarry
from jaxrl.networks import MLP, ActionValues, QNetwork
from jaxrl.schedules import Linear, Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    EnvSpec,
    Network,
    PyTree,
    Replicas,
    Rollout,
    RolloutBatch,
    Source,
    TimeStep,
    UpdateInfo,
)


@struct.dataclass
class PQNState:
    """All that the learner is."""

    params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32


@algorithm
class PQN:
    """Q(lambda) from rollouts of many environments, kept stable by layer normalisation."""

    learning_rate: Scalar = number(Linear(2.5e-4, 0.0), above=0, help="step size")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    return_lambda: Scalar = number(0.65, low=0, high=1, help="of Q(lambda); 0 looks one step ahead")
    epsilon: Scalar = number(Linear(1.0, 0.05, 0.5), low=0, high=1, help="chance of a random action")
    ladder_exponent: Scalar = number(7.0, low=0, help="with a ladder: its last environment has epsilon^(1 + this)")
    max_grad_norm: Scalar | None = number(10.0, above=0, help="largest global norm of a gradient; None: no limit")
    rollout_length: int = static(128, low=1, help="rows of every environment a batch")
    epochs: int = static(4, low=1, help="passes over a batch")
    minibatches: int = static(4, low=1, help="steps a pass")
    ladder: bool = static(False, help="epsilons fall from the first environment to the last")
    optimiser: Optimiser = number(RAdam())
    network: Network = static(QNetwork(MLP((128, 128), activation="relu", layer_norm=True)))

    @property
    def recurrent(self) -> bool:
        return policy_gradient.is_recurrent(self.network)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = field_problems(self) + policy_gradient.minibatch_problems(self, num_envs, shards)
        if not isinstance(spec.action_space, spaces.Discrete):
            problems.append(
                f"PQN chooses among discrete actions, but {spec.name} has {spec.action_space!r}; use PPO or A2C"
            )
        else:
            problems += policy_gradient.network_problems(self, spec)
        if isinstance(self.network, QNetwork):
            head = self.network.head
            if not isinstance(head, ActionValues) or head.noisy:
                problems.append(f"PQN's targets are expected values and its noise epsilon; not {head!r}: use DQN")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"rollout": Rollout(self.rollout_length)}

    def init(self, key: jax.Array, spec: EnvSpec) -> PQNState:
        params = self.network.init(key, spec)
        return PQNState(params, self.optimiser.rule().init(params), jnp.int32(0))

    def actor(self, state: PQNState) -> ActorState:
        return q_learning.actor(self, state.params)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> QCarry:
        return QCarry(self.network.initial_carry(spec), q_learning.rung(env_index, num_envs))

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: QCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        moment = jax.tree.map(lambda x: x[None], timestep)
        values, network = self.network.apply(actor.params, moment, carry.network, spec=spec)
        action = jnp.argmax(values[0], axis=-1).astype(jnp.int32)
        if explore:
            action = q_learning.explored(self, actor, action, timestep.action_mask, carry, key, spec)
        return ActorOutput(action, carry.replace(network=network))

    def update(
        self, state: PQNState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PQNState, UpdateInfo]:
        rollout: RolloutBatch = batch["rollout"]
        rows = rollout.rows
        data = {
            "timesteps": rollout.timesteps,
            "action": rows.action,
            "target": self._targets(state.params, rollout, spec),
            "weight": rows.weight,
        }
        cut = policy_gradient.minibatch_cutter(self, data, rollout.carry, key, replicas)

        def loss(params, minibatch, carry):
            values, _ = self.network.apply(params, minibatch["timesteps"], carry.network, spec=spec)
            chosen = jnp.take_along_axis(values, minibatch["action"][..., None], axis=-1)[..., 0]
            error, weight = minibatch["target"] - chosen, minibatch["weight"]
            loss = weighted_mean(0.5 * jnp.square(error), weight, replicas)
            return loss, {
                "loss": loss,
                "q_value": weighted_mean(chosen, weight, replicas),
                "td_error": weighted_mean(jnp.abs(error), weight, replicas),
            }

        def step(learner, indices):
            params, optimiser = learner
            gradients, metrics = jax.grad(loss, has_aux=True)(params, *cut.take(indices))
            params, optimiser, norm = descend(
                self.optimiser,
                params,
                gradients,
                optimiser,
                learning_rate=self.learning_rate,
                max_grad_norm=self.max_grad_norm,
                replicas=replicas,
            )
            return (params, optimiser), metrics | {"gradient_norm": norm}

        (params, optimiser), metrics = jax.lax.scan(step, (state.params, state.optimiser), cut.indices)
        metrics = replicas.mean(jax.tree.map(jnp.mean, metrics))
        metrics |= {"epsilon": jnp.asarray(self.epsilon), "learning_rate": jnp.asarray(self.learning_rate)}
        return PQNState(params, optimiser, state.updates + 1), UpdateInfo(metrics)

    def _targets(self, params, rollout, spec):
        """Q(lambda) returns [T, B] with the parameters that the update begins with."""
        rows, final = rollout.rows, jax.tree.map(lambda x: x[None], rollout.final)
        values, _ = self.network.apply(params, rollout.timesteps, rollout.carry.network, spec=spec)
        last, _ = self.network.apply(params, final, rollout.final_carry.network, spec=spec)
        return returns.q_lambda(
            rows.reward, values, last[0], rows.terminated, rows.truncated, rows.weight, self.gamma, self.return_lambda
        )
