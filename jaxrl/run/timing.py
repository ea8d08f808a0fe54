"""Where a run's time goes: every second in one part. Nothing here imports JAX."""

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from jaxrl.run.background import BackgroundTask

# import: from the command's first line to the run, which makes the environment and loads a dataset too; compile: until
# the first chunk and the first evaluation can run, and the initial state is made meanwhile; start: the same where the
# cache held every program, so that none was compiled; restore: a checkpoint; other: callbacks, logging, and what else
# lies between.
PARTS = ("import", "start", "compile", "restore", "train", "evaluate", "save", "other")
_NOTES = {"start": " (programs loaded from the cache)"}

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
        self.clock = clock
        self.began = self._last = clock()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        if _command:
            self.seconds["import"] = self.began - _command.pop()

    def lap(self, part: str, until: float | None = None) -> float:
        """Give the time since the last lap to `part`, and return it.

        Args:
          part: one of `PARTS`.
          until: when the lap ended, by the clock; None: now. What has passed since then is a part of the next lap.
        """
        until = self.clock() if until is None else max(until, self._last)
        took, self._last = until - self._last, until
        self.seconds[part] += took
        return took

    def move(self, seconds: float, source: str, to: str) -> None:
        """Gives seconds of one part to another, at most those it has."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[to] += seconds

    @property
    def session_seconds(self) -> float:
        """Seconds from the beginning to the last lap; imports came before."""
        return sum(self.seconds.values()) - self.seconds["import"]

    @property
    def wall(self) -> float:
        """Seconds from the beginning until now."""
        return self.clock() - self.began


class ChunkTimes:
    """Gives the time of chunks to training, or to compiling where it was the first of them.

    Args:
      laps: the clock of the run.
    """

    def __init__(self, laps: Laps):
        self._laps = laps
        self._first, self._iterations, self._seconds, self._at_hand = 0, 0, 0.0, 0.0

    def add(self, iterations: int, ended: float, actors: Mapping[str, float]) -> float | None:
        """Return the seconds of a chunk; None if it compiled, or holds what actors collected while one compiled.

        Args:
          iterations: of the chunk.
          ended: a time of the clock.
          actors: figures of host actors at its end: "batches_at_hand", "compiled" if a later chunk may compile too.
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
        """Return the speed of the loop alone at `rows` steps an iteration; 0 of a run of one chunk, which compiled."""
        return self._iterations * rows / max(self._seconds, 1e-9)

    def settle(self, *, all_loaded: bool) -> None:
        """Give the first chunk's own time to training, by what those after it took.

        Args:
          all_loaded: the cache held every program, so that what is left of compiling was starting.
        """
        self._laps.move(self._first * (self._seconds / max(self._iterations, 1)), "compile", "train")
        if all_loaded:
            self._laps.move(self._laps.seconds["compile"], "compile", "start")


class Completions:
    """Notes when work that was dispatched has ended, by a clock, in a thread that does nothing else.

    A loop that dispatches a chunk before it reads the report of the one before cannot time chunks by when it reads
    them: where a dispatch blocks until the device has taken the work, or collects experience itself, a chunk would get
    the time of the next one, and the last before a border almost none.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._waiting: queue.SimpleQueue[tuple[Callable[[], object], Future[float]] | None] = queue.SimpleQueue()
        self.task = BackgroundTask(self._run, "completions")  # over after `close`, once nothing is waited for

    def of(self, wait: Callable[[], object]) -> Future[float]:
        """Return the time at which `wait` will have returned or raised. Calls are waited for one after another."""
        ended: Future[float] = Future()
        self._waiting.put((wait, ended))
        return ended

    def close(self) -> None:
        """End the thread, after what it still waits for."""
        self._waiting.put(None)

    def _run(self):
        while (work := self._waiting.get()) is not None:
            wait, ended = work
            with contextlib.suppress(Exception):  # raised where the work's result is read
                wait()
            ended.set_result(self._clock())


def described(seconds: Mapping[str, float]) -> str:
    """Seconds by part in a line, those that matter."""
    parts = [part for part in PARTS if seconds.get(part, 0.0) >= 0.05]
    return ", ".join(f"{part} {seconds[part]:,.1f}{_NOTES.get(part, '')}" for part in parts)
