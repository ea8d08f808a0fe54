"""Inputs of networks at the observations of transitions, from a replay of single transitions or of sequences.

An update is written once, for a batch of N transitions whose observations are `Observations` or `Histories`. Both
evaluate policies, Q-networks and critics; `Histories` unroll recurrent networks over the time steps before.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import q_learning
from jaxrl.algos.train_state import Variables, weighted_mean
from jaxrl.core.schedules import Scalar
from jaxrl.core.shared_batch import weighted_rows
from jaxrl.core.types import (
    Carry,
    EnvSpec,
    ModelState,
    Network,
    NetworkInputs,
    PyTree,
    Replicas,
    Rollout,
    SequenceBatch,
    TransitionBatch,
)
from jaxrl.networks import Critic


class Observations(struct.PyTreeNode):
    """Observations of N single transitions."""

    observation: PyTree  # [N, ...]
    action_mask: PyTree | None = None  # [N, ...]

    @property
    def current(self) -> PyTree:
        """Return the observations [N, ...]."""
        return self.observation

    def map(self, function: Callable[[PyTree], PyTree]) -> "Observations":
        """Apply a function to the observations."""
        return self.replace(observation=function(self.observation))

    def joined(self, other: "Observations") -> "Observations":
        """Return the 2 N observations of both."""
        return jax.tree.map(lambda *x: jnp.concatenate(x), self, other)

    def output(
        self, network: Network, variables: Variables, spec: EnvSpec, key: jax.Array | None = None, *, train: bool
    ) -> tuple[PyTree, ModelState]:
        """Return the output of a policy or Q-network, to pass to `taken` and `following`, and the new model state.

        `key` is for noisy layers, one for each transition or sequence.
        """
        inputs = NetworkInputs.of_transitions(self.observation, self.action_mask)
        output, _, model_state = network.apply(
            variables.params, inputs, (), spec=spec, model_state=variables.model_state, train=train, key=key
        )
        return jax.tree.map(lambda x: x[0], output), model_state

    def taken(self, output: PyTree) -> PyTree:
        """Return the part [N, ...] of an `output` that belongs to the transitions."""
        return output

    def following(
        self, output: PyTree, network: Network, variables: Variables, spec: EnvSpec, key: jax.Array | None
    ) -> PyTree:
        """Return a network's output [N, ...] at these next observations, given the `output` at the observations."""
        return self.output(network, variables, spec, key, train=False)[0]

    def policy_output(
        self, network: Network, policy: Variables, spec: EnvSpec, *, train: bool = False
    ) -> tuple[PyTree, ModelState]:
        """Return the policy's output [N, ...], and the new model state.

        `train` is as in `types.Network`.
        """
        return self.output(network, policy, spec, train=train)

    def critic_output(
        self,
        network: Critic,
        critic: Variables,
        action: jax.Array | None,
        spec: EnvSpec,
        key: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> tuple[PyTree, ModelState]:
        """Return the critics' output, leaves [ensemble, N, actions, ...], for actions [N, n], and the new model state.

        `action` is None if actions are discrete; `key` [N] is for dropout; `train` is as in `types.Network`.
        """
        inputs = NetworkInputs.of_transitions(self.observation, self.action_mask)
        return _evaluated(network, critic, inputs, action, spec, key, train)

    def rows_that_count(self, weight: jax.Array) -> contextlib.AbstractContextManager[None]:
        """Declare which rows count in layers that normalize over the batch: those with `weight`."""
        return weighted_rows(weight)

    def keys(self, key: jax.Array, replicas: Replicas) -> jax.Array:
        """Return keys [N], one for each transition, independent of the number of devices."""
        return q_learning.transition_keys(key, jax.tree.leaves(self.observation)[0].shape[0], replicas)

    def loss(self, losses: jax.Array, weight: jax.Array, reduction: str, replicas: Replicas) -> jax.Array:
        """Return this device's share of the mean of `losses` [N]; `reduction` is for sequences."""
        return weighted_mean(losses, weight, replicas)

    def priorities(self, error: jax.Array, weight: jax.Array, eta: Scalar) -> jax.Array:
        """Return the priority of each item: the `error` [N] of its transition; `eta` is for sequences."""
        return error


class Histories(struct.PyTreeNode):
    """N time steps within B sequences, each with the steps before it.

    The burn-in only warms up recurrent states: it has no loss and no gradient. Methods are those of `Observations`.
    """

    inputs: NetworkInputs  # of all rows, [burn_in + L, B, ...]
    carry: Carry  # of the policy before the first row, [B, ...]
    index: jax.Array  # int32 [N], the time steps: indices into the L * B after the burn-in
    burn_in: int = struct.field(pytree_node=False)

    @property
    def columns(self) -> int:
        """Return the number of sequences, B."""
        return jax.tree.leaves(self.inputs.observation)[0].shape[1]

    @property
    def current(self) -> PyTree:
        return jax.tree.map(lambda x: x[0], self._selected.observation)

    def map(self, function: Callable[[PyTree], PyTree]) -> "Histories":
        return self.replace(inputs=self.inputs.replace(observation=function(self.inputs.observation)))

    def joined(self, other: "Histories") -> "Histories":
        return self.replace(index=jnp.concatenate([self.index, other.index]))  # both have the same rows

    def output(
        self, network: Network, variables: Variables, spec: EnvSpec, key: jax.Array | None = None, *, train: bool
    ) -> tuple[PyTree, ModelState]:
        """Unroll the network over the rows after the burn-in, from the stored carry; outputs are [L, B, ...]."""

        def unroll(variables, time, carry, train):
            inputs, model_state = self._part(time), variables.model_state
            return network.apply(
                variables.params, inputs, carry, spec=spec, model_state=model_state, train=train, key=key
            )

        return after_burn_in(unroll, variables, self.carry, self.burn_in, train=train)

    def taken(self, output: PyTree) -> PyTree:
        return jax.tree.map(self._taken, output)

    def following(
        self, output: PyTree, network: Network, variables: Variables, spec: EnvSpec, key: jax.Array | None
    ) -> PyTree:
        return self.taken(output)

    def policy_output(
        self, network: Network, policy: Variables, spec: EnvSpec, *, train: bool = False
    ) -> tuple[PyTree, ModelState]:
        if network.recurrent:
            output, model_state = self.output(network, policy, spec, train=train)
            return self.taken(output), model_state
        output, _, model_state = network.apply(
            policy.params, self._selected, (), spec=spec, model_state=policy.model_state, train=train
        )
        return jax.tree.map(lambda x: x[0], output), model_state

    def critic_output(
        self,
        network: Critic,
        critic: Variables,
        action: jax.Array | None,
        spec: EnvSpec,
        key: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> tuple[PyTree, ModelState]:
        """Return the output and the new model state, as `Observations.critic_output` does.

        Actors do not store recurrent states of critics, so these begin at the initial state and rely on the burn-in.
        """
        if not network.recurrent:
            return _evaluated(network, critic, self._selected, action, spec, key, train)

        def encode(critic, time, carry, train):
            inputs, model_state = self._part(time), critic.model_state
            return network.encode(critic.params, inputs, carry, spec=spec, model_state=model_state, train=train)

        members = jax.tree.leaves(critic.params)[0].shape[0]  # all members, or only the first
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (members, self.columns, *x.shape)), network.initial_carry(spec)
        )
        features, model_state = after_burn_in(encode, critic, carry, self.burn_in, train=train)
        features, mask = jax.vmap(self._taken)(features)[:, None], self._selected.action_mask
        action = None if action is None else action[None]
        output, model_state = network.evaluate(
            critic.params, features, action, mask, spec=spec, model_state=model_state, train=train, key=key
        )
        return jax.tree.map(lambda x: x[:, 0], output), model_state

    def rows_that_count(self, weight: jax.Array) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all rows count."""
        return contextlib.nullcontext()

    def keys(self, key: jax.Array, replicas: Replicas) -> jax.Array:
        of_columns = q_learning.transition_keys(key, self.columns, replicas)
        row = jnp.arange(self.index.shape[0] // self.columns, dtype=jnp.uint32)
        folded = jax.vmap(lambda n: jax.vmap(lambda k: jax.random.fold_in(k, n))(of_columns))(row)
        return folded.reshape((-1, *folded.shape[2:]))

    def loss(self, losses: jax.Array, weight: jax.Array, reduction: str, replicas: Replicas) -> jax.Array:
        """Return this device's share of the mean of `losses` [N] ("mean"), or of each sequence's sum ("sum")."""
        if reduction == "mean":
            return weighted_mean(losses, weight, replicas)
        counts = weight.reshape((-1, self.columns))
        total = jnp.sum(jnp.where(counts, losses.reshape(counts.shape), 0.0), axis=0)
        return weighted_mean(total, jnp.any(counts, axis=0), replicas)

    def priorities(self, error: jax.Array, weight: jax.Array, eta: Scalar) -> jax.Array:
        """Return eta max |error| + (1 - eta) mean |error| of each sequence (Kapturowski et al., 2019, section 2.3)."""
        counts = weight.reshape((-1, self.columns)).astype(jnp.float32)
        error = error.reshape((-1, self.columns)) * counts
        mean = jnp.sum(error, axis=0) / jnp.maximum(jnp.sum(counts, axis=0), 1.0)
        return eta * jnp.max(error, axis=0) + (1.0 - eta) * mean

    @property
    def _selected(self) -> NetworkInputs:
        """Return only the inputs at the N time steps, [1, N, ...]."""
        return jax.tree.map(lambda x: self._taken(x)[None], self._part(slice(self.burn_in, None)))

    def _part(self, time):
        return jax.tree.map(lambda x: x[time], self.inputs)

    def _taken(self, x):
        return x.reshape((-1, *x.shape[2:]))[self.index]


def _evaluated(network, critic, inputs, action, spec, key, train):
    """Return the critics' output [ensemble, N, actions, ...] at inputs [1, N, ...], and the model state."""
    action = None if action is None else action[None]
    output, model_state = network.apply(
        critic.params, inputs, action, spec=spec, model_state=critic.model_state, train=train, key=key
    )
    return jax.tree.map(lambda x: x[:, 0], output), model_state


