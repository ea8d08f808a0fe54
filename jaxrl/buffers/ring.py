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

_COUNTERS = "cursor", "filled", "written"


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

    If G groups of environments store their rollouts independently, each at its own slot, the counters have shape [G],
    and the columns of a group are adjacent. `of_group` returns the ring of one of these groups, to write to it.
    """

    rows: Trajectory  # [environment, slots, ...]
    carry: PyTree  # [environment, slots // rollout, ...]: at the first row of every rollout; () if not stored
    episode_step: jax.Array | None  # [environment, slots] int32: the row's number in its episode; None if not stored
    cursor: jax.Array  # int32, the slot written next
    filled: jax.Array  # int32, number of slots that hold rows
    written: jax.Array  # uint32, number of steps so far, modulo 2^32
    parts: Parts | None = None  # only for rings of datasets, which are full from the start
    members: jax.Array | None = None  # int32 [k], the columns of a group; only in a result of `of_group`

    @property
    def slots(self) -> int:
        return self.rows.reward.shape[1]

    @property
    def columns(self) -> int:
        return self.rows.reward.shape[0] if self.members is None else self.members.shape[0]

    def group_at(self, position: jax.Array | int) -> jax.Array | int:
        """Return the groups of columns, or of positions in a single shard (`slot * columns + column`)."""
        return position % self.columns // (self.columns // self.cursor.shape[0])

    def at(self, position: jax.Array | int) -> "Ring":
        """Return this ring, with groups with the counters of each position's group; `position` as in `group_at`."""
        return self if self.cursor.ndim == 0 else self._counting(self.group_at(position))

    def of_group(self, group: jax.Array) -> "Ring":
        """Return the ring of one group, whose index is an int32 scalar: its counters, and its columns as `members`."""
        size = self.columns // self.cursor.shape[0]
        return self._counting(group).replace(members=group * size + jnp.arange(size, dtype=jnp.int32))

    def with_group(self, group: jax.Array, own: "Ring") -> "Ring":
        """Return the ring after a write to a result of `of_group`."""
        counters = {name: getattr(self, name).at[group].set(getattr(own, name)) for name in _COUNTERS}
        return own.replace(members=None, **counters)

    def _counting(self, group):
        return self.replace(**{name: getattr(self, name)[group] for name in _COUNTERS})

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
        columns = jnp.arange(self.columns, dtype=jnp.int32) if self.members is None else self.members
        return self.take(leaf, slot[:, None], columns[None])


def slots(capacity: int, num_envs: int, rollout: int) -> int:
    """Return the number of slots for `capacity` rows of all environments, a multiple of `rollout`: no write wraps."""
    return max(capacity // (num_envs * rollout), 1) * rollout


def init(
    example: Trajectory,
    carry: PyTree,
    columns: int,
    slots: int,
    rollout: int,
    keep_steps: bool,
    on_host: bool = False,
    groups: int | None = None,
) -> Ring:
    """Return an empty ring.

    Args:
      example: rows with leaves `[T, B, ...]`, or their shapes; only the shapes of one row are used.
      carry: carry `[B, ...]`, or its shapes; () to store none.
      columns: number of environments.
      slots: number of slots, a multiple of `rollout`, the length of every write.
      keep_steps: whether to number the rows of each episode.
      on_host: whether observations and recurrent states are stored in the host's memory.
      groups: number of groups of environments that store their rollouts independently; None: all store together.
    """

    def zeros(shape, dtype, space):
        if space is jax.memory.Space.Device:
            return jnp.zeros(shape, dtype)
        # Broadcast from a scalar on the host: otherwise the zeros would fill the device's memory first.
        return jax.lax.broadcast(jax.device_put(jnp.zeros((), dtype), space), shape)

    counters = () if groups is None else (groups,)
    large = jax.memory.Space.Host if on_host else jax.memory.Space.Device
    empty = lambda x, space=jax.memory.Space.Device: zeros((columns, slots, *x.shape[2:]), x.dtype, space)  # noqa: E731
    rows = jax.tree.map(empty, example.replace(observation=()))
    return Ring(
        rows=rows.replace(observation=jax.tree.map(lambda x: empty(x, large), example.observation)),
        carry=jax.tree.map(lambda x: zeros((columns, slots // rollout, *x.shape[1:]), x.dtype, large), carry),
        episode_step=jnp.zeros((columns, slots), jnp.int32) if keep_steps else None,
        cursor=jnp.zeros(counters, jnp.int32),
        filled=jnp.zeros(counters, jnp.int32),
        written=jnp.zeros(counters, jnp.uint32),
    )


def partition(
    axis: str, episode_steps: bool, parts: bool = False, on_host: bool = False, groups: int | None = None
) -> Ring:
    """Return a ring's partition specs, a prefix tree, on a mesh whose axis `axis` shards the environments.

    With `on_host`, the specs of observations and recurrent states are `HostMemory`. With `groups`, each device has the
    counters of its groups.
    """
    columns: PyTree = PartitionSpec(axis)
    everywhere: PyTree = PartitionSpec()
    large: PyTree = HostMemory(columns) if on_host else columns
    rows = Trajectory(*[columns] * len(dataclasses.fields(Trajectory))).replace(observation=large)
    steps = columns if episode_steps else None
    divided = Parts(columns, columns, columns, everywhere) if parts else None
    counters = everywhere if groups is None else columns
    return Ring(rows, large, steps, counters, counters, counters, divided)


def add(ring: Ring, rows: Trajectory, carry: PyTree) -> Ring:
    """Store one rollout `[T, B, ...]`, where T is `init`'s `rollout`, and the carry `[B, ...]` at its first row.

    The B environments are all columns of the ring, or those of a group if the ring is a result of `Ring.of_group`.

    If a row of nonzero weight is followed by the first row of an episode, its next observation is missing (for example
    because the run was resumed with new host environments), and the row is stored with weight 0.
    """
    length, size = rows.reward.shape[0], ring.slots
    rows = rows.replace(weight=rows.weight & jnp.concatenate([~rows.first[1:], jnp.ones_like(rows.first[:1])]))
    last = (ring.cursor - 1) % size
    columns = slice(None) if ring.members is None else ring.members
    weight = ring.rows.weight.at[columns, last].set(ring.rows.weight[columns, last] & ~rows.first[0])
    ring = ring.replace(rows=ring.rows.replace(weight=weight))

    def write(stored, new, slot=ring.cursor):
        new, column = jnp.swapaxes(new, 0, 1), jnp.int32(0) if ring.members is None else ring.members[0]
        if is_on_host(stored):
            new, slot, column = jax.device_put((new, slot, column), jax.memory.Space.Host)
        start = column, slot, *[jnp.zeros_like(slot)] * (stored.ndim - 2)
        return jax.lax.dynamic_update_slice(stored, new, start, allow_negative_indices=False)

    episode_step = None
    if ring.episode_step is not None:
        # Count from the episode's first row, or continue from the last stored number, without a loop over time.
        number = jnp.arange(length, dtype=jnp.int32)[:, None]
        began = jax.lax.cummax(jnp.where(rows.first, number, -1 - ring.episode_step[columns, last][None]), axis=0)
        episode_step = write(ring.episode_step, number - began)
    return ring.replace(
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
