"""Which rollouts a learner takes for its next batch: one of every group, or those that are full, the oldest first."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Selection(Protocol):
    """Choose the rollouts of a batch. Groups are numbers, in the order of their environments."""

    # Whether every group's k-th rollout is acted with the same version, and so all of a batch.
    one_version: bool

    @property
    def size(self) -> int:
        """Rollouts of a batch."""
        ...

    def choose(
        self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], taken: Sequence[int], version: int
    ) -> list[int]:
        """Return the groups whose oldest full rollout goes into the batch now; one may be there more than once.

        Args:
          full: for each group the versions of the parameters that its full rollouts were acted with, oldest first.
          collecting: the version that each group acts with now, of those that collect a rollout.
          taken: the groups of the rollouts that are in this batch already.
          version: of the parameters that will learn from the batch.
        """
        ...


class OneOfEveryGroup:
    """A `Selection` of one rollout of every group, taken as they come.

    Args:
      groups: their number.
    """

    one_version = True

    def __init__(self, groups: int):
        self.size = groups

    def choose(
        self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], taken: Sequence[int], version: int
    ) -> list[int]:
        return [group for group in range(self.size) if full[group] and group not in taken]


class OldestFull:
    """A `Selection` of whichever rollouts are full, the oldest parameters first: no group waits for another.

    No rollout is learned from by parameters more than `lag` versions after its own. One of version v that is still
    collected holds the learner up at version v + lag - D + 1, where D is the number of batches that all rollouts at
    hand make (`batches_at_hand`). From then on it is full, and so are all that are as old; no others of that age can
    begin, as by then actors have the next version, which comes a period later. They are at most as many as there are at
    hand and go first, so the last of them is learned from D batches later at most, at version v + lag.

    Args:
      size: rollouts of a batch.
      groups: their number.
      queue: full rollouts of a group that may wait while it collects the next one.
      lag: versions, at least the sum of `batches_at_hand` and of the period of the versions that actors are given.
    """

    one_version = False

    def __init__(self, size: int, groups: int, queue: int, lag: int):
        self.size, self._most = size, lag - batches_at_hand(size, groups, queue)

    def choose(
        self, full: Sequence[Sequence[int]], collecting: Mapping[int, int], taken: Sequence[int], version: int
    ) -> list[int]:
        if any(version - begun > self._most for begun in collecting.values()):
            return []
        # Among rollouts that are as old, first one of every group.
        ranked = sorted((of, place, group) for group, versions in enumerate(full) for place, of in enumerate(versions))
        return [group for *_, group in ranked[: self.size]] if len(ranked) >= self.size else []


def batches_at_hand(size: int, groups: int, queue: int) -> int:
    """Return an upper bound on the batches of `size` rollouts that are full or being collected."""
    return -(-groups * (queue + 1) // size)
