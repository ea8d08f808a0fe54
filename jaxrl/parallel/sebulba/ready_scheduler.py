"""The order in which a group acts for the environments that are ready first."""

import numpy as np


class ReadyScheduler:
    """A scheduler with which every environment of a group acts `length` times, in batches of `ready`.

    A batch has exactly `ready` different environments, as acting is compiled for this number, and the environments
    return this number. Batches are sent and received as a whole, and `ready` divides the group. So if any environments
    are stepping, there are enough to receive a batch.

    This could only fail at the end of a rollout, if fewer than `ready` environments still have to act. The remaining
    steps can be divided into batches of different environments if and only if no environment has more steps left than
    there are batches left: `max(left) <= sum(left) / ready`. This is true at the beginning, and a batch that would
    violate it is not returned. Environments with the most steps left act first, which includes the (at most `ready`)
    environments with as many steps left as there are batches. So a batch would violate the condition only if one of
    these is stepping, and then it can be received first. If none is stepping, `ready` of them can act, since
    `sum(left) <= count * max(left)`. Therefore, the scheduler never stops before the end.

    Args:
      group: number of environments; none of them is stepping.
      ready: number of environments that act at the same time; divides `group`.
      length: number of steps of each environment.
    """

    def __init__(self, group: int, ready: int, length: int):
        self._ready, self._length = ready, length
        self._left = np.full(group, length, np.int32)
        self._at_work = np.zeros(group, np.bool_)

    @property
    def over(self) -> bool:
        """True if all environments have acted and were received."""
        return not (self._at_work.any() or self._left.any())

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the environments that act next, and the step of the rollout of each, int32 [ready].

        They count as stepping afterwards. Return None if others must be received first.
        """
        waiting = np.flatnonzero(~self._at_work & (self._left > 0)).astype(np.int32)
        env_ids = waiting[np.argsort(-self._left[waiting], kind="stable")[: self._ready]]
        left = self._left.copy()
        left[env_ids] -= 1
        if env_ids.size < self._ready or left.max() * self._ready > left.sum():
            return None
        numbers = self._length - self._left[env_ids]
        self._left = left
        self._at_work[env_ids] = True
        return env_ids, numbers

    def came(self, env_ids: np.ndarray) -> None:
        """Record that these environments were received."""
        self._at_work[env_ids] = False
