"""Learning curves: interquartile means over runs, with bootstrap intervals (Agarwal et al., 2021, arXiv:2108.13264)."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxrl.core import files, ownership
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.plots import labels
from jaxrl.plots.labels import EVALUATION, TRAINING, Group, Run
from jaxrl.plots.statistics import bootstrap_interval, interquartile_mean, summarize

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart

__all__ = [
    "EVALUATION",
    "TRAINING",
    "Plottable",
    "Run",
    "bootstrap_interval",
    "interquartile_mean",
    "plot_run",
    "plot_runs",
    "plot_trials",
]

_NONE = "no episode has ended yet"
_NAMES = {TRAINING: "training return", EVALUATION: "evaluation return"}

Plottable = Run | Sequence[Mapping[str, Any]]


def plot_run(run: Plottable, out: str | os.PathLike | None = None) -> "Chart":
    """Plot one run's learning curve: the returns in training and in evaluations.

    Args:
      run: a run, or the rows of its metrics.
      out: image file to write, or None; its suffix sets the format.

    Returns:
      The figure, with a note if there is no return yet.
    """
    from jaxrl.plots import chart  # matplotlib takes seconds to import, and not every run is plotted

    run = _as_run(run, 0)
    figure, (axes,) = chart.panels([""], run.title or run.name, "steps", "return")
    handles = {}
    for place, (metric, label) in enumerate(((TRAINING, "training"), (EVALUATION, "evaluation"))):
        steps, values = run.curve(metric)
        if len(steps):
            drawn = chart.style(place, False)
            if metric == EVALUATION:
                drawn |= {"marker": "o", "markersize": 4}
            (handles[label],) = axes.plot(steps, values, label=label, **drawn)
    if not handles:
        chart.say(axes, _NONE)
    chart.finish(figure, handles)
    return save_chart(figure, out)


def plot_runs(
    runs: Sequence[Plottable] | Sequence[Group],
    out: str | os.PathLike | None = None,
    *,
    metric: str | None = None,
    resamples: int = 2000,
) -> "Chart":
    """Plot the interquartile mean over the runs of each configuration, with its 95 % bootstrap interval.

    Runs that differ only in their seed form one curve. Each environment has a panel; a label has only what differs: the
    algorithm, the settings in which configurations of one algorithm and environment differ, and the number of runs. A
    run contributes only between its first and last value, so a curve begins with the first value of any of its runs. A
    curve of one run has no interval. Stars next to curves of training returns are the interquartile means of the last
    evaluations.

    Args:
      runs: runs, or the rows of their metrics; or some of the groups of `jaxrl.plots.labels.grouped`, whose curves have
        the same styles in each figure.
      out: image file to write, or None; its suffix sets the format.
      metric: the metric to plot; None: the evaluation return if every run has at least two evaluations, otherwise the
        training return.
      resamples: number of resamples of the bootstrap.

    Returns:
      The figure.

    Raises:
      ConfigError: there are no runs, no run has values of the metric (close names are suggested), or the format is not
        supported.
    """
    if not runs:
        raise ConfigError("no runs to plot; pass at least one run directory")
    from jaxrl.plots import chart

    groups = [run for run in runs if isinstance(run, Group)]
    if not groups:
        read = map(_as_run, cast("Sequence[Plottable]", runs), itertools.count())
        groups = labels.grouped(labels.once((run.place, run) for run in read))
    read = [run for group in groups for run in group.runs]
    if metric is None:
        metric = EVALUATION if all(len(run.curve(EVALUATION)[0]) >= 2 for run in read) else TRAINING
    _check_metric(metric, read)
    names, curves = labels.labels(groups), [_curves(group, metric) for group in groups]
    environments = list(dict.fromkeys(group.runs[0].environment for group in groups))
    figure, panels = chart.panels(environments, labels.title(read), "steps", _NAMES.get(metric, metric))
    counts = {}
    for name in names:
        counts[name] = _count([found for found, other in zip(curves, names, strict=True) if other == name])
    over, *others = set(counts.values())
    handles, stars = {}, None
    for group, name, found in zip(groups, names, curves, strict=True):
        axes = panels[environments.index(group.runs[0].environment)]
        drawn = chart.style(group.style, len(counts) > 1)
        label = f"{name} ({counts[name]})" if others else name
        summary = summarize(found, resamples=resamples)
        (line,) = axes.plot(summary.steps, summary.center, label=chart.plain(label), **drawn)
        handles.setdefault(label, line)
        if len(found) > 1:
            axes.fill_between(summary.steps, summary.low, summary.high, color=drawn["color"], alpha=0.2, linewidth=0)
        if metric == TRAINING and (last := [(steps[-1], values[-1]) for steps, values in _curves(group, EVALUATION)]):
            step, score = interquartile_mean(np.asarray(last))
            stars = axes.scatter(
                step, score, 80, drawn["color"], marker="*", edgecolors="white", zorder=3, clip_on=False
            )
    for axes in panels:
        if not any(np.size(line.get_xdata()) for line in axes.get_lines()):
            chart.say(axes, _NONE)
    caption = []
    if any(len(found) > 1 for found in curves):
        of = "runs" if others else over
        caption.append(f"Lines: interquartile mean over {of}. Bands: 95 % bootstrap confidence intervals.")
    if stars:
        caption.append(
            "Lines: return in training. Stars: return of the last evaluation, by which tables of sweeps are ordered."
        )
    chart.finish(figure, handles if len(handles) > 1 else {}, caption)
    return save_chart(figure, out)


def plot_trials(scores: Sequence[float], out: str | os.PathLike | None = None, *, title: str = "") -> "Chart":
    """Plot the scores of a search's trials and the best score so far.

    Args:
      scores: the score of each trial, in order; NaN for trials that did not finish.
      out: image file to write, or None; its suffix sets the format.
      title: title of the figure.

    Returns:
      The figure.

    Raises:
      ConfigError: the format is not supported.
    """
    from jaxrl.plots import chart

    figure, (axes,) = chart.panels([""], title, "trial", "mean evaluation return")
    values = np.asarray(scores, float)
    places = np.arange(len(values))
    trial, best = "trial", "best so far"
    (dots,) = axes.plot(places, values, "o", color=chart.COLORS[3], markersize=4, label=trial)
    (line,) = axes.step(places, np.fmax.accumulate(values), where="post", color=chart.COLORS[0], label=best)
    chart.finish(figure, {trial: dots, best: line})
    return save_chart(figure, out)


def _check_metric(metric: str, runs: Sequence[Run]) -> None:
    """Raise a ConfigError if no run has a value of the metric."""
    if any(len(run.curve(metric)[0]) for run in runs):
        return
    known = {name for run in runs for row in run.rows for name, value in row.items() if value is not None} - {"step"}
    places = list(dict.fromkeys(run.name for run in runs))  # the runs of a sweep share its name
    names = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    if metric in _NAMES:
        if any(run.rows for run in runs):
            return  # the figure notes that no episode has ended yet
        raise ConfigError(f"no value of {metric} in {names}: no metrics were written")
    raise unknown("metric", metric, known, f"searched: {names}")


def _curves(group: Group, metric: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the curve of a metric for each run in the group that has values of it."""
    return [curve for curve in (run.curve(metric) for run in group.runs) if len(curve[0])]


