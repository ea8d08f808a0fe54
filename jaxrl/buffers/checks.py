"""Checks of an algorithm's replay sources, made before anything is allocated."""

from collections.abc import Mapping

from jaxrl.buffers import flashbax, index, replay, ring
from jaxrl.core.sources import Fifo, Prioritized, Remover, Replay

_FILLS = ("repeat", "zeros")
_ENDS = ("write", "truncate", "zero_pad", "continue")


def source_problems(sources: Mapping[str, Replay], num_envs: int, rollout: int, shards: int) -> list[str]:
    """Return the problems of replay sources, one line each; empty if all can be built.

    Args:
      sources: replay sources by name.
      num_envs: environments over all devices.
      rollout: rows per environment and iteration.
      shards: logical shards over all devices.
    """
    found = []
    for name in sources:
        found += [f"replay source {name!r}: {line}" for line in _problems(sources, name, num_envs, rollout, shards)]
    return found


def _problems(sources, name, num_envs, rollout, shards):
    source, found = sources[name], []
    if source.over is not None:
        other = sources.get(source.over)
        if other is None or other.over is not None:
            owners = [n for n, s in sources.items() if s.over is None]
            return [f"over={source.over!r} is not a source that stores rows; use one of {owners}"]
    stored = replay.storage(sources, name)
    if source.n_step < 1:
        found.append(f"n_step={source.n_step} must be at least 1")
    if source.max_times_sampled < 0:
        found.append(f"max_times_sampled={source.max_times_sampled} must be 0 (no limit) or more")
    if source.batch_size < 1:
        found.append(f"batch_size={source.batch_size} must be at least 1")
    if source.sequence is not None:
        found += _sequence_problems(source.sequence, rollout)
        if found:
            return found
    if isinstance(source.sampler, Prioritized) and source.sampler.normalize not in ("batch", "none"):
        found.append(f"normalize={source.sampler.normalize!r} must be 'batch' or 'none'")
    stack = source.frame_stack
    if stack is not None and (stack.frames < 1 or stack.fill not in _FILLS):
        found.append(f"frame_stack={stack!r}: frames must be at least 1, and fill one of {_FILLS}")
        return found
    if stored.capacity < source.min_size:
        found.append(f"capacity={stored.capacity} is less than min_size={source.min_size}; raise it")
    if source.replay_memory not in ("device", "host"):
        found.append(f"replay_memory={source.replay_memory!r} must be 'device' or 'host'")
    elif source.replay_memory == "host" and source.storage != "ring":
        found.append(f"replay_memory='host' needs storage='ring', not {source.storage!r}")
    if source.storage == "table" or index.bounded(source):
        found += _item_problems(source, shards)
    if source.storage == "table":
        if source.over is not None or any(other.over == name for other in sources.values()):
            found.append("storage='table' stores items, not rows that several sources could share (over=); use 'ring'")
        return found + _batch_problems(source, shards)
    if source.over is None and source.remover not in (None, Fifo()):
        found.append(
            f"remover={source.remover!r} needs storage='table', or a view (over=); with storage={source.storage!r} the "
            "oldest rows are removed"
        )
    # In addition to the rollout being written, the ring must hold the rows of one item; slots are whole rollouts.
    rows = replay.lookahead(source) + replay.lookback(source, stored) + 1 + rollout
    least = -(-rows // rollout) * rollout * num_envs
    if num_envs * ring.slots(stored.capacity, num_envs, rollout) < least:
        found.append(
            f"capacity={stored.capacity} is too small for items of {num_envs} environments; use at least {least}"
        )
    found += _batch_problems(source, shards)
    if source.storage == "flashbax":
        found += flashbax.problems(source, num_envs, rollout, shards)
    elif source.storage != "ring":
        found.append(f"storage={source.storage!r} must be 'ring', 'table' or 'flashbax'")
    return found


def _item_problems(source, shards):
    found = []
    if not isinstance(source.remover, Remover | None):
        found.append(f"remover={source.remover!r} is random; use Fifo, Lifo, MinHeap or MaxHeap")
    if source.capacity < 1 or source.capacity % shards:
        above = max(-(-source.capacity // shards), 1) * shards
        found.append(f"capacity={source.capacity} is not divisible by {shards} shards; use {above}")
    return found


def _batch_problems(source, shards):
    if source.batch_size % shards:
        return [f"batch_size={source.batch_size} is not divisible by {shards} shards; use a multiple"]
    return []


def _sequence_problems(sequence, rollout):
    found = []
    if sequence.length < 1 or sequence.period < 1 or sequence.burn_in < 0:
        found.append(
            f"length={sequence.length}, period={sequence.period} and burn_in={sequence.burn_in} must be at least "
            f"1, 1 and 0"
        )
    if sequence.end not in _ENDS:
        found.append(f"end={sequence.end!r} must be one of {_ENDS}")
    if sequence.stored_carry and sequence.end == "write" and rollout != 1:
        found.append(
            f"stored_carry stores a recurrent state every {rollout} rows, but end='write' begins sequences at any row; "
            f"use end='continue' or 'truncate', or rollout_length=1"
        )
    if sequence.stored_carry and sequence.end in ("truncate", "zero_pad") and 1 != rollout != sequence.period:
        found.append(
            f"period={sequence.period} must be the {rollout} rows between two stored recurrent states if "
            f"end={sequence.end!r}; use {rollout}"
        )
    if sequence.stored_carry and sequence.end == "continue" and sequence.period % rollout:
        below = sequence.period // rollout * rollout or rollout
        found.append(
            f"period={sequence.period} must be a multiple of the {rollout} rows between two stored recurrent states; "
            f"use {below} or change rollout_length"
        )
    return found
