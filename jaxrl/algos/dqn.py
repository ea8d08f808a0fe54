"""Deep Q-networks (Mnih et al., 2015) and their extensions; Rainbow (Hessel et al., 2018, arXiv:1710.02298)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxrl.algos import combined_replay, histories, q_learning, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, network_problems, number, part, static
from jaxrl.algos.fields import (
    CombinedReplayFields,
    DistributionFields,
    MemoryFields,
    PrioritizedFields,
    TargetPeriodFields,
)
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.q_learning import QLearningFields, QMemory, QPrioritizedReplay, QState, Returns
from jaxrl.algos.train_state import Variables, weighted_mean
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.sources import FrameStack, Sequence, sources_by_priority
from jaxrl.core.types import (
    SEQUENCE_INPUTS,
    TRANSITION_INPUTS,
    ActorState,
    EnvSpec,
    PyTree,
    Replicas,
    Rollout,
    Source,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import MLP, ActionValues, CategoricalValues, QNetwork, resolve_network
from jaxrl.networks.torsos import has_images


@algorithm
class DQN(
    PrioritizedFields, CombinedReplayFields, MemoryFields, TargetPeriodFields, DistributionFields, QLearningFields
):
    """Deep Q-learning with replay and a target network; its head predicts expected values or distributions."""

    has_target = True

    learning_rate: Scalar | None = number(
        None, above=0, help="learning rate; None: linear decay from 1e-3 to 0, or 2.5e-4 for images"
    )
    n_step: int | None = static(
        None,
        low=1,
        help="number of rewards summed before bootstrapping; None: 3, or 1 for images, munchausen or storage=flashbax",
    )
    capacity: int = changed(50_000)
    batch_size: int = changed(128)
    replay_ratio: float | None = changed(0.1)
    v_min: Scalar = changed(-10.0, only_with="network.head=categoricalvalues")
    v_max: Scalar = changed(10.0, only_with="network.head=categoricalvalues")
    target_update: Scalar = number(
        1.0, above=0, high=1, help="soft update coefficient of the target network (Polyak averaging); 1: hard update"
    )
    huber: Scalar | None = number(
        None,
        above=0,
        only_with="network.head=actionvalues",
        help="Huber threshold of the TD error, above which the loss is linear; None: squared error",
    )
    quantile_huber: Scalar = changed(
        1.0, only_with="network.head=quantilevalues or network.head=implicitquantilevalues"
    )
    double: bool = static(True, help="double DQN: the online network selects the next action")
    value_rescaling: bool = static(False, help="learn rescaled values, for returns of very different magnitudes")
    munchausen: Munchausen | None = part(
        Munchausen,
        was={"munchausen_scale": "scale", "munchausen_temperature": "temperature", "munchausen_clip": "clip"},
        help="soft targets, with the scaled log-policy added to the reward; None: standard targets",
    )
    prioritized: QPrioritizedReplay | None = changed(None, part=QPrioritizedReplay)
    memory: QMemory = changed(QMemory(length=16, burn_in=0), part=QMemory, only_with="network.recurrent")
    time_reduction: Literal["mean", "sum"] = static(
        "mean",
        choices=("mean", "sum"),
        only_with="network.recurrent",
        help="reduction of the loss over the time steps of a sequence",
    )
    frame_stack: FrameStack | None = static(
        None, help="frame stacking of the observations, so that each frame is stored once"
    )

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        network = resolve_network(self.network, spec, MLP((120, 84), activation="relu", stretch=True))
        images, rate = has_images(spec.observation_space), self.learning_rate
        if rate is None:
            # The rate that MountainCar needs; without decay, it lowers the score in CartPole (docs/algorithms/dqn.md).
            rate = 2.5e-4 if images else Linear(1e-3, 0.0)
        return dataclasses.replace(
            self,
            network=network,
            rollout_length=self.steps_per_update(num_envs),
            learning_rate=rate,
            n_step=1 if images and self.n_step is None else self._n_step,
        )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems, name = field_problems(self), type(self).__name__
        known = SEQUENCE_INPUTS if self.recurrent else TRANSITION_INPUTS
        problems += network_problems(f"{name}.network", self.network, spec, known, discrete=True)
        head = self.network.head if isinstance(self.network, QNetwork) else ActionValues()
        if self.munchausen and (isinstance(head, CategoricalValues) or self.value_rescaling):
            problems.append(
                f"{name}.munchausen needs a head of expected values or quantiles, because its target adds a term "
                "per action, and value_rescaling=False, because its policy is a softmax of values"
            )
        if self.value_rescaling and not isinstance(head, ActionValues):
            problems.append(f"{name}.value_rescaling=True needs expected values, not {head!r}; use ActionValues()")
        return problems

    @property
    def sequence(self) -> Sequence:
        end = "continue" if self.memory.cross_episodes else "truncate"
        return dataclasses.replace(super().sequence, end=end)

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(
            self.source(
                self.prioritized and self.prioritized.sampler,
                sequence=self.sequence if self.recurrent else None,
                frame_stack=self.frame_stack,
                n_step=self._n_step,
            )
        )

    def noise_keys(self, key: jax.Array) -> jax.Array:
        return jax.vmap(lambda k: jax.random.fold_in(k, 1))(key)

    def values_of(self, output: PyTree) -> jax.Array:
        return q_learning.action_values(output, self.v_min, self.v_max)

    def rollout_extras(self, actor: ActorState, rollout: Rollout, *, spec: EnvSpec) -> dict[str, jax.Array]:
        """Return each row's TD error under the acting parameters, as its initial priority (R2D2, section 2.3)."""
        if not self.prioritized or self.prioritized.initial == "max":
            return {}
        rows, acted = histories.of_rollout(rollout, self._n_step), Variables(actor.params, actor.model_state)
        output, _ = rows.observation.output(self.network, acted, spec, train=False)
        target = self._target(rows, acted, acted, output, [None] * 4, spec)
        error = self._td_loss(rows.observation.taken(output), rows, target)[1]
        return {"priority": error.reshape(rollout.timesteps.first.shape)[:-1] + combined_replay.LEAST_PRIORITY}

    def update(
        self, state: QState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[QState, UpdateInfo]:
        drawn = combined_replay.combined_batch(batch, replicas)
        rows = histories.transitions(drawn, self._n_step)
        noise = [
            q_learning.transition_keys(k, drawn.sample_info.position.shape[0], replicas)
            for k in jax.random.split(key, 4)
        ]

        def loss(online):
            output, model_state = rows.observation.output(self.network, online, spec, noise[0], train=True)
            learned = state.network.variables, state.network.target_variables
            target = jax.lax.stop_gradient(self._target(rows, *learned, output, noise, spec))
            current = rows.observation.taken(output)
            losses, error = self._td_loss(current, rows, target)
            if sources_by_priority(self.experience):
                losses = losses * rows.importance
            loss = rows.observation.loss(losses, rows.weight, self.time_reduction, replicas)
            chosen = jnp.take_along_axis(self.values_of(current), rows.action[:, None], axis=-1)[:, 0]
            metrics = {
                "loss": loss,
                "q_value": weighted_mean(chosen, rows.weight, replicas),
                "td_error": weighted_mean(error, rows.weight, replicas),
            }
            metrics |= q_learning.support_metrics(current, target, self.v_min, self.v_max, rows.weight, replicas)
            return loss, ((metrics, error), model_state)

        found = train_state.gradient(loss, state.network)
        network, norm, (metrics, error) = found.step(self.transformation, replicas)
        updates = state.updates + 1
        tau = jnp.where(updates % self.target_period == 0, self.target_update, 0.0)
        network = train_state.polyak_update(network, tau)
        metrics = replicas.mean(metrics) | {
            "gradient_norm": norm,
            "epsilon": jnp.asarray(self.epsilon),
            "learning_rate": jnp.asarray(self.learning_rate),
        }
        eta = jnp.float32((self.prioritized or QPrioritizedReplay()).eta)
        errors = rows.observation.priorities(error, rows.weight, eta)
        priorities = combined_replay.priorities(errors, self.experience, batch, replicas)
        return QState(network, updates), UpdateInfo(metrics, priorities)

    @property
    def _n_step(self) -> int:
        if self.n_step is not None:
            return self.n_step
        return 1 if self.munchausen or self.storage == "flashbax" else 3

    def _td_loss(self, output: PyTree, rows: TransitionBatch, target: Returns) -> tuple[jax.Array, jax.Array]:
        """Return the loss [N] and the priority [N] of each transition; `output` has leaves [N, ...]."""
        return q_learning.td_loss(output, rows.action, target, self.v_min, self.v_max, self.quantile_huber, self.huber)

    def _target(
        self,
        rows: TransitionBatch,
        online: Variables,
        target_network: Variables,
        output: PyTree,
        noise: list[jax.Array] | list[None],
        spec: EnvSpec,
    ) -> Returns:
        """Return each transition's target distribution of returns; `output` is the online network's output."""
        rewards, here, there = rows.rewards, rows.observation, rows.next_observation
        target_output, _ = here.output(self.network, target_network, spec, noise[1], train=False)
        next_output = there.following(target_output, self.network, target_network, spec, noise[2])
        next_values = self.values_of(next_output)
        if self.munchausen:
            bonus = self.munchausen.bonus(self.values_of(here.taken(target_output)), rows.action)
            # Only the first reward gets the bonus: the replay stores only the first of several actions.
            rewards = rewards.at[:, 0].add(bonus)
            next_returns = self.munchausen.soft_returns(next_output, next_values)
        else:
            if self.double:
                next_values = self.values_of(there.following(output, self.network, online, spec, noise[3]))
            next_returns = q_learning.returns_of(next_output, jnp.argmax(next_values, axis=-1), self.v_min, self.v_max)
        if self.value_rescaling:
            next_returns = next_returns.replace(atoms=q_learning.unscaled(next_returns.atoms))
        target = q_learning.n_step_returns(rewards, rows.steps, rows.bootstrap, next_returns, self.gamma)
        return target.replace(atoms=q_learning.rescaled(target.atoms)) if self.value_rescaling else target
