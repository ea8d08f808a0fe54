"""Learning curves: interquartile means over runs, with bootstrap intervals (Agarwal et al., 2021, arXiv:2108.13264)."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.core import files
from jaxrl.core.config import flatten
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.limits import checked_seed

if TYPE_CHECKING:
    from jaxrl.plots.chart import Axes, Chart

EVALUATION, TRAINING = "evaluation/return_mean", "train/return_mean"
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito


@dataclasses.dataclass(frozen=True)
class Run:
    """What a plot needs of a run: its name, the rows of its metrics, and its configuration.

    Runs of the same configuration make one curve, so what runs of one curve may differ in is left out of it.
    """

    name: str
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric where it is finite, ascending; empty where there are none."""
        points = {row["step"]: row[metric] for row in self.rows if row.get(metric) is not None}
        steps = np.array(sorted(points), float)
        values = np.array([points[step] for step in sorted(points)], float)
        return steps[np.isfinite(values)], values[np.isfinite(values)]


Plottable = Run | Sequence[Mapping[str, Any]]


def plot_run(run: Plottable, out: str | os.PathLike | None = None) -> "Chart":
    """Draws one run's learning curve: returns while training, and of the evaluations.

    Args:
      run: a run, or the rows of its metrics.
      out: where the picture goes, if anywhere; its suffix gives the format.

    Returns:
      The picture. One without any return yet says so.
    """
    run = _as_run(run, 0)
    figure, axes = _figure(_title(run.config) or run.name)
    drawn = False
    for metric, label, color, alpha, marker in (
        (TRAINING, "training", _COLORS[0], 0.7, ""),
        (EVALUATION, "evaluation", _COLORS[1], 1.0, "o"),
    ):
        steps, values = run.curve(metric)
        if len(steps):
            axes.plot(steps, values, label=label, color=color, alpha=alpha, marker=marker, markersize=4)
            drawn = True
    if drawn:
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "no episode has ended yet", transform=axes.transAxes, ha="center")
    return _saved(figure, out)


