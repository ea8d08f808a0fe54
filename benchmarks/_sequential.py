"""A group-sequential permutation test of two lists of scores, which determines how many seeds are needed."""

import itertools
from collections.abc import Sequence

import numpy as np


class Comparison:
    """A two-sided test after each batch of scores, of the hypothesis that two algorithms' scores are alike distributed.

    As AdaStop (Mathieu et al., 2023, arXiv:2306.10882) tests two: under the hypothesis every split of a batch's scores
    into two halves is equally likely, so the difference of the sums so far is held against those of other splits. Of
    all splits a share of at most `level * k / analyses` is beyond the bounds by the k-th analysis; the first time that
    the scores' own is, the hypothesis is rejected. So the chance that it ever is, where it holds, is at most `level`.
    That the splits are drawn, where they are too many to be counted, does not change this: the scores' own is among
    them.

    Args:
      batch: scores of each algorithm in an analysis.
      analyses: how many there are at most.
      level: of the test.
      draws: how many splits, if there are more than that.
      seed: of the draws.

    Raises:
      ValueError: even if all scores are apart, the last analysis could not reject.
    """

    def __init__(self, batch: int, analyses: int, *, level: float = 0.05, draws: int = 20_000, seed: int = 0):
        self.batch, self.analyses, self.level = batch, analyses, level
        halves = list(itertools.combinations(range(2 * batch), batch))  # first those of the scores as they are
        self._signs = -np.ones((len(halves), 2 * batch))
        np.put_along_axis(self._signs, np.asarray(halves), 1.0, axis=1)
        if (number := len(halves) ** analyses) * level < 2:  # the split and its mirror image
            raise ValueError(f"{batch * analyses} scores of each cannot differ at a level of {level:g}: take more")
        if number <= draws:
            self._splits = np.asarray(list(itertools.product(range(len(halves)), repeat=analyses)))
        else:
            self._splits = np.random.default_rng(seed).integers(len(halves), size=(draws, analyses))
            self._splits[0] = 0
        self._sums = np.zeros(len(self._splits))
        self._within = np.ones(len(self._splits), bool)
        self.done, self.difference = 0, 0.0

    def add(self, ours: Sequence[float], theirs: Sequence[float]) -> bool:
        """Take the scores of one more batch; whether the hypothesis is rejected now.

        Args:
          ours, theirs: finite, `batch` of each.

        Raises:
          ValueError: they are not, or the test is over.
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
        """What is shown so far: "A is better", "B is better" or "not shown"."""
        if self._within[0]:
            return "not shown"
        return "A is better" if self.difference > 0 else "B is better"
