"""Deterministic policies that ascend their critic: DDPG and its extensions TD3 and D4PG.

Lillicrap et al. (2016, arXiv:1509.02971), Fujimoto et al. (2018, arXiv:1802.09477) and Barth-Maron et al. (2018,
arXiv:1804.08617).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import acting, combined_replay, off_policy, q_learning, train_state
from jaxrl.algos.acting import DeterministicActing, GaussianNoise
from jaxrl.algos.base import algorithm, changed, field_group, number, part, static
from jaxrl.algos.fields import (
    CombinedReplayFields,
    DistributionFields,
    NStepFields,
    PrioritizedFields,
    PrioritizedReplay,
    SequenceFields,
    TargetFields,
)
from jaxrl.algos.off_policy import CriticLoss, LearnerState
from jaxrl.algos.resets import Resets, after_reset
from jaxrl.algos.train_state import TrainState, Variables, polyak_update, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import sources_by_priority
from jaxrl.core.types import EnvSpec, ModelState, Replicas, Source, TransitionBatch, UpdateInfo
from jaxrl.networks import CategoricalValues, Critic


class TD3State(LearnerState):
    """State of the learner."""

    policy_loss: jax.Array  # at the policy's last step, which may be some updates ago


@field_group
class DeterministicLearner(NStepFields, DistributionFields, DeterministicActing, TargetFields):
    """Learner with a deterministic policy, critics, and target networks of the policy and the critics."""

    resets: Resets | None = part(
        Resets, was={"reset_at": "at"}, switch="reset_at", help="resets of networks and optimizers; None: never"
    )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return self.actor_critic_problems(spec, stochastic=False)

    def update(
        self: Any, state: LearnerState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[LearnerState, UpdateInfo]:
        """Take a step of the critics, the policy and the targets (DDPG)."""
        statistics, replay = self.learning_batch(state, batch, replicas)
        critic, fit = self._critic_step(state, replay, self._target_action(state, replay, spec), spec, replicas)
        policy, loss = self._policy_step(state.policy, critic, replay, spec, replicas)
        policy, critic = polyak_update(policy, self.tau), polyak_update(critic, self.tau)
        priorities = combined_replay.priorities(fit.error, self.experience, batch, replicas)
        metrics = replicas.mean(fit.metrics | {"policy_loss": loss})
        new = LearnerState(policy, critic, statistics, state.updates + 1)
        return after_reset(self.resets, self.init, new, key, spec), UpdateInfo(metrics, priorities)

    def _target_action(self, state: LearnerState, replay: TransitionBatch, spec: EnvSpec) -> jax.Array:
        """Return the target policy's actions at the next observations, [batch, n]."""
        return replay.next_observation.policy_output(self.policy, state.policy.target_variables, spec)[0]

    def _critic_step(
        self: Any,
        state: LearnerState,
        replay: TransitionBatch,
        next_action: jax.Array,
        spec: EnvSpec,
        replicas: Replicas,
    ) -> tuple[TrainState, CriticLoss]:
        """Take a gradient step of the critics towards targets that bootstrap from `next_action` [batch, n].

        The targets are the rewards plus, unless the task terminated, the next action's returns under the target critic
        with the smallest expectation (Fujimoto et al., 2018, equation 10).
        """
        seen = replay.next_observation
        output = seen.critic_output(self.critic, state.critic.target_variables, next_action, spec)[0]
        least = jnp.argmin(q_learning.action_values(output, self.v_min, self.v_max)[..., 0], axis=0)

        def of_least(x):
            return jnp.take_along_axis(x, least.reshape((1, -1) + (1,) * (x.ndim - 2)), axis=0)[0]

        only = jnp.zeros(least.shape, jnp.int32)
        following = q_learning.returns_of(jax.tree.map(of_least, output), only, self.v_min, self.v_max)
        target = q_learning.n_step_returns(replay.rewards, replay.steps, replay.bootstrap, following, self.gamma)
        options = self.loss_options
        if sources_by_priority(self.experience):
            options["importance"] = replay.importance
        optimizer = self.critic_optimizer
        return off_policy.critic_step(self.critic, state.critic, optimizer, replay, target, spec, replicas, **options)

    def _policy_step(
        self, policy: TrainState, critic: TrainState, replay: TransitionBatch, spec: EnvSpec, replicas: Replicas
    ) -> tuple[TrainState, jax.Array]:
        """Take a gradient step of the policy that increases its value (Lillicrap et al., equation 6).

        Returns:
          The policy after the step, and the loss before the step.
        """
        optimizer = self.policy_optimizer

        def loss(variables):
            _, value, model_state = self._action_and_value(variables, critic, replay, spec)
            loss = weighted_mean(-value, replay.weight, replicas)
            return loss, (loss, model_state)

        policy, _, before = train_state.gradient(loss, policy).step(optimizer, replicas)
        return policy, before

    def _action_and_value(
        self, policy: Variables, critic: TrainState, replay: TransitionBatch, spec: EnvSpec
    ) -> tuple[jax.Array, jax.Array, ModelState]:
        """Return the policy's actions [batch, n], their values [batch] by the first critic, and the new model state."""
        action, model_state = replay.observation.policy_output(self.policy, policy, spec, train=True)
        first = jax.tree.map(lambda x: x[:1], critic.variables)  # without computing the other members
        output = replay.observation.critic_output(self.critic, first, action, spec)[0]
        return action, q_learning.action_values(output, self.v_min, self.v_max)[0, :, 0], model_state


