"""Rate limiters: how many items may be drawn for each that is inserted (Reverb's arithmetic).

The balance is `samples_per_insert * inserted - sampled`. Drawing must leave it at `min_diff` at least, inserting at
`max_diff` at most; and nothing is drawn before `min_size` items are there, nor is the first `min_size` ever kept out.
`Limits` is plain data, in a compiled program `LimiterState` counts, between threads `HostLimiter` blocks.
"""

import dataclasses
import math
import threading
import time
from fractions import Fraction

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


# --- in a compiled program ---------------------------------------------------------------------------------------


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


def updates_per_iteration(ratio: float, rows: int, batch_size: int) -> int:
    """How many updates an iteration runs in a compiled program, where a limiter is a plan made beforehand.

    Args:
      ratio: items drawn for each row inserted.
      rows: rows that an iteration inserts, over all environments.
      batch_size: items an update draws.

    Raises:
      ConfigError: it is no whole number of updates; says which rows or ratio would make one.
    """
    if ratio <= 0 or rows < 1 or batch_size < 1:
        raise ConfigError(f"ratio={ratio}, rows={rows} and batch_size={batch_size} must be above 0")
    exact = Fraction(ratio).limit_denominator(1_000_000) * rows / batch_size
    if exact.denominator == 1:
        return int(exact)
    least = rows * exact.denominator
    nearest = max(round(exact), 1)
    raise ConfigError(
        f"ratio={ratio} with {rows} rows an iteration and batch_size={batch_size} is {float(exact):.4g} updates an "
        f"iteration, not a whole number; use {least} rows (longer rollouts), or ratio={nearest * batch_size / rows:g}"
    )


# --- between threads ---------------------------------------------------------------------------------------------


class HostLimiter:
    """Blocks the threads that insert and those that draw, so that neither runs away from the other.

    Args:
      limits: the rule.
    """

    def __init__(self, limits: Limits):
        self._limits, self._changed = limits, threading.Condition()
        self._inserted = self._sampled = self._deleted = 0
        self._blocked = {"insert": 0.0, "sample": 0.0}
        self._closed = False

    def await_insert(self, count: int = 1, timeout: float | None = None) -> bool:
        """Waits until `count` items may be inserted, and counts them; False if closed or out of time (seconds)."""
        return self._await("insert", self._can_insert, count, timeout)

    def await_sample(self, count: int = 1, timeout: float | None = None) -> bool:
        """Waits until `count` items may be drawn, and counts them; False if closed or out of time (seconds)."""
        return self._await("sample", self._can_sample, count, timeout)

    def deleted(self, count: int = 1) -> None:
        """Counts items that were removed."""
        with self._changed:
            self._deleted += count
            self._changed.notify_all()

    def set_ratio(self, samples_per_insert: float) -> None:
        """Changes the ratio from now on: what was inserted so far keeps the old one."""
        with self._changed:
            # Reverb's balance is of all inserts at one ratio; the difference becomes draws already made.
            self._sampled += (samples_per_insert - self._limits.samples_per_insert) * self._inserted
            self._limits = dataclasses.replace(self._limits, samples_per_insert=samples_per_insert)
            self._changed.notify_all()

    def close(self) -> None:
        """Lets every waiting thread go, now and in future."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def counters(self) -> dict[str, float]:
        """What a checkpoint keeps, for `restore`."""
        with self._changed:
            return {
                "inserted": self._inserted,
                "sampled": self._sampled,
                "deleted": self._deleted,
                "samples_per_insert": self._limits.samples_per_insert,
            }

    def restore(self, counters: dict[str, float]) -> None:
        """Goes on from `counters()`."""
        with self._changed:
            self._inserted, self._sampled = counters["inserted"], counters["sampled"]
            self._deleted = counters["deleted"]
            ratio = counters["samples_per_insert"]
            self._limits = dataclasses.replace(self._limits, samples_per_insert=ratio)
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """Seconds that threads have waited so far on either side, and the balance."""
        with self._changed:
            return {
                "insert_blocked_seconds": self._blocked["insert"],
                "sample_blocked_seconds": self._blocked["sample"],
                "size": self._inserted - self._deleted,
                "balance": self._balance(),
            }

    def _balance(self):
        return self._limits.samples_per_insert * self._inserted - self._sampled

    def _can_insert(self, count):
        if self._inserted + count - self._deleted <= self._limits.min_size:
            return True
        return self._balance() + self._limits.samples_per_insert * count <= self._limits.max_diff

    def _can_sample(self, count):
        enough = self._inserted - self._deleted >= self._limits.min_size
        return enough and self._balance() - count >= self._limits.min_diff

    def _await(self, side, allowed, count, timeout):
        with self._changed:
            if not self._closed and not allowed(count):
                began = time.monotonic()
                self._changed.wait_for(lambda: self._closed or allowed(count), timeout)
                self._blocked[side] += time.monotonic() - began
            if self._closed or not allowed(count):
                return False
            if side == "insert":
                self._inserted += count
            else:
                self._sampled += count
            self._changed.notify_all()
            return True
