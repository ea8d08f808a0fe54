"""Selection of the parameters that rollouts are collected with, and of the rollouts of each batch."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Selection:
    """A rule that selects the parameters of a rollout and the rollouts of a batch. Its methods are pure.

    Without `max_lag`, a batch has one rollout of every group, all with the same version of the parameters. With
    `max_lag`, it has the full rollouts with the oldest parameters, and groups do not wait for each other: each acts
    with the newest version.

    With `max_lag`, parameters never learn from rollouts that are more than `max_lag` versions older. A rollout of
    version v that is still being collected stops the learner at version v + max_lag - D + 1, where D is the number of
    batches that all full and current rollouts make (`batches_at_hand`). When the learner continues, this rollout is
    full, and so are all rollouts of the same age. No other rollouts of that age can begin, as actors have received the
    next version, which is published one period later. These rollouts make at most D batches and are learned from first,
    so the last of them is learned from at most D batches later, at version v + max_lag.

    Args:
      size: number of rollouts of a batch.
      groups: number of groups, numbered in the order of their environments.
      queue: number of full rollouts of a group that may wait while it collects the next one.
      lag: exact age of a rollout's parameters, in versions, before the version is rounded down to a multiple of
        `period`; None: the newest version when the first group begins the rollout.
      period: interval of the versions that actors receive, which are the first version and multiples of this number.
      max_lag: maximum age in versions, at least the sum of `batches_at_hand` and `period`; None: batches of one rollout
        of every group. Infinity for data of any age: the learner never waits for a rollout because of its age.
    """

    size: int
    groups: int
    queue: int
    lag: int | None = None
    period: int = 1
    max_lag: float | None = None

    def version_for(self, number: int, first: int, published: Collection[int]) -> int | None:
        """Return the version for collecting rollout `number`, or None if it is not published yet.

        Args:
          number: number of the rollout in the whole run.
          first: number of the first rollout after the actor threads started.
          published: the versions that were published.
        """
        if self.lag is None:
            return max(published, default=None)
        version = max((number - self.lag) // self.period * self.period, first)
        return version if version in published else None

    def choose(self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], version: int) -> list[int]:
        """Return the groups whose oldest full rollouts form the next batch, or [] if there is no complete batch yet.

        With `max_lag`, a group may occur more than once.

        Args:
          full: versions of the parameters of each group's full rollouts, oldest first.
          collecting: version that each group that is collecting a rollout acts with.
          version: version of the parameters that will learn from the batch.
        """
        if self.max_lag is None:
            return list(range(self.groups)) if all(full) else []
        most = self.max_lag - batches_at_hand(self.size, self.groups, self.queue)
        if any(version - begun > most for begun in collecting.values()):
            return []
        # Among rollouts of the same age, first one of every group.
        ranked = sorted((of, place, group) for group, versions in enumerate(full) for place, of in enumerate(versions))
        return [group for *_, group in ranked[: self.size]] if len(ranked) >= self.size else []


def batches_at_hand(size: int, groups: int, queue: int) -> int:
    """Return the maximum number of batches of `size` rollouts that all full and current rollouts make."""
    return -(-groups * (queue + 1) // size)
