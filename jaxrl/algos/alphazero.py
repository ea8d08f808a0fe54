"""AlphaZero (Silver et al., 2018, doi:10.1126/science.aar6404), with PUCT or Gumbel search (Danihelka et al., 2022)."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import normalization, on_policy, returns, search
from jaxrl.algos.base import action_problems, algorithm, changed, number
from jaxrl.algos.minibatches import MinibatchFields, steps_over_minibatches
from jaxrl.algos.on_policy import OnPolicy, PolicyCarry, PolicyState
from jaxrl.algos.search import Expansion, TreeSearchFields
from jaxrl.algos.train_state import Variables, weighted_means
from jaxrl.core.planning import Model
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    PyTree,
    Replicas,
    Source,
    TimeStep,
    UpdateInfo,
)
from jaxrl.networks import Categorical, PolicyValue


class Node(struct.PyTreeNode):
    """Node of the search tree."""

    state: PyTree  # the environment's state
    carry: Carry  # the network's carry after the node's observation
    over: jax.Array  # bool: whether the episode has ended
    output: tuple[jax.Array, jax.Array]  # logits and value


@algorithm
class AlphaZero(TreeSearchFields, MinibatchFields, OnPolicy):
    """AlphaZero: tree search with the environment as its model, for one agent or two players."""

    learning_rate: Scalar | None = changed(2e-3)
    # With gamma below 1, a later loss is better, so a player in a lost position still defends.
    gamma: Scalar = changed(0.97)
    gae_lambda: Scalar = number(
        1.0, low=0, high=1, help="lambda of the value targets; 1: game outcomes, 0: one-step bootstrapped values"
    )
    value_cost: Scalar = changed(1.0)
    entropy_cost: Scalar | None = changed(0.0, help="weight of the entropy bonus; the search already explores")
    max_grad_norm: Scalar | None = changed(1.0)
    rollout_length: int | None = changed(32)
    epochs: int | None = changed(2)
    minibatches: int | None = changed(8)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = super().validate(spec, num_envs, shards) + action_problems("AlphaZero", spec, discrete=True)
        if spec.num_agents > 1:
            problems.append(
                f"AlphaZero plans for one agent, but {spec.name} has {spec.num_agents}; for PGX's two-player games, "
                "use opponent=turns"
            )
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        # The search policy is a valid target at any lag.
        return {"rollout": self.rollouts(max_policy_lag=None, unit=self.minibatches)}

    def plan(
        self,
        actor: ActorState,
        timestep: TimeStep,
        carry: PolicyCarry,
        key: jax.Array,
        *,
        model: Model,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        """Return each environment's best action found by search; the search policy is an extra, used in the update."""
        timestep = self.preprocess(timestep)
        (logits, value), network_carry = self._evaluate(actor, timestep, carry.network, spec)
        node = Node(model.state, network_carry, timestep.last, (logits, value))
        expand = functools.partial(self._expand, actor, model, spec)
        root = Expansion(logits, value, node)
        found = self.tree_search.plan(root, expand, key, mask=timestep.action_mask, explore=explore)
        discounted = on_policy.discounted_return(timestep, carry, self.gamma)
        carry = PolicyCarry(network_carry, discounted)
        if not explore:
            return ActorOutput(found.action, carry)
        extras = {"value": value, "search_policy": found.policy}
        if self.normalize_reward:
            extras["discounted_return"] = discounted
        return ActorOutput(found.action, carry, extras)

    def _evaluate(self, actor, timestep, carry, spec):
        """Return the policy's logits and the value at time steps [B, ...], and the network's next carry."""
        inputs = on_policy.network_inputs(timestep, actor.statistics, self.observation_clip)
        network = Variables(actor.params, actor.model_state)
        output, carry, _ = self.unroll(network, jax.tree.map(lambda x: x[None], inputs), carry, spec, train=False)
        return (_log_probs(output)[0], output.value[0]), carry

    def _expand(self, actor, model, spec, node, action, key) -> Expansion:
        """Take an action from a node's state; a finished episode stays in its last state and keeps that state's value.

        After a time limit, this value estimates the return that would have followed; after a termination, it is 0.
        """
        state, after = model.env.step(node.state, action, key)
        after = self.preprocess(after.replace(previous_action=action))
        batched = jax.tree.map(lambda x: x[None], (after, node.carry))
        output, carry = jax.tree.map(lambda x: x[0], self._evaluate(actor, *batched, spec))
        reward = after.reward
        if self.normalize_reward:
            reward = normalization.scale_reward(actor.statistics.reward, reward, self.reward_clip)
        ended = after.terminated if self.bootstrap_truncated else after.last
        follows = self.gamma if after.discount is None else self.gamma * after.discount
        new = Node(state, carry, after.last, output), reward, jnp.where(ended, 0.0, follows)
        same = node, jnp.zeros_like(reward), jnp.ones_like(reward)
        node, reward, discount = jax.tree.map(functools.partial(jnp.where, node.over), same, new)
        return Expansion(*node.output, node, reward, discount)

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        statistics, rollout = self.prepare(state.statistics, batch, replicas)
        rows = rollout.rows
        segment = self.recorded_segment(rollout, state.network.variables, spec)
        targets = returns.gae(segment, self.gamma, self.gae_lambda) + segment.values
        data = {
            "inputs": self.inputs(rollout),
            "policy": rows.extras["search_policy"],
            "target": targets,
            "weight": rows.weight,
        }
        divided = self.divided(data, rollout.carry.network, key, replicas)

        def step(network, indices):
            network, norms, metrics = self.gradient_step(
                self._loss, network, replicas, *divided.take(indices), spec, replicas
            )
            return network, metrics | norms

        network, metrics = steps_over_minibatches(step, state.network, divided.indices)
        explained = on_policy.explained_variance(targets, segment.values, rows.weight, replicas)
        metrics = replicas.mean(metrics) | {"explained_variance": explained}
        metrics["learning_rate"] = jnp.asarray(self.learning_rate)
        return state.replace(network=network, statistics=statistics, updates=state.updates + 1), UpdateInfo(metrics)

    def _loss(self, network, minibatch, carry, spec, replicas):
        """Return the loss of Silver et al. without weight decay, (z - v)^2 / 2 - pi log p, and its parts as metrics."""
        output, _, model_state = self.unroll(network, minibatch["inputs"], carry, spec, train=True)
        values = {
            "policy_loss": search.cross_entropy(minibatch["policy"], _log_probs(output)),
            "value_loss": 0.5 * jnp.square(output.value - minibatch["target"]),
            "entropy": output.distribution.entropy(),
            "search_entropy": search.cross_entropy(minibatch["policy"], jnp.log(minibatch["policy"])),
        }
        metrics = weighted_means(values, minibatch["weight"], replicas)
        loss = self.total_loss(metrics["policy_loss"], metrics["value_loss"], metrics["entropy"])
        return loss, (metrics, model_state)


def _log_probs(output: PolicyValue) -> jax.Array:
    assert isinstance(output.distribution, Categorical)  # because actions are discrete
    return output.distribution.log_probs()