def transitions(batch: TransitionBatch | SequenceBatch, n_step: int = 1) -> TransitionBatch:
    """Return a batch's transitions, whose observations are `Observations`, or for sequences, `Histories`.

    For B sequences, they are the L * B that begin at the L rows after the burn-in. These have up to `n_step` steps, or
    fewer at the end of their sequence or episode; the last of each sequence has weight 0, since it only bootstraps.
    """
    if not isinstance(batch, SequenceBatch):
        return batch.replace(
            observation=Observations(batch.observation, batch.action_mask),
            next_observation=Observations(batch.next_observation, batch.next_action_mask),
        )
    steps = steps_within(batch, n_step)
    columns = batch.mask.shape[1]
    here = jnp.arange(steps.weight.shape[0], dtype=jnp.int32)
    there = here + steps.steps * columns
    inputs = NetworkInputs.of_timesteps(batch.timesteps)
    masks = inputs.action_mask
    if masks is not None:
        masks = jax.tree.map(lambda x: x[batch.burn_in :].reshape((-1, *x.shape[2:])), masks)
    history = Histories(inputs, batch.carry.network, here, batch.burn_in)
    return TransitionBatch(
        observation=history,
        action=steps.action,
        rewards=steps.rewards,
        steps=steps.steps,
        bootstrap=steps.bootstrap,
        next_observation=history.replace(index=there),
        weight=steps.weight,
        action_mask=masks,
        extras=jax.tree.map(lambda x: x[batch.burn_in :].reshape((-1, *x.shape[2:])), batch.rows.extras),
        sample_info=jax.tree.map(lambda x: jnp.tile(x, here.shape[0] // columns), batch.sample_info),
    )


def of_rollout(rollout: Rollout, n_step: int) -> TransitionBatch:
    """Return the transitions of a rollout of T rows: sequences of T + 1 rows, the last of which only bootstraps."""
    rows = rollout.rows.replace(observation=(), extras={})
    rows = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])]), rows)
    timesteps = rollout.timesteps.replace(episode=None, info=None)
    mask = jnp.ones(rows.weight.shape, bool)
    return transitions(SequenceBatch(rows, timesteps, mask, rollout.carry, None), n_step)


