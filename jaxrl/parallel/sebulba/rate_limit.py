"""The rate limit of a learner that samples from a replay while actors insert: the side that is too far ahead waits.

The balance is the replay ratio times the number of stored environment steps, minus the number of updates. The limit
keeps the balance within a tolerance of its value at the minimum size of the replay. Rows are stored in rounds: one
rollout of every group or, with `learner_batch`, the rollouts that are full first. Rollouts that must not be stored yet
wait in their queues, so the actors wait, too.
"""

import dataclasses
from typing import NamedTuple

from jaxrl.buffers.replay import ReplayState, least_size
from jaxrl.parallel.experience import Experience
from jaxrl.parallel.rollout import rollout_length

_ROUNDING = 1e-6  # updates


class Counts(NamedTuple):
    """The numbers of insertions into a replay and of updates from it since it was empty."""

    inserted: int  # stored environment steps
    updates: int  # updates that sampled from it

    def stored(self, steps: int) -> "Counts":
        return self._replace(inserted=self.inserted + steps)

    def updated(self) -> "Counts":
        return self._replace(updates=self.updates + 1)


@dataclasses.dataclass(frozen=True)
class RateLimit:
    """A limit on how far the learner or the actors may be ahead of the other side.

    Args:
      replay_ratio: updates per environment step.
      min_size: environment steps to store before the first update.
      steps: environment steps of a round.
      tolerance: maximum lead of either side, in updates.
    """

    replay_ratio: float
    min_size: int
    steps: int
    tolerance: float

    @property
    def least_tolerance(self) -> float:
        """The smallest tolerance that cannot cause a deadlock: the number of updates per round, but at least 1."""
        return max(1.0, self.replay_ratio * self.steps)

    def is_update_next(self, counts: Counts, *, is_round_ready: bool) -> bool:
        """Return True to make an update next, and False to store a round, after waiting for it if necessary. Pure.

        Args:
          counts: all insertions and updates so far.
          is_round_ready: whether all rollouts of the next round are full.
        """

        def balance(inserted, updates):
            return self.replay_ratio * (inserted - self.min_size) - updates

        (inserted, updates), most = counts, self.tolerance + _ROUNDING
        stored = inserted + self.steps
        can_store = stored <= self.min_size or balance(stored, updates) <= most  # True before the first update
        can_update = inserted >= self.min_size and balance(inserted, updates + 1) >= -most
        is_update = can_update and not (is_round_ready and can_store)
        assert is_update or can_store, "one side can continue if the tolerance is at least `least_tolerance`"
        return is_update


def rate_limit(experience: Experience, error_buffer: float) -> RateLimit:
    """Return the limit for the largest replay ratio of the sources; `error_buffer` is a number of transitions."""
    sources = experience.online_sources.values()
    ratio = float(max(source.replay_ratio for source in sources))
    size = max(least_size(source, experience.all_envs) for source in sources)
    steps = rollout_length(experience.algo) * experience.num_envs
    return RateLimit(ratio, size, steps, error_buffer / experience.samples_per_update)


def counts_of(experience: Experience, buffers: dict[str, ReplayState]) -> Counts:
    """Return the counts of a run's replays, which are the same for all of them."""
    name = next(iter(experience.online_sources))
    source, index = experience.online_sources[name], buffers[name].index
    updates = int(index.sampled) // source.batch_size if source.storage == "flashbax" else int(index.updates) % 2**32
    return Counts(int(index.inserted), updates)


def problems(experience: Experience, error_buffer: float) -> list[str]:
    """Return an error line if this limit is impossible, or []. The other settings of the algorithm must be valid."""
    kind = type(experience.algo).__name__
    if not experience.online_sources:
        return [f"error_buffer={error_buffer} needs a replay, but {kind} has none; use error_buffer=None"]
    limit = rate_limit(experience, error_buffer)
    if limit.tolerance >= limit.least_tolerance:
        return []
    least = limit.least_tolerance * experience.samples_per_update
    return [
        f"error_buffer={error_buffer} would make learner and actors wait for each other; use at least {least:g}, the "
        f"transitions sampled by the {limit.least_tolerance:g} updates for the {limit.steps} environment steps of a "
        "round"
    ]
