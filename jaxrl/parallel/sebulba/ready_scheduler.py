"""The order in which a group acts for the environments that are ready first."""

import numpy as np


class ReadyScheduler:
    """A scheduler that lets every environment of a group act `length` times, in batches of `ready`.

    A batch has exactly `ready` different environments: acting is compiled for that many, and the environments return
    that many. Batches are sent and received whole and `ready` divides the group, so whenever some environments are
    stepping, there are enough to receive a batch.

    This could only fail at the end of a rollout, with fewer than `ready` environments that still have to act. The
    remaining steps can be divided into batches of different environments exactly if no environment has more steps left
    than there are batches left: `max(left) <= sum(left) / ready`. This holds at the beginning, and no turn is taken
    that breaks it. Environments with the most steps left go first, among them the at most `ready` with as many steps
    left as there are batches; so a turn would break it only if one of these is stepping, and can be waited for. If none
    is stepping, `ready` of them can act, since `sum(left) <= count * max(left)`. Hence it never stops before the end.

    Args:
      group: number of environments, all of them received.
      ready: number of environments that act at once; divides `group`.
      length: number of steps of each environment.
    """

    def __init__(self, group: int, ready: int, length: int):
        self._ready, self._length = ready, length
        self._left = np.full(group, length, np.int32)
        self._at_work = np.zeros(group, np.bool_)

    @property
    def over(self) -> bool:
        """True if all have acted and were received."""
        return not (self._at_work.any() or self._left.any())

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the environments that act now, and the step of the rollout for each, int32 [ready].

        They count as stepping from then on. None: others must be received first.
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