class StepsWithin(struct.PyTreeNode):
    """Transitions of up to n steps, one per row of the sequences after the burn-in; N = L * batch, with L rows each."""

    action: PyTree  # [N, ...]
    rewards: jax.Array  # [N, n], not discounted, 0 after the end of an episode
    steps: jax.Array  # int32 [N], number of steps taken
    bootstrap: jax.Array  # as in `TransitionBatch`, [N]
    weight: jax.Array  # bool [N], False for rows to ignore in learning


def after_burn_in(
    unroll: Callable[..., tuple[PyTree, Carry, ModelState]],
    variables: Variables,
    carry: Carry,
    burn_in: int,
    *,
    train: bool,
) -> tuple[PyTree, ModelState]:
    """Return a network's output for the time steps after the burn-in, and its new model state.

    The burn-in only warms up the recurrent state: it has no loss and no gradient.

    Args:
      unroll: a function `unroll(variables, time, carry, train) -> (output, carry, model_state)`; `time` is a slice of
        the time steps, and the argument `carry` is the carry before the slice.
      variables: the network's variables.
      carry: the carry before the burn-in.
      burn_in: number of time steps of the burn-in.
      train: whether the time steps after the burn-in are evaluated in training mode.
    """
    if burn_in:
        frozen = jax.lax.stop_gradient(variables)
        carry = jax.lax.stop_gradient(unroll(frozen, slice(burn_in), carry, False)[1])
    output, _, model_state = unroll(variables, slice(burn_in, None), carry, train)
    return output, model_state


