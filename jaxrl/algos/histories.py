"""Histories: inputs of a recurrent policy or critic up to a time step, instead of one observation.

A batch of sequences becomes a batch of the transitions within them, whose observations are histories. An algorithm's
update for transitions then also works for sequences, without changes.
"""

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import q_views
from jaxrl.algos.train_state import Variables
from jaxrl.core.types import (
    Carry,
    EnvSpec,
    ModelState,
    Network,
    NetworkInputs,
    PyTree,
    SequenceBatch,
    TransitionBatch,
)
from jaxrl.networks import Critic


class History(struct.PyTreeNode):
    """N time steps within sequences, each with the steps before it.

    The burn-in only warms up recurrent states: it has no loss and no gradient.
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
    def selected(self) -> NetworkInputs:
        """Return only the inputs at the N time steps, [1, N, ...]."""
        return jax.tree.map(lambda x: self._taken(x)[None], self._part(slice(self.burn_in, None)))

    def policy(self, network: Network, policy: Variables, spec: EnvSpec, *, train: bool) -> tuple[PyTree, ModelState]:
        """Return the policy's output at the N time steps, with leaves [N, ...], and the new model state.

        The policy's recurrent state starts from the state stored while acting.
        """
        if not network.recurrent:
            output, _, model_state = network.apply(
                policy.params, self.selected, (), spec=spec, model_state=policy.model_state, train=train
            )
            return jax.tree.map(lambda x: x[0], output), model_state

        def unroll(policy, time, carry, train):
            inputs, model_state = self._part(time), policy.model_state
            return network.apply(policy.params, inputs, carry, spec=spec, model_state=model_state, train=train)

        output, model_state = q_views.after_burn_in(unroll, policy, self.carry, self.burn_in, train=train)
        return jax.tree.map(self._taken, output), model_state

    def critic(
        self,
        network: Critic,
        critic: Variables,
        action: jax.Array | None,
        spec: EnvSpec,
        mask: jax.Array | None,
        key: jax.Array | None,
        *,
        train: bool,
    ) -> tuple[PyTree, ModelState]:
        """Return the critics' output, leaves [ensemble, N, actions, ...], for actions [N, n], and the new model state.

        Actors do not store recurrent states of critics, so these begin at the initial state and rely on the burn-in.
        """
        action, mask = (None if x is None else x[None] for x in (action, mask))
        if not network.recurrent:
            inputs = self.selected.replace(action_mask=mask)
            output, model_state = network.apply(
                critic.params, inputs, action, spec=spec, model_state=critic.model_state, train=train, key=key
            )
            return jax.tree.map(lambda x: x[:, 0], output), model_state

        def encode(critic, time, carry, train):
            inputs, model_state = self._part(time), critic.model_state
            return network.encode(critic.params, inputs, carry, spec=spec, model_state=model_state, train=train)

        members = jax.tree.leaves(critic.params)[0].shape[0]  # all members, or only the first
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (members, self.columns, *x.shape)), network.initial_carry(spec)
        )
        features, model_state = q_views.after_burn_in(encode, critic, carry, self.burn_in, train=train)
        features = jax.vmap(self._taken)(features)[:, None]
        output, model_state = network.evaluate(
            critic.params, features, action, mask, spec=spec, model_state=model_state, train=train, key=key
        )
        return jax.tree.map(lambda x: x[:, 0], output), model_state

    def _part(self, time):
        return jax.tree.map(lambda x: x[time], self.inputs)

    def _taken(self, x):
        return x.reshape((-1, *x.shape[2:]))[self.index]


def transitions(batch: TransitionBatch | SequenceBatch, n_step: int) -> TransitionBatch:
    """Return a batch's transitions; for B sequences, the L * B that begin at the L rows after the burn-in.

    Transitions of sequences have up to `n_step` steps; the last of each sequence has weight 0, since it only
    bootstraps.
    """
    if not isinstance(batch, SequenceBatch):
        return batch
    steps = q_views.steps_within(batch, n_step)
    columns = batch.mask.shape[1]
    here = jnp.arange(steps.weight.shape[0], dtype=jnp.int32)
    there = here + steps.steps * columns
    inputs = NetworkInputs.of_timesteps(batch.timesteps)
    masks = inputs.action_mask
    if masks is not None:
        masks = jax.tree.map(lambda x: x[batch.burn_in :].reshape((-1, *x.shape[2:])), masks)
    history = History(inputs, batch.carry.network, here, batch.burn_in)
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
        next_action_mask=jax.tree.map(lambda x: x[there], masks),
    )
