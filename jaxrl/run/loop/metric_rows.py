"""Rows of training metrics: the period of the rows, and the combination of chunk reports into rows."""

from collections.abc import Mapping

import numpy as np

from jaxrl.core.report import Report, joined

_ROWS = 15, 50  # approximate numbers of rows in short and long runs; each row ends a chunk, which takes milliseconds
_FEWEST_ITERATIONS = 100


def row_period(iterations: int, evaluation_period: int, every: int | None) -> int | None:
    """Return the number of iterations between rows, the same on all machines, or None for a row after every chunk.

    Args:
      iterations: iterations of the run.
      evaluation_period: iterations between evaluations, which also write rows.
      every: the number to return; None: a fifteenth to a fiftieth of the run (a fiftieth from 2,500 iterations on),
        rounded to divide an evaluation period evenly, or None in a run of fewer than 100 iterations.
    """
    if every is not None or iterations < _FEWEST_ITERATIONS:
        return every
    rows = min(max(iterations // 50, _ROWS[0]), _ROWS[1])
    target = iterations // rows
    whole = min(evaluation_period, iterations)
    fewest, most = -(-whole // (2 * iterations // rows)), whole // -(-iterations // (2 * rows))
    near = [whole // parts for parts in range(most, fewest - 1, -1) if whole % parts == 0]
    return min(near, key=lambda n: max(n / target, target / n), default=target)


class TrainingRows:
    """A collector that combines the reports of chunks into rows.

    Args:
      steps_per_iteration: environment steps per iteration.
      transitions: number of transitions in an item of each replay buffer, by name.
    """

    def __init__(self, steps_per_iteration: int, transitions: Mapping[str, int]):
        self._steps, self._transitions = steps_per_iteration, transitions
        self._begin()

    def _begin(self):
        self._parts: list[tuple[Report, int]] = []
        self._timed, self._seconds = 0, 0.0

    def add(self, report: Report, iterations: int, seconds: float | None) -> None:
        """Add the report of a chunk, as numpy arrays, and its seconds (None: not timed, because it compiled)."""
        self._parts.append((report, iterations))
        if seconds is not None:
            self._timed += iterations
            self._seconds += seconds

    def speed(self) -> dict[str, float]:
        """Return a dictionary with "steps_per_second" since the last row; empty if the speed is unknown."""
        return {"steps_per_second": self._timed * self._steps / max(self._seconds, 1e-9)} if self._timed else {}

    def row(self) -> dict[str, float]:
        """Return the finite metrics since the last row, and begin the next row."""
        with np.errstate(invalid="ignore", divide="ignore"):  # means over no episodes are NaN and are left out
            metrics = joined(self._parts).metrics()
            row = {name: float(value) for name, value in metrics.items() if np.isfinite(value)} | self.speed()
        if self._timed:
            updates = row["train/updates"] * self._timed / sum(iterations for _, iterations in self._parts)
            row["updates_per_second"] = updates / max(self._seconds, 1e-9)
            if self._transitions:
                found = sum(row.get(f"update/{name}_found", 0.0) * n for name, n in self._transitions.items())
                row["inserts_per_second"] = row["steps_per_second"]
                row["samples_per_second"] = row["updates_per_second"] * found
        self._begin()
        return row
