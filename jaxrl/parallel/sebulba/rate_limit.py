"""Which side goes on where a learner draws from a replay while actors insert: the one that is not ahead.

The balance is of updates: the replay ratio times the environment steps that are stored, less the updates that were
made. It stays within a tolerance of what it is when the replay has reached its minimum size. Rows are stored a round at
a time, the rollouts of all groups, which the actors collect meanwhile; rollouts that are not let in wait in their
queues, and so do the actors.
"""

import dataclasses
from enum import Enum
from typing import NamedTuple

from jaxrl.buffers.replay import ReplayState, least_size
from jaxrl.parallel.experience import Experience

_ROUNDING = 1e-6  # updates


class Move(Enum):
    """What the learner does next."""

    INSERT = "stores a round of rollouts that is there"
    SAMPLE = "makes an update"
    WAIT = "is ahead, and waits for a round of rollouts to store"


class Counts(NamedTuple):
    """What a replay has seen since it was empty."""

    inserted: int  # environment steps that were stored
    updates: int  # that drew from it


@dataclasses.dataclass(frozen=True)
class RateLimit:
    """How far either side may be ahead.

    Args:
      replay_ratio: updates per environment step.
      min_size: environment steps that are stored before the first update.
      steps: environment steps of a round.
      tolerance: updates that either side may be ahead by.
    """

    replay_ratio: float
    min_size: int
    steps: int
    tolerance: float

    @property
    def least_tolerance(self) -> float:
        """Below which both sides could wait for each other: that of one update, or those of one round."""
        return max(1.0, self.replay_ratio * self.steps)

    def can_store(self, counts: Counts) -> bool:
        """Whether a round may be stored: until there is enough for an update, always."""
        inserted = counts.inserted + self.steps
        return inserted <= self.min_size or self._balance(inserted, counts.updates) <= self.tolerance + _ROUNDING

    def can_update(self, counts: Counts) -> bool:
        """Whether an update may be made."""
        enough = counts.inserted >= self.min_size
        return enough and self._balance(counts.inserted, counts.updates + 1) >= -self.tolerance - _ROUNDING

    def _balance(self, inserted, updates):
        return self.replay_ratio * (inserted - self.min_size) - updates

    def next_move(self, counts: Counts, *, is_round_ready: bool) -> Move:
        """The next move; pure.

        Args:
          counts: of everything so far.
          is_round_ready: whether the next rollout of every group is there.
        """
        can_store = self.can_store(counts)
        if is_round_ready and can_store:
            return Move.INSERT
        if self.can_update(counts):
            return Move.SAMPLE
        assert can_store, "a tolerance of `least_tolerance` or more lets one of both sides go on"
        return Move.WAIT

    def after(self, counts: Counts, move: Move) -> Counts:
        """The counts once a move was made."""
        if move is Move.SAMPLE:
            return counts._replace(updates=counts.updates + 1)
        return counts._replace(inserted=counts.inserted + self.steps)


def rate_limit(experience: Experience, error_buffer: float, steps: int) -> RateLimit:
    """That of the replay which asks for the most updates; `error_buffer` is in transitions, `steps` are of a round."""
    sources = experience.online_sources.values()
    ratio = float(max(source.replay_ratio for source in sources))
    size = max(least_size(source, experience.num_envs) for source in sources)
    return RateLimit(ratio, size, steps, error_buffer / experience.samples_per_update)


def counts_of(experience: Experience, buffers: dict[str, ReplayState]) -> Counts:
    """What a run's replays, which are filled and drawn from together, have seen."""
    name = next(iter(experience.online_sources))
    source, index = experience.online_sources[name], buffers[name].index
    updates = int(index.sampled) // source.batch_size if source.storage == "flashbax" else int(index.updates) % 2**32
    return Counts(int(index.inserted), updates)


def problems(experience: Experience, error_buffer: float, steps: int) -> list[str]:
    """Why there is no such limit; empty if there is. The algorithm's own settings are fine."""
    kind = type(experience.algo).__name__
    if not experience.online_sources:
        return [f"error_buffer={error_buffer} is of a replay, and {kind} has none; use error_buffer=None"]
    limit = rate_limit(experience, error_buffer, steps)
    if limit.tolerance >= limit.least_tolerance:
        return []
    least = limit.least_tolerance * experience.samples_per_update
    return [
        f"error_buffer={error_buffer} lets both sides wait for each other: it must be at least the {least:g} "
        f"transitions that {limit.least_tolerance:g} updates draw, those of a batch and of the {steps} environment "
        "steps between two insertions"
    ]
