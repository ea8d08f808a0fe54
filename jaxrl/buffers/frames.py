"""Frame sharing: each frame is stored once, and stacked observations are rebuilt when sampled."""

import jax
import jax.numpy as jnp

from jaxrl.buffers.ring import Ring
from jaxrl.core.sources import FrameStack
from jaxrl.core.types import PyTree


def newest(observation: PyTree, stack: FrameStack | None) -> PyTree:
    """Return the newest frame of stacked observations `[T, B, ...]`; only this frame is stored."""
    if stack is None:
        return observation

    def cut(x):
        axis = _axis(x, stack, 2)
        width = x.shape[axis] // stack.frames
        return jax.lax.slice_in_dim(x, x.shape[axis] - width, x.shape[axis], axis=axis)

    return jax.tree.map(cut, observation)


def observation(ring: Ring, slot: jax.Array, column: jax.Array, stack: FrameStack | None) -> PyTree:
    """Return the observations of rows, with stacks rebuilt from the frames of their episode.

    Args:
      ring: the ring that stores the rows.
      slot, column: slots and columns of the rows, int32 [...].
      stack: frame stacking; None: observations are stored whole.
    """
    stored = ring.rows.observation
    if stack is None:
        return ring.take(stored, slot, column)
    # Frames are collected backwards from the newest; the episode's first frame is repeated.
    slots, before = [slot], jnp.zeros(slot.shape, bool)
    absent = [before]
    for _ in range(stack.frames - 1):
        before = before | ring.take(ring.rows.first, slots[-1], column)
        slots.append(jnp.where(before, slots[-1], slots[-1] - 1))
        absent.append(before)

    def gather(leaf):
        frames = []
        for slot_back, missing in zip(slots[::-1], absent[::-1], strict=True):
            frame = ring.take(leaf, slot_back, column)
            if stack.fill == "zeros":
                missing = missing.reshape(missing.shape + (1,) * (frame.ndim - missing.ndim))
                frame = jnp.where(missing, jnp.zeros_like(frame), frame)
            frames.append(frame)
        return jnp.concatenate(frames, axis=_axis(frames[0], stack, slot.ndim))

    return jax.tree.map(gather, stored)


def lookback(stack: FrameStack | None) -> int:
    """Return the number of earlier rows needed to rebuild an observation."""
    return 0 if stack is None else stack.frames - 1


def problems(observation: PyTree, stack: FrameStack | None) -> list[str]:
    """Return the problems with observations `[T, B, ...]` that do not match the frame stack, one line per leaf."""
    if stack is None:
        return []
    found = []
    for path, leaf in jax.tree.leaves_with_path(observation):
        axis, shape = _axis(leaf, stack, 2), leaf.shape[2:]
        if not 2 <= axis < leaf.ndim or leaf.shape[axis] % stack.frames:
            name = f"observation{jax.tree_util.keystr(path)}"
            found.append(
                f"frame_stack={stack.frames} frames along axis {stack.axis}: {name} has shape {shape}, which does "
                f"not match; set FrameStack(frames, axis) to the number of frames and the axis of the observation"
            )
    return found


def _axis(x: jax.Array, stack: FrameStack, leading: int) -> int:
    """Return the stacking axis in `x`, which has `leading` axes before those of one observation."""
    return x.ndim + stack.axis if stack.axis < 0 else leading + stack.axis
