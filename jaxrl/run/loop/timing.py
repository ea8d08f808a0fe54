"""Timing of the parts of a run. This module does not import JAX."""

import time
from collections.abc import Callable, Mapping

# import: from the start of the command to the run, including creating the environment and loading a dataset; compile:
# until the first chunk and the first evaluation can run, including creating the initial state; start: replaces compile
# if all programs were in the cache; restore: reading a checkpoint; other: callbacks, logging and everything else.
PARTS = ("import", "start", "compile", "restore", "train", "evaluate", "save", "other")
_NOTES = {"start": " (programs loaded from the cache)"}

_command: list[float] = []  # start time of the command, until its run begins


def command_begins() -> None:
    """Start measuring the import time of a command that will start a run."""
    _command[:] = [time.monotonic()]


def is_for_a_command() -> bool:
    """Return whether this process executes a command whose run has not begun."""
    return bool(_command)


class Laps:
    """A clock that attributes every second to one of `PARTS`; it must be used in only one thread.

    Attributes:
      seconds: seconds of each part.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.began = self._last = clock()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        if _command:
            self.seconds["import"] = self.began - _command.pop()

    def lap(self, part: str, until: float | None = None) -> float:
        """Add the time since the last lap to `part`, and return this time.

        Args:
          part: one of `PARTS`.
          until: end of the lap, by the clock; None: now. Time since then is part of the next lap.
        """
        until = self.clock() if until is None else max(until, self._last)
        took, self._last = until - self._last, until
        self.seconds[part] += took
        return took

    def move(self, seconds: float, source: str, to: str) -> None:
        """Move `seconds`, or all seconds if there are fewer, from the part `source` to the part `to`."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[to] += seconds

    @property
    def session_seconds(self) -> float:
        """The seconds from the beginning of the session to the last lap, without imports."""
        return sum(self.seconds.values()) - self.seconds["import"]

    @property
    def wall(self) -> float:
        """The seconds from the beginning of the session until now."""
        return self.clock() - self.began


class ChunkTimes:
    """A timer of chunks that attributes the first one to compiling and the others to training.

    Args:
      laps: the clock of the run.
    """

    def __init__(self, laps: Laps):
        self._laps = laps
        self._first, self._iterations, self._seconds, self._at_hand = 0, 0, 0.0, 0.0

    def add(self, iterations: int, ended: float, actors: Mapping[str, float]) -> float | None:
        """Add a chunk; return its seconds, or None if they include compilation or exclude the collection of its steps.

        Args:
          iterations: iterations of the chunk.
          ended: clock time at the end of the chunk.
          actors: metrics of host actors at that time: "batches_at_hand", and "compiled" if a later chunk may compile.
        """
        first = not self._first
        seconds = self._laps.lap("compile" if first else "train", until=ended)
        if first or actors.get("compiled"):
            self._first, self._at_hand = self._first or iterations, actors.get("batches_at_hand", 0.0)
            return None
        if self._at_hand > 0.0:
            self._at_hand -= iterations
            return None
        self._iterations += iterations
        self._seconds += seconds
        return seconds

    def steps_per_second(self, rows: int) -> float:
        """Return the environment steps per second without the first chunk, or 0 if there is only one chunk.

        Args:
          rows: environment steps per iteration.
        """
        return self._iterations * rows / max(self._seconds, 1e-9)

    def settle(self, *, all_loaded: bool) -> None:
        """Move the estimated training time of the first chunk from compiling to training.

        Args:
          all_loaded: whether all programs were in the cache, so that the remaining compile time counts as "start".
        """
        self._laps.move(self._first * (self._seconds / max(self._iterations, 1)), "compile", "train")
        if all_loaded:
            self._laps.move(self._laps.seconds["compile"], "compile", "start")


def described(seconds: Mapping[str, float]) -> str:
    """Return a line with the parts that took at least 0.05 seconds."""
    parts = [part for part in PARTS if seconds.get(part, 0.0) >= 0.05]
    return ", ".join(f"{part} {seconds[part]:,.1f}{_NOTES.get(part, '')}" for part in parts)
