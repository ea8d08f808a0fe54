"""Whole episodes out of rollouts: environments go on as ever, and a batch closes when enough episodes have ended.

Every environment writes its episode into a slot of its own, rollout by rollout. A slot whose episode has ended waits
for a batch, and the environment's next episode begins in a free one. So nothing waits for the longest episode, and
what is learned from is all that was collected, but for what is still going on.
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

_PARTS = (1, 4, 16)  # of the longest episode: to what length batches are cut
_SHORT = 16


class EpisodeIndex(struct.PyTreeNode):
    """Where the episodes are; leaves are sharded along their first axis."""

    slot: jax.Array  # [num_envs] int32, within the shard, that the environment writes to; -1: to none
    position: jax.Array  # [num_envs] int32, the row of the episode that comes next
    order: jax.Array  # [shards, slots] int32: 0, or for an episode that has ended its number among those of the shard
    length: jax.Array  # [shards, slots] int32, transitions of an episode that has ended
    ended: jax.Array  # [shards] int32, episodes that have ended since the order was last begun anew


@dataclasses.dataclass(frozen=True)
class EpisodeBuffer:
    """An `Episodes` source bound to its rules; pure functions over a `ReplayState`, whose ring holds the slots.

    Args:
      source: what a batch is.
      num_envs: environments over all devices.
      shards: logical shards over all devices; each gives an equal part of every batch.
      replicas: says which shards are here, and reduces over devices.
      initial_carry: of one environment.
    """

    source: Episodes
    num_envs: int
    shards: int
    replicas: Replicas
    initial_carry: PyTree

    @property
    def episodes(self) -> int:
        """Episodes of a batch that each shard gives."""
        return self.source.count // self.shards

    @property
    def slots(self) -> int:
        """Slots of a shard: for what goes on, what waits for the next batch, and what ends in a rollout.

        Of the last as many as there are if episodes have `_SHORT` rows; of shorter ones some are left out. So are some
        where shards differ: a batch waits for the shard whose episodes are longest, and the others' slots fill up.
        """
        return self.episodes + self.num_envs // self.shards * (2 + self.source.length // _SHORT)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in rows that batches are cut to, ascending: few, since the update is compiled for each."""
        most, unit = self.source.max_length, self.source.unit
        return tuple(sorted({-(-most // (part * unit)) * unit for part in _PARTS}))

    def problems(self) -> list[str]:
        """Why there cannot be such batches; empty if there can."""
        count, longest = self.source.count, self.source.max_length
        if count % self.shards:
            return [f"whole_episodes={count} does not divide over {self.shards} shards; use a multiple"]
        if (rows := (longest + 1) * self.slots * self.shards) >= 2**31:
            return [f"room for {rows:,} rows of episodes of {longest:,} transitions; it must be less than 2^31"]
        return []

    def init(self, rollout: Rollout) -> ReplayState:
        """No episode yet, over all devices; `rollout` is of all environments, or its shapes."""
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
        """How the state lies on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
        return ReplayState(PartitionSpec(None, axis), PartitionSpec(axis))

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """Write down a rollout of this device's environments.

        An episode that is longer than the source allows has ended there, and what follows of it is left out. So is one
        that finds no free slot, and what an environment had played before it broke.
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
        row = jnp.where(written, position, longest + 1)  # beyond the room, where nothing is written
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
        """How many batches are complete, int32: as many as the shard of all devices that has fewest can give."""
        waiting = jnp.sum(state.index.order > 0, axis=1, dtype=jnp.int32)
        return -self.replicas.max(-jnp.min(waiting)) // self.episodes

    def take(self, state: ReplayState, rollout: Rollout) -> tuple[ReplayState, Rollout]:
        """The episodes of this device's shards that ended first, as a batch.

        Args:
          state: with a complete batch.
          rollout: the last one, whose statistics and version the batch has.

        Returns:
          The state without them, and the batch: `T` is the largest of `lengths`, and each episode's last row is
          repeated to the end and does not count.
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
        # Numbers begin anew with what still waits, so that they never come to an end.
        taken = jnp.take_along_axis(index.order, slot, axis=1)[:, -1:]
        order = jnp.maximum(index.order - taken, 0)
        index = index.replace(order=order, ended=index.ended - taken[:, 0])
        return state.replace(index=index), batch

    def cut_to_length[T](self, batch: Rollout, learn: Callable[[Rollout], T]) -> T:
        """`learn` from a batch without the rows after the end of the longest episode, as far as `lengths` allow."""
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
        """For each row [T, B] where an episode begins its slot, or -1 where none is free."""
        shards, columns = self.replicas.shards, first.shape[1] // self.replicas.shards
        going = index.slot.reshape(shards, columns)
        used = jax.vmap(lambda slot: jnp.zeros(self.slots + 1, bool).at[slot].set(True)[:-1])(going)
        used |= index.order > 0
        free = jnp.argsort(used, axis=1, stable=True).astype(jnp.int32)  # the free ones, and then the others
        rank = jnp.minimum(self._by_shard(self._ranked(first)), self.slots).reshape(shards, -1)
        free = jnp.where(jnp.sort(used, axis=1), -1, free)
        free = jnp.pad(free, ((0, 0), (0, 1)), constant_values=-1)
        found = jnp.take_along_axis(free, rank, axis=1).reshape(shards, -1, columns)
        return jnp.where(first, jnp.swapaxes(found, 0, 1).reshape(first.shape), -1)

    def _by_shard(self, x):
        """Rows [T, B] as [shards, T, columns]."""
        return jnp.swapaxes(x.reshape(x.shape[0], self.replicas.shards, -1), 0, 1)

    def _ranked(self, flags):
        """The number of each row that `flags` [T, B] marks among its shard's, by time and then by environment."""
        marked = self._by_shard(flags.astype(jnp.int32))
        ranks = jnp.cumsum(marked.reshape(marked.shape[0], -1), axis=1, dtype=jnp.int32) - 1
        return jnp.swapaxes(ranks.reshape(marked.shape), 0, 1).reshape(flags.shape)


def _rows(rollout: Rollout) -> PyTree:
    """What is kept of a rollout [T, B, ...]: time steps, actions and extras, without what environments count."""
    timesteps = rollout.timesteps.replace(episode=None, info=None)
    return jax.tree.map(lambda x: x[:-1], timesteps), rollout.action, rollout.extras


def _shard_of(environments, shards):
    return jnp.arange(environments, dtype=jnp.int32) // (environments // shards)
