"""Uniform draws among rows that are all alike: nothing is kept about them, a draw looks whether a row counts."""

import jax
import jax.numpy as jnp

from jaxrl.buffers import transitions
from jaxrl.buffers.ring import Ring

_TRIES = 4


def draw(ring: Ring, keys: jax.Array, count: int, lookback: int, lookahead: int) -> tuple[jax.Array, jax.Array]:
    """Draws rows that a transition may begin at, `count` from every shard.

    A draw that meets a row that does not count, such as an episode's last observation, tries again three times; what
    is left has nothing to learn from.

    Args:
      ring: the rows; its environments are the shards' one after another.
      keys: [shards].
      count: static.
      lookback, lookahead: rows before and after that an item reads, static.

    Returns:
      Places int32 [shards, count], and whether the row counts, bool.
    """
    columns = ring.rows.reward.shape[1] // keys.shape[0]
    # The newest rows have no complete future yet, and a full ring's oldest have lost what came before them.
    oldest = jnp.where(ring.filled == ring.slots, lookback, 0) if lookback else jnp.int32(0)
    room = jnp.maximum(ring.filled - lookahead - oldest, 1)

    def one(key, shard):
        number = below(jax.random.bits(key, (_TRIES, count), jnp.uint32), room * columns)
        slot = (ring.cursor - ring.filled + oldest + number // columns) % ring.slots
        column = number % columns
        counts = transitions.eligible(ring, slot, shard * columns + column) & (ring.filled > lookahead + oldest)
        first = jnp.argmax(counts, axis=0)
        pick = jnp.arange(count, dtype=jnp.int32)
        return (slot * columns + column)[first, pick], counts[first, pick]

    return jax.vmap(one)(keys, jnp.arange(keys.shape[0], dtype=jnp.int32))


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
