"""An off-policy algorithm of a user's own, in one file: critics with batch normalization and without targets.

It is much of CrossQ (Bhatt et al., 2024, arXiv:1902.05605) with a fixed temperature: both ends of a transition go
through the critics in one batch, so that batch normalization sees the actions of the data and of the policy alike.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from helpers.programs import resumed

import jaxrl
from jaxrl.algos import off_policy, q_learning, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, number
from jaxrl.algos.fields import ReplayFields
from jaxrl.algos.off_policy import Statistics
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.soft_policies import value_and_log_prob
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Network,
    Replicas,
    Source,
    UpdateInfo,
)
from jaxrl.networks import Actor, Critic


class JointSACState(struct.PyTreeNode):
    """All that the learner is."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


@algorithm
class JointSAC(StochasticActing, ReplayFields):
    """Soft actor-critic without target networks, kept stable by batch normalization."""

    learning_rate: Scalar = changed(1e-3)
    temperature: Scalar = number(0.05, above=0, help="weight of the entropy")
    capacity: int = changed(10_000)
    min_size: int = changed(256)
    batch_size: int = changed(64)
    rollout_length: int = changed(1)
    replay_ratio: float | None = changed(0.25)
    optimizer: Optimizer = changed(Adam(b1=0.5, eps=1e-8))
    policy: Network = changed(Actor(widths=(32,)))
    critic: Critic = changed(Critic(widths=(64,), normalization="batch"))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return self.actor_critic_problems(spec, stochastic=True)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": self.source()}

    def init(self, key: jax.Array, spec: EnvSpec) -> JointSACState:
        policy_key, critic_key = jax.random.split(key)
        return JointSACState(
            policy=train_state.create(*self.policy.init(policy_key, spec), self.policy_optimizer),
            critic=train_state.create(*self.critic.init(critic_key, spec), self.critic_optimizer),
            statistics=off_policy.init_statistics(spec, self.normalize_observation),
            updates=jnp.int32(0),
        )

    def update(
        self, state: JointSACState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[JointSACState, UpdateInfo]:
        statistics, replay = off_policy.learning_batch(state.statistics, batch, self.observation_clip, replicas)
        next_key, key = (q_learning.transition_keys(k, replay.weight.shape[0], replicas) for k in jax.random.split(key))
        following = replay.next_observation.policy_output(self.policy, state.policy.variables, spec)[0]
        next_action, next_log_prob = following.sample_and_log_prob(next_key)

        def critic_loss(variables):
            """Both ends in one pass; no gradient through the next values."""
            both = replay.observation.joined(replay.next_observation)
            actions = jnp.concatenate([replay.action, next_action])
            output, model_state = both.critic_output(self.critic, variables, actions, spec, train=True)
            values, next_values = jnp.split(output[..., 0], 2, axis=1)
            soft = jnp.min(next_values, axis=0) - self.temperature * next_log_prob
            target = off_policy.expected_target(replay, soft, self.gamma).atoms[:, 0]
            losses = 0.5 * jnp.sum(jnp.square(values - target[None]), axis=0)
            loss = weighted_mean(losses, replay.weight, replicas)
            return loss, (
                {"critic_loss": loss, "q_value": weighted_mean(values[0], replay.weight, replicas)},
                model_state,
            )

        critic, _, metrics = train_state.gradient(critic_loss, state.critic).step(self.critic_optimizer, replicas)

        def policy_loss(variables):
            distribution, model_state = replay.observation.policy_output(self.policy, variables, spec, train=True)
            value, log_prob, _ = value_and_log_prob(
                self.critic, critic.variables, distribution, replay.observation, key, spec
            )
            loss = weighted_mean(self.temperature * log_prob - value, replay.weight, replicas)
            return loss, (loss, model_state)

        policy, _, loss = train_state.gradient(policy_loss, state.policy).step(self.policy_optimizer, replicas)
        metrics = replicas.mean(metrics | {"policy_loss": loss})
        return JointSACState(policy, critic, statistics, state.updates + 1), UpdateInfo(metrics)


ENV = jaxrl.make("probe:ActionReward", continuous=True)


def test_it_learns_and_resumes_bit_for_bit(tmp_path):
    """Episodes have one step, worth 1 less the squared distance of the action from 0.5; random ones -0.6 on average."""
    whole = resumed(tmp_path, JointSAC(), ENV, 2_048, topology=jaxrl.Anakin(num_envs=8, devices=1))
    assert whole.evaluation.return_mean > 0.9
    learner = whole.state.learner
    fresh = JointSAC().init(jax.random.key(0), jaxrl.core.types.env_spec(ENV)).critic.model_state
    moved = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), learner.critic.model_state, fresh
    )
    assert jax.tree.leaves(moved) and min(jax.tree.leaves(moved)) > 0.0
    assert learner.policy.model_state == () and learner.critic.target_params == ()
