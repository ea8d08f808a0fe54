"""TD3 with a pull towards the data's actions (Fujimoto and Gu, 2021, arXiv:2106.06860)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import normalise, off_policy, regression
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.optimisers import weighted_mean
from jaxrl.algos.td3 import TD3, TD3State
from jaxrl.schedules import Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    PyTree,
    Replicas,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class TD3BCState(TD3State):
    """All that the learner is."""

    statistics: PyTree  # of the observations; () where they are not normalised


@algorithm
class TD3BC(TD3):
    """TD3 whose policy is also drawn to the actions of the data, of which the observations are normalised."""

    alpha: Scalar = number(2.5, above=0, help="weight of the critic, whose values are scaled to a mean size of 1")
    normalize_observation: bool = static(True, help="by running mean and deviation")

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3BCState:
        statistics = normalise.init(spec.observation_space) if self.normalize_observation else ()
        return TD3BCState(**vars(super().init(key, spec)), statistics=statistics)

    def actor(self, state: PyTree) -> ActorState:
        return super().actor(state).replace(statistics=state.statistics)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        seen = timestep.replace(observation=self._normalised(actor.statistics, timestep.observation))
        return super().act(actor, seen, carry, key, spec=spec, explore=explore)

    def update(
        self, state: PyTree, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PyTree, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        if self.normalize_observation:
            statistics = normalise.update(state.statistics, replay.observation, replay.weight, replicas)
            state = state.replace(statistics=statistics)
        seen = replay.replace(
            observation=self._normalised(state.statistics, replay.observation),
            next_observation=self._normalised(state.statistics, replay.next_observation),
        )
        return super().update(state, {"replay": seen}, spec=spec, key=key, replicas=replicas)

    def _normalised(self, statistics, observation):
        if not self.normalize_observation:
            return observation
        return normalise.normalise(statistics, observation, clip=float("inf"))

    def _climb(self, policy, critic, replay, spec, replicas):
        """One step down the mean of |pi(o) - a|^2 - lambda Q_1(o, pi(o)), lambda = alpha / mean |Q_1| (equation 5)."""

        def loss(params):
            action = off_policy.evaluate_policy(self, params, replay.observation, spec)
            first = jax.tree.map(lambda x: x[:1], critic.params)  # the others would be computed for nothing
            output = off_policy.evaluate_critic(self, first, replay.observation, action, spec)
            value = off_policy.expected_values(self, output)[0, :, 0]
            size = replicas.mean(weighted_mean(jnp.abs(jax.lax.stop_gradient(value)), replay.weight, replicas))
            scale = self.alpha / jnp.maximum(size, 1e-6)
            distance = regression.squared_distance(action, replay.action, spec)
            return weighted_mean(distance - scale * value, replay.weight, replicas)

        value, gradients = jax.value_and_grad(loss)(policy.params)
        return off_policy.step(self, policy, gradients, off_policy.policy_rate(self), replicas), value