@field_group
class DelayedLearner(DeterministicLearner):
    """TD3's update: smoothed target actions, and a step of the policy and the targets every `policy_delay` updates."""

    target_noise: Scalar = number(
        0.2, low=0, help="standard deviation of the target policy's noise, in units of half the action range"
    )
    target_noise_clip: Scalar = number(
        0.5, low=0, help="maximum absolute value of the target policy's noise, in the same units"
    )
    policy_delay: int = static(2, low=1, help="critic updates per update of the policy and the targets")

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3State:
        return TD3State(**vars(super().init(key, spec)), policy_loss=jnp.float32(0.0))

    def update(
        self, state: TD3State, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[TD3State, UpdateInfo]:
        statistics, replay = self.learning_batch(state, batch, replicas)
        keys = replay.observation.keys(key, replicas)
        box = spaces.expect(spec.action_space, spaces.Box)
        # Similar actions should have similar values (section 5.3).
        smoothed = acting.add_noise(
            self._target_action(state, replay, spec), keys, self.target_noise, box, self.target_noise_clip
        )
        critic, fit = self._critic_step(state, replay, smoothed, spec, replicas)

        def step(policy, slow, _):
            policy, loss = self._policy_step(policy, critic, replay, spec, replicas)
            return polyak_update(policy, self.tau), polyak_update(slow, self.tau), replicas.mean(loss)

        updates = state.updates + 1
        learned = state.policy, critic, state.policy_loss
        # In vmapped runs, the two branches are always computed.
        due = updates % self.policy_delay == 0
        policy, critic, loss = jax.lax.cond(due, step, lambda *same: same, *learned)
        metrics = replicas.mean(fit.metrics) | {"policy_loss": loss}
        new = TD3State(policy, critic, statistics, updates, loss)
        return after_reset(self.resets, self.init, new, key, spec), UpdateInfo(metrics)


@algorithm
class DDPG(SequenceFields, DeterministicLearner):
    """Deep deterministic policy gradients: a deterministic policy that ascends its critic; uniform replay."""

    critic: Critic = changed(Critic(ensemble=1))


@algorithm
class TD3(SequenceFields, DelayedLearner):
    """Twin delayed DDPG: the smaller of two critics, smoothed target actions, delayed policy updates."""

    min_size: int = changed(5_000)
    noise: GaussianNoise = changed(GaussianNoise(correlation=0.9))


@algorithm
class D4PG(PrioritizedFields, CombinedReplayFields, DeterministicLearner):
    """DDPG with a distributional critic, n-step returns and prioritized replay."""

    n_step: int = changed(5)
    noise: GaussianNoise = changed(GaussianNoise(std=0.3))
    prioritized: PrioritizedReplay | None = changed(PrioritizedReplay(exponent=0.6))
    critic: Critic = changed(Critic(ensemble=1, head=CategoricalValues(51)))

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(self.source(self.prioritized and self.prioritized.sampler, n_step=self.n_step))
