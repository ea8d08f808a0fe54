"""Learning from demonstrations without rewards: what a dataset holds beside what a run lives through."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxrl.algos import combined_replay
from jaxrl.core.sources import Dataset, Replay, Source
from jaxrl.core.types import Replicas, TransitionBatch


def sources(replay: Replay) -> dict[str, Source]:
    """The run's own replay, and demonstrations for half of each batch."""
    half = replay.batch_size // 2
    own = dataclasses.replace(replay, batch_size=replay.batch_size - half)
    return {"replay": own, "demonstrations": Dataset(half, n_step=replay.n_step)}


def rewarded(batch: Mapping[str, Any], replicas: Replicas) -> TransitionBatch:
    """Both parts as one batch, in which a demonstration's step has reward 1 and another 0 (SQIL, algorithm 1)."""
    own, shown = batch["replay"], batch["demonstrations"]
    taken = jnp.arange(shown.rewards.shape[1], dtype=jnp.int32)[None] < shown.steps[:, None]
    own = own.replace(rewards=jnp.zeros_like(own.rewards))
    shown = shown.replace(rewards=taken.astype(shown.rewards.dtype))
    # What was told of the draws is the replays' own.
    return combined_replay.concatenate_by_shard(
        own.replace(sample_info=None), shown.replace(sample_info=None), replicas
    )
