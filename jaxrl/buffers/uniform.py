"""Uniform sampling of rows without an index, by rejection of rows whose weight is 0."""

import jax
import jax.numpy as jnp

from jaxrl.buffers.ring import Ring

_TRIES = 4


def draw(
    ring: Ring, key: jax.Array, shard: jax.Array, count: int, lookback: int, lookahead: int, shards: int
) -> tuple[jax.Array, jax.Array]:
    """Draw rows at which a transition may begin, `count` from every shard.

    In a dataset, all transitions of all shards are equally likely. In rows that a run collected, all transitions of a
    shard are equally likely: the draw of a row of weight 0, such as an episode's last observation, is repeated up to
    three times. If every attempt fails, the result is a row that is ignored in learning. If groups of environments
    store their rollouts independently, the rows of all groups are equally likely.

    Args:
      ring: the ring that stores the rows; its environments are ordered by shard.
      key: key that is the same on all devices.
      shard: numbers of the logical shards on this device, int32 [shards].
      count: number of draws per shard, static.
      lookback, lookahead: numbers of rows that an item reads before and after its first row, static.
      shards: number of shards on all devices, static; equal to the number of columns of a dataset.

    Returns:
      Positions int32 [shards, count], and whether a transition begins there, bool.
    """
    if ring.parts is not None:  # a dataset: one column per shard, so slots are positions
        number = below(bits(key, shard, count), ring.parts.total)
        at = (ring.parts.offset[:, None] + number) // shards
        return jnp.take_along_axis(ring.parts.slot, at, axis=1), jnp.ones(at.shape, bool)
    # The newest rows lack the rows after them, and a full ring's oldest rows lack those before them.
    oldest = jnp.where(ring.filled == ring.slots, lookback, 0) if lookback else jnp.int32(0)

    words = [bits(key, shard, count)]
    for _ in range(_TRIES - 1):
        words.append(mixed(words[-1]))
    tried, columns = jnp.stack(words, axis=1), ring.columns // shard.shape[0]
    if ring.cursor.ndim == 1:
        slot, column, some = _of_groups(ring, tried, lookahead, oldest)
    else:
        room = jnp.maximum(ring.filled - lookahead - oldest, 1)
        number = below(tried, room * columns)
        slot, column = ring.cursor - ring.filled + oldest + number // columns, number % columns
        some = ring.filled > lookahead + oldest
    slot, here = slot % ring.slots, jnp.arange(shard.shape[0], dtype=jnp.int32)[:, None, None]
    counts = ring.take(ring.rows.weight, slot, here * columns + column) & some
    first = jnp.argmax(counts, axis=1, keepdims=True)
    position = jnp.take_along_axis(slot * columns + column, first, axis=1)[:, 0]
    return position, jnp.any(counts, axis=1)


def _of_groups(ring, bits, lookahead, oldest):
    """Draw among the rows of all groups; return slots and columns, shaped as `bits`, and whether there are any rows."""
    groups = ring.cursor.shape[0]
    size = ring.columns // groups
    ends = jnp.cumsum(jnp.maximum(ring.filled - lookahead - oldest, 0) * size, dtype=jnp.int32)
    number = below(bits, jnp.maximum(ends[-1], 1))
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), groups - 1).astype(jnp.int32)
    # Count from the end, as the newest rows of every group are adjacent to its cursor.
    back = ends[group] - 1 - number
    return ring.cursor[group] - lookahead - 1 - back // size, group * size + back % size, ends[-1] > 0


def bits(key: jax.Array, shard: jax.Array, count: int) -> jax.Array:
    """Return random bits for each shard, independent of which other shards are on this device.

    All bits are generated in one call.

    Args:
      key: key that is the same on all devices.
      shard: numbers of the shards, int32 [shards].
      count: number of words per shard, static.

    Returns:
      uint32 [shards, count].
    """
    half = -(-count // 2)  # a folded key has two words
    number = shard.astype(jnp.uint32)[:, None] * jnp.uint32(half) + jnp.arange(half, dtype=jnp.uint32)[None]
    words = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(number.reshape(-1))
    return words.reshape(shard.shape[0], -1)[:, :count]


def mixed(bits: jax.Array) -> jax.Array:
    """Hash uint32 bits [...] with the bijection lowbias32 (C. Wellons' hash-prospector), not a random generator."""
    x = bits + jnp.uint32(0x9E3779B9)  # otherwise 0 would stay 0
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def unit(bits: jax.Array) -> jax.Array:
    """Convert bits to float32 in [0, 1), in steps of 2^-24."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def below(bits: jax.Array, limit: jax.Array) -> jax.Array:
    """Convert random bits to integers in [0, limit), by the high word of their product with the limit.

    Probabilities are uneven by at most limit / 2^32. This needs half the random numbers of `jax.random.randint`, and no
    division.

    Args:
      bits: uint32 [...].
      limit: int32, a scalar.

    Returns:
      int32 [...].
    """
    limit = limit.astype(jnp.uint32)
    high, low = bits >> 16, bits & 0xFFFF
    limit_high, limit_low = limit >> 16, limit & 0xFFFF
    carry = high * limit_low + ((low * limit_low) >> 16)
    middle = low * limit_high + (carry & 0xFFFF)
    return (high * limit_high + (carry >> 16) + (middle >> 16)).astype(jnp.int32)
