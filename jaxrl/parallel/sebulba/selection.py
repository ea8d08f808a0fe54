"""Selections of the rollouts of a learner's next batch: one of every group, or those that are full, oldest first."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Selection(Protocol):
    """A rule that chooses the rollouts of a batch. Groups are numbered in the order of their environments."""

    # Whether every group's k-th rollout uses the same version, and so all rollouts of a batch.
    one_version: bool

    @property
    def size(self) -> int:
        """Number of rollouts of a batch."""
        ...

    def choose(
        self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], taken: Sequence[int], version: int
    ) -> list[int]:
        """Return the groups whose oldest full rollout goes into the batch now; a group may occur more than once.

        Args:
          full: for each group the versions of the parameters of its full rollouts, oldest first.
          collecting: for each group that collects a rollout, the version with which it acts.
          taken: the groups of the rollouts that are in this batch already.
          version: version of the parameters that will learn from the batch.
        """
        ...


class OneOfEveryGroup:
    """A `Selection` of one rollout of every group, taken as they are full.

    Args:
      groups: number of groups.
    """

    one_version = True

    def __init__(self, groups: int):
        self.size = groups

    def choose(
        self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], taken: Sequence[int], version: int
    ) -> list[int]:
        return [group for group in range(self.size) if full[group] and group not in taken]


class OldestFull:
    """A `Selection` of the full rollouts with the oldest parameters: no group waits for another.

    No rollout is learned from by parameters more than `lag` versions after its own. A rollout of version v that is
    still being collected stops the learner at version v + lag - D + 1, where D is the number of batches that all
    rollouts at hand make (`batches_at_hand`). When the learner continues, it is full, and so are all of the same age;
    no others of that age can begin, as actors then have the next version, which comes a period later. They are at most
    all rollouts at hand and go first, so the last of them is learned from at most D batches later, at version v + lag.

    Args:
      size: number of rollouts of a batch.
      groups: number of groups.
      queue: number of full rollouts of a group that may wait while it collects the next one.
      lag: versions, at least the sum of `batches_at_hand` and the period of the versions that actors get.
    """

    one_version = False

    def __init__(self, size: int, groups: int, queue: int, lag: int):
        self.size, self._most = size, lag - batches_at_hand(size, groups, queue)

    def choose(
        self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], taken: Sequence[int], version: int
    ) -> list[int]:
        if any(version - begun > self._most for begun in collecting.values()):
            return []
        # Among rollouts of the same age, first one of every group.
        ranked = sorted((of, place, group) for group, versions in enumerate(full) for place, of in enumerate(versions))
        return [group for *_, group in ranked[: self.size]] if len(ranked) >= self.size else []


def batches_at_hand(size: int, groups: int, queue: int) -> int:
    """Return an upper bound on the batches of `size` rollouts that are full or being collected."""
    return -(-groups * (queue + 1) // size)
