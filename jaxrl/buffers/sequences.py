"""Sequences of rows from a ring, with Reverb's rules for sequence starts and episode ends."""

import jax
import jax.numpy as jnp

from jaxrl.buffers import frames
from jaxrl.buffers.ring import Ring
from jaxrl.core.sources import FrameStack, Sequence
from jaxrl.core.types import Carry, SequenceBatch, TimeStep


def lengths(first: jax.Array, longest: int) -> jax.Array:
    """Return the number of rows from each row to the end of its episode, at most `longest`.

    Args:
      first: whether each of consecutive rows begins an episode, bool [T, B].
      longest: the maximum, static.

    Returns:
      int32 [T - longest + 1, B], without the last `longest - 1` rows.
    """
    starts = first.shape[0] - longest + 1
    row = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None]
    here = jnp.where(first, row, first.shape[0])
    following = jax.lax.cummin(here, axis=0, reverse=True)[1:]
    following = jnp.concatenate([following, jnp.full_like(here[:1], first.shape[0])])
    return jnp.minimum(following[:starts] - row[:starts], longest)


def eligible(ring: Ring, slot: jax.Array, sequence: Sequence, rollout: int) -> jax.Array:
    """Return a mask of the rows at which a sequence begins.

    Args:
      ring: the ring that stores the rows.
      slot: int32 [starts + rows - 1], consecutive slots, modulo the ring's slots; the last `rows - 1` are not starts.
      sequence: the definition of the sequences.
      rollout: number of rows between two stored carries, static.

    Returns:
      bool [starts, B].
    """
    slot = slot % ring.slots
    longest = sequence.rows
    count = slot.shape[0] - longest + 1
    start = slot[:count]
    if sequence.end == "continue":
        grid = (ring.step_at(start) % jnp.uint32(sequence.period) == 0)[:, None]
        found = jnp.broadcast_to(grid, (count, ring.columns))
    else:
        assert ring.episode_step is not None, "episode_step is only stored if a sequence needs it"
        step = ring.take_all(ring.episode_step, start)
        length = lengths(ring.take_all(ring.rows.first, slot), longest)
        full = length == longest
        if sequence.stored_carry and rollout > 1:
            # Begin wherever a recurrent state is known: a stored one, or the initial one at an episode's beginning.
            grid = (start % rollout == 0)[:, None] | ring.take_all(ring.rows.first, start)
            short = (step < sequence.period) | (length > longest - sequence.period)
            return grid & (full | (short & (length > sequence.burn_in + 1)))  # a transition after burn-in
        grid = step % sequence.period == 0
        if sequence.end == "write":
            ends = ~ring.take_all(ring.rows.weight, slot[longest - 1 :])
            found = full & (grid | ends)
        else:
            # One short sequence follows the last full one, unless that ends with the episode.
            short = (step < sequence.period) | (length > longest - sequence.period)
            found = grid & (full | short)
    if sequence.stored_carry:
        found = found & (start % rollout == 0)[:, None]
    return found


def mixed_priority(
    per_row: jax.Array, weight: jax.Array, length: jax.Array, sequence: Sequence, eta: float
) -> jax.Array:
    """Return the sequences' priorities, eta * max + (1 - eta) * mean over rows (Kapturowski et al., 2019, section 2.3).

    The rows are those used for learning: of nonzero weight, after the burn-in and before the last row, which is only
    used for bootstrapping.

    Args:
      per_row: priorities of consecutive rows, float32 [T, B].
      weight: bool [T, B].
      length: int32 [T - rows + 1, B], number of rows of each sequence that belong to its episode.
      sequence: the definition of the sequences.
      eta: weight of the maximum priority.

    Returns:
      float32 [T - rows + 1, B].
    """
    learned = jnp.arange(sequence.burn_in, max(sequence.rows - 1, sequence.burn_in + 1), dtype=jnp.int32)
    offset = jnp.arange(length.shape[0], dtype=jnp.int32)[:, None] + learned[None]
    inside = weight[offset] & (learned[None, :, None] < length[:, None])
    values = jnp.where(inside, per_row[offset], 0.0)
    mean = jnp.sum(values, axis=1) / jnp.maximum(jnp.sum(inside.astype(jnp.float32), axis=1), 1.0)
    return eta * jnp.max(values, axis=1) + (1.0 - eta) * mean


def gather(
    ring: Ring,
    slot: jax.Array,
    column: jax.Array,
    valid: jax.Array,
    initial: Carry,
    sequence: Sequence,
    frame_stack: FrameStack | None,
) -> SequenceBatch:
    """Return the sequences that begin at the given rows.

    Args:
      ring: the ring that stores the rows.
      slot, column: slots and columns of the first rows, int32 [batch].
      valid: bool [batch], False where no item was found.
      initial: the carry [batch, ...] if none is stored.
      sequence: the definition of the sequences.
      frame_stack: frame stacking; None: observations are stored whole.

    Returns:
      A batch with leaves `[sequence.rows, batch, ...]`, whose `sample_info` is None.
    """
    rows = ring.rows
    offset = jnp.arange(sequence.rows, dtype=jnp.int32)[:, None]
    slots, columns = slot[None] + offset, jnp.broadcast_to(column[None], (sequence.rows, column.shape[0]))
    at = lambda leaves, where: ring.take(leaves, where, columns)  # noqa: E731

    first = at(rows.first, slots)
    stretch = at(rows.replace(observation=()), slots).replace(
        observation=frames.observation(ring, slots, columns, frame_stack)
    )
    mask = jnp.broadcast_to(valid[None], first.shape)
    if sequence.end != "continue":
        mask = mask & (jnp.cumsum((first & (offset > 0)).astype(jnp.int32), axis=0, dtype=jnp.int32) == 0)
    # A time step's reward, endings and previous action come from the row before, unless it begins an episode.
    before = at((rows.reward, rows.terminated, rows.truncated, rows.action, rows.discount), slots - 1)
    reward, terminated, truncated, action, discount = jax.tree.map(lambda x: _where(mask & ~first, x), before)
    if discount is not None:
        discount = jnp.where(first, 1.0, discount)
    stretch = jax.tree.map(lambda x: _where(mask, x), stretch)
    timesteps = TimeStep(
        observation=stretch.observation,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        first=stretch.first,
        action_mask=stretch.action_mask,
        previous_action=action,
        discount=discount,
    )
    belongs = jnp.broadcast_to(valid[None], mask.shape) if sequence.end == "zero_pad" else mask
    carry = initial
    if sequence.stored_carry:
        carry = ring.take_carry(slot, column)
    stretch = stretch.replace(weight=stretch.weight & (offset >= sequence.burn_in))
    return SequenceBatch(stretch, timesteps, belongs, carry, None, sequence.burn_in)


def _where(mask, x):
    """Return `x` [L, batch, ...] where the mask [L, batch] is true, otherwise zeros."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x))
