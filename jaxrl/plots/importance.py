"""The importance of settings (the share of the scores' variance that each explains), and a plot of all runs."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.plots.curves import save_chart
from jaxrl.plots.labels import LARGEST
from jaxrl.plots.statistics import is_logarithmic

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart

_GROUPS = (3, 8)  # minimum and maximum number of groups for settings with many values
_MOST_AXES = 10  # maximum number of axes in a figure
_MOST_LINES = 400
_MOST_TICKS = 5  # maximum number of ticks on an axis
_LEAST_DISTANCE = 0.04  # minimum distance between ticks, as a fraction of the axis


def importance(settings: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> dict[str, float]:
    """Return the share of the variance of scores that each setting explains by itself, in descending order.

    The scores are fitted by a sum of effects, one per setting. The share of a setting is the variance of its effect,
    minus the part due to noise, divided by the variance of the scores. This is omega squared (Hays, 1963); on a full
    grid, it is the main effect of functional analysis of variance (Hutter, Hoos and Leyton-Brown, 2014), corrected for
    chance. Seeds and interactions of settings explain the remaining variance. If there are too many distinct values to
    estimate their effects, as in random search, numbers are divided into three to eight groups of equal size.

    Args:
      settings: settings of each run, by name.
      scores: score of each run; NaN for a run that failed, which counts as the worst.

    Returns:
      Shares between 0 and 1; empty if there are too few runs, or all scores are equal.

    Raises:
      ConfigError: the numbers of settings and scores differ.
    """
    if len(settings) != len(scores):
        raise ConfigError(
            f"settings are from {len(settings)} runs, but scores from {len(scores)}; pass one of each per run"
        )
    values = np.asarray(scores, float)
    names = list(dict.fromkeys(name for one in settings for name in one))
    if not names or not np.isfinite(values).any():
        return {}
    values = np.where(np.isfinite(values), values, values[np.isfinite(values)].min())
    values = values - values.mean()
    tried = {name: [one.get(name) for one in settings] for name in names}
    levels = {name: _levels(column) for name, column in tried.items()}
    configurations = len(set(zip(*(found.tolist() for found in levels.values()), strict=True)))
    if 1 + sum(int(found.max()) for found in levels.values()) > min(configurations, len(values) - 1):
        groups = int(np.clip(1 + configurations // (3 * len(names)), *_GROUPS))
        levels = {name: _levels(column, groups) for name, column in tried.items()}
    effects = {
        name: np.eye(found.max() + 1)[found] for name, found in levels.items() if 0 < found.max() < len(values) - 1
    }
    if not effects:
        return {}
    design = np.concatenate([np.ones((len(values), 1)), *effects.values()], axis=1)
    inverse = np.linalg.pinv(design, rcond=1e-9)
    total, free = float(values @ values), len(values) - np.linalg.matrix_rank(design, rtol=1e-9)
    if free < 1 or total <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return {}
    noise = float(np.sum((values - design @ (inverse @ values)) ** 2)) / free
    found, start = {}, 1
    for name, columns in effects.items():
        columns = columns - columns.mean(axis=0)
        weights = inverse[start : start + columns.shape[1]]  # map scores to the effect of each value
        start += columns.shape[1]
        by_noise = noise * float(np.sum((columns.T @ columns @ weights) * weights))
        explained = float(np.sum((columns @ (weights @ values)) ** 2)) - by_noise
        found[name] = float(np.clip(explained / (total + noise), 0.0, 1.0))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def plot_parallel(
    settings: Sequence[Mapping[str, Any]],
    scores: Sequence[float],
    out: str | os.PathLike | None = None,
    *,
    title: str = "",
) -> "Chart":
    """Plot runs as lines across one axis per setting and a last axis for the score (parallel coordinates).

    Settings are in order of importance, and better runs are brighter and on top. An axis of positive numbers that span
    a factor of 20 or more is logarithmic. If the values of a setting are not all finite numbers, they are shown as
    names. Runs without a score are left out; if there are more than 400 runs, 400 of them are drawn, evenly spaced in
    the order of their scores.

    Args:
      settings: settings of each run, by name.
      scores: score of each run.
      out: image file to write, or None; its suffix sets the format.
      title: title of the figure.

    Raises:
      ConfigError: the format is not supported, or the numbers of settings and scores differ.
    """
    from jaxrl.plots import chart

    shares = importance(settings, scores)
    names = list(dict.fromkeys([*shares, *(name for one in settings for name in one)]))[:_MOST_AXES]
    order = [place for place in np.argsort(scores, kind="stable") if np.isfinite(scores[place])]
    order = [order[place] for place in np.linspace(0, len(order) - 1, min(len(order), _MOST_LINES)).astype(int)]
    figure, (axes,) = chart.panels([""], title, "", "")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_xlim(-0.2, len(names) + 0.4)
    axes.set_ylim(-0.05, 1.05)
    labels = [*(f"{name}\n{shares[name]:.0%}" if name in shares else name for name in names), "score"]
    axes.set_xticks(range(len(labels)), [chart.plain(label) for label in labels])
    axes.tick_params("x", length=0, labelsize=7.5 if len(labels) < 7 else 6.5)
    if not order:
        chart.say(axes, "no run has a score")
    columns = [[settings[place].get(name) for place in order] for name in names]
    heights = np.zeros((len(order), len(labels)))
    for place, column in enumerate([*columns, [float(scores[place]) for place in order]]):
        heights[:, place], ticks = _axis(column, place == len(names))
        axes.axvline(place, color="#999999", linewidth=0.8, zorder=0)
        for height, text in ticks:
            written = axes.text(place + 0.03, height, chart.plain(text), fontsize=6.5, va="center")
            written.set(zorder=len(order) + 3, bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.5, "linewidth": 0})
    colors = chart.brightness(heights[:, -1])
    for place, line in enumerate(heights):
        axes.plot(range(len(labels)), line, color=colors[place], linewidth=1.2, alpha=0.8, zorder=place + 1)
    caption = ["Percentages: share of the variance of scores that the setting explains by itself."] if shares else []
    chart.finish(figure, {}, caption)
    return save_chart(figure, out)


def _levels(values: Sequence[Any], groups: int | None = None) -> np.ndarray:
    """Return the index of each value among the distinct values; divide more than `groups` numbers into groups."""
    if not all(_is_number(value) for value in values):
        return np.unique([str(value) for value in values], return_inverse=True)[1]
    numbers = np.asarray(values, float)
    if groups is not None and len(np.unique(numbers)) > groups:
        numbers = np.digitize(numbers, np.quantile(numbers, np.arange(1, groups) / groups))
    return np.unique(numbers, return_inverse=True)[1]


def _axis(column: Sequence[Any], every: bool) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """Return the heights of the values, between 0 and 1, and the ticks; with `every`, the axis is always linear."""
    if not all(_is_number(value) for value in column):
        kinds, places = np.unique([str(value) for value in column], return_inverse=True)
        heights = (np.arange(len(kinds)) + 0.5) / len(kinds)
        return heights[places], [(at, text[:24]) for at, text in zip(heights[:20], kinds.tolist(), strict=False)]
    numbers = np.asarray(column, float)
    if not len(numbers):
        return numbers, []
    scale = np.log if not every and is_logarithmic(numbers) else np.asarray
    low, high = scale(numbers.min()), scale(numbers.max())

    def heights(values):
        return (scale(values) - low) / (high - low) if high > low else np.full(len(values), 0.5)

    distinct = np.unique(numbers)
    if len(distinct) > _MOST_TICKS:
        places = np.linspace(float(low), float(high), 3)
        distinct = np.exp(places) if scale is np.log else places
    ticks = heights(distinct)
    free = np.diff(ticks, prepend=-1.0) >= _LEAST_DISTANCE
    return heights(numbers), [
        (float(at), f"{value:.3g}") for at, value in zip(ticks[free], distinct[free], strict=True)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
