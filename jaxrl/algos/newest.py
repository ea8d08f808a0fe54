"""Combined experience replay (Zhang and Sutton, 2017, arXiv:1712.01275): the newest transitions in every batch.

What is new is drawn late from a large replay. So the newest transitions are a part of each batch, and the rest is drawn
as ever. Both parts are views of one storage.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.types import Replicas, TransitionBatch


def drawn(batch: Mapping[str, Any], replicas: Replicas) -> Any:
    """What both sources delivered as one batch; without the second, what the replay did: transitions or sequences."""
    return joined(batch["replay"], batch["newest"], replicas) if "newest" in batch else batch["replay"]


def joined(one: TransitionBatch, other: TransitionBatch, replicas: Replicas) -> TransitionBatch:
    """Two batches as one: each logical shard's transitions side by side, so that devices make no difference."""

    def both(*parts):
        parts = [x.reshape(replicas.shards, -1, *x.shape[1:]) for x in parts]
        return jnp.concatenate(parts, axis=1).reshape(-1, *parts[0].shape[2:])

    return jax.tree.map(both, one, other)


def of_replay(x: jax.Array, batch: Mapping[str, Any], replicas: Replicas) -> jax.Array:
    """Of x [transitions], of a joined batch, the entries of what the replay itself delivered."""
    if "newest" not in batch:
        return x
    own = batch["replay"].weight.shape[0] // replicas.shards
    return x.reshape(replicas.shards, -1)[:, :own].reshape(-1)
