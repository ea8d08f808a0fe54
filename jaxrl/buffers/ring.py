"""Storage: a ring of raw rows, where every environment has a column and every step a slot.

A column's rows lie one after another in memory, so that what is drawn together, an observation and the next or a
stretch of rows, is read together.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.core.types import PyTree, Trajectory


class Parts(struct.PyTreeNode):
    """How the transitions of a dataset are divided over columns, to draw all alike: N over C, each has N / C of them.

    Laid end to end, column j has those from j N / C to (j + 1) N / C. One at a border is stored in both columns, and
    each draws it as often as the part of it that it has.
    """

    slot: jax.Array  # [column, ...] int32: where its transitions begin, in order
    offset: jax.Array  # [column] int32: j N modulo C, the part of its first one that is not its own, in C-ths
    own: jax.Array  # [column, 2] int32: the slots whose rows no other column has, from the first to before the second
    total: jax.Array  # int32: N


class Ring(struct.PyTreeNode):
    """The stored rows and where the next goes. A row's step is its number among all rows of its environment."""

    rows: Trajectory  # [environment, slots, ...]
    carry: PyTree  # [environment, slots // rollout, ...]: at the first row of every rollout; () where not kept
    episode_step: jax.Array | None  # [environment, slots] int32: its number in its episode; None where not kept
    cursor: jax.Array  # int32, the slot written next
    filled: jax.Array  # int32, how many slots hold rows
    written: jax.Array  # uint32, steps so far modulo 2^32
    parts: Parts | None = None  # of a ring that is full from the beginning

    @property
    def slots(self) -> int:
        return self.rows.reward.shape[1]

    @property
    def columns(self) -> int:
        return self.rows.reward.shape[0]

    def step_at(self, slot: jax.Array) -> jax.Array:
        """The step (uint32) of the row that a slot holds."""
        return self.written - 1 - ((self.cursor - 1 - slot) % self.slots).astype(jnp.uint32)

    def holds(self, step: jax.Array) -> jax.Array:
        """Whether the row of a step is still stored, bool."""
        return self.written - 1 - step < self.filled.astype(jnp.uint32)

    def take(self, leaf: jax.Array, slot: jax.Array, column: jax.Array) -> jax.Array:
        """The entries of a leaf [environment, slots, ...] at (slot, column), modulo the number of slots."""
        # One index and no check of bounds: a third of the time of a gather by two.
        flat = leaf.reshape(-1, *leaf.shape[2:])
        position = column * self.slots + slot % self.slots
        return flat.at[position].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def take_all(self, leaf: jax.Array, slot: jax.Array) -> jax.Array:
        """The entries of a leaf at slots [count] of every environment, [count, environment, ...]."""
        return self.take(leaf, slot[:, None], jnp.arange(self.columns, dtype=jnp.int32)[None])


def slots(capacity: int, num_envs: int, rollout: int) -> int:
    """How many slots hold `capacity` rows of `num_envs` environments: whole rollouts, so that no write wraps."""
    return max(capacity // (num_envs * rollout), 1) * rollout


def init(example: Trajectory, carry: PyTree, slots: int, rollout: int, keep_steps: bool) -> Ring:
    """An empty ring.

    Args:
      example: rows with leaves `[T, B, ...]`, or their shapes; only the shapes of one row are read.
      carry: `[B, ...]` or its shapes; () keeps none.
      slots: a multiple of `rollout`, the length of every write.
      keep_steps: whether to number the rows of each episode.
    """

    def empty(x):
        return jnp.zeros((x.shape[1], slots, *x.shape[2:]), x.dtype)

    return Ring(
        rows=jax.tree.map(empty, example),
        carry=jax.tree.map(lambda x: jnp.zeros((x.shape[0], slots // rollout, *x.shape[1:]), x.dtype), carry),
        episode_step=jnp.zeros((example.reward.shape[1], slots), jnp.int32) if keep_steps else None,
        cursor=jnp.int32(0),
        filled=jnp.int32(0),
        written=jnp.uint32(0),
    )


def partition(axis: str, episode_steps: bool, parts: bool = False) -> Ring:
    """How a ring lies on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
    columns: PyTree = PartitionSpec(axis)
    everywhere: PyTree = PartitionSpec()
    divided = Parts(columns, columns, columns, everywhere) if parts else None
    return Ring(columns, columns, columns if episode_steps else None, everywhere, everywhere, everywhere, divided)


def add(ring: Ring, rows: Trajectory, carry: PyTree) -> Ring:
    """Stores one rollout `[T, B, ...]`, T as given to `init`, and the carry `[B, ...]` at its first row.

    A row that counts but is followed by a first one has lost what came next (the run was resumed with new host
    environments): it is stored as one that does not count.
    """
    length, size = rows.reward.shape[0], ring.slots
    rows = rows.replace(weight=rows.weight & jnp.concatenate([~rows.first[1:], jnp.ones_like(rows.first[:1])]))
    last = (ring.cursor - 1) % size
    weight = ring.rows.weight.at[:, last].set(ring.rows.weight[:, last] & ~rows.first[0])
    ring = ring.replace(rows=ring.rows.replace(weight=weight))

    def write(stored, new):
        return jax.lax.dynamic_update_slice_in_dim(stored, jnp.swapaxes(new, 0, 1), ring.cursor, 1)

    episode_step = None
    if ring.episode_step is not None:
        # From the newest first row on, or as the row before these was numbered: no loop over time.
        number = jnp.arange(length, dtype=jnp.int32)[:, None]
        began = jax.lax.cummax(jnp.where(rows.first, number, -1 - ring.episode_step[:, last][None]), axis=0)
        episode_step = write(ring.episode_step, number - began)
    return Ring(
        rows=jax.tree.map(write, ring.rows, rows),
        carry=jax.tree.map(lambda stored, new: stored.at[:, ring.cursor // length].set(new), ring.carry, carry),
        episode_step=episode_step,
        cursor=(ring.cursor + length) % size,
        filled=jnp.minimum(ring.filled + length, size),
        written=ring.written + jnp.uint32(length),
    )
