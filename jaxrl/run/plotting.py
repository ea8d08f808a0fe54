"""Plots of run directories: learning curves, search trials and lineages."""

import contextlib
import os
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.core import files
from jaxrl.plots import curves
from jaxrl.plots.curves import Run
from jaxrl.plots.labels import unique_names
from jaxrl.plots.lineage import plot_lineage
from jaxrl.run.directory import sweep_directory
from jaxrl.run.directory.run_directory import MAY_CHANGE, read_config, with_new_fields
from jaxrl.run.loggers import read_metrics

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart


def named(paths: Sequence[str | os.PathLike]) -> list[tuple[str | os.PathLike, str]]:
    """Return pairs (path, unique name), without directories that are listed twice."""
    found = {_resolved(path): path for path in paths}
    return list(zip(found.values(), unique_names([path.parts for path in found], "/"), strict=True))


def _resolved(path):
    path = files.expand(path)
    with contextlib.suppress(ValueError):  # not a valid file name; the error is raised when it is read
        path = path.resolve()
    return path


def read_run(path: str | os.PathLike, name: str = "") -> Run:
    """Read a run directory.

    Args:
      path: the run directory.
      name: name of the run; empty: the name of the directory.

    Raises:
      RunDirectoryError: `path` is not a run directory.
    """
    path = files.expand(path)
    config, rows = with_new_fields(read_config(path)), read_metrics(path / "metrics.jsonl")
    return as_run(name or path.name, config, rows, sweep_directory.place_of(path.resolve()))


def read_runs(path: str | os.PathLike, name: str) -> list[Run]:
    """Return the run in a run directory, or all runs in the directory of a sweep, with the name `name`.

    Raises:
      RunDirectoryError: `path` is neither a run directory nor the directory of a sweep.
    """
    if not sweep_directory.is_sweep(path):
        return [read_run(path, name)]
    place = files.expand(path).resolve()
    is_population = sweep_directory.read_lineage(path) is not None
    return [
        as_run(name, config, rows, (place, number, config["seed"]), f"{name}, member {number}" * is_population)
        for number, config, rows in sweep_directory.read_curves(path)
    ]


def as_run(
    name: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], place: Hashable = (), member: str = ""
) -> Run:
    """Return a run for plotting, without settings that may differ between seeds or when a run is resumed."""
    identity = {key: value for key, value in config.items() if key not in (*MAY_CHANGE, "seed", "sweep")}
    if isinstance(topology := identity.get("topology"), Mapping):  # the devices affect only rounding
        identity["topology"] = {key: value for key, value in topology.items() if key != "devices"}
    seed = config.get("seed")
    return Run(name, identity, rows, seed if type(seed) is int else None, place or object(), member)


def plot_runs(paths: Sequence[str | os.PathLike], out: str | os.PathLike, *, metric: str | None = None) -> "Chart":
    """Plot one run, several runs by configuration, the trials of a search, or the lineage of a population.

    Among several directories, searches are left out with a warning, because they do not have learning curves.

    Args:
      paths: run directories and directories of sweeps, or the directory of one search or population.
      out: the image file; its suffix sets the format.
      metric: the metric to plot for several runs; see `jaxrl.plots.curves.plot_runs`.

    Raises:
      ConfigError: there are no runs, or a run has no value of the metric (the message names it).
      RunDirectoryError: a path is not a run directory.
    """
    runs, found = [], named(paths)
    alone = len(found) == 1 and metric is None
    for path, name in found:
        if not sweep_directory.is_search(path):
            runs += read_runs(path, name)
        elif alone:
            config, trials = sweep_directory.read_trials(path)
            return curves.plot_trials([trial.score for trial in trials], out, title=Run("", config, []).title)
        else:
            warnings.warn(f"{path} is left out, because searches have no learning curves; plot it alone", stacklevel=2)
    if alone and (lineage := sweep_directory.read_lineage(paths[0])) is not None:
        return plot_lineage(lineage, out, title=runs[0].title if runs else "")
    if len(runs) == 1 and metric is None:
        return curves.plot_run(runs[0], out)
    return curves.plot_runs(runs, out, metric=metric)