def steps_within(batch: SequenceBatch, n_step: int) -> StepsWithin:
    """Return the transitions that begin at the L rows after the burn-in; the last row has weight 0: it only bootstraps.

    Args:
      batch: sequences.
      n_step: maximum number of steps of a transition.
    """
    rows = jax.tree.map(lambda x: x[batch.burn_in :], batch.rows)
    ends = jnp.zeros((1, rows.weight.shape[1]), bool)
    # A row begins a step if it counts and is followed by another row.
    counts = jnp.concatenate([(rows.weight & batch.mask[batch.burn_in :])[:-1], ends])
    alive, rewards = counts, []
    steps = jnp.zeros(counts.shape, jnp.int32)
    bootstrap = jnp.ones(counts.shape, bool if rows.discount is None else jnp.float32)
    for k in range(n_step):
        alive = alive & _ahead(counts, k)
        rewards.append(jnp.where(alive, _ahead(rows.reward, k), 0.0))
        steps = steps + alive.astype(jnp.int32)
        terminated = alive & _ahead(rows.terminated, k)
        if rows.discount is None:
            bootstrap = bootstrap & ~terminated
        else:
            rewards[k] = rewards[k] * bootstrap
            bootstrap = bootstrap * jnp.where(alive, _ahead(rows.discount, k), 1.0)
        alive = alive & ~terminated & ~_ahead(rows.truncated, k)
    parts = StepsWithin(rows.action, jnp.stack(rewards, axis=-1), steps, bootstrap, counts)
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), parts)


def _ahead(x: jax.Array, k: int) -> jax.Array:
    """Shift `x` [L, batch] by k rows, so that each row has the entry of the row k later; the last k rows are 0."""
    return jnp.concatenate([x[k:], jnp.zeros_like(x[:k])])
