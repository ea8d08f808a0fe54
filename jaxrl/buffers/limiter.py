"""Rate limiters: how many items may be drawn for each that is inserted (Reverb's arithmetic).

The balance is `samples_per_insert * inserted - sampled`. Drawing must leave it at `min_diff` at least, inserting at
`max_diff` at most; and nothing is drawn before `min_size` items are there, nor is the first `min_size` ever kept out.
`Limits` is plain data; `LimiterState` counts, in a compiled program.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Limits:
    """When items may be drawn and inserted; made by `min_size`, `sample_to_insert_ratio` and `queue`."""

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float


def min_size(size: int) -> Limits:
    """Draws wait until `size` items are there; inserts never wait.

    Raises:
      ConfigError: `size` is less than 1.
    """
    if size < 1:
        raise ConfigError(f"min_size={size} must be at least 1")
    return Limits(1.0, size, -math.inf, math.inf)


def sample_to_insert_ratio(ratio: float, size: int, error_buffer: float | tuple[float, float]) -> Limits:
    """Keeps draws at `ratio` an insert, once `size` items are there.

    Args:
      ratio: items drawn for each inserted.
      size: items before the first draw.
      error_buffer: how far the balance may be from `ratio * size`; or the least and largest balance themselves.

    Raises:
      ConfigError: the buffer is too small for one insert and one draw, so that both sides would wait for each other.
    """
    if ratio <= 0 or size < 1:
        raise ConfigError(f"ratio={ratio} must be above 0 and size={size} at least 1")
    if isinstance(error_buffer, tuple):
        low, high = error_buffer
    else:
        low, high = ratio * size - error_buffer, ratio * size + error_buffer
    least = 2 * max(1.0, ratio)
    if high - low < least:
        raise ConfigError(
            f"error_buffer={error_buffer} leaves a balance between {low} and {high}; with ratio={ratio} they must be "
            f"{least} apart at least, so use error_buffer={least / 2} or more"
        )
    return Limits(float(ratio), size, low, high)


def queue(size: int) -> Limits:
    """Every item is drawn once: at most `size` inserted ones wait. Goes with `max_times_sampled=1`."""
    if size < 1:
        raise ConfigError(f"queue size={size} must be at least 1")
    return Limits(1.0, 1, 0.0, float(size))


class LimiterState(struct.PyTreeNode):
    """A limiter's settings, which may be changed while it runs, and its counters."""

    samples_per_insert: jax.Array  # float32
    min_size: jax.Array  # int32
    min_diff: jax.Array  # float32
    max_diff: jax.Array  # float32
    size: jax.Array  # int32, inserted and not deleted
    balance: jax.Array  # float32, samples_per_insert * inserted - sampled
    lost: jax.Array  # float32, what rounding has kept out of the balance

    def can_insert(self, count: int | jax.Array = 1) -> jax.Array:
        """Whether `count` items may be inserted now, bool."""
        after = self.balance + self.samples_per_insert * jnp.asarray(count, jnp.float32)
        return (self.size + count <= self.min_size) | (after <= self.max_diff)

    def can_sample(self, count: int | jax.Array = 1) -> jax.Array:
        """Whether `count` items may be drawn now, bool."""
        return (self.size >= self.min_size) & (self.balance - jnp.asarray(count, jnp.float32) >= self.min_diff)

    def inserted(self, count: int | jax.Array = 1) -> "LimiterState":
        return self._moved(self.samples_per_insert * jnp.asarray(count, jnp.float32)).replace(size=self.size + count)

    def sampled(self, count: int | jax.Array = 1) -> "LimiterState":
        return self._moved(-jnp.asarray(count, jnp.float32))

    def deleted(self, count: int | jax.Array = 1) -> "LimiterState":
        return self.replace(size=self.size - count)

    def _moved(self, change: jax.Array) -> "LimiterState":
        # Kahan's sum, so that a ratio such as 0.1 stays exact over any number of steps. The barrier keeps XLA from
        # simplifying the correction away.
        step = change - self.lost
        balance = jax.lax.optimization_barrier(self.balance + step)
        return self.replace(balance=balance, lost=(balance - self.balance) - step)


def limiter(limits: Limits) -> LimiterState:
    """A limiter that has counted nothing yet."""
    return LimiterState(
        samples_per_insert=jnp.float32(limits.samples_per_insert),
        min_size=jnp.int32(limits.min_size),
        min_diff=jnp.float32(limits.min_diff),
        max_diff=jnp.float32(limits.max_diff),
        size=jnp.int32(0),
        balance=jnp.float32(0.0),
        lost=jnp.float32(0.0),
    )
