"""Learning curves of run directories."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.core import files
from jaxrl.plots import curves
from jaxrl.plots.curves import Run
from jaxrl.plots.lineage import plot_lineage
from jaxrl.run import sweep_directory
from jaxrl.run.directory import MAY_CHANGE, read_config, with_new_fields
from jaxrl.run.loggers import read_metrics

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart


def read_run(path: str | os.PathLike) -> Run:
    """Reads a run directory.

    Raises:
      RunDirectoryError: `path` is none.
    """
    path = files.expand(path)
    return as_run(path.name, with_new_fields(read_config(path)), read_metrics(path / "metrics.jsonl"))


def read_runs(path: str | os.PathLike) -> list[Run]:
    """Return the run of a run directory, or all runs of a sweep's.

    Raises:
      RunDirectoryError: `path` is neither.
    """
    if not sweep_directory.is_sweep(path):
        return [read_run(path)]
    name = files.expand(path).name
    return [as_run(name, config, rows) for config, rows in sweep_directory.read_curves(path)]


def as_run(name: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Run:
    """Return a run as a plot needs it: without what runs of one configuration, or a resumed run, may differ in."""
    identity = {key: value for key, value in config.items() if key not in (*MAY_CHANGE, "seed", "sweep")}
    if isinstance(topology := identity.get("topology"), Mapping):  # on other devices it is the same run, up to rounding
        identity["topology"] = {key: value for key, value in topology.items() if key != "devices"}
    seed = config.get("seed")
    return Run(name, identity, rows, seed if type(seed) is int else None)


def plot_runs(paths: Sequence[str | os.PathLike], out: str | os.PathLike, *, metric: str | None = None) -> "Chart":
    """Draws run directories: one by itself, or the runs of each configuration together.

    Of a search it draws the trials, of a population the lineage.

    Args:
      paths: run directories, and directories of sweeps; or that of one search or population.
      out: where the picture goes; its suffix gives the format.
      metric: what to draw of several; see `jaxrl.plots.curves.plot_runs`.

    Raises:
      ConfigError: there is no run, or a run has no value of the metric (named).
      RunDirectoryError: a path is no run directory.
    """
    if len(paths) == 1 and metric is None and sweep_directory.is_search(paths[0]):
        config, trials = sweep_directory.read_trials(paths[0])
        return curves.plot_trials([trial.score for trial in trials], out, title=Run("", config, []).title)
    runs = [run for path in paths for run in read_runs(path)]
    if len(paths) == 1 and metric is None and (lineage := sweep_directory.read_lineage(paths[0])) is not None:
        return plot_lineage(lineage, out, title=runs[0].title if runs else "")
    if len(runs) == 1 and metric is None:
        return curves.plot_run(runs[0], out)
    return curves.plot_runs(runs, out, metric=metric)
