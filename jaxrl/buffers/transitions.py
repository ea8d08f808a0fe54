"""N-step transitions from the rows of a ring, with correct handling of terminations and truncations."""

import jax
import jax.numpy as jnp

from jaxrl.buffers import frames
from jaxrl.buffers.ring import Ring
from jaxrl.core.sources import FrameStack
from jaxrl.core.types import TransitionBatch


def gather(
    ring: Ring, slot: jax.Array, column: jax.Array, n_step: int, frame_stack: FrameStack | None
) -> TransitionBatch:
    """Return the n-step transitions that begin at the given rows, assembled from the ring.

    Args:
      ring: the ring that stores the rows.
      slot, column: slots and columns of the first rows, int32 [batch]; the n following slots must hold rows.
      n_step: n, the maximum number of rewards of a transition.
      frame_stack: frame stacking; None: observations are stored whole.

    Returns:
      A batch with leaves `[batch, ...]`, whose `sample_info` is None.
    """
    rows = ring.rows
    alive = weight = ring.take(rows.weight, slot, column)
    rewards, steps = [], jnp.zeros(slot.shape, jnp.int32)
    bootstrap = jnp.ones(slot.shape, bool if rows.discount is None else jnp.float32)
    for k in range(n_step):
        if k:
            # A later row of weight 0 has no valid next row: bootstrap from its observation.
            alive = alive & ring.take(rows.weight, slot + k, column)
        rewards.append(jnp.where(alive, ring.take(rows.reward, slot + k, column), 0.0))
        steps = steps + alive.astype(jnp.int32)
        terminated = alive & ring.take(rows.terminated, slot + k, column)
        if rows.discount is None:
            bootstrap = bootstrap & ~terminated
        else:
            rewards[k] = rewards[k] * bootstrap
            bootstrap = bootstrap * jnp.where(alive, ring.take(rows.discount, slot + k, column), 1.0)
        alive = alive & ~terminated & ~ring.take(rows.truncated, slot + k, column)

    def at(leaves, where):
        return ring.take(leaves, where, column)

    # If the episode ends earlier, `steps` stops there, at the row of the true last observation.
    return TransitionBatch(
        observation=frames.observation(ring, slot, column, frame_stack),
        action=at(rows.action, slot),
        rewards=jnp.stack(rewards, axis=-1),
        steps=steps,
        bootstrap=bootstrap,
        next_observation=frames.observation(ring, slot + steps, column, frame_stack),
        weight=weight,
        action_mask=at(rows.action_mask, slot),
        next_action_mask=at(rows.action_mask, slot + steps),
        extras=at(rows.extras, slot),
    )
