"""The rate limit of a learner that samples from a replay while actors insert: the side that is ahead waits.

The balance counts updates: the replay ratio times the environment steps that are stored, minus the updates that were
made. It stays within a tolerance of its value when the replay reaches its minimum size. Rows are stored one round at a
time, the rollouts of all groups, which the actors collect meanwhile; rollouts that may not be stored yet wait in their
queues, and so do the actors.
"""

import dataclasses
from typing import NamedTuple

from jaxrl.buffers.replay import ReplayState, least_size
from jaxrl.parallel.experience import Experience
from jaxrl.parallel.rollout import rollout_length

_ROUNDING = 1e-6  # updates


class Counts(NamedTuple):
    """The insertions and updates of a replay since it was empty."""

    inserted: int  # environment steps that were stored
    updates: int  # updates that sampled from it

    def stored(self, steps: int) -> "Counts":
        return self._replace(inserted=self.inserted + steps)

    def updated(self) -> "Counts":
        return self._replace(updates=self.updates + 1)


@dataclasses.dataclass(frozen=True)
class RateLimit:
    """The limit on how far either side may be ahead.

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
        """The smallest tolerance with which both sides never wait for each other: one update, or those of one round."""
        return max(1.0, self.replay_ratio * self.steps)

    def can_store(self, counts: Counts) -> bool:
        """Return whether a round may be stored: always, until there is enough for an update."""
        inserted = counts.inserted + self.steps
        return inserted <= self.min_size or self._balance(inserted, counts.updates) <= self.tolerance + _ROUNDING

    def can_update(self, counts: Counts) -> bool:
        """Return whether an update may be made."""
        enough = counts.inserted >= self.min_size
        return enough and self._balance(counts.inserted, counts.updates + 1) >= -self.tolerance - _ROUNDING

    def _balance(self, inserted, updates):
        return self.replay_ratio * (inserted - self.min_size) - updates

    def is_update_next(self, counts: Counts, *, is_round_ready: bool) -> bool:
        """Return whether the next move is an update, rather than to store a round, after waiting for it; pure.

        Args:
          counts: all insertions and updates so far.
          is_round_ready: whether the next rollout of every group is full.
        """
        can_store = self.can_store(counts)
        is_update = self.can_update(counts) and not (is_round_ready and can_store)
        assert is_update or can_store, "a tolerance of `least_tolerance` or more lets one of both sides go on"
        return is_update


def rate_limit(experience: Experience, error_buffer: float) -> RateLimit:
    """Return the limit for the largest replay ratio; `error_buffer` is in transitions."""
    sources = experience.online_sources.values()
    ratio = float(max(source.replay_ratio for source in sources))
    size = max(least_size(source, experience.num_envs) for source in sources)
    steps = rollout_length(experience.algo) * experience.num_envs
    return RateLimit(ratio, size, steps, error_buffer / experience.samples_per_update)


def counts_of(experience: Experience, buffers: dict[str, ReplayState]) -> Counts:
    """Return the counts of a run's replays, which are all filled and sampled together."""
    name = next(iter(experience.online_sources))
    source, index = experience.online_sources[name], buffers[name].index
    updates = int(index.sampled) // source.batch_size if source.storage == "flashbax" else int(index.updates) % 2**32
    return Counts(int(index.inserted), updates)


def problems(experience: Experience, error_buffer: float) -> list[str]:
    """Return why this limit is not possible; empty if it is. The algorithm's own settings must be valid."""
    kind = type(experience.algo).__name__
    if not experience.online_sources:
        return [f"error_buffer={error_buffer} is of a replay, and {kind} has none; use error_buffer=None"]
    limit = rate_limit(experience, error_buffer)
    if limit.tolerance >= limit.least_tolerance:
        return []
    least = limit.least_tolerance * experience.samples_per_update
    return [
        f"error_buffer={error_buffer} lets both sides wait for each other: it must be at least the {least:g} "
        f"transitions that {limit.least_tolerance:g} updates draw, those of a batch and of the {limit.steps} "
        "environment steps between two insertions"
    ]
