"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018, arXiv:1802.09477)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.ddpg import DDPG, DDPGState
from jaxrl.networks import Critic
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec, PyTree, Replicas, TransitionBatch, UpdateInfo


@struct.dataclass
class TD3State(DDPGState):
    """All that the learner is."""

    policy_loss: jax.Array  # at the policy's last step: most updates have none


@algorithm
class TD3(DDPG):
    """DDPG with the smaller of two critics, smoothed target actions, and a policy that learns less often."""

    target_noise: Scalar = number(0.2, low=0, help="deviation of the target policy's actions, over half their range")
    target_noise_clip: Scalar = number(0.5, low=0, help="largest noise of the target policy's actions")
    policy_delay: int = static(2, low=1, help="updates of the critics for each of the policy and the targets")
    critic: Critic = static(Critic())

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3State:
        begun = super().init(key, spec)
        return TD3State(begun.policy, begun.critic, begun.updates, jnp.float32(0.0))

    def update(
        self, state: PyTree, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PyTree, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_action = self._smoothed_target_action(state.policy, replay, key, spec, replicas)
        target = off_policy.target(self, state.critic, replay, next_action, spec)
        critic, metrics, _ = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)

        def move(learnt):
            policy, critic, _ = learnt
            policy, loss = self._climb(policy, critic, replay, spec, replicas)
            return off_policy.follow(policy, self.tau), off_policy.follow(critic, self.tau), replicas.mean(loss)

        # The counter is the same on all devices. Over mapped runs this becomes a choice between both results.
        updates = state.updates + 1
        learnt = (state.policy, critic, state.policy_loss)
        policy, critic, loss = jax.lax.cond(updates % self.policy_delay == 0, move, lambda x: x, learnt)
        metrics = replicas.mean(metrics) | {"policy_loss": loss}
        learnt = state.replace(policy=policy, critic=critic, updates=updates, policy_loss=loss)
        return learnt, UpdateInfo(metrics)

    def _climb(self, policy, critic, replay, spec, replicas):
        """The policy a step on, and this device's share of its loss."""
        return off_policy.climb(self, policy, critic, replay, spec, replicas)

    def _smoothed_target_action(self, policy, replay, key, spec, replicas):
        """Section 5.3: like actions should have like values, so the target is of an action near the policy's."""
        action = off_policy.evaluate_policy(self, policy.target_params, replay.next_observation, spec)
        keys = q_learning.transition_keys(key, action.shape[0], replicas)
        return off_policy.add_noise(action, keys, self.target_noise, spec.action_space, self.target_noise_clip)
