"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018, arXiv:1802.09477)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import Adam, Optimiser
from jaxrl.networks import Actor, Critic
from jaxrl.schedules import Scalar
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    Replicas,
    Source,
    TimeStep,
    TransitionBatch,
    UpdateInfo,
)


@struct.dataclass
class TD3State:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    updates: jax.Array  # int32
    policy_loss: jax.Array  # at the policy's last step: most updates have none


@algorithm
class TD3:
    """DDPG with the smaller of two critics, smoothed target actions, and a policy that learns less often."""

    learning_rate: Scalar = number(3e-4, above=0, help="step size of the critics")
    policy_learning_rate: Scalar | None = number(None, above=0, help="step size of the policy; None: the critics'")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    tau: Scalar = number(0.005, above=0, high=1, help="share of the new parameters at each target update")
    exploration_noise: Scalar = number(0.1, low=0, help="deviation of the actions' noise, over half their range")
    target_noise: Scalar = number(0.2, low=0, help="the same of the target policy's actions")
    target_noise_clip: Scalar = number(0.5, low=0, help="largest noise of the target policy's actions")
    policy_delay: int = static(2, low=1, help="updates of the critics for each of the policy and the targets")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update, of random actions")
    batch_size: int = static(256, low=1, help="transitions an update")
    rollout_length: int = static(1, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    policy: Network = static(Actor(stochastic=False))
    critic: Critic = static(Critic())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return off_policy.problems(self, spec, stochastic=False)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": off_policy.replay(self)}

    def init(self, key: jax.Array, spec: EnvSpec) -> TD3State:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=True)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        return TD3State(policy, critic, jnp.int32(0), jnp.float32(0.0))

    def actor(self, state: TD3State) -> ActorState:
        return off_policy.actor(state.policy, state.updates, noise=self.exploration_noise)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        return off_policy.act_with_noise(self, actor, timestep, carry, key, spec=spec, explore=explore)

    def update(
        self, state: TD3State, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[TD3State, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_action = self._smoothed_target_action(state.policy, replay, key, spec, replicas)
        target = off_policy.target(self, state.critic, replay, next_action, spec)
        critic, metrics, _ = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)

        def move(learnt):
            policy, critic, _ = learnt
            policy, loss = off_policy.climb(self, policy, critic, replay, spec, replicas)
            return off_policy.follow(policy, self.tau), off_policy.follow(critic, self.tau), replicas.mean(loss)

        # The counter is the same on all devices. Over mapped runs this becomes a choice between both results.
        updates = state.updates + 1
        learnt = (state.policy, critic, state.policy_loss)
        policy, critic, loss = jax.lax.cond(updates % self.policy_delay == 0, move, lambda x: x, learnt)
        metrics = replicas.mean(metrics) | {"policy_loss": loss}
        return TD3State(policy, critic, updates, loss), UpdateInfo(metrics)

    def _smoothed_target_action(self, policy, replay, key, spec, replicas):
        """Section 5.3: like actions should have like values, so the target is of an action near the policy's."""
        action = off_policy.evaluate_policy(self, policy.target_params, replay.next_observation, spec)
        keys = q_learning.transition_keys(key, action.shape[0], replicas)
        return off_policy.add_noise(action, keys, self.target_noise, spec.action_space, self.target_noise_clip)
