"""Batches of several parts, each from a view of one storage: combined experience replay, and views of one's own."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.buffers.batches import join, split
from jaxrl.core.sources import Replay, Source, by_priority
from jaxrl.core.types import Replicas

_PARTS = ("replay", "newest", "view")


def combined_batch(batch: Mapping[str, Any], replicas: Replicas) -> Any:
    """Return the batches of all parts as one; of one part as it is, also of sequences."""
    return join([batch[name] for name in _PARTS if name in batch], replicas.shards)


def sources_by_priority(sources: Mapping[str, Source]) -> list[str]:
    """Return the names of the replays that draw or remove by priorities, so that updates must give some."""
    replays = {name: source for name, source in sources.items() if isinstance(source, Replay)}
    return [name for name, source in replays.items() if by_priority(source.sampler, source.remover)]


def priorities(
    x: jax.Array, sources: Mapping[str, Source], batch: Mapping[str, Any], replicas: Replicas
) -> dict[str, jax.Array]:
    """Return the entries of x [items], of a combined batch, for each source that goes by priorities."""
    names, needed = [name for name in _PARTS if name in batch], sources_by_priority(sources)
    sizes = [batch[name].sample_info.probability.shape[0] for name in names] if needed else []
    parts = split(x, sizes, replicas.shards) if needed else []
    return {name: part for name, part in zip(names, parts, strict=False) if name in needed}
