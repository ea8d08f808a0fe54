"""Learning curves of run directories."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.plots import curves
from jaxrl.plots.curves import Run
from jaxrl.run.directory import MAY_CHANGE, read_config
from jaxrl.run.loggers import read_metrics

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart


def read_run(path: str | os.PathLike) -> Run:
    """Reads a run directory.

    Raises:
      RunDirectoryError: `path` is none.
    """
    path = Path(path)
    return as_run(path.name, read_config(path), read_metrics(path / "metrics.jsonl"))


def as_run(name: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Run:
    """A run as a plot needs it: without the seed, and without what a resumed run may change."""
    return Run(name, {key: value for key, value in config.items() if key not in (*MAY_CHANGE, "seed")}, rows)


def plot_runs(paths: Sequence[str | os.PathLike], out: str | os.PathLike, *, metric: str | None = None) -> "Chart":
    """Draws run directories: one by itself, or the runs of each configuration together.

    Args:
      paths: run directories.
      out: where the picture goes; its suffix gives the format.
      metric: what to draw of several; see `jaxrl.plots.curves.plot_runs`.

    Raises:
      ConfigError: there is no run, or a run has no value of the metric (named).
      RunDirectoryError: a path is no run directory.
    """
    runs = [read_run(path) for path in paths]
    if len(runs) == 1 and metric is None:
        return curves.plot_run(runs[0], out)
    return curves.plot_runs(runs, out, metric=metric)
