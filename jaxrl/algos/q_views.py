"""Views of a replay's batch: one interface for Q-learning from single transitions and from those within sequences.

A view contains the transitions' actions, rewards and weights, and evaluates a network at their first and next
observations. A recurrent network is unrolled only once for the two observations.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos.train_state import Variables, weighted_mean
from jaxrl.core.schedules import Scalar
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


class Transitions(struct.PyTreeNode):
    """View of a batch of N single transitions."""

    batch: TransitionBatch
    network: Network = struct.field(pytree_node=False)
    spec: EnvSpec = struct.field(pytree_node=False)

    @property
    def rows(self) -> TransitionBatch:
        """Return the transitions: their actions, rewards, steps, whether to bootstrap, and weights."""
        return self.batch

    @property
    def importance(self) -> jax.Array:
        """Return the importance weights [N]."""
        return self.batch.importance

    def output(self, network: Variables, key: jax.Array | None, *, train: bool) -> tuple[PyTree, ModelState]:
        """Return the network's output, to pass to `current` and `next`, and the new model state.

        `key` [N] is for noisy layers.
        """
        return self._apply(network, self.batch.observation, self.batch.action_mask, key, train=train)

    def current(self, output: PyTree) -> PyTree:
        """Return the network's output where the transitions begin, [N, ...]."""
        return output

    def next(self, output: PyTree, network: Variables, key: jax.Array | None) -> PyTree:
        """Return the network's output at the next observations, [N, ...]; `key` [N] is for noisy layers."""
        return self._apply(network, self.batch.next_observation, self.batch.next_action_mask, key, train=False)[0]

    def loss(self, losses: jax.Array, reduction: str, replicas: Replicas) -> jax.Array:
        """Return this device's share of the mean of `losses` [N]; `reduction` is unused, as there is no time axis."""
        return weighted_mean(losses, self.rows.weight, replicas)

    def priorities(self, error: jax.Array, eta: Scalar) -> jax.Array:
        """Return the priority of each item: the `error` [N] of its transition; `eta` is unused."""
        return error

    def _apply(
        self, network: Variables, observation: PyTree, mask: PyTree, key: jax.Array | None, *, train: bool
    ) -> tuple[PyTree, ModelState]:
        inputs = NetworkInputs.of_transitions(observation, mask)
        output, _, model_state = self.network.apply(
            network.params, inputs, (), spec=self.spec, model_state=network.model_state, train=train, key=key
        )
        return jax.tree.map(lambda x: x[0], output), model_state


class Sequences(struct.PyTreeNode):
    """View of the N = L * batch transitions within sequences of L rows after the burn-in.

    A transition begins at every row except the last, which is only used for bootstrapping. It has n steps, or fewer at
    the end of its sequence or episode.
    """

    batch: SequenceBatch
    rows: "StepsWithin"  # as in `Transitions`
    importance: jax.Array
    network: Network = struct.field(pytree_node=False)
    spec: EnvSpec = struct.field(pytree_node=False)

    @classmethod
    def of(cls, batch: SequenceBatch, network: Network, spec: EnvSpec, n_step: int) -> "Sequences":
        """Return the view of a batch, with transitions of up to `n_step` steps."""
        rows, columns = steps_within(batch, n_step), batch.mask.shape[1]
        importance = jnp.tile(batch.importance, rows.weight.shape[0] // columns)
        return cls(batch, rows, importance, network, spec)

    def output(self, network: Variables, key: jax.Array | None, *, train: bool) -> tuple[PyTree, ModelState]:
        """Unroll the network over the rows after the burn-in; return its output [L, batch, ...] and new model state.

        Noisy layers use one noise per sequence, from the key of the sequence's first transition.
        """
        key = None if key is None else key[: self.batch.mask.shape[1]]

        def unroll(network, time, carry, train):
            inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x: x[time], self.batch.timesteps))
            return self.network.apply(
                network.params, inputs, carry, spec=self.spec, model_state=network.model_state, train=train, key=key
            )

        return after_burn_in(unroll, network, self.batch.carry.network, self.batch.burn_in, train=train)

    def current(self, output: PyTree) -> PyTree:
        """Return the network's output where the transitions begin, [N, ...]."""
        return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), output)

    def next(self, output: PyTree, network: Variables, key: jax.Array | None) -> PyTree:
        """Return the network's output at the next observations, [N, ...], selected from `output`."""
        columns = self.batch.mask.shape[1]
        there = jnp.arange(self.rows.steps.shape[0], dtype=jnp.int32) + self.rows.steps * columns
        return jax.tree.map(lambda x: x[there], self.current(output))

    def loss(self, losses: jax.Array, reduction: str, replicas: Replicas) -> jax.Array:
        """Return this device's share of the mean of `losses` [N] ("mean"), or of each sequence's sum ("sum")."""
        if reduction == "mean":
            return weighted_mean(losses, self.rows.weight, replicas)
        counts = self.rows.weight.reshape((-1, self.batch.mask.shape[1]))
        total = jnp.sum(jnp.where(counts, losses.reshape(counts.shape), 0.0), axis=0)
        return weighted_mean(total, jnp.any(counts, axis=0), replicas)

    def priorities(self, error: jax.Array, eta: Scalar) -> jax.Array:
        """Return eta max |error| + (1 - eta) mean |error| of each sequence (Kapturowski et al., 2019, section 2.3)."""
        columns = self.batch.mask.shape[1]
        counts = self.rows.weight.reshape((-1, columns)).astype(jnp.float32)
        error = error.reshape((-1, columns)) * counts
        mean = jnp.sum(error, axis=0) / jnp.maximum(jnp.sum(counts, axis=0), 1.0)
        return eta * jnp.max(error, axis=0) + (1.0 - eta) * mean


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


def view(
    batch: TransitionBatch | SequenceBatch, network: Network, spec: EnvSpec, n_step: int
) -> Transitions | Sequences:
    """Return the view of a replay's batch."""
    if isinstance(batch, SequenceBatch):
        return Sequences.of(batch, network, spec, n_step)
    return Transitions(batch, network, spec)


def of_rollout(rollout: Rollout, network: Network, spec: EnvSpec, n_step: int) -> Sequences:
    """Return the view of a rollout of T rows as sequences of T + 1 rows, the last of which only bootstraps."""
    rows = rollout.rows.replace(observation=(), extras={})
    rows = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])]), rows)
    timesteps = rollout.timesteps.replace(episode=None, info=None)
    mask = jnp.ones(rows.weight.shape, bool)
    return Sequences.of(SequenceBatch(rows, timesteps, mask, rollout.carry, None), network, spec, n_step)


def _ahead(x: jax.Array, k: int) -> jax.Array:
    """Shift `x` [L, batch] by k rows, so that each row has the entry of the row k later; the last k rows are 0."""
    return jnp.concatenate([x[k:], jnp.zeros_like(x[:k])])
