"""Journal of a run, which passes metrics to files, loggers and the progress display, and issues warnings about them."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl.parallel.multihost import distributed
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.directory.run_log import RunLog
from jaxrl.run.loggers import Logger, Loggers, read_metrics
from jaxrl.run.loop import advice
from jaxrl.run.loop.progress import ProgressBar
from jaxrl.run.loop.timing import Laps
from jaxrl.run.result import metrics_files


class Journal:
    """The metrics of a run, including those of its earlier sessions, and the outputs that they are passed to.

    Args:
      loggers: the user's loggers.
      display: progress display, which shows the newest values.
      log: the text log.

    Attributes:
      history: the rows of metrics, in order.
      newest: the newest value of every metric.
      earlier_seconds: total duration of the earlier sessions.
      laps: the clock of this session.
    """

    def __init__(self, loggers: Sequence[Logger], display: ProgressBar, log: RunLog):
        self.history: list[dict[str, float]] = []
        self.newest: dict[str, float] = {}
        self.earlier_seconds = 0.0
        self.laps, self._display, self._log = Laps(), display, log
        self._files, self._loggers = Loggers([]), Loggers(loggers)
        self._advised: set[str] = set()

    def start(self, total_steps: int) -> None:
        """Show that a run of `total_steps` steps is being compiled."""
        self._display.start(total_steps, timed=True, phase="compiling")

    def open(self, directory: RunDirectory, step: int) -> None:
        """Open the files of a run directory, read the rows up to `step`, and delete the rows after it."""
        if step:
            self._display.resume(step)
        self._files = Loggers(metrics_files(directory, step))
        rows = read_metrics(directory.metrics_jsonl)  # the file has null for NaN
        self.history = [{name: np.nan if x is None else x for name, x in row.items()} for row in rows]
        self.earlier_seconds = max((row.get("seconds", 0.0) for row in self.history), default=0.0)
        for row in self.history:
            self.newest |= {name: value for name, value in row.items() if name != "step"}

    def seconds(self, until: float | None = None) -> float:
        """Return the total seconds of all sessions, until now or until the clock time `until`."""
        return self.earlier_seconds + (self.laps.wall if until is None else until - self.laps.began)

    def write(self, step: int, metrics: Mapping[str, float], seconds: float | None = None) -> None:
        """Write a row of metrics.

        Args:
          step: environment steps.
          metrics: metrics by name.
          seconds: duration of the run up to this row; None: up to now.
        """
        found = {"seconds": self.seconds() if seconds is None else seconds} | dict(metrics)
        self.history.append({"step": step} | found)
        self.newest |= found
        self._files.write(step, found)
        self._loggers.write(step, found)
        if (score := metrics.get("evaluation/return_mean")) is not None:
            self.log(f"step {step:,}: return {score:.6g} in evaluation")
        # An evaluation in a thread belongs to an earlier step.
        self._display.report(max(step, self._display.step), found)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show metrics in the progress display without writing them."""
        self._display.update(step, metrics)

    def show_video(self, step: int, video: Path) -> None:
        """Pass a video to the loggers that accept videos."""
        self._files.show(step, video)
        self._loggers.show(step, video)

    def note(self, text: str) -> None:
        """Show a line of text, and write it to the log."""
        self.log(text)
        self._display.note(text)

    def log(self, text: str) -> None:
        """Write a line of text only to the log."""
        self._log.write(text)

    def advise(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn about problems that the metrics show, once per run and problem."""
        for name, text in advice.of(metrics).items():
            if name not in self._advised and distributed.is_leader():
                warnings.warn(f"at step {step}: {text}", RuntimeWarning, stacklevel=6)
            self._advised.add(name)

    def drop_files(self) -> None:
        """Stop writing to the run directory, which was deleted or moved."""
        self._files.abandon()
        self._log.close()

    def close(self, last: str | None = None) -> None:
        """Write `last` to the log if it is given, then close files, loggers and display. May be called twice."""
        if last is not None:
            self.log(last)
        self._files.close()
        self._loggers.close()
        self._display.close()
