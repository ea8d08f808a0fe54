"""Deep Q-networks (Mnih et al., 2015) and what was added to them; Rainbow (Hessel et al., 2018, arXiv:1710.02298)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import q_learning
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.optimisers import Adam, Optimiser, descend, weighted_mean
from jaxrl.algos.q_learning import QCarry
from jaxrl.algos.q_learning import epsilon_greedy as epsilon_greedy
from jaxrl.algos.q_learning import n_step_target as n_step_target
from jaxrl.networks import CategoricalValues, QNetwork
from jaxrl.schedules import Linear, Scalar
from jaxrl.sources import Prioritised, Uniform
from jaxrl.types import (
    ActorOutput,
    ActorState,
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

_LEAST_PRIORITY = 1e-6  # added to every priority, so that nothing is never drawn again


@struct.dataclass
class DQNState:
    """All that the learner is."""

    params: PyTree
    target_params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32


@algorithm
class DQN:
    """Q-learning from a replay, with a target network; expected or distributional by the network's head."""

    learning_rate: Scalar = number(2.5e-4, above=0, help="step size")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    epsilon: Scalar = number(Linear(1.0, 0.05, 0.5), low=0, high=1, help="chance of a random action")
    ladder_exponent: Scalar = number(7.0, low=0, help="with a ladder: its last environment has epsilon^(1 + this)")
    max_grad_norm: Scalar | None = number(10.0, above=0, help="largest global norm of a gradient; None: no limit")
    target_update: Scalar = number(1.0, above=0, high=1, help="share of the new parameters at a target update")
    priority_exponent: Scalar = number(0.5, low=0, help="prioritised: chances are priorities to this power")
    importance_exponent: Scalar = number(Linear(0.4, 1.0), low=0, high=1, help="prioritised: beta of the weights")
    v_min: Scalar = number(-10.0, help="categorical head: lowest return")
    v_max: Scalar = number(10.0, help="categorical head: highest return")
    quantile_huber: Scalar = number(1.0, above=0, help="quantile head: error from which the loss is linear")
    munchausen_scale: Scalar = number(0.9, low=0, high=1, help="munchausen: weight of the log-policy in the reward")
    munchausen_temperature: Scalar = number(0.03, above=0, help="munchausen: of the softmax policy")
    munchausen_clip: Scalar = number(-1.0, high=0, help="munchausen: least log-policy term")
    target_period: int = static(100, low=1, help="updates between two target updates")
    double: bool = static(True, help="the online network chooses the next action")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    prioritised: bool = static(False, help="draw transitions by how wrong the network was there")
    munchausen: bool = static(False, help="soft targets, and the log-policy in the reward")
    ladder: int = static(
        0, low=0, help="environments that epsilons fall over, from the first to the last; 0: all alike"
    )
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
            problems.append(
                "DQN's replay draws single transitions; a recurrent core needs sequence replay (R2D2, to come)"
            )
        if self.ladder not in (0, num_envs):
            problems.append(f"DQN.ladder={self.ladder} must be 0 or the number of environments, {num_envs}")
        categorical = isinstance(self.network, QNetwork) and isinstance(self.network.head, CategoricalValues)
        if self.munchausen and (self.n_step > 1 or categorical):
            problems.append(
                "DQN.munchausen=True needs n_step=1, because its bonus belongs to every step and the replay knows the "
                "first one's action alone, and a head of values or quantiles: its target shifts each action's returns"
            )
        problems += q_learning.support_problems(self) if categorical else []
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        prioritised = Prioritised(exponent=self.priority_exponent, beta=self.importance_exponent)
        return {
            "replay": Replay(
                capacity=self.capacity,
                batch_size=self.batch_size,
                min_size=self.min_size,
                rollout_length=self.rollout_length,
                updates=self.updates,
                n_step=self.n_step,
                sampler=prioritised if self.prioritised else Uniform(),
            )
        }

    def init(self, key: jax.Array, spec: EnvSpec) -> DQNState:
        params = self.network.init(key, spec)
        target = jax.tree.map(jnp.copy, params)  # its own buffers: the state must not hold an array twice
        return DQNState(params, target, self.optimiser.rule().init(params), jnp.int32(0))

    def actor(self, state: DQNState) -> ActorState:
        return q_learning.actor(self, state.params)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array) -> QCarry:
        return QCarry(self.network.initial_carry(spec), q_learning.rung(env_index, self.ladder))

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: QCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        noise = jax.vmap(lambda k: jax.random.fold_in(k, 1))(key) if explore else None
        moment = jax.tree.map(lambda x: x[None], timestep)
        output, network = self.network.apply(actor.params, moment, carry.network, spec=spec, key=noise)
        values = q_learning.action_values(jax.tree.map(lambda x: x[0], output), self.v_min, self.v_max)
        action = jnp.argmax(values, axis=-1).astype(jnp.int32)
        if explore:
            action = q_learning.explored(self, actor, action, timestep.action_mask, carry, key, spec)
        return ActorOutput(action, carry.replace(network=network))

    def update(
        self, state: DQNState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[DQNState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        noise = [q_learning.transition_keys(k, replay.weight.shape[0], replicas) for k in jax.random.split(key, 4)]
        target = self._target(state, replay, noise[1:], spec)

        def loss(params):
            output = self._output(params, replay.observation, replay.action_mask, noise[0], spec)
            losses, error = q_learning.td_loss(
                output, replay.action, target, self.v_min, self.v_max, self.quantile_huber
            )
            if self.prioritised:
                losses = losses * replay.drawn.importance
            loss = weighted_mean(losses, replay.weight, replicas)
            values = q_learning.action_values(output, self.v_min, self.v_max)
            chosen = jnp.take_along_axis(values, replay.action[:, None], axis=-1)[:, 0]
            metrics = {
                "loss": loss,
                "q_value": weighted_mean(chosen, replay.weight, replicas),
                "td_error": weighted_mean(error, replay.weight, replicas),
            }
            return loss, (metrics, error)

        gradients, (metrics, error) = jax.grad(loss, has_aux=True)(state.params)
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
        priorities = {"replay": error + _LEAST_PRIORITY} if self.prioritised else {}
        return DQNState(params, target_params, optimiser, updates), UpdateInfo(metrics, priorities)

    def _output(self, params, observation, mask, noise, spec):
        """The network's output for single observations, [batch, ...]."""
        flags = jnp.zeros(jax.tree.leaves(observation)[0].shape[:1], bool)
        zero = jnp.zeros(flags.shape, jnp.float32)
        timestep = TimeStep(observation, zero, flags, flags, flags, action_mask=mask)
        carry, moment = self.network.initial_carry(spec), jax.tree.map(lambda x: x[None], timestep)
        return jax.tree.map(lambda x: x[0], self.network.apply(params, moment, carry, spec=spec, key=noise)[0])

    def _target(self, state, replay, noise, spec):
        """The distribution of returns that each transition should have."""
        low, high, rewards = self.v_min, self.v_max, replay.rewards
        following = self._output(state.target_params, replay.next_observation, replay.next_action_mask, noise[0], spec)
        values = q_learning.action_values(following, low, high)
        if self.munchausen:
            now = self._output(state.target_params, replay.observation, replay.action_mask, noise[1], spec)
            tau, scale = self.munchausen_temperature, self.munchausen_scale
            bonus = q_learning.munchausen_bonus(
                q_learning.action_values(now, low, high), replay.action, tau, scale, self.munchausen_clip
            )
            rewards, after = rewards + bonus[:, None], q_learning.soft_returns(following, values, tau)
        else:
            if self.double:
                online = self._output(state.params, replay.next_observation, replay.next_action_mask, noise[2], spec)
                values = q_learning.action_values(online, low, high)
            after = q_learning.returns_of(following, jnp.argmax(values, axis=-1), low, high)
        return q_learning.n_step_returns(rewards, replay.steps, replay.bootstrap, after, self.gamma)
