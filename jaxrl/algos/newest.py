"""Combined experience replay (Zhang and Sutton, 2017, arXiv:1712.01275): the newest transitions in every batch.

What is new is drawn late from a large replay. So the newest transitions are a part of each batch, and the rest is drawn
as ever. Both parts are views of one storage.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.sources import Lifo, Replay, Source
from jaxrl.core.types import Replicas, TransitionBatch


class Fields(Protocol):
    """The fields of an algorithm whose batches may have such a part."""

    @property
    def newest(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def storage(self) -> str: ...


def sources(replay: Replay, newest: int) -> dict[str, Source]:
    """The run's replay, which gives all of a batch but its `newest` transitions, and these."""
    if not newest:
        return {"replay": replay}
    own = dataclasses.replace(replay, batch_size=replay.batch_size - newest)
    # Drawn as the newest once, so that several of them, or several updates in one iteration, have different ones.
    view = dataclasses.replace(
        replay, over="replay", batch_size=newest, sampler=Lifo(), max_times_sampled=1, extras=(), frame_stack=None
    )
    return {"replay": own, "newest": view}


def problems(fields: Fields, recurrent: bool) -> list[str]:
    """Why an algorithm cannot have the newest transitions in its batches, one line each; empty if it can."""
    name, found = type(fields).__name__, []
    if not fields.newest:
        return found
    if fields.newest >= fields.batch_size:
        found.append(
            f"{name}.newest={fields.newest} must be less than batch_size={fields.batch_size}, of which it is a part"
        )
    if fields.storage != "ring":
        found.append(f"{name}.newest={fields.newest} needs storage='ring', not {fields.storage!r}: both draw from it")
    if recurrent:
        found.append(f"{name}.newest={fields.newest} is of transitions; use networks without a recurrent core")
    return found


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
