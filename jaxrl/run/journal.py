"""The reports of a run: metrics to its files, its loggers and its display, and the warnings that follow from them."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl.core.sources import Episodes, Rollouts
from jaxrl.core.spaces import Box, leaves
from jaxrl.core.types import Algorithm, EnvSpec
from jaxrl.parallel.multihost import distributed
from jaxrl.run import advice
from jaxrl.run.directory import RunDirectory
from jaxrl.run.loggers import Logger, Loggers, read_metrics
from jaxrl.run.progress import ProgressBar
from jaxrl.run.result import metrics_files
from jaxrl.run.run_log import RunLog
from jaxrl.run.timing import Laps


class Journal:
    """The metrics of a run, over all its sessions.

    Args:
      loggers: the user's loggers.
      display: shows the newest values, or None.
      log: the text log, or None.
      laps: the clock of this session.

    Attributes:
      history: the rows of metrics, in order.
      newest: the last value of every metric.
      earlier_seconds: seconds of the earlier sessions.
      laps: the clock of this session.
    """

    def __init__(self, loggers: Sequence[Logger], display: ProgressBar | None, log: RunLog | None, laps: Laps):
        self.history: list[dict[str, float]] = []
        self.newest: dict[str, float] = {}
        self.earlier_seconds = 0.0
        self.laps, self._display, self._log, self._user_loggers = laps, display, log or RunLog(), loggers
        self._files: list[Logger] = []
        self._loggers = Loggers(loggers)
        self._advised: set[str] = set()

    def open(self, directory: RunDirectory, step: int) -> None:
        """Write to the files of a run directory too, after the rows up to `step` there, and show them."""
        if self._display is not None and step:
            self._display.resume(step)
        self._files = metrics_files(directory, step)
        rows = read_metrics(directory.metrics_jsonl)  # None stands for NaN, as an uninterrupted run has it
        self.history = [{name: np.nan if x is None else x for name, x in row.items()} for row in rows]
        self.earlier_seconds = max((row.get("seconds", 0.0) for row in self.history), default=0.0)
        for row in self.history:
            self.newest |= {name: value for name, value in row.items() if name != "step"}
        self._loggers = Loggers([*self._files, *self._user_loggers])

    def seconds(self, until: float | None = None) -> float:
        """Return the seconds of the run over all sessions, until now or until a time of the clock."""
        return self.earlier_seconds + (self.laps.wall if until is None else until - self.laps.began)

    def write(self, step: int, metrics: Mapping[str, float], seconds: float | None = None) -> None:
        """Write a row of metrics.

        Args:
          step: environment steps.
          metrics: by name.
          seconds: seconds of the run; None: until now.
        """
        found = {"seconds": self.seconds() if seconds is None else seconds} | dict(metrics)
        self.history.append({"step": step} | found)
        self.newest |= found
        self._loggers.write(step, found)
        if (score := metrics.get("evaluation/return_mean")) is not None:
            self.log(f"step {step:,}: return {score:.6g} in evaluation")
        if self._display is not None:
            # The step of an evaluation in a thread is an earlier one.
            self._display.update(max(step, self._display.step), found)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show metrics without writing them."""
        if self._display is not None:
            self._display.update(step, metrics)

    def show_video(self, step: int, video: Path) -> None:
        """Pass a video to the loggers that accept one."""
        self._loggers.show(step, video)

    def note(self, text: str) -> None:
        """Show a line, and log it."""
        self.log(text)
        if self._display is not None:
            self._display.note(text)

    def log(self, text: str) -> None:
        """Write a line only to the log."""
        self._log.write(text)

    def advise(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn, once per run and problem, of settings that the metrics show to be wrong."""
        for name, text in advice.of(metrics).items():
            if name not in self._advised and distributed.is_leader():
                warnings.warn(f"at step {step}: {text}", RuntimeWarning, stacklevel=6)
            self._advised.add(name)

    def advise_at_end(
        self,
        algo: Algorithm,
        spec: EnvSpec,
        run_dir: Path | None,
        best_step: int | None,
        *,
        same_env: bool,
        **how: bool,
    ) -> None:
        """Warn of a run that has not learned, or whose greedy actions or last evaluation do not show it.

        Args:
          algo, spec: algorithm and environment spec of the run.
          run_dir: the run directory, or None.
          best_step: step of the best checkpoint, or None.
          same_env, **how: as in `advice.at_end`.
        """
        text = advice.at_end(
            self.history,
            on_policy=all(isinstance(source, Rollouts | Episodes) for source in algo.experience.values()),
            discrete=not any(isinstance(part, Box) for part in leaves(spec.action_space)),
            same_env=same_env and spec.num_agents == 1,  # other agents learn too
            **how,
        )
        for line in (text, advice.below_best(self.history, run_dir, best_step)):
            if line is not None and distributed.is_leader():
                warnings.warn(line, RuntimeWarning, stacklevel=5)

    def drop_files(self) -> None:
        """Stop writing to the run directory, which is gone."""
        self._loggers.drop(self._files)
        self._log.close()

    def close(self, last: str | None = None) -> None:
        """Close the files, and the log after an optional last line. May be called twice."""
        if last is not None:
            self.log(last)
        self._loggers.close()
