"""Progress display of a run in terminals, log files and notebooks: steps, speed, time left and a table of metrics."""

import atexit
import collections
import contextlib
import datetime
import io
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich import progress as rich_progress
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel

from jaxrl.core import interrupts

_LEAST_INTERVAL = 0.1  # minimum seconds between two updates, each of which takes some milliseconds
RETURN_METRICS = ("train/return_mean", "evaluation/return_mean")  # the first available one is shown
_LABELS = {
    "train/return_mean": "return",
    "evaluation/return_mean": "evaluation return",
    "train/length_mean": "episode length",
}
_IN_TABLE = re.compile(r"loss|entropy|kl$|explained_variance|temperature|epsilon|learning_rate|q_value")
_TABLES = 10  # per run, unless `verbose`
_NOTEBOOK_WIDTH = 100  # characters


class ProgressBar:
    """A progress display: a bar in a terminal, a changing line in a notebook, otherwise a line every few seconds.

    `update` draws the display in the caller's thread. Use the object as a context manager, or call `close`, to restore
    the terminal.

    Args:
      console: the output; None: standard error.
      interval: seconds between lines outside of terminals and notebooks.
      clock: a monotonic clock in seconds.
      unit: plural name of the counted items.
      visible: whether to show the display.
      verbose: whether to show a table of metrics for every row; False: only in terminals, at every tenth of the run.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "steps",
        visible: bool = True,
        verbose: bool = False,
    ):
        self._unit = unit
        self._console = console or Console(stderr=True)
        self._interval = interval
        self._clock = clock
        self._bar: rich_progress.Progress | None = None
        self._notebook: Any = None
        self._open = False
        self._leaving = contextlib.ExitStack()
        self._metrics: dict[str, float] = {}
        self._verbose, self._table_due, self._has_rows = verbose, False, False
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=20)  # times and steps
        self._timed = False
        self._phase: str | None = None
        self._drawn_step, self._printed = -1, ""
        self._drawn_at = -math.inf
        self._gone = not visible  # also set if the output fails: a closed terminal, a full disk

    def start(self, total: int, initial: int = 0, *, timed: bool = False, phase: str | None = None) -> None:
        """Start the display.

        Args:
          total: total number of steps.
          initial: number of steps already done.
          timed: whether the metrics contain the speed as "steps_per_second"; otherwise, it is measured between updates.
          phase: text until the first update, such as "compiling".
        """
        self.total, self._timed, self._phase = total, timed, phase
        self._began = self._clock()
        self._count_from(initial)
        if self._gone:
            return
        self._open = True
        if self._console.is_jupyter:
            from IPython.display import display

            self._notebook = display({"text/plain": self._line()}, raw=True, display_id=True)
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = rich_progress.BarColumn(bar_width=None), rich_progress.TextColumn("{task.description}")
            self._bar = rich_progress.Progress(*columns, console=self._console, auto_refresh=False)
            atexit.register(self.close)
            self._leaving.enter_context(interrupts.cleaning_up(self.close))
            self._bar.start()
            self._bar.add_task(self._line(), total=total, completed=initial)
            self._bar.refresh()
        elif phase is not None:
            self._console.print(phase, markup=False, highlight=False)

    def resume(self, initial: int) -> None:
        """Set the number of steps already done, if it was unknown at `start`."""
        self._count_from(initial)
        if self._bar is not None or self._notebook is not None:
            self._try(lambda: self._show(last=False))

    def _count_from(self, step: int) -> None:
        self.step = self._tabled = step
        self._recent.clear()
        self._recent.append((self._clock(), step))

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Show the number of steps done and the newest metrics."""
        metrics = metrics or {}
        if step > self.step:
            self._try(self._show_table)
        if not self._timed:
            self._recent.append((self._clock(), step))
        elif step > self.step and (speed := metrics.get("steps_per_second", 0.0)) > 0.0:
            ended, before = self._recent[-1]
            self._recent.append((ended + (step - before) / speed, step))
        elif step > self.step:
            self._count_from(step)
        self.step, self._phase = step, None
        self._metrics.update({k: v for k, v in metrics.items() if v is not None and math.isfinite(v)})
        self._try(lambda: self._show(last=False))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a row of metrics, also as a table if one is due, which waits for further rows of the same step."""
        self._has_rows = True
        self.update(step, metrics)
        parts = self.total if self._verbose else _TABLES if self._bar is not None else 0
        self._table_due |= parts * step // self.total > parts * self._tabled // self.total

    def note(self, text: str) -> None:
        """Print a line of text, above the bar if there is one."""
        self._try(lambda: self._console.print(text, markup=False, highlight=False))

    def close(self) -> None:
        """Show the last state and restore the terminal. May be called twice."""
        if not self._open:
            return
        self._open = False
        try:
            self._try(self._show_table)
            self._try(lambda: self._show(last=True))
        finally:
            if self._bar is not None:
                self._try(self._bar.stop)
                atexit.unregister(self.close)
                self._leaving.close()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps_per_second(self) -> float:
        """The speed over the last updates; NaN if unknown."""
        (then, start), (now, step) = self._recent[0], self._recent[-1]
        return (step - start) / (now - then) if now > then else math.nan

    def _try(self, draw: Callable[[], object]) -> None:
        """Draw, and never draw again if the output fails, because a failing display must not end the run."""
        if not self._gone:
            try:
                draw()
            except OSError:
                self._gone = True

    def _show(self, last: bool) -> None:
        is_live = self._bar is not None or self._notebook is not None
        if is_live and not last and self._clock() - self._drawn_at < _LEAST_INTERVAL:
            return
        if is_live:
            self._drawn_at = self._clock()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.step, description=self._line())
            self._bar.refresh()
        elif self._notebook is not None:
            self._notebook.update({"text/plain": self._text()}, raw=True)
        elif self._clock() - self._drawn_at >= self._interval or (last and self.step != self._drawn_step):
            self._drawn_at, self._drawn_step = self._clock(), self.step
            if (line := self._line()) != self._printed:  # after an evaluation, the step may be the same
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._printed = line

    def _show_table(self) -> None:
        if self._table_due:
            self._table_due, self._tabled = False, self.step
            self._console.print(self._table())

    def _text(self) -> str:
        """Return the line and, if there are rows of metrics, the table, for a notebook."""
        if not self._has_rows:
            return self._line()
        plain = Console(file=io.StringIO(), width=_NOTEBOOK_WIDTH, color_system=None, force_jupyter=False)
        with plain.capture() as captured:
            plain.print(self._table())
        return f"{self._line()}\n{captured.get()}".rstrip()

    def _table(self) -> Panel:
        """Return the newest metrics, the speed and the times as a table."""
        updates = {name: name.removeprefix("update/").replace("_", " ") for name in self._metrics}
        labels = _LABELS | {name: text for name, text in updates.items() if name != text and _IN_TABLE.search(name)}
        cells = {text: f"{self._metrics[name]:.4g}" for name, text in labels.items() if name in self._metrics}
        if math.isfinite(rate := self.steps_per_second):
            speed, unit = _speed(rate, self._unit).split()
            cells[unit] = speed
        cells["time elapsed"] = _duration(self._clock() - self._began)
        if (seconds := self._seconds_left) is not None:
            cells["time left"] = _duration(seconds)
        left, right = max(map(len, cells)), max(map(len, cells.values()))
        rows = Columns([f"{text:<{left}} {value:>{right}}" for text, value in cells.items()], padding=(0, 3))
        return Panel(rows, title=f"{self.step:,} / {self.total:,} {self._unit}", border_style="dim", expand=False)

    @property
    def _seconds_left(self) -> float | None:
        rate = self.steps_per_second
        return max(self.total - self.step, 0) / rate if math.isfinite(rate) and rate > 0 else None

    def _line(self) -> str:
        parts = [f"{self.step:,} / {self.total:,} {self._unit}"]
        if self._phase is not None:
            return "  ".join([*parts, self._phase])
        rate = self.steps_per_second
        if math.isfinite(rate):
            parts.append(_speed(rate, self._unit))
        value = next((self._metrics[name] for name in RETURN_METRICS if name in self._metrics), None)
        if value is not None:
            parts.append(f"return {value:.4g}")
        if (left := self._seconds_left) is not None:
            parts.append(f"{_duration(left)} left")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    """Return a duration as text: "00:08" or "7:59:56"."""
    whole = math.ceil(min(seconds, 1e12))  # within the limits of timedelta
    return f"{datetime.timedelta(seconds=whole)}".removeprefix("0:")


def _speed(rate: float, unit: str) -> str:
    """Return a speed as short text: "1.2M steps/s", "2,048 steps/s", or "3.2 s/trial" if the speed is below one."""
    if rate >= 1e6:
        return f"{rate / 1e6:,.1f}M {unit}/s"
    if rate >= 10 or rate <= 0:
        return f"{rate:,.0f} {unit}/s"
    return f"{rate:.3g} {unit}/s" if rate >= 1 else f"{1 / rate:,.1f} s/{unit.removesuffix('s')}"
