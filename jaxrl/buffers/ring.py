"""Storage of raw rows: a ring with one column per environment and one slot per step.

A column's rows are contiguous in memory, so that rows that are sampled together, such as those of an observation and
the next observation, are read together.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec

from jaxrl.core.types import PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Partition spec of arrays that are stored in the memory of the devices' hosts."""

    spec: PartitionSpec


class Parts(struct.PyTreeNode):
    """Division of a dataset's N transitions into C columns, N / C each, so that all transitions are equally likely.

    Column j has the transitions from j N / C to (j + 1) N / C. A transition at a border is stored in both columns, and
    each samples it in proportion to its fraction of the transition.
    """

    slot: jax.Array  # [column, ...] int32: slots at which the column's transitions begin, in order
    offset: jax.Array  # [column] int32: j N modulo C; offset / C of the first transition is in column j - 1
    own: jax.Array  # [column, 2] int32: range of slots, end excluded, whose rows are counted only in this column
    total: jax.Array  # int32: N


class Ring(struct.PyTreeNode):
    """Stored rows and the slot of the next row. A row's step is its number among all rows of its environment.

    Observations and recurrent states, which use most of the memory, may be in the host's memory: see `is_on_host`.
    """

    rows: Trajectory  # [environment, slots, ...]
    carry: PyTree  # [environment, slots // rollout, ...]: at the first row of every rollout; () if not stored
    episode_step: jax.Array | None  # [environment, slots] int32: the row's number in its episode; None if not stored
    cursor: jax.Array  # int32, the slot written next
    filled: jax.Array  # int32, number of slots that hold rows
    written: jax.Array  # uint32, number of steps so far, modulo 2^32
    parts: Parts | None = None  # only for rings of datasets, which are full from the start

    @property
    def slots(self) -> int:
        return self.rows.reward.shape[1]

    @property
    def columns(self) -> int:
        return self.rows.reward.shape[0]

    def step_at(self, slot: jax.Array) -> jax.Array:
        """Return the step (uint32) of the row in a slot."""
        return self.written - 1 - ((self.cursor - 1 - slot) % self.slots).astype(jnp.uint32)

    def holds(self, step: jax.Array) -> jax.Array:
        """Return whether the row of a step is still stored, bool."""
        return self.written - 1 - step < self.filled.astype(jnp.uint32)

    def take(self, leaves: PyTree, slot: jax.Array, column: jax.Array) -> PyTree:
        """Return the entries of leaves [environment, slots, ...] at (slot, column), modulo the number of slots."""
        return _gather(leaves, column * self.slots + slot % self.slots)

    def take_carry(self, slot: jax.Array, column: jax.Array) -> PyTree:
        """Return the recurrent state at the first row of the rollouts that contain the slots, leaves [..., *state]."""
        if not (leaves := jax.tree.leaves(self.carry)):
            return self.carry
        rollouts = leaves[0].shape[1]
        return _gather(self.carry, column * rollouts + slot % self.slots // (self.slots // rollouts))

    def take_all(self, leaf: jax.Array, slot: jax.Array) -> jax.Array:
        """Return the entries of a leaf at slots [count] of every environment, [count, environment, ...]."""
        return self.take(leaf, slot[:, None], jnp.arange(self.columns, dtype=jnp.int32)[None])


def slots(capacity: int, num_envs: int, rollout: int) -> int:
    """Return the number of slots for `capacity` rows of all environments, a multiple of `rollout`: no write wraps."""
    return max(capacity // (num_envs * rollout), 1) * rollout


def init(example: Trajectory, carry: PyTree, slots: int, rollout: int, keep_steps: bool, on_host: bool = False) -> Ring:
    """Return an empty ring.

    Args:
      example: rows with leaves `[T, B, ...]`, or their shapes; only the shapes of one row are used.
      carry: carry `[B, ...]`, or its shapes; () to store none.
      slots: number of slots, a multiple of `rollout`, the length of every write.
      keep_steps: whether to number the rows of each episode.
      on_host: whether observations and recurrent states are stored in the host's memory.
    """

    def zeros(shape, dtype, space):
        if space is jax.memory.Space.Device:
            return jnp.zeros(shape, dtype)
        # Broadcast from a scalar on the host: otherwise the zeros would fill the device's memory first.
        return jax.lax.broadcast(jax.device_put(jnp.zeros((), dtype), space), shape)

    large = jax.memory.Space.Host if on_host else jax.memory.Space.Device
    empty = lambda x, space=jax.memory.Space.Device: zeros((x.shape[1], slots, *x.shape[2:]), x.dtype, space)  # noqa: E731
    rows = jax.tree.map(empty, example.replace(observation=()))
    return Ring(
        rows=rows.replace(observation=jax.tree.map(lambda x: empty(x, large), example.observation)),
        carry=jax.tree.map(lambda x: zeros((x.shape[0], slots // rollout, *x.shape[1:]), x.dtype, large), carry),
        episode_step=jnp.zeros((example.reward.shape[1], slots), jnp.int32) if keep_steps else None,
        cursor=jnp.int32(0),
        filled=jnp.int32(0),
        written=jnp.uint32(0),
    )


def partition(axis: str, episode_steps: bool, parts: bool = False, on_host: bool = False) -> Ring:
    """Return a ring's partition specs, a prefix tree, on a mesh whose axis `axis` shards the environments.

    With `on_host`, the specs of observations and recurrent states are `HostMemory`.
    """
    columns: PyTree = PartitionSpec(axis)
    everywhere: PyTree = PartitionSpec()
    large: PyTree = HostMemory(columns) if on_host else columns
    rows = Trajectory(*[columns] * len(dataclasses.fields(Trajectory))).replace(observation=large)
    steps = columns if episode_steps else None
    divided = Parts(columns, columns, columns, everywhere) if parts else None
    return Ring(rows, large, steps, everywhere, everywhere, everywhere, divided)


def add(ring: Ring, rows: Trajectory, carry: PyTree) -> Ring:
    """Store one rollout `[T, B, ...]`, where T is `init`'s `rollout`, and the carry `[B, ...]` at its first row.

    If a row of nonzero weight is followed by the first row of an episode, its next observation is missing (for example
    because the run was resumed with new host environments), and the row is stored with weight 0.
    """
    length, size = rows.reward.shape[0], ring.slots
    rows = rows.replace(weight=rows.weight & jnp.concatenate([~rows.first[1:], jnp.ones_like(rows.first[:1])]))
    last = (ring.cursor - 1) % size
    weight = ring.rows.weight.at[:, last].set(ring.rows.weight[:, last] & ~rows.first[0])
    ring = ring.replace(rows=ring.rows.replace(weight=weight))

    def write(stored, new, slot=ring.cursor):
        new = jnp.swapaxes(new, 0, 1)
        if is_on_host(stored):
            new, slot = jax.device_put((new, slot), jax.memory.Space.Host)
        return jax.lax.dynamic_update_slice_in_dim(stored, new, slot, 1, allow_negative_indices=False)

    episode_step = None
    if ring.episode_step is not None:
        # Count from the episode's first row, or continue from the last stored number, without a loop over time.
        number = jnp.arange(length, dtype=jnp.int32)[:, None]
        began = jax.lax.cummax(jnp.where(rows.first, number, -1 - ring.episode_step[:, last][None]), axis=0)
        episode_step = write(ring.episode_step, number - began)
    return Ring(
        rows=jax.tree.map(write, ring.rows, rows),
        carry=jax.tree.map(lambda stored, new: write(stored, new[None], ring.cursor // length), ring.carry, carry),
        episode_step=episode_step,
        cursor=(ring.cursor + length) % size,
        filled=jnp.minimum(ring.filled + length, size),
        written=ring.written + jnp.uint32(length),
    )


def is_on_host(leaves: PyTree) -> bool:
    """Return whether arrays are in the host's memory; all must be in the same memory."""
    return any(jax.typeof(x).memory_space is jax.memory.Space.Host for x in jax.tree.leaves(leaves))


def _gather(leaves: PyTree, position: jax.Array) -> PyTree:
    """Return the entries of leaves [environment, slots, ...] at positions in the first two axes, flattened.

    The host gathers leaves in its memory, all at once, and only the result is copied to the device.
    """

    def gather(leaves, position):
        # One index without bounds checks takes a third of the time of a gather by two indices.
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), leaves)
        how = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
        return jax.tree.map(lambda x: x.at[position].get(**how), flat)

    if is_on_host(leaves):
        gather = compute_on(gather, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
        position = jax.device_put(position, jax.memory.Space.Host)
    return gather(leaves, position)
