"""Context for layers that normalize over a whole batch: the devices that share it, and the weights of its rows."""

import contextlib
import contextvars
from collections.abc import Generator

import jax
import jax.numpy as jnp

from jaxrl.core.types import Replicas

_replicas: contextvars.ContextVar[Replicas | None] = contextvars.ContextVar("replicas", default=None)
_weight: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("weight", default=None)


@contextlib.contextmanager
def shared_batch(replicas: Replicas) -> Generator[None]:
    """Make layers traced in this context manager treat their batch as part of a batch that `replicas` share."""
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


@contextlib.contextmanager
def weighted_rows(weight: jax.Array) -> Generator[None]:
    """Give layers traced in this context manager the weights [rows], 0 or 1, of the rows of their batch."""
    token = _weight.set(weight)
    try:
        yield
    finally:
        _weight.reset(token)


def mean_over_batch(x: jax.Array) -> jax.Array:
    """Return the mean [features] of x [..., features] over the rows of weight 1, on all devices that share the batch.

    The leading axes of x are the axes of the rows, followed by axes within each row, such as pixels.
    """
    replicas, weight = _replicas.get(), _weight.get()
    if weight is None:
        mean = jnp.mean(x, axis=tuple(range(x.ndim - 1)))
        return mean if replicas is None else replicas.mean(mean)
    rows = jnp.mean(x.reshape(weight.shape[0], -1, x.shape[-1]), axis=1)
    counts = weight.astype(x.dtype)
    total, number = jnp.sum(jnp.where(counts[:, None] != 0.0, rows, 0.0), axis=0), jnp.sum(counts)
    if replicas is not None:
        total, number = replicas.mean((total, number))
    return total / jnp.maximum(number, 1e-8)
