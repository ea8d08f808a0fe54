"""Statistics over runs: interquartile means and bootstrap intervals (Agarwal et al., 2021, arXiv:2108.13264)."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import checked_seed

_MOST_POINTS = 1000  # maximum number of points of a curve over several runs; more than a figure can show
_LOGARITHMIC = 20.0  # minimum ratio of the largest to the smallest number for a logarithmic axis


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean over the first axis without the lowest and the highest quarter, whose sizes are rounded down."""
    from scipy import stats  # takes half a second to import, and only curves of several runs need it

    return stats.trim_mean(scores, 0.25, axis=0)


def bootstrap_interval(
    strata: Sequence[np.ndarray],
    *,
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a percentile bootstrap interval of a statistic over runs, which are resampled within each stratum.

    Args:
      strata: one array per task (or configuration), shape (runs, ...) with at least two runs; all dimensions except the
        first must be equal.
      statistic: function that reduces the first axis of an array of shape (all runs, ...).
      confidence: confidence level, between 0 and 1.
      resamples: number of resamples; the error of the interval's ends decreases with its square root.
      seed: seed of the resampling; the same seed results in the same interval.

    Returns:
      The lower and the upper end, shape (...).

    Raises:
      ConfigError: `confidence` is out of range, the seed is invalid, or a stratum has fewer than two runs.
    """
    from scipy import stats

    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: use a number between 0 and 1, such as 0.95")
    if (fewest := min(map(len, strata))) < 2:
        raise ConfigError(f"a stratum has {fewest} runs; an interval needs at least two per stratum")
    # A few resamples at a time: runs x resamples x points would not fit for long curves.
    points = max(1, int(np.prod(strata[0].shape[1:])))
    found = stats.bootstrap(
        strata,  # scipy resamples each of several samples separately
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


def is_logarithmic(values: np.ndarray) -> bool:
    """Return whether an axis of finite `values` should be logarithmic: they are positive and span a factor of 20."""
    return bool(len(values) and 0 < _LOGARITHMIC * values.min() <= values.max())


def align(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate curves at common steps, without extrapolating beyond a curve's first and last points.

    Args:
      curves: ascending steps and finite values of each run, at least one point each.

    Returns:
      The steps of all runs in ascending order, thinned to at most 1,000 if there are several runs; and the values at
      these steps, shape (runs, steps), NaN before a run's first point and after its last.
    """
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    if len(curves) > 1 and len(grid) > _MOST_POINTS:
        ends = [steps[place] for steps, _ in curves for place in (0, -1)]
        grid = np.union1d(grid[np.linspace(0, len(grid) - 1, _MOST_POINTS - len(ends), dtype=int)], ends)
    return grid, np.stack([np.interp(grid, steps, values, left=np.nan, right=np.nan) for steps, values in curves])


@dataclasses.dataclass(frozen=True)
class Summary:
    """A curve over several runs; all arrays have shape (points,).

    Attributes:
      steps: ascending steps.
      center: interquartile mean of the runs that have a value at the step.
      low, high: bootstrap interval of `center`; NaN where fewer than two runs have a value.
    """

    steps: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray


def summarize(curves: Sequence[tuple[np.ndarray, np.ndarray]], *, resamples: int = 2000) -> Summary:
    """Return the interquartile mean over runs, with its 95 % bootstrap interval.

    Args:
      curves: as in `align`; if there are none, the summary has no points.
      resamples: see `bootstrap_interval`.
    """
    if not curves:
        return Summary(*(np.zeros(0) for _ in range(4)))
    steps, values = align(curves)
    center, low, high = (np.full(len(steps), np.nan) for _ in range(3))
    # Each run covers one contiguous range of steps, so there are at most twice as many combinations of runs as runs.
    present, pattern = np.unique(np.isfinite(values), axis=1, return_inverse=True)
    for number, runs in enumerate(present.T):
        points = pattern.ravel() == number
        some = values[runs][:, points]
        if len(some) == 1:
            center[points] = some[0]
        elif len(some) > 1:
            center[points] = interquartile_mean(some)
            low[points], high[points] = bootstrap_interval([some], resamples=resamples)
    return Summary(steps, center, low, high)
