"""Batches of several parts, each from a view of one storage: combined experience replay, and custom views."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.sources import Source, sources_by_priority
from jaxrl.core.types import Replicas, TransitionBatch

_PARTS = ("replay", "view")


def combined_batch(batch: Mapping[str, Any], replicas: Replicas) -> Any:
    """Join the batches of all parts; a single part, which may consist of sequences, is returned unchanged."""
    parts = [batch[name] for name in _PARTS if name in batch]
    return concatenate_by_shard(*parts, replicas=replicas) if len(parts) > 1 else parts[0]


def concatenate_by_shard(*batches: TransitionBatch, replicas: Replicas) -> TransitionBatch:
    """Join batches shard by shard, so that the result does not depend on the number of devices."""

    def joined(*parts):
        parts = [x.reshape(replicas.shards, -1, *x.shape[1:]) for x in parts]
        return jnp.concatenate(parts, axis=1).reshape(-1, *parts[0].shape[2:])

    return jax.tree.map(joined, *batches)


LEAST_PRIORITY = 1e-6  # added to priorities so that every item stays reachable


def priorities(
    error: jax.Array, sources: Mapping[str, Source], batch: Mapping[str, Any], replicas: Replicas
) -> dict[str, jax.Array]:
    """Convert the errors [items] of a combined batch to priorities, for each source that uses priorities."""
    if not (needed := sources_by_priority(sources)):
        return {}
    names = [name for name in _PARTS if name in batch]
    ends = list(accumulate(batch[name].sample_info.position.shape[0] // replicas.shards for name in names))
    parts = jnp.split((error + LEAST_PRIORITY).reshape(replicas.shards, -1), ends[:-1], axis=1)
    return {name: part.reshape(-1) for name, part in zip(names, parts, strict=True) if name in needed}
