"""Replay buffers that store and sample jaxrl's rows with flashbax.

They are meant for comparison, and for users of flashbax: `Replay(..., storage="flashbax")`. Flashbax does not report
priorities, ages and sampling counts, so these are constants. A new priority for an overwritten row is not dropped.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Generator
from types import ModuleType

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.buffers import samplers
from jaxrl.buffers.batches import importance
from jaxrl.buffers.replay import ReplayState
from jaxrl.buffers.ring import Ring
from jaxrl.core.errors import MissingExtraError
from jaxrl.core.sources import Prioritized, Replay, Uniform
from jaxrl.core.types import Counter, Metrics, PyTree, Replicas, SampleInfo, Trajectory, TransitionBatch


class FlashbaxIndex(struct.PyTreeNode):
    """Part of a replay's state that sampling and priority updates change."""

    sums: PyTree  # flashbax's tree of sums, leaves [shards, ...]; () without priorities
    sampled: Counter  # items sampled so far, over all devices
    inserted: Counter  # rows stored so far, over all devices


@dataclasses.dataclass(frozen=True)
class FlashbaxReplay:
    """Replay of one-step transitions in `flashbax.make_flat_buffer` or its prioritized version, one buffer per shard.

    The class implements `jaxrl.buffers.replay.Buffer`. Rows are stored unchanged; a row and the next one form a
    transition, whose weight is 0 if the row is an episode's last observation.

    Args:
      name: the source's name.
      source: only its capacity, batch size and sampler are used; see `problems` for what flashbax does not support.
      num_envs: number of environments over all devices.
      rollout_length: number of rows per environment that each `add` stores.
      shards: number of logical shards over all devices.
      replicas: the devices, with the shards of this device.
    """

    name: str
    source: Replay
    num_envs: int
    rollout_length: int
    shards: int
    replicas: Replicas

    @property
    def _flashbax(self) -> PyTree:
        """The flashbax buffer of one shard."""
        columns, capacity = self.num_envs // self.shards, self.source.capacity // self.shards
        settings = {
            "max_length": capacity,
            "min_length": 2 * columns,
            "sample_batch_size": self.source.batch_size // self.shards,
            "add_sequences": True,
            "add_batch_size": columns,
        }
        with foreign() as flashbax:
            if isinstance(self.source.sampler, Uniform):
                return flashbax.make_flat_buffer(**settings)
            # The exponent may be traced, which flashbax does not allow. So it is applied before priorities are stored.
            # Flashbax accepts only devices of this machine, but uses the device only to choose how priorities are
            # summed.
            made = flashbax.make_prioritised_flat_buffer(**settings, priority_exponent=1.0, device="cpu")
            add, set_priorities = (
                functools.partial(one, device=self.replicas.platform) for one in (made.add, made.set_priorities)
            )
            return made.replace(add=add, set_priorities=set_priorities)

    def init(self, rows: Trajectory, carry: PyTree) -> ReplayState:
        """Return an empty replay over all devices for rows like `rows`, arrays or shapes `[T, num_envs, ...]`."""
        example = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), _stored(rows))
        with foreign():
            state = self._flashbax.init(example)
        state = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.shards, *x.shape)).copy(), state)
        return self._split(state, FlashbaxIndex((), Counter.zero(), Counter.zero()))

    def partition(self, axis: str) -> ReplayState:
        """Return the state's partition specs, a prefix tree, on a mesh whose axis `axis` shards the environments."""
        shards: PyTree = PartitionSpec(axis)
        everywhere: PyTree = PartitionSpec()
        return ReplayState(shards, FlashbaxIndex(shards, everywhere, everywhere))

    def add(self, state: ReplayState, rows: Trajectory, carry: PyTree) -> ReplayState:
        """Store one rollout, rows `[T, B, ...]`."""
        chex.assert_rank([rows.reward, rows.first, rows.weight], 2)
        length, shards = rows.reward.shape[0], self.replicas.shards

        def by_shard(x):
            return jnp.swapaxes(x, 0, 1).reshape(shards, -1, length, *x.shape[2:])

        with foreign():
            stored = jax.vmap(self._flashbax.add)(self._whole(state), jax.tree.map(by_shard, _stored(rows)))
        inserted = state.index.inserted.add(length * self.num_envs)
        return self._split(stored, state.index.replace(inserted=inserted))

    def sample(self, state: ReplayState, key: jax.Array) -> tuple[ReplayState, TransitionBatch]:
        """Sample this device's part of a batch, with the same number of items from every shard."""
        shards, whole = self.replicas.shards, self._whole(state)
        shard = self.replicas.first_shard + jnp.arange(shards, dtype=jnp.int32)
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(shard)
        with foreign():
            drawn = jax.vmap(self._flashbax.sample)(whole, keys)
        now, following = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (drawn.experience.first, drawn.experience.second)
        )
        items = self._items(whole)
        if isinstance(self.source.sampler, Prioritized):
            position, chance = drawn.indices.reshape(-1), drawn.probabilities.reshape(-1) / self.shards
            weights = importance(self.source.sampler, items * self.shards, chance, self.replicas)
        else:
            chance = jnp.full(now.reward.shape, 1.0 / (jnp.maximum(items, 1.0) * self.shards))
            position, weights = jnp.zeros(chance.shape, jnp.int32), jnp.ones_like(chance)
        zeros = jnp.zeros(chance.shape, jnp.int32)
        info = SampleInfo(
            position=position,
            step=zeros.astype(jnp.uint32),
            probability=chance,
            importance=weights,
            priority=jnp.ones_like(chance),
            age_steps=zeros,
            age_updates=zeros,
            times_sampled=zeros,
        )
        batch = TransitionBatch(
            observation=now.observation,
            action=now.action,
            rewards=now.reward[:, None],
            steps=jnp.ones(now.reward.shape, jnp.int32),
            bootstrap=~now.terminated if now.discount is None else now.discount,
            next_observation=following.observation,
            weight=now.weight & ~following.first,
            action_mask=now.action_mask,
            next_action_mask=following.action_mask,
            sample_info=info,
        )
        sampled = state.index.sampled.add(self.source.batch_size)
        return state.replace(index=state.index.replace(sampled=sampled)), batch

    def update_priorities(self, state: ReplayState, info: SampleInfo, priorities: jax.Array) -> ReplayState:
        """Set the priorities [batch] of sampled transitions in a prioritized buffer."""
        chex.assert_equal_shape([info.position, priorities])
        raised = samplers.weight(self.source.sampler, priorities)
        position, raised = (x.reshape(self.replicas.shards, -1) for x in (info.position, raised))
        with foreign():
            whole = jax.vmap(self._flashbax.set_priorities)(self._whole(state), position, raised)
        return self._split(whole, state.index)

    def statistics(self, state: ReplayState, info: SampleInfo) -> Metrics:
        """Return statistics of the replay over all devices: float32 scalars."""
        inserted, sampled = state.index.inserted.as_float(), state.index.sampled.as_float()
        return {
            "items": self._items(state.ring) * self.shards,
            "inserted": inserted,
            "sampled": sampled,
            "found": jnp.float32(self.source.batch_size),
            "samples_per_insert": sampled / jnp.maximum(inserted, 1.0),
        }

    def _items(self, rows: PyTree) -> jax.Array:
        """Return the number of transitions in a shard, float32; it is the same for all shards."""
        slots, columns = self.source.capacity // self.num_envs, self.num_envs // self.shards
        filled = jnp.where(rows.is_full[0], slots, rows.current_index[0])
        return (jnp.maximum(filled - 1, 0) * columns).astype(jnp.float32)

    def _split(self, state: PyTree, index: FlashbaxIndex) -> ReplayState:
        """Split flashbax's state into the part that sampling only reads and the part that it changes."""
        if isinstance(self.source.sampler, Uniform):
            return ReplayState(state, index)
        return ReplayState(state.replace(sum_tree_state=()), index.replace(sums=state.sum_tree_state))

    def _whole(self, state: ReplayState) -> PyTree:
        """Return flashbax's whole state, the reverse of `_split`."""
        if isinstance(self.source.sampler, Uniform):
            return state.ring
        return state.ring.replace(sum_tree_state=state.index.sums)


