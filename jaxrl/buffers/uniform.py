"""A ring of raw rows with uniform n-step sampling: every environment has a column, every tick a slot."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.types import Replay, Replicas, Trajectory, TransitionBatch


@struct.dataclass
class RingState:
    """The stored rows, leaves `[slots, environment, ...]`, and where the next goes."""

    rows: Trajectory
    cursor: jax.Array  # int32, the slot written next
    filled: jax.Array  # int32, how many slots hold rows


def slots(source: Replay, num_envs: int) -> int:
    """How many slots a ring of `source.capacity` rows has, for `num_envs` environments in all."""
    return max(source.capacity // num_envs, 1)


def init(example: Trajectory, source: Replay, num_envs: int) -> RingState:
    """An empty ring.

    Args:
      example: rows with leaves `[T, B, ...]`, or their shapes; only shapes and dtypes are read.
      source: capacity in rows over all environments.
      num_envs: environments over all devices.
    """

    def empty(x):
        return jnp.zeros((slots(source, num_envs),) + x.shape[1:], x.dtype)

    return RingState(jax.tree.map(empty, example), jnp.int32(0), jnp.int32(0))


def add(state: RingState, rows: Trajectory) -> RingState:
    """Stores rows `[T, B, ...]` after the newest, over the oldest."""
    length = rows.reward.shape[0]
    size = state.rows.reward.shape[0]
    if length > size:
        rows = jax.tree.map(lambda x: x[length - size :], rows)
        length = size
    # Slots that divide into rollouts need no wrap within one write, so the write is one contiguous copy.
    if size % length == 0:
        write = lambda ring, x: jax.lax.dynamic_update_slice_in_dim(ring, x, state.cursor, 0)  # noqa: E731
    else:
        where = (state.cursor + jnp.arange(length, dtype=jnp.int32)) % size
        write = lambda ring, x: ring.at[where].set(x, unique_indices=True)  # noqa: E731
    return RingState(
        rows=jax.tree.map(write, state.rows, rows),
        cursor=(state.cursor + length) % size,
        filled=jnp.minimum(state.filled + length, size),
    )


def sample(state: RingState, key: jax.Array, source: Replay, replicas: Replicas) -> TransitionBatch:
    """Draws n-step transitions uniformly among the rows that count, this device's share of the batch.

    Each logical shard of environments gives an equal part of the batch, drawn with its own key, so the content does
    not depend on the number of devices. A draw that meets an episode's last observation tries again three
    times; what is left has weight 0.
    """
    size, envs = state.rows.reward.shape
    n, shards = source.n_step, replicas.shards
    per_shard, columns = source.batch_size // (shards * replicas.devices), envs // shards

    def draw(shard):
        slot_key, column_key = jax.random.split(jax.random.fold_in(key, replicas.first_shard + shard))
        # The newest n rows have no complete future yet.
        age = jax.random.randint(slot_key, (4, per_shard), 0, jnp.maximum(state.filled - n, 1))
        slot = (state.cursor - state.filled + age) % size
        column = shard * columns + jax.random.randint(column_key, (4, per_shard), 0, columns)
        counts = state.rows.weight[slot, column]
        first = jnp.argmax(counts, axis=0)
        pick = jnp.arange(per_shard, dtype=jnp.int32)
        return slot[first, pick], column[first, pick]

    slot, column = jax.vmap(draw)(jnp.arange(shards, dtype=jnp.int32))
    return transitions(state.rows, slot.reshape(-1), column.reshape(-1), n)


def transitions(rows: Trajectory, slot: jax.Array, column: jax.Array, n: int) -> TransitionBatch:
    """The n-step transitions that begin at the given rows: a view, nothing is stored twice.

    Args:
      rows: the ring, leaves `[slots, environment, ...]`.
      slot, column: where the transitions begin, shape (batch,); the n following slots hold rows.
      n: static.
    """
    size = rows.reward.shape[0]
    at = [(slot + k) % size for k in range(n + 1)]
    weight = rows.weight[slot, column]
    alive, rewards, steps = weight, [], jnp.zeros(slot.shape, jnp.int32)
    bootstrap = jnp.ones(slot.shape, bool)
    for k in range(n):
        rewards.append(jnp.where(alive, rows.reward[at[k], column], 0.0))
        steps = steps + alive.astype(jnp.int32)
        terminated = alive & rows.terminated[at[k], column]
        bootstrap = bootstrap & ~terminated
        alive = alive & ~terminated & ~rows.truncated[at[k], column]
    # Where the episode ends on the way, `steps` stops there, and the row it points to is the true last observation.
    end = (slot + steps) % size
    gather = lambda x, where: None if x is None else jax.tree.map(lambda leaf: leaf[where, column], x)  # noqa: E731
    return TransitionBatch(
        observation=gather(rows.observation, slot),
        action=gather(rows.action, slot),
        rewards=jnp.stack(rewards, axis=-1),
        steps=steps,
        bootstrap=bootstrap,
        next_observation=gather(rows.observation, end),
        weight=weight,
        action_mask=gather(rows.action_mask, slot),
        next_action_mask=gather(rows.action_mask, end),
    )


def memory(example: Trajectory, source: Replay, num_envs: int) -> int:
    """Bytes that the ring will hold over all devices."""
    leaves = jax.tree.leaves(example)
    per_row = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in leaves)
    return per_row * slots(source, num_envs) * num_envs


def partition(axis: str) -> RingState:
    """How a ring lies on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
    return RingState(PartitionSpec(None, axis), PartitionSpec(), PartitionSpec())
