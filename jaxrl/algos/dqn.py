"""Deep Q-networks (Mnih et al., 2015), double by choice (van Hasselt et al., 2016, arXiv:1509.06461)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.optimisers import Adam, Optimiser, descend, weighted_mean
from jaxrl.networks import QNetwork
from jaxrl.schedules import Linear, Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    PyTree,
    Replay,
    Replicas,
    Source,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class DQNState:
    """All that the learner is."""

    params: PyTree
    target_params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32


@algorithm
class DQN:
    """Q-learning from a uniform replay, with a target network."""

    learning_rate: Scalar = number(2.5e-4, above=0, help="step size")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    epsilon: Scalar = number(Linear(1.0, 0.05, 0.5), low=0, high=1, help="chance of a random action")
    max_grad_norm: Scalar | None = number(10.0, above=0, help="largest global norm of a gradient; None: no limit")
    target_update: Scalar = number(1.0, above=0, high=1, help="share of the new parameters at a target update")
    target_period: int = static(100, low=1, help="updates between two target updates")
    double: bool = static(True, help="the online network chooses the next action")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    capacity: int = static(50_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update")
    batch_size: int = static(128, low=1, help="transitions an update")
    rollout_length: int = static(4, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    network: Network = static(QNetwork())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = field_problems(self)
        if not isinstance(spec.action_space, spaces.Discrete):
            problems.append(
                f"DQN chooses among discrete actions, but {spec.name} has {spec.action_space!r}; use PPO or A2C"
            )
        if self.network.recurrent:
            problems.append("DQN's replay draws single transitions; a recurrent core needs sequence replay (to come)")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        return {
            "replay": Replay(
                capacity=self.capacity,
                batch_size=self.batch_size,
                min_size=self.min_size,
                rollout_length=self.rollout_length,
                updates=self.updates,
                n_step=self.n_step,
            )
        }

    def init(self, key: jax.Array, spec: EnvSpec) -> DQNState:
        params = self.network.init(key, spec)
        target = jax.tree.map(jnp.copy, params)  # its own buffers: the state must not hold an array twice
        return DQNState(params, target, self.optimiser.rule().init(params), jnp.int32(0))

    def actor(self, state: DQNState) -> ActorState:
        return ActorState(params=state.params, exploration={"epsilon": jnp.asarray(self.epsilon, jnp.float32)})

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array) -> Carry:
        return self.network.initial_carry(spec)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        values, carry = self.network.apply(actor.params, jax.tree.map(lambda x: x[None], timestep), carry, spec=spec)
        action = jnp.argmax(values[0], axis=-1).astype(jnp.int32)
        if explore:
            action = epsilon_greedy(
                key, action, timestep.action_mask, actor.exploration["epsilon"], spec.action_space.n
            )
        return ActorOutput(action, carry)

    def update(
        self, state: DQNState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DQNState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        target = self._target(state, replay, spec)

        def loss(params):
            values = self._values(params, replay.observation, replay.action_mask, spec)
            chosen = jnp.take_along_axis(values, replay.action[:, None], axis=-1)[:, 0]
            td_error = target - chosen
            loss = weighted_mean(0.5 * jnp.square(td_error), replay.weight, replicas)
            return loss, {
                "loss": loss,
                "q_value": weighted_mean(chosen, replay.weight, replicas),
                "td_error": weighted_mean(jnp.abs(td_error), replay.weight, replicas),
            }

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        params, optimiser, norm = descend(
            self.optimiser,
            state.params,
            gradients,
            state.optimiser,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            replicas=replicas,
        )
        updates = state.updates + 1
        share = jnp.where(updates % self.target_period == 0, self.target_update, 0.0)
        target_params = jax.tree.map(lambda old, new: old + share * (new - old), state.target_params, params)
        metrics = replicas.mean(metrics) | {"gradient_norm": norm, "epsilon": jnp.asarray(self.epsilon)}
        return DQNState(params, target_params, optimiser, updates), UpdateInfo(metrics)

    def _values(self, params, observation, mask, spec):
        """Q values [batch, actions] of single observations."""
        flags = jnp.zeros(jax.tree.leaves(observation)[0].shape[:1], bool)
        zero = jnp.zeros(flags.shape, jnp.float32)
        timestep = TimeStep(observation, zero, flags, flags, flags, action_mask=mask)
        carry = self.network.initial_carry(spec)
        return self.network.apply(params, jax.tree.map(lambda x: x[None], timestep), carry, spec=spec)[0][0]

    def _target(self, state, replay, spec):
        next_values = self._values(state.target_params, replay.next_observation, replay.next_action_mask, spec)
        chooser = next_values
        if self.double:
            chooser = self._values(state.params, replay.next_observation, replay.next_action_mask, spec)
        best = jnp.argmax(chooser, axis=-1)
        value = jnp.take_along_axis(next_values, best[:, None], axis=-1)[:, 0]
        return n_step_target(replay.rewards, replay.steps, replay.bootstrap, value, self.gamma)


def epsilon_greedy(
    key: jax.Array, greedy: jax.Array, mask: jax.Array | None, epsilon: jax.Array, actions: int
) -> jax.Array:
    """A uniformly drawn allowed action with probability epsilon, else the greedy one.

    Args:
      key: keys [B].
      greedy: int32 [B].
      mask: bool [B, actions] or None.
      epsilon: a scalar, or [B].
      actions: how many there are.

    Returns:
      int32 [B].
    """
    draws = jax.vmap(lambda k: jax.random.uniform(k, (2,)))(key)
    if mask is None:
        random = (draws[:, 1] * actions).astype(jnp.int32)
    else:
        rank = (draws[:, 1] * jnp.sum(mask, axis=-1).astype(jnp.float32)).astype(jnp.int32)
        random = jnp.argmax(jnp.cumsum(mask.astype(jnp.int32), axis=-1) > rank[:, None], axis=-1).astype(jnp.int32)
    return jnp.where(draws[:, 0] < epsilon, random, greedy)


def n_step_target(
    rewards: jax.Array, steps: jax.Array, bootstrap: jax.Array, value: jax.Array, gamma: Scalar
) -> jax.Array:
    """Sum over the steps taken of gamma^k r_k, plus gamma^steps V unless the task ended there; no gradient.

    Args:
      rewards: [batch, n], 0 after an ending.
      steps: [batch] how many were taken, 1..n.
      bootstrap: [batch] bool, False where the task terminated.
      value: [batch] of the observation that `steps` lead to.
      gamma: discount.
    """
    powers = jnp.power(jnp.asarray(gamma, jnp.float32), jnp.arange(rewards.shape[-1], dtype=jnp.float32))
    reach = jnp.power(jnp.asarray(gamma, jnp.float32), steps.astype(jnp.float32))
    total = jnp.sum(rewards * powers[None], axis=-1) + jnp.where(bootstrap, reach * value, 0.0)
    return jax.lax.stop_gradient(total)