def plot_runs(
    runs: Sequence[Plottable],
    out: str | os.PathLike | None = None,
    *,
    metric: str | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> "Chart":
    """Draws the interquartile mean over runs of each configuration, with its bootstrap interval.

    Runs that differ in their seed alone make one curve, over the steps that all of them have reached. A curve of one
    run has no interval.

    Args:
      runs: runs, or the rows of their metrics.
      out: where the picture goes, if anywhere; its suffix gives the format.
      metric: what to draw; if None, the evaluations' return where every run has two or more, else that while training.
      confidence: of the interval.
      resamples: of the bootstrap.
      seed: of the bootstrap.

    Returns:
      The picture.

    Raises:
      ConfigError: there is no run, or a run has no value of the metric (named).
    """
    if not runs:
        raise ConfigError("no runs to plot; give at least one run directory")
    read = [_as_run(run, index) for index, run in enumerate(runs)]
    if metric is None:
        metric = EVALUATION if all(len(run.curve(EVALUATION)[0]) >= 2 for run in read) else TRAINING
    for run in read:
        if not len(run.curve(metric)[0]):
            known = sorted({name for row in run.rows for name in row if name != "step"})
            raise ConfigError(f"run {run.name} has no values of {metric!r}; it has: {', '.join(known) or 'no metrics'}")
    groups = _groups(read)
    titles = {_title(run.config) for run in read}
    figure, axes = _figure(titles.pop() if len(titles) == 1 else "", metric)
    for index, (label, members) in enumerate(groups.items()):
        color = _COLORS[index % len(_COLORS)]
        steps, values = _align([run.curve(metric) for run in members])
        plural = f"{len(members)} runs" if len(members) > 1 else "1 run"
        name = _plain(f"{label} ({plural})") if label else plural
        axes.plot(steps, interquartile_mean(values), color=color, label=name)
        if len(members) > 1:
            low, high = bootstrap_interval([values], confidence=confidence, resamples=resamples, seed=seed)
            axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.legend(frameon=False, fontsize="small")
    return _saved(figure, out)


@dataclasses.dataclass(frozen=True)
class Curves:
    """The curves of one configuration: its label, steps `[points]`, and values `[seeds, points]`, NaN where unknown."""

    label: str
    steps: np.ndarray
    values: np.ndarray


def plot_sweep(
    curves: Sequence[Curves], out: str | os.PathLike | None = None, *, title: str = "", metric: str = TRAINING
) -> "Chart":
    """Draws the mean over seeds of each configuration, and the band between its quartiles.

    Args:
      curves: one a configuration.
      out: where the picture goes, if anywhere; its suffix gives the format.
      title: over the picture.
      metric: what the values are of.

    Returns:
      The picture.

    Raises:
      ConfigError: there is no configuration, or pictures have no such format.
    """
    if not curves:
        raise ConfigError("no curves to plot; a sweep has at least one configuration")
    figure, axes = _figure(title, metric)
    for index, one in enumerate(curves):
        color, values = _COLORS[index % len(_COLORS)], np.asarray(one.values, float)
        known = np.isfinite(values).any(axis=0)  # else no episode had ended yet
        steps, values = np.asarray(one.steps)[known], np.where(np.isfinite(values), values, np.nan)[:, known]
        style = ("-", "--", ":", "-.")[index // len(_COLORS) % 4]
        axes.plot(steps, np.nanmean(values, axis=0), style, color=color, label=_plain(one.label))
        if len(values) > 1 and known.any():
            low, high = np.nanpercentile(values, [25, 75], axis=0)
            axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(curves) // 16)
    return _saved(figure, out)


def plot_trials(scores: Sequence[float], out: str | os.PathLike | None = None, *, title: str = "") -> "Chart":
    """Draws the scores of a search's trials and the best so far.

    Args:
      scores: one a trial, in their order; NaN of those that did not finish.
      out: where the picture goes, if anywhere; its suffix gives the format.
      title: over the picture.

    Returns:
      The picture.

    Raises:
      ConfigError: pictures have no such format.
    """
    figure, axes = _figure(title)
    axes.set_xlabel("trial")
    values = np.asarray(scores, float)
    places = np.arange(len(values))
    axes.plot(places, values, "o", color=_COLORS[5], markersize=4, label="trial")
    best = np.fmax.accumulate(values)
    axes.step(places, best, where="post", color=_COLORS[0], label="best so far")
    axes.legend(frameon=False, fontsize="small")
    return _saved(figure, out)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half over the first axis: a quarter, rounded down, is cut from each end."""
    from scipy import stats  # half a second to import, and only curves of several runs need it

    return stats.trim_mean(scores, 0.25, axis=0)


def bootstrap_interval(
    strata: Sequence[np.ndarray],
    *,
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """A percentile interval of a statistic over runs, resampled within each stratum.

    Args:
      strata: one array a task (or configuration), shape (runs, ...) with two runs or more; the shapes after the runs
        are the same.
      statistic: of an array (all runs, ...) over its first axis, to (...).
      confidence: between 0 and 1.
      resamples: how many; the error of the interval's ends falls with its root.
      seed: the same seed gives the same interval.

    Returns:
      The lower and the upper end, shape (...).

    Raises:
      ConfigError: `confidence` is out of range, the seed is not one, or a stratum has fewer than two runs.
    """
    from scipy import stats

    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: use a number between 0 and 1, such as 0.95")
    if (fewest := min(map(len, strata))) < 2:
        raise ConfigError(f"a stratum has {fewest} runs; an interval needs two or more of each")
    # A few resamples at a time: runs x resamples x points would not fit for long curves.
    points = max(1, int(np.prod(strata[0].shape[1:])))
    found = stats.bootstrap(
        strata,  # several samples are resampled each by itself
        lambda *samples, axis: statistic(np.moveaxis(np.concatenate(samples, axis), axis, 0)),
        axis=0,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=max(1, 4_000_000 // (points * sum(map(len, strata)))),
        rng=np.random.default_rng(checked_seed("seed", seed)),
    )
    return found.confidence_interval


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one configuration labeled by the fields in which it differs from the others."""
    flat = [flatten(run.config) for run in runs]
    names = sorted({name for config in flat for name in config})
    differing = [name for name in names if len({repr(config.get(name)) for config in flat}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, config in zip(runs, flat, strict=True):
        label = ", ".join(f"{name.rsplit('.', 1)[-1]}={config[name]}" for name in differing if name in config)
        groups.setdefault(label, []).append(run)
    return groups


def _align(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Curves at the same steps, [run, step]: those of any, between the latest start and the earliest end."""
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    if not len(grid):
        raise ConfigError(
            f"the runs of one configuration share no steps: one starts at {first:g}, one ends at {last:g}"
        )
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in curves])


def _as_run(run: Plottable, index: int) -> Run:
    if isinstance(run, Run):
        return run
    return Run(f"run {index}", {}, run)


def _title(config: Mapping[str, Any]) -> str:
    """'PPO on gymnax:CartPole-v1', as far as the configuration says."""
    algorithm, environment = (
        found if isinstance(found := config.get(name), Mapping) else {} for name in ("algorithm", "environment")
    )
    place = ":".join(str(environment[key]) for key in ("suite", "name") if environment.get(key))
    return " on ".join(part for part in (str(algorithm.get("type", "")).rpartition(":")[2].upper(), place) if part)


def _figure(title: str, metric: str = TRAINING) -> "tuple[Chart, Axes]":
    from jaxrl.plots import chart  # matplotlib takes seconds to import, and not every run is drawn

    return chart.empty(_plain(title), "return" if metric in (EVALUATION, TRAINING) else _plain(metric))


def _plain(text: str) -> str:
    """Text of files as it stands: between two $ matplotlib would read a formula, and it draws no half of a pair."""
    return files.shown(text[:200]).replace("$", r"\$")


def _saved(figure: "Chart", out: str | os.PathLike | None) -> "Chart":
    if out is not None:
        kind, known = Path(out).suffix.removeprefix(".").lower() or "png", figure.canvas.get_supported_filetypes()
        if kind not in known:
            raise unknown("format of pictures", f".{kind}", [f".{name}" for name in known], f"of {out}")
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(out, "wb") as file:
            figure.savefig(file, format=kind)
    return figure
