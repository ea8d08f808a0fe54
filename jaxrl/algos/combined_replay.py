"""Batches of combined experience replay (Zhang and Sutton, 2017, arXiv:1712.01275)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.types import Replicas, TransitionBatch


def combined_batch(batch: Mapping[str, Any], replicas: Replicas) -> Any:
    """Return the batches of both sources as one; without the second the replay's, also of sequences."""
    return concatenate_by_shard(batch["replay"], batch["newest"], replicas) if "newest" in batch else batch["replay"]


def concatenate_by_shard(one: TransitionBatch, other: TransitionBatch, replicas: Replicas) -> TransitionBatch:
    """Join two batches, each logical shard's transitions side by side, so that devices make no difference."""

    def both(*parts):
        parts = [x.reshape(replicas.shards, -1, *x.shape[1:]) for x in parts]
        return jnp.concatenate(parts, axis=1).reshape(-1, *parts[0].shape[2:])

    return jax.tree.map(both, one, other)


def replay_part(x: jax.Array, batch: Mapping[str, Any], replicas: Replicas) -> jax.Array:
    """Return the entries of x [transitions], of a combined batch, that belong to the replay itself."""
    if "newest" not in batch:
        return x
    own = batch["replay"].weight.shape[0] // replicas.shards
    return x.reshape(replicas.shards, -1)[:, :own].reshape(-1)
