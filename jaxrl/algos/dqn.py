"""Deep Q-networks (Mnih et al., 2015) and what was added to them; Rainbow (Hessel et al., 2018, arXiv:1710.02298)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import q_learning, q_views
from jaxrl.algos.base import algorithm, field_problems, number, static
from jaxrl.algos.optimisers import Adam, Optimiser, descend, weighted_mean
from jaxrl.algos.q_learning import QCarry
from jaxrl.networks import QNetwork
from jaxrl.schedules import Linear, Scalar
from jaxrl.sources import FrameStack, Prioritised, Sequence, Uniform
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
    """Q-learning from a replay, with a target network; expected or distributional by the network's head."""

    learning_rate: Scalar = number(2.5e-4, above=0, help="step size")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    epsilon: Scalar = number(Linear(1.0, 0.05, 0.5), low=0, high=1, help="chance of a random action")
    ladder_exponent: Scalar = number(7.0, low=0, help="with a ladder: its last environment has epsilon^(1 + this)")
    max_grad_norm: Scalar | None = number(10.0, above=0, help="largest global norm of a gradient; None: no limit")
    target_update: Scalar = number(1.0, above=0, high=1, help="share of the new parameters at a target update")
    priority_exponent: Scalar = number(0.5, low=0, help="prioritised: chances are priorities to this power")
    importance_exponent: Scalar = number(Linear(0.4, 1.0), low=0, high=1, help="prioritised: beta of the weights")
    priority_eta: Scalar = number(0.9, low=0, high=1, help="recurrent: weight of a sequence's largest error, not mean")
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
    value_rescaling: bool = static(False, help="learn returns on a scale that flattens large ones")
    munchausen: bool = static(False, help="soft targets, and the log-policy in the reward")
    ladder: bool = static(False, help="epsilons fall from the first environment to the last")
    sequence_length: int = static(16, low=2, help="recurrent: rows that are learnt from, the last to bootstrap only")
    burn_in: int = static(0, low=0, help="recurrent: rows before these, to warm up the recurrent state")
    capacity: int = static(50_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update")
    batch_size: int = static(128, low=1, help="transitions an update")
    rollout_length: int = static(4, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    frame_stack: FrameStack | None = static(None, help="how observations are stacked: the replay keeps a frame once")
    network: Network = static(QNetwork())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = field_problems(self)
        if not isinstance(spec.action_space, spaces.Discrete):
            problems.append(
                f"DQN chooses among discrete actions, but {spec.name} has {spec.action_space!r}; use PPO or A2C"
            )
        return problems + q_learning.head_problems(self)

    @property
    def experience(self) -> Mapping[str, Source]:
        prioritised = Prioritised(exponent=self.priority_exponent, beta=self.importance_exponent)
        sequence = Sequence(self.sequence_length, self.rollout_length, burn_in=self.burn_in, stored_carry=True)
        return {
            "replay": Replay(
                capacity=self.capacity,
                batch_size=self.batch_size,
                min_size=self.min_size,
                rollout_length=self.rollout_length,
                updates=self.updates,
                n_step=self.n_step,
                sequence=sequence if self.network.recurrent else None,
                sampler=prioritised if self.prioritised else Uniform(),
                frame_stack=self.frame_stack,
            )
        }

    def init(self, key: jax.Array, spec: EnvSpec) -> DQNState:
        params = self.network.init(key, spec)
        target = jax.tree.map(jnp.copy, params)  # its own buffers: the state must not hold an array twice
        return DQNState(params, target, self.optimiser.rule().init(params), jnp.int32(0))

    def actor(self, state: DQNState) -> ActorState:
        return q_learning.actor(self, state.params)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> QCarry:
        return QCarry(self.network.initial_carry(spec), q_learning.rung(env_index, num_envs))

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
        view = q_views.view(batch["replay"], self.network, spec, self.n_step)
        noise = [
            q_learning.transition_keys(k, batch["replay"].drawn.place.shape[0], replicas)
            for k in jax.random.split(key, 4)
        ]

        def loss(params):
            output = view.output(params, noise[0])
            target = jax.lax.stop_gradient(self._target(view, state, output, noise))
            now = view.now(output)
            losses, error = q_learning.td_loss(now, view.action, target, self.v_min, self.v_max, self.quantile_huber)
            if self.prioritised:
                losses = losses * view.importance
            loss = weighted_mean(losses, view.weight, replicas)
            values = q_learning.action_values(now, self.v_min, self.v_max)
            chosen = jnp.take_along_axis(values, view.action[:, None], axis=-1)[:, 0]
            metrics = {
                "loss": loss,
                "q_value": weighted_mean(chosen, view.weight, replicas),
                "td_error": weighted_mean(error, view.weight, replicas),
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
        priorities = {}
        if self.prioritised:
            priorities["replay"] = view.priorities(error, self.priority_eta) + q_learning.LEAST_PRIORITY
        return DQNState(params, target_params, optimiser, updates), UpdateInfo(metrics, priorities)

    def _target(self, view, state, output, noise):
        """The distribution of returns that each transition should have; `output` is the learning network's."""
        low, high, rewards = self.v_min, self.v_max, view.rewards
        slow = view.output(state.target_params, noise[1])
        following = view.after(slow, state.target_params, noise[2])
        values = q_learning.action_values(following, low, high)
        if self.munchausen:
            tau, now = self.munchausen_temperature, q_learning.action_values(view.now(slow), low, high)
            bonus = q_learning.munchausen_bonus(now, view.action, tau, self.munchausen_scale, self.munchausen_clip)
            rewards, after = rewards + bonus[:, None], q_learning.soft_returns(following, values, tau)
        else:
            if self.double:
                values = q_learning.action_values(view.after(output, state.params, noise[3]), low, high)
            after = q_learning.returns_of(following, jnp.argmax(values, axis=-1), low, high)
        if not self.value_rescaling:
            return q_learning.n_step_returns(rewards, view.steps, view.bootstrap, after, self.gamma)
        after = after.replace(atoms=q_learning.unscaled(after.atoms))
        target = q_learning.n_step_returns(rewards, view.steps, view.bootstrap, after, self.gamma)
        return target.replace(atoms=q_learning.rescaled(target.atoms))
