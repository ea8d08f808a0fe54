"""Learning from demonstrations without rewards: batches of a dataset and of the run's own replay."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxrl.algos import combined_replay
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import Dataset, Replay, Source
from jaxrl.core.types import Replicas, TransitionBatch


def sources(replay: Replay) -> dict[str, Source]:
    """Return the run's own replay, and demonstrations for half of each batch."""
    half = replay.batch_size // 2
    own = dataclasses.replace(replay, batch_size=replay.batch_size - half)
    return {"replay": own, "demonstrations": Dataset(half, n_step=replay.n_step)}


def rewarded(batch: Mapping[str, Any], replicas: Replicas) -> TransitionBatch:
    """Join both parts, with reward 1 for steps of demonstrations and 0 for others (SQIL, algorithm 1)."""
    own, expert = batch["replay"], batch["demonstrations"]
    if expert.rewards.shape[1] > 1 and expert.bootstrap.dtype != bool:
        raise ConfigError(
            f"imitate=True with n_step={expert.rewards.shape[1]}: the dataset has discounts within episodes, and an "
            "n-step transition stores only their product, not one per reward; use n_step=1"
        )
    taken = jnp.arange(expert.rewards.shape[1], dtype=jnp.int32)[None] < expert.steps[:, None]
    own = own.replace(rewards=jnp.zeros_like(own.rewards))
    expert = expert.replace(rewards=taken.astype(expert.rewards.dtype))
    # Sampling statistics are kept per source.
    return combined_replay.concatenate_by_shard(
        own.replace(sample_info=None), expert.replace(sample_info=None), replicas=replicas
    )
