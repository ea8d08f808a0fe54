"""MuZero (Schrittwieser et al., 2020, arXiv:1911.08265), with Gumbel search (Danihelka et al., 2022) or PUCT."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import histories, q_learning, search, train_state
from jaxrl.algos.base import algorithm, changed, field_problems, network_problems, number, static
from jaxrl.algos.fields import DiscountFields, NStepFields, ReplayFields, SupportFields
from jaxrl.algos.optimizers import Adam, Optimizer, clipped
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.search import Expansion, TreeSearch, TreeSearchFields
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.sources import Sequence
from jaxrl.core.types import (
    TRANSITION_INPUTS,
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    NetworkInputs,
    Replicas,
    SequenceBatch,
    Source,
    TimeStep,
    UpdateInfo,
)
from jaxrl.networks import Categorical, ModelNetwork, resolve_network


class MuZeroState(struct.PyTreeNode):
    """State of the learner."""

    network: TrainState
    updates: jax.Array  # int32


@algorithm
class MuZero(TreeSearchFields, ReplayFields, NStepFields, SupportFields, DiscountFields):
    """MuZero: search in a learned model of rewards, values and policies."""

    learning_rate: Scalar = number(Linear(2e-3, 0.0), above=0, help="learning rate")
    max_grad_norm: Scalar | None = number(5.0, above=0, help="clip gradients to this global norm; None: no clipping")
    value_cost: Scalar = number(0.25, low=0, help="weight of the value loss")
    v_min: Scalar = changed(-300.0, only_with=None, help="minimum of the categorical support of values and rewards")
    v_max: Scalar = changed(300.0, only_with=None, help="maximum of the categorical support of values and rewards")
    unroll_steps: int = static(5, low=1, help="number of steps for which the model is unrolled in an update")
    n_step: int = changed(10)
    tree_search: TreeSearch = changed(TreeSearch(simulations=16, epsilon=0.0))
    capacity: int = changed(50_000)
    batch_size: int = changed(128, help="sequences per update")
    replay_ratio: float | None = changed(0.1)
    optimizer: Optimizer = number(Adam(eps=1e-5))
    network: ModelNetwork = static(ModelNetwork())

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        length = self.unroll_steps if self.rollout_length is None else self.rollout_length
        return dataclasses.replace(self, network=resolve_network(self.network, spec), rollout_length=length)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems, network = field_problems(self), self.network
        if not isinstance(network, ModelNetwork):
            return [*problems, f"MuZero.network={network!r:.80} has no model; pass jaxrl.networks.ModelNetwork(...)"]
        return problems + network_problems("MuZero.network", network, spec, TRANSITION_INPUTS, discrete=True)

    @property
    def experience(self) -> Mapping[str, Source]:
        source = self.source(sequence=Sequence(self.unroll_steps + self.n_step + 1))
        return {"replay": dataclasses.replace(source, extras=("search_policy", "search_value"))}

    def init(self, key: jax.Array, spec: EnvSpec) -> MuZeroState:
        network = train_state.create(*self.network.init(key, spec), self._transformation())
        return MuZeroState(network, jnp.int32(0))

    def actor(self, state: MuZeroState) -> ActorState:
        return ActorState(state.network.params, model_state=state.network.model_state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        """Return actions found by search in the model; without keys, as in exports, the policy's most likely ones."""
        inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x: x[None], timestep))
        output, _, _ = self.network.apply(
            actor.params, inputs, (), spec=spec, model_state=actor.model_state, train=False
        )
        output = jax.tree.map(lambda x: x[0], output)
        prior = Categorical.masked(output.logits, timestep.action_mask)
        if key is None:
            return ActorOutput(prior.mode(), carry)
        root = Expansion(prior.logits, self._scalar(output.value), output.latent)
        expand = functools.partial(self._expand, actor, spec, timestep.discount is not None)
        found = self.tree_search.plan(root, expand, key, mask=timestep.action_mask, explore=explore)
        extras = {"search_policy": found.policy, "search_value": found.value} if explore else {}
        return ActorOutput(found.action, carry, extras)

    def _expand(self, actor, spec, discounted, latent, action, key) -> Expansion:
        output = self.network.step(actor.params, latent, action, spec=spec, model_state=actor.model_state)
        scalars = self._scalar(output.value), output.latent, self._scalar(output.reward)
        follows = jnp.clip(output.discount, -1.0, 1.0) if discounted else 1.0  # the environment's discount
        return Expansion(output.logits, *scalars, jnp.asarray(self.gamma, jnp.float32) * follows)

    def update(
        self, state: MuZeroState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[MuZeroState, UpdateInfo]:
        targets = self._targets(batch["replay"], key, spec, replicas)
        observation = jax.tree.map(lambda x: x[0], batch["replay"].rows.observation)

        def loss(network):
            inputs = NetworkInputs.of_transitions(observation)
            variables: Any = {"spec": spec, "model_state": network.model_state}
            output, _, model_state = self.network.apply(network.params, inputs, (), train=True, **variables)
            output = jax.tree.map(lambda x: x[0], output)
            total: dict[str, Any] = {}
            for k in range(self.unroll_steps + 1):
                if k:
                    # Halve the gradient at each step, so that long unrolls weigh no more than short ones (appendix G).
                    latent = 0.5 * (output.latent + jax.lax.stop_gradient(output.latent))
                    output = self.network.step(network.params, latent, targets.action[k - 1], **variables)
                losses = {
                    "policy_loss": targets.real[k] * _entropy_to(targets.policy[k], output.logits),
                    "value_loss": targets.known[k] * _entropy_to(targets.value[k], output.value),
                }
                if k:
                    losses["reward_loss"] = targets.known[k - 1] * _entropy_to(targets.reward[k - 1], output.reward)
                if k and targets.discount is not None:
                    error = jnp.square(output.discount - targets.discount[k - 1])
                    losses["discount_loss"] = targets.known[k - 1] * error
                scale = 1.0 / self.unroll_steps if k else 1.0
                total |= {name: total.get(name, 0.0) + scale * x for name, x in losses.items()}
            metrics = {name: weighted_mean(x, targets.real[0], replicas) for name, x in total.items()}
            costs = {name: self.value_cost if name == "value_loss" else 1.0 for name in metrics}
            return sum(costs[name] * x for name, x in metrics.items()), (metrics, model_state)

        network, norm, metrics = train_state.gradient(loss, state.network).step(self._transformation(), replicas)
        metrics["value_target"] = weighted_mean(targets.returns, targets.real[0], replicas)
        metrics = replicas.mean(metrics) | {"gradient_norm": norm, "learning_rate": jnp.asarray(self.learning_rate)}
        return MuZeroState(network, state.updates + 1), UpdateInfo(metrics)

    def _targets(self, drawn: SequenceBatch, key, spec, replicas) -> "Targets":
        """Return the targets of each unrolled step, from the sequence and the search results stored while acting.

        After a termination, all targets are 0 and actions are random.
        """
        rows, count = drawn.rows, self.unroll_steps + 1
        length, columns = drawn.mask.shape
        steps = histories.steps_within(drawn, self.n_step)
        lead = jnp.arange(length * columns, dtype=jnp.int32) + steps.steps * columns
        value = rows.extras["search_value"].reshape(-1)[jnp.minimum(lead, length * columns - 1)]
        returns = q_learning.n_step_target(steps.rewards, steps.steps, steps.bootstrap, value, self.gamma)
        # The row after an episode's end has weight 0, so the rows after it are not part of the same episode.
        real = jnp.cumprod(steps.weight.reshape(length, columns)[:count].astype(jnp.int32), axis=0) > 0
        returns = jnp.where(real, returns.reshape(length, columns)[:count], 0.0)
        ended = jnp.cumsum((real & rows.terminated[:count]).astype(jnp.int32), axis=0) > 0
        over = jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])
        keys = q_learning.transition_keys(key, columns, replicas)
        actions = spaces.expect(spec.action_space, spaces.Discrete).n
        random = jax.vmap(lambda k: jax.random.randint(k, (count - 1,), 0, actions, jnp.int32), out_axes=1)(keys)
        return Targets(
            action=jnp.where(real[:-1], rows.action[: count - 1], random),
            policy=rows.extras["search_policy"][:count],
            value=self._two_hot(returns),
            reward=self._two_hot(jnp.where(real[:-1], rows.reward[: count - 1], 0.0)),
            discount=None if rows.discount is None else jnp.where(real[:-1], rows.discount[: count - 1], 0.0),
            real=real.astype(jnp.float32),
            known=(real | over).astype(jnp.float32),
            returns=returns[0],
        )

    def _two_hot(self, scalars):
        """Encode scalars [...] as probabilities [..., atoms] of the two atoms around their `rescaled` values."""
        atoms = q_learning.rescaled(scalars).reshape(-1, 1)
        found = q_learning.categorical_projection(
            Returns(atoms, jnp.ones_like(atoms)), *self._support(), self.network.atoms
        )
        return found.reshape(*scalars.shape, -1)

    def _scalar(self, logits):
        """Decode logits [..., atoms] to `unscaled` expected values [...]."""
        atoms = q_learning.support(*self._support(), self.network.atoms)
        return q_learning.unscaled(
            jnp.sum(jax.nn.softmax(logits, axis=-1) * jnp.expand_dims(atoms, range(logits.ndim - 1)), axis=-1)
        )

    def _support(self):
        return tuple(q_learning.rescaled(jnp.asarray(x, jnp.float32)) for x in (self.v_min, self.v_max))

    def _transformation(self):
        return clipped(self.optimizer(self.learning_rate), self.max_grad_norm)


class Targets(struct.PyTreeNode):
    """Targets of an update, [unrolled step, batch, ...]; actions, rewards and discounts are one step shorter."""

    action: jax.Array
    policy: jax.Array
    value: jax.Array  # probabilities of atoms
    reward: jax.Array  # probabilities of atoms
    discount: jax.Array | None  # the environment's own discounts, if it has any
    real: jax.Array  # float32: 1 if the step exists in the same episode
    known: jax.Array  # float32: 1 if real, or if the episode terminated before
    returns: jax.Array  # [batch], n-step returns at the first step


def _entropy_to(target, logits):
    return search.cross_entropy(target, jax.nn.log_softmax(logits, axis=-1))
