"""A group-sequential permutation test of two lists of scores, which determines how many seeds are needed."""

import itertools
from collections.abc import Sequence

import numpy as np


class Comparison:
    """A two-sided test, after each batch, of the hypothesis that two algorithms' scores have the same distribution.

    This is AdaStop (Mathieu et al., 2023, arXiv:2306.10882) for two algorithms. Under the hypothesis, every split of a
    batch's scores into two halves is equally likely, so the difference of the sums so far is compared with those of
    other splits. By the k-th analysis, at most a fraction `level * k / analyses` of all splits is outside the bounds,
    and the hypothesis is rejected once the actual split is. The probability of a false rejection is therefore at most
    `level`. This also holds if the splits are sampled, because the actual split is among them.

    Args:
      batch: scores of each algorithm per analysis.
      analyses: maximum number of analyses.
      level: significance level of the test.
      draws: number of sampled splits, if there are more splits than this.
      seed: seed of the sampled splits.

    Raises:
      ValueError: even fully separated scores could not be significant in the last analysis.
    """

    def __init__(self, batch: int, analyses: int, *, level: float = 0.05, draws: int = 20_000, seed: int = 0):
        self.batch, self.analyses, self.level = batch, analyses, level
        halves = list(itertools.combinations(range(2 * batch), batch))  # the actual split comes first
        self._signs = -np.ones((len(halves), 2 * batch))
        np.put_along_axis(self._signs, np.asarray(halves), 1.0, axis=1)
        if (number := len(halves) ** analyses) * level < 2:  # the split and its mirror image
            raise ValueError(f"{batch * analyses} scores of each cannot differ at a level of {level:g}; use more")
        if number <= draws:
            self._splits = np.asarray(list(itertools.product(range(len(halves)), repeat=analyses)))
        else:
            self._splits = np.random.default_rng(seed).integers(len(halves), size=(draws, analyses))
            self._splits[0] = 0
        self._sums = np.zeros(len(self._splits))
        self._within = np.ones(len(self._splits), bool)
        self.done, self.difference = 0, 0.0

    def add(self, ours: Sequence[float], theirs: Sequence[float]) -> bool:
        """Add the scores of one batch; return whether the hypothesis is rejected.

        Args:
          ours, theirs: `batch` finite scores of each.

        Raises:
          ValueError: the scores are invalid, or the test is over.
        """
        scores = np.concatenate([np.asarray(ours, float), np.asarray(theirs, float)])
        if len(ours) != self.batch or scores.shape != (2 * self.batch,) or not np.isfinite(scores).all():
            raise ValueError(f"{list(ours)} and {list(theirs)}: use {self.batch} finite scores of each")
        if self.done == self.analyses or not self._within[0]:
            raise ValueError("the comparison is over")
        self.difference += float(np.mean(scores[: self.batch]) - np.mean(scores[self.batch :]))
        self._sums += (self._signs @ (scores - scores.mean()))[self._splits[:, self.done]]
        self.done += 1
        apart = np.abs(self._sums)
        may = int(self.level * self.done / self.analyses * len(apart) + 1e-9) - int((~self._within).sum())
        inside = np.sort(apart[self._within])
        if may < len(inside):
            bound = inside[len(inside) - 1 - may]
            # Sums of the same scores in another order differ in their last digits.
            self._within &= apart <= bound + 1e-9 * (bound + np.abs(scores).max())
        return not self._within[0]

    @property
    def verdict(self) -> str:
        """Return the result so far: "A is better", "B is better" or "not shown"."""
        if self._within[0]:
            return "not shown"
        return "A is better" if self.difference > 0 else "B is better"
