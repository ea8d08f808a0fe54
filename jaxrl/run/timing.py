"""Where a run's time goes: every second in one part. Nothing here imports JAX."""

import time
from collections.abc import Callable, Mapping

# import: from the command's first line to the run, which makes the environment and loads a dataset too; compile: until
# the first chunk and the first evaluation can run, and the initial state is made meanwhile; restore: a checkpoint;
# other: callbacks, logging, and what else lies between.
PARTS = ("import", "compile", "restore", "train", "evaluate", "save", "other")

_command: list[float] = []  # when the command began, until its run has asked


def command_begins() -> None:
    """What is imported from here on is for the command's run, which counts it."""
    _command[:] = [time.monotonic()]


def is_for_a_command() -> bool:
    """Whether this process does one command and ends, and its run has not begun."""
    return bool(_command)


class Laps:
    """A clock that gives every second to one of `PARTS`, in the thread that calls it.

    Attributes:
      seconds: by part, so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.began = self._last = clock()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        if _command:
            self.seconds["import"] = self.began - _command.pop()

    def lap(self, part: str) -> float:
        """Gives the time since the last lap to `part`, and returns it."""
        now = self._clock()
        took, self._last = now - self._last, now
        self.seconds[part] += took
        return took

    def move(self, seconds: float, source: str, to: str) -> None:
        """Gives seconds of one part to another, at most those it has."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[to] += seconds

    @property
    def told(self) -> float:
        """Seconds from the beginning to the last lap; imports came before."""
        return sum(self.seconds.values()) - self.seconds["import"]

    @property
    def wall(self) -> float:
        """Seconds from the beginning until now."""
        return self._clock() - self.began


def described(seconds: Mapping[str, float]) -> str:
    """Seconds by part in a line, those that matter."""
    return ", ".join(f"{part} {seconds[part]:,.1f}" for part in PARTS if seconds.get(part, 0.0) >= 0.05)
