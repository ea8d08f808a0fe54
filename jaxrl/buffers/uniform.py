"""Uniform draws among rows that are all alike: nothing is kept about them, a draw looks whether a row counts."""

import jax
import jax.numpy as jnp

from jaxrl.buffers import transitions
from jaxrl.buffers.ring import Ring

_TRIES = 4


def draw(
    ring: Ring, key: jax.Array, shard: jax.Array, count: int, lookback: int, lookahead: int, shards: int
) -> tuple[jax.Array, jax.Array]:
    """Draws rows that a transition may begin at, `count` from every shard.

    Of a dataset every transition has the same chance, over all shards. Of a run's own rows every one of a shard has: a
    draw that meets a row that does not count, such as an episode's last observation, tries again three times; what is
    left has nothing to learn from.

    Args:
      ring: the rows; its environments are the shards' one after another.
      key: for all devices.
      shard: int32 [shards], the numbers of the logical shards here.
      count: static.
      lookback, lookahead: rows before and after that an item reads, static.
      shards: over all devices, static; as many as a dataset has columns.

    Returns:
      Positions int32 [shards, count], and whether the row counts, bool.
    """
    if ring.parts is not None:  # each has a position for every slot
        number = below(bits(key, shard, count), ring.parts.total)
        at = (ring.parts.offset[:, None] + number) // shards
        return jnp.take_along_axis(ring.parts.slot, at, axis=1), jnp.ones(at.shape, bool)
    columns = ring.columns // shard.shape[0]
    # The newest rows have no complete future yet, and a full ring's oldest have lost what came before them.
    oldest = jnp.where(ring.filled == ring.slots, lookback, 0) if lookback else jnp.int32(0)
    room = jnp.maximum(ring.filled - lookahead - oldest, 1)

    words = [bits(key, shard, count)]
    for _ in range(_TRIES - 1):
        words.append(mixed(words[-1]))
    number = below(jnp.stack(words, axis=1), room * columns)
    slot = (ring.cursor - ring.filled + oldest + number // columns) % ring.slots
    here = jnp.arange(shard.shape[0], dtype=jnp.int32)[:, None, None]
    counts = transitions.eligible(ring, slot, here * columns + number % columns) & (ring.filled > lookahead + oldest)
    first = jnp.argmax(counts, axis=1, keepdims=True)
    position = jnp.take_along_axis(slot * columns + number % columns, first, axis=1)[:, 0]
    return position, jnp.any(counts, axis=1)


def bits(key: jax.Array, shard: jax.Array, count: int) -> jax.Array:
    """Random bits for each shard, the same however many are asked for here: one pass of the generator for all.

    Args:
      key: for all devices.
      shard: int32 [shards], their numbers.
      count: static.

    Returns:
      uint32 [shards, count].
    """
    half = -(-count // 2)  # a folded key is two words
    number = shard.astype(jnp.uint32)[:, None] * jnp.uint32(half) + jnp.arange(half, dtype=jnp.uint32)[None]
    words = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(number.reshape(-1))
    return words.reshape(shard.shape[0], -1)[:, :count]


def mixed(bits: jax.Array) -> jax.Array:
    """Other bits from bits [...], uint32, one to one: a hash (lowbias32 of C. Wellons' prospector), not a generator."""
    x = bits + jnp.uint32(0x9E3779B9)  # 0 would stay 0
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def unit(bits: jax.Array) -> jax.Array:
    """float32 in [0, 1) from bits, in steps of 2^-24."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def below(bits: jax.Array, limit: jax.Array) -> jax.Array:
    """Integers in [0, limit) from random bits: the high word of their product, so uneven by limit / 2^32 at most.

    Half the random numbers that `jax.random.randint` needs, and no division.

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
