"""Buffer of whole episodes: environments keep running, and a batch is complete once enough episodes have ended.

Every environment writes its episode into a separate slot, rollout by rollout. A slot whose episode has ended waits for
a batch, and the environment's next episode begins in a free slot. So no environment waits for the longest episode, and
all collected data is used, except episodes that are still running.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers.replay import ReplayState
from jaxrl.core.sources import Episodes
from jaxrl.core.types import PyTree, Replicas, Rollout

_PARTS = (1, 4, 16)  # batches are cut to `max_length` divided by one of these numbers
_SHORT = 16  # assumed minimum length, in rows, of most episodes


class EpisodeIndex(struct.PyTreeNode):
    """Index of the episodes' slots, order and lengths; leaves are sharded along their first axis."""

    slot: jax.Array  # [num_envs] int32, the shard's slot that the environment writes to; -1: none
    position: jax.Array  # [num_envs] int32, the next row of the environment's episode
    order: jax.Array  # [shards, slots] int32, rank of a finished episode in the shard by time, from 1; otherwise 0
    length: jax.Array  # [shards, slots] int32, transitions of a finished episode
    ended: jax.Array  # [shards] int32, episodes that have ended since the ranks last restarted


@dataclasses.dataclass(frozen=True)
class EpisodeBuffer:
    """Buffer of an `Episodes` source, as pure functions over a `ReplayState` whose ring holds the slots.

    Args:
      source: defines the number of episodes in a batch and their maximum length.
      num_envs: number of environments over all devices.
      shards: number of logical shards over all devices; each contributes an equal part of every batch.
      replicas: the devices, with the shards of this device.
      initial_carry: the initial carry of one environment.
    """

    source: Episodes
    num_envs: int
    shards: int
    replicas: Replicas
    initial_carry: PyTree

    @property
    def episodes(self) -> int:
        """The number of episodes that each shard contributes to a batch."""
        return self.source.count // self.shards

    @property
    def slots(self) -> int:
        """The number of slots of a shard: for running, waiting, and newly finished episodes.

        The number of newly finished episodes per rollout assumes at least `_SHORT` rows per episode; some shorter ones
        are dropped. Episodes are also dropped if their lengths differ between shards: a batch waits for the shard with
        the longest episodes, while the slots of the other shards fill up.
        """
        return self.episodes + self.num_envs // self.shards * (2 + self.source.length // _SHORT)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The possible lengths of batches in rows, ascending; only a few, because the update is compiled for each."""
        most, unit = self.source.max_length, self.source.unit
        return tuple(sorted({-(-most // (part * unit)) * unit for part in _PARTS}))

    def problems(self) -> list[str]:
        """Return the problems with the source's settings, one line each, or an empty list."""
        count, longest = self.source.count, self.source.max_length
        if count % self.shards:
            return [f"whole_episodes.episodes={count} is not divisible by {self.shards} shards; use a multiple"]
        if (rows := (longest + 1) * self.slots * self.shards) >= 2**31:
            return [f"{rows:,} rows are needed to store episodes of {longest:,} transitions; they must be under 2^31"]
        return []

    def init(self, rollout: Rollout) -> ReplayState:
        """Return an empty state over all devices; `rollout` has the arrays of all environments, or their shapes."""
        rows, slots = self.source.max_length + 1, self.shards * self.slots

        def room(x):
            return jnp.zeros((rows, slots, *x.shape[2:]), x.dtype)

        index = EpisodeIndex(
            slot=jnp.full(self.num_envs, -1, jnp.int32),
            position=jnp.zeros(self.num_envs, jnp.int32),
            order=jnp.zeros((self.shards, self.slots), jnp.int32),
            length=jnp.zeros((self.shards, self.slots), jnp.int32),
            ended=jnp.zeros(self.shards, jnp.int32),
        )
        return ReplayState(jax.tree.map(room, jax.eval_shape(_rows, rollout)), index)

    def partition(self, axis: str) -> ReplayState:
        """Return the state's partition specs, a prefix tree, on a mesh whose axis `axis` shards the environments."""
        return ReplayState(PartitionSpec(None, axis), PartitionSpec(axis))

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """Store a rollout of this device's environments.

        An episode longer than the source's `max_length` ends at that length, and the rest of it is dropped. An episode
        is also dropped if no slot is free when it begins, or if its environment fails before the episode ends.
        """
        index, first, last = state.index, rollout.timesteps.first[:-1], rollout.timesteps.last[:-1]
        time = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None]
        begun = jax.lax.cummax(jnp.where(first, time, -1), axis=0)  # the row at which the running episode began
        position = jnp.where(begun < 0, index.position[None] + time, time - begun)
        fresh = self._free_slots(index, first)
        slot = jnp.where(begun < 0, index.slot[None], jnp.take_along_axis(fresh, jnp.maximum(begun, 0), axis=0))
        longest = self.source.max_length
        written = (slot >= 0) & (position <= longest)
        ends = written & (last | (position == longest))

        of_all = _shard_of(first.shape[1], self.replicas.shards)[None] * self.slots + slot
        row = jnp.where(written, position, longest + 1)  # out of range: dropped
        slots = jax.tree.map(
            lambda room, x: room.at[row, of_all].set(x, mode="drop", unique_indices=True), state.ring, _rows(rollout)
        )

        number = self._ranked(ends)
        at = jnp.where(ends, of_all, index.order.size).reshape(-1)

        def put(old, new):
            return old.reshape(-1).at[at].set(new.reshape(-1), mode="drop", unique_indices=True).reshape(old.shape)

        ended = jnp.repeat(index.ended, first.shape[1] // self.replicas.shards)[None]
        index = EpisodeIndex(
            slot=jnp.where(ends[-1] | ~written[-1], -1, slot[-1]),
            position=position[-1] + 1,
            order=put(index.order, ended + number + 1),
            length=put(index.length, position),
            ended=index.ended + jnp.sum(self._by_shard(ends), axis=(1, 2), dtype=jnp.int32),
        )
        return ReplayState(slots, index)

    def batches(self, state: ReplayState) -> jax.Array:
        """Return the number of complete batches, int32, limited by the shard with the fewest episodes on any device."""
        waiting = jnp.sum(state.index.order > 0, axis=1, dtype=jnp.int32)
        return -self.replicas.max(-jnp.min(waiting)) // self.episodes

    def take(self, state: ReplayState, rollout: Rollout) -> tuple[ReplayState, Rollout]:
        """Remove the episodes that ended first from this device's shards and return them as a batch.

        Args:
          state: a state with a complete batch.
          rollout: the last rollout, whose statistics and version are used for the batch.

        Returns:
          The state without these episodes, and the batch, where T is the largest of `lengths`. After an episode's end,
          its last row is repeated with weight 0.
        """
        index, shards = state.index, self.replicas.shards
        never = jnp.iinfo(jnp.int32).max
        waiting = jnp.where(index.order > 0, index.order, never)
        slot = jnp.argsort(waiting, axis=1)[:, : self.episodes].astype(jnp.int32)
        length = jnp.take_along_axis(index.length, slot, axis=1).reshape(-1)
        number = jnp.arange(self.lengths[-1] + 1, dtype=jnp.int32)[:, None]
        first_slot = jnp.arange(shards, dtype=jnp.int32)[:, None] * self.slots
        row, column = jnp.minimum(number, length[None]), (first_slot + slot).reshape(1, -1)
        timesteps, action, extras = jax.tree.map(lambda x: x[row, column], state.ring)
        carry = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (length.shape[0], *jnp.shape(x))), self.initial_carry)
        batch = rollout.replace(
            timesteps=timesteps.replace(first=timesteps.first | (number > length[None])),
            action=jax.tree.map(lambda x: x[:-1], action),
            extras=jax.tree.map(lambda x: x[:-1], extras),
            carry=carry,
            final_carry=carry,
            whole_episodes=True,
        )
        # Ranks restart from 1 with the waiting episodes, so that they never overflow.
        taken = jnp.take_along_axis(index.order, slot, axis=1)[:, -1:]
        order = jnp.maximum(index.order - taken, 0)
        index = index.replace(order=order, ended=index.ended - taken[:, 0])
        return state.replace(index=index), batch

    def cut_to_length[T](self, batch: Rollout, learn: Callable[[Rollout], T]) -> T:
        """Return `learn(batch)` for the batch cut to the smallest of `lengths` that fits its longest episode."""
        longest = self.replicas.max(jnp.max(jnp.sum(batch.rows.weight, axis=0, dtype=jnp.int32)))

        def of(length):
            return lambda whole: learn(
                whole.replace(
                    timesteps=whole.timesteps[: length + 1],
                    action=jax.tree.map(lambda x: x[:length], whole.action),
                    extras=jax.tree.map(lambda x: x[:length], whole.extras),
                )
            )

        enough = sum((longest > length).astype(jnp.int32) for length in self.lengths[:-1])
        return jax.lax.switch(enough, [of(length) for length in self.lengths], batch)

    def _free_slots(self, index, first):
        """Return the slot of the episode that begins at each row [T, B]; -1 if none begins or no slot is free."""
        shards, columns = self.replicas.shards, first.shape[1] // self.replicas.shards
        going = index.slot.reshape(shards, columns)
        used = jax.vmap(lambda slot: jnp.zeros(self.slots + 1, bool).at[slot].set(True)[:-1])(going)
        used |= index.order > 0
        free = jnp.argsort(used, axis=1, stable=True).astype(jnp.int32)  # free slots first
        rank = jnp.minimum(self._by_shard(self._ranked(first)), self.slots).reshape(shards, -1)
        free = jnp.where(jnp.sort(used, axis=1), -1, free)
        free = jnp.pad(free, ((0, 0), (0, 1)), constant_values=-1)
        found = jnp.take_along_axis(free, rank, axis=1).reshape(shards, -1, columns)
        return jnp.where(first, jnp.swapaxes(found, 0, 1).reshape(first.shape), -1)

    def _by_shard(self, x):
        """Reshape rows [T, B] to [shards, T, columns]."""
        return jnp.swapaxes(x.reshape(x.shape[0], self.replicas.shards, -1), 0, 1)

    def _ranked(self, flags):
        """Return the rank, from 0, of each row [T, B] marked by `flags` in its shard, by time, then environment."""
        marked = self._by_shard(flags.astype(jnp.int32))
        ranks = jnp.cumsum(marked.reshape(marked.shape[0], -1), axis=1, dtype=jnp.int32) - 1
        return jnp.swapaxes(ranks.reshape(marked.shape), 0, 1).reshape(flags.shape)


def _rows(rollout: Rollout) -> PyTree:
    """Return the stored part of a rollout [T, B, ...]: time steps without `episode` and `info`, actions and extras."""
    timesteps = rollout.timesteps.replace(episode=None, info=None)
    return jax.tree.map(lambda x: x[:-1], timesteps), rollout.action, rollout.extras


def _shard_of(environments, shards):
    return jnp.arange(environments, dtype=jnp.int32) // (environments // shards)