def _count(curves: Sequence[Sequence[Any]]) -> str:
    """Return the number of runs of a configuration's curves: "3 runs", or "3 to 5 runs" if panels differ."""
    counts = sorted({len(found) for found in curves})
    if counts[-1] == 0:
        return "no values"
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} run{'s' * (counts[-1] > 1)}"


def _as_run(run: Plottable, index: int) -> Run:
    return run if isinstance(run, Run) else Run(f"run {index}", {}, run)


def save_chart(figure: "Chart", out: str | os.PathLike | None) -> "Chart":
    """Write a figure to `out` if given; its suffix sets the format. Return the figure.

    Raises:
      ConfigError: the format is not supported, or `out` is a file that jaxrl did not write.
    """
    if out is not None:
        out = files.expand(out)
        kind, known = (
            out.suffix.removeprefix(".").lower() or "png",
            figure.canvas.get_supported_filetypes(),
        )
        if kind not in known:
            raise unknown("image format", f".{kind}", [f".{name}" for name in known], f"of {out}")
        ownership.check_output(out, kind)
        out.parent.mkdir(parents=True, exist_ok=True)
        mark = {"Software" if kind == "png" else "Creator": ownership.MARK}
        with files.replacing(out, "wb") as file:
            figure.savefig(file, format=kind, metadata=mark if kind in ("eps", "pdf", "png", "ps", "svg") else None)
    return figure