def problems(source: Replay, num_envs: int, rollout_length: int, shards: int) -> list[str]:
    """Return the settings of a source that flashbax does not support, one line each; empty if it supports all."""
    found = []
    if source.n_step != 1 or source.sequence or source.max_times_sampled or source.frame_stack or source.over:
        found.append(
            "storage='flashbax' stores one-step transitions only: n_step must be 1, and sequence, max_times_sampled, "
            "frame_stack and over must be unset; use storage='ring' for them"
        )
    if source.extras or (isinstance(source.sampler, Prioritized) and source.sampler.insertion):
        found.append("storage='flashbax' does not store extras; use storage='ring' for them")
    if not isinstance(source.sampler, Uniform | Prioritized):
        found.append(f"storage='flashbax' does not support the sampler {source.sampler!r}; use Uniform or Prioritized")
    if source.batch_size > source.capacity:
        found.append(f"storage='flashbax' needs batch_size={source.batch_size} <= capacity={source.capacity}")
    if source.capacity % num_envs or source.capacity // num_envs < rollout_length + 1:
        whole = max(source.capacity // num_envs, rollout_length + 1) * num_envs
        found.append(
            f"storage='flashbax' needs a capacity that is divisible by the number of environments, {num_envs}, and is "
            f"more than one rollout, not capacity={source.capacity}; use {whole}"
        )
    return found


def as_ring(state: ReplayState) -> Ring:
    """Return the stored rows as a `Ring`, for reading."""
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state.ring.experience)
    (envs, slots), cursor = rows.reward.shape, state.ring.current_index[0]
    filled = jnp.where(state.ring.is_full[0], slots, cursor)
    return Ring(rows, (), None, cursor, filled, jnp.uint32(int(state.index.inserted) // envs % 2**32))


def template(rows: Trajectory, number: PyTree) -> ReplayState:
    """Return a state with only the parts that `as_ring` reads, with `rows` and `number` as leaves."""
    with foreign() as flashbax:
        read = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
            experience=rows, current_index=number, is_full=number
        )
    count = Counter(number, number)
    return ReplayState(read, FlashbaxIndex((), count, count))


@contextlib.contextmanager
def foreign() -> Generator[ModuleType]:
    """Import flashbax and, within the context, apply the type promotion rules that it needs.

    Raises:
      MissingExtraError: flashbax is not installed.
    """
    try:
        flashbax = importlib.import_module("flashbax")
    except ImportError as error:
        raise MissingExtraError("storage='flashbax'", "flashbax") from error
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield flashbax


def _stored(rows: Trajectory) -> Trajectory:
    return rows.replace(extras={})
