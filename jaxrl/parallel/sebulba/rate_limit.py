"""Which side goes on where a learner draws from a replay while actors insert: the one that is not ahead.

The balance is of updates: the replay ratio times the environment steps that are stored, less the updates that were
made. It stays within a tolerance of what it is when the replay has reached its minimum size. Rows are stored a round at
a time, the rollouts of all groups, which the actors collect meanwhile; rollouts that are not let in wait in their
queues, and so do the actors.
"""

import dataclasses
from collections.abc import Callable
from enum import Enum

from jaxrl.buffers.limiter import HostLimiter, Limits
from jaxrl.buffers.replay import ReplayState, least_size
from jaxrl.core.sources import Replay
from jaxrl.parallel.experience import Experience

_ROUNDING = 1e-6  # updates


class Move(Enum):
    """What the learner does next."""

    INSERT = "stores a round of rollouts that is there"
    SAMPLE = "makes an update"
    WAIT = "is ahead, and waits for a round of rollouts to store"


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

    def limiter(self, inserted: int, updates: int) -> HostLimiter:
        """That of a replay which has seen so many environment steps and updates."""
        ratio, apart = self.replay_ratio, self.tolerance + _ROUNDING
        middle = ratio * self.min_size
        limiter = HostLimiter(Limits(ratio, self.min_size, middle - apart, middle + apart))
        limiter.restore({"inserted": inserted, "sampled": updates, "deleted": 0, "samples_per_insert": ratio})
        return limiter

    def next_move(self, limiter: HostLimiter, is_round_ready: Callable[[], bool]) -> Move:
        """The next move, which is counted.

        Args:
          limiter: as from `limiter`.
          is_round_ready: whether the next rollout of every group is there.
        """
        if is_round_ready() and limiter.await_insert(self.steps, timeout=0.0):
            return Move.INSERT
        if limiter.await_sample(1, timeout=0.0):
            return Move.SAMPLE
        admitted = limiter.await_insert(self.steps, timeout=0.0)
        assert admitted, "a tolerance of `least_tolerance` or more lets one of both sides go on"
        return Move.WAIT


def rate_limit(experience: Experience, error_buffer: float, steps: int) -> RateLimit:
    """That of the replay which asks for the most updates; `error_buffer` is in transitions, `steps` are of a round."""
    sources = experience.online_sources.values()
    ratio = float(max(source.replay_ratio for source in sources))
    size = max(least_size(source, experience.num_envs) for source in sources)
    return RateLimit(ratio, size, steps, error_buffer / experience.samples_per_update)


def counted(experience: Experience, buffers: dict[str, ReplayState]) -> tuple[int, int]:
    """Environment steps that replays have stored since they were empty, and updates that drew from them."""
    name = next(iter(experience.online_sources))
    source, index = experience.algo.experience[name], buffers[name].index
    assert isinstance(source, Replay)
    return int(index.inserted), int(index.sampled) // (source.batch_size - experience.items_of_dataset(source))


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
