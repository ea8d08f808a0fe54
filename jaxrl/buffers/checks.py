"""Checks of an algorithm's replay sources, which run before any memory is allocated."""

from collections.abc import Mapping

from jaxrl.buffers import flashbax, index, replay, ring
from jaxrl.core.sources import Fifo, Lifo, Remover, Replay, value_problems


def source_problems(sources: Mapping[str, Replay], num_envs: int, rollout: int, shards: int) -> list[str]:
    """Return the problems with replay sources, one line each, or an empty list.

    Args:
      sources: replay sources by name.
      num_envs: number of environments over all devices.
      rollout: number of rows per environment and iteration.
      shards: number of logical shards over all devices.
    """
    found = []
    for name in sources:
        found += [f"replay source {name!r}: {line}" for line in _problems(sources, name, num_envs, rollout, shards)]
    return found


def group_problems(name: str, source: Replay) -> list[str]:
    """Return the reasons why groups of environments cannot store rows in a source independently, one line each."""
    found = [str(rule) for rule in index.rules(source) if isinstance(rule, Fifo | Lifo)]
    if source.storage == "flashbax":
        found.append("storage='flashbax'")
    why = "needs the order of rows over all environments; use another one, or learner_batch=None"
    return [f"replay source {name!r}: {one} {why}" for one in found]


def _problems(sources, name, num_envs, rollout, shards):
    source, found = sources[name], []
    if source.over is not None:
        other = sources.get(source.over)
        if other is None or other.over is not None:
            owners = [n for n, s in sources.items() if s.over is None]
            return [f"over={source.over!r} is not a source that stores rows; use one of {owners}"]
    found += value_problems(source)
    if source.sequence is not None and not found:
        found += _sequence_problems(source.sequence, rollout)
    if found:
        return found
    stored = replay.storage(sources, name)
    if stored.capacity < source.min_size:
        found.append(f"capacity={stored.capacity} must be at least min_size={source.min_size}")
    if source.batch_size % shards:
        found.append(f"batch_size={source.batch_size} is not divisible by {shards} shards; use a multiple")
    if index.bounded(source):
        found += _item_problems(source, shards)
    if source.over is None and source.remover not in (None, Fifo()):
        found.append(f"remover={source.remover!r} needs a view (over=); a ring removes its oldest rows")
    # In addition to the rollout being written, the ring must hold the rows of one item; slots are whole rollouts.
    rows = source.lookahead + replay.lookback(source, stored) + 1 + rollout
    least = -(-rows // rollout) * rollout * num_envs
    if num_envs * ring.slots(stored.capacity, num_envs, rollout) < least:
        found.append(
            f"capacity={stored.capacity} is too small for items of {num_envs} environments; use at least {least}"
        )
    if source.storage == "flashbax":
        found += flashbax.problems(source, num_envs, rollout, shards)
    return found


def _item_problems(source, shards):
    found = []
    if not isinstance(source.remover, Remover | None):
        found.append(f"remover={source.remover!r} is random; use Fifo, Lifo, MinHeap or MaxHeap")
    if source.capacity < 1 or source.capacity % shards:
        above = max(-(-source.capacity // shards), 1) * shards
        found.append(f"capacity={source.capacity} is not divisible by {shards} shards; use {above}")
    return found


def _sequence_problems(sequence, rollout):
    found = []
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
