"""The ages of a learner's data: the parameters that rollouts are collected with, and the rollouts of the next batch."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Selection:
    """A rule that chooses the parameters of a rollout and the rollouts of a batch; its methods are pure.

    A batch has one rollout of every group, of the same version. With `max_lag` it has the full rollouts with the oldest
    parameters, and no group waits for another: each acts with the newest version.

    With `max_lag`, no rollout is learned from by parameters more than `max_lag` versions after its own. A rollout of
    version v that is still being collected stops the learner at version v + max_lag - D + 1, where D is the number of
    batches that all rollouts at hand make (`batches_at_hand`). When the learner continues, it is full, and so are all
    of the same age; no others of that age can begin, as actors then have the next version, which comes a period later.
    They are at most all rollouts at hand and go first, so the last of them is learned from at most D batches later, at
    version v + max_lag.

    Args:
      size: number of rollouts of a batch.
      groups: number of groups, numbered in the order of their environments.
      queue: number of full rollouts of a group that may wait while it collects the next one.
      lag: number of versions that rollouts are behind, exactly, or rounded down to a multiple of `period`; None: the
        newest version when the first group begins the rollout.
      period: actors only get versions that are multiples of it, and the first one.
      max_lag: versions, at least the sum of `batches_at_hand` and `period`; None: one rollout of every group.
    """

    size: int
    groups: int
    queue: int
    lag: int | None = None
    period: int = 1
    max_lag: int | None = None

    def version_for(self, number: int, first: int, published: Collection[int]) -> int | None:
        """Return the version to collect rollout `number` with, or None if it is not published yet.

        Args:
          number: number of the rollout in the whole run.
          first: number of the first rollout since the actors began.
          published: the versions that actors may get.
        """
        if self.lag is None:
            return max(published, default=None)
        version = max((number - self.lag) // self.period * self.period, first)
        return version if version in published else None

    def choose(self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], version: int) -> list[int]:
        """Return the groups whose oldest full rollouts make the next batch; [] if there is none yet.

        With `max_lag` a group may occur more than once.

        Args:
          full: for each group the versions of the parameters of its full rollouts, oldest first.
          collecting: for each group that collects a rollout, the version with which it acts.
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
    """Return an upper bound on the batches of `size` rollouts that are full or being collected."""
    return -(-groups * (queue + 1) // size)
