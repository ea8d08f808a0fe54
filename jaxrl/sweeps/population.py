"""Exploit and explore steps of population-based training (Jaderberg et al., 2017, arXiv:1711.09846).

The host decides which members copy which others, from the scores of all members and a random key that depends on the
point. The devices copy the states.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxrl.algos.base import replace
from jaxrl.core import keys, schedules
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.parallel.multihost import distributed
from jaxrl.sweeps.distributions import Distribution, LogUniform, Uniform
from jaxrl.sweeps.make_train import CompiledRun
from jaxrl.sweeps.search_spaces import Range
from jaxrl.sweeps.vectorized import VectorizedRuns, share

Score = Literal["training", "evaluation"]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Truncation selection of members, and exploration of the hyperparameters that they copy.

    Args:
      fraction: fraction of the members that copy others, and also the fraction that may be copied; each is at least
        one member.
      factor: factor that a copied hyperparameter is multiplied or divided by.
      resample: probability that a copied hyperparameter is sampled from its range instead.
      exploit_from: fraction of the run, at its beginning, in which only failed members copy others.
      score: the score of a member: the mean return of its episodes in "training", or of an "evaluation".
      copy_replay: whether the replay buffer is also copied.
    """

    fraction: float
    factor: float
    resample: float
    exploit_from: float = 0.0
    score: Score = "training"
    copy_replay: bool = False

    def parents(self, rng: np.random.Generator, scores: np.ndarray, failed: np.ndarray) -> np.ndarray:
        """Return the index of the member that each member copies; members that stay unchanged have their own index.

        Args:
          rng: the generator that samples from the best members.
          scores: scores of shape (population,), higher is better; a member with NaN neither copies nor is copied.
          failed: bool (population,); failed members count as the worst, and all of them copy others.

        Returns:
          The index of the copied member for each member, int32 (population,).
        """
        parents = np.arange(len(scores), dtype=np.int32)
        ranked = [int(member) for member in np.argsort(np.where(failed, -np.inf, scores), kind="stable")]
        ranked = [member for member in ranked if failed[member] or not np.isnan(scores[member])]
        most = max(int(self.fraction * len(scores) + 1e-9), 1)  # 0.29 * 100 is 28.999999999999996
        size = min(most, len(ranked) // 2)
        best = [member for member in ranked[len(ranked) - size :] if not failed[member]]
        if best:
            worst = [member for place, member in enumerate(ranked) if place < size or failed[member]]
            parents[worst] = rng.choice(best, len(worst))
        return parents

    def explored(
        self, rng: np.random.Generator, hyperparameters: Sequence["Hyperparameter"], values: np.ndarray
    ) -> np.ndarray:
        """Return the `values` of a copied member, perturbed or resampled, as float32 (hyperparameters,)."""
        found = []
        for one, value in zip(hyperparameters, values, strict=True):
            if rng.random() < self.resample:
                found.append(one.drawn(rng))
            else:
                found.append(one.perturbed(float(value), self.factor if rng.random() < 0.5 else 1 / self.factor))
        return np.asarray(found, np.float32)


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """A field of the algorithm that differs between members, stored as one number: its value, or an index in a list.

    Args:
      name: the field's name.
      values: the range of the field, or the list of its values.
    """

    name: str
    values: Range

    def drawn(self, rng: np.random.Generator) -> float:
        """Return a random value from the range or the list."""
        if isinstance(self.values, Distribution):
            return self.values.draw(rng)
        return float(rng.integers(len(self.values)))

    def perturbed(self, value: float, factor: float) -> float:
        """Return a value near `value`, clipped to the range.

        In a logarithmic range, the value is multiplied by `factor`. In a uniform range, it changes by ln(factor)
        times the width, so that a factor and its inverse change it equally. In a list, it changes to the next or the
        previous entry.
        """
        if isinstance(self.values, LogUniform):
            return min(max(value * factor, self.values.low), self.values.high)
        if isinstance(self.values, Uniform):
            low, high = self.values.low, self.values.high
            return min(max(value + math.log(factor) * (high - low), low), high)
        return min(max(value + math.copysign(1, factor - 1), 0.0), len(self.values) - 1.0)

    def setting(self, value: float) -> Any:
        """Return the value of the field that the number `value` represents."""
        return value if isinstance(self.values, Distribution) else self.values[int(value)]

    def number(self, value: float, progress: float) -> float:
        """Return the value of the field as a number; for a schedule, its value at `progress`."""
        setting = self.setting(value)
        return float(setting(progress)) if schedules.is_schedule(setting) else float(setting)


class Population:
    """The members of a population, with a record of their hyperparameters, scores and copies.

    Args:
      many: the compiled program of this process's members.
      run: the compiled run of any member.
      space: the range of each hyperparameter, by field.
      selection: the rules that select the copies and explore their hyperparameters.
      members: number of members over all processes.
      seed: the population's seed.
      points: number of points; at each point except the last, members may copy others.

    Attributes:
      mine: the members of this process. Each process has the same number of members, so the last may be repeated.
      record: a dictionary of arrays: "values" (points, hyperparameters, population), the hyperparameters in the
        interval before each point; "scores" (points, population), the scores at each point; and "parents" (points,
        population), the index of the member that each member copied at each point, or its own index if it copied none.
    """

    def __init__(
        self,
        many: VectorizedRuns,
        run: CompiledRun,
        space: Mapping[str, Range],
        selection: Selection,
        *,
        members: int,
        seed: int,
        points: int,
    ):
        self.hyperparameters = [Hyperparameter(name, values) for name, values in space.items()]
        self._many, self._run, self._selection, self._root = many, run, selection, keys.root_key(seed)
        self.mine = share(list(range(members)))
        rng = self._rng(0)
        drawn = [[one.drawn(rng) for one in self.hyperparameters] for _ in range(members)]
        self.record = {
            "values": np.zeros((points, len(self.hyperparameters), members), np.float32),
            "scores": np.full((points, members), np.nan, np.float32),
            "parents": np.tile(np.arange(members, dtype=np.int32), (points, 1)),
        }
        self.record["values"][0] = np.asarray(drawn, np.float32).T

    @property
    def members(self) -> int:
        """The number of members over all processes."""
        return self.record["parents"].shape[1]

    def settings(self, point: int, member: int) -> dict[str, Any]:
        """Return the hyperparameters of a member in the interval before a point, by field."""
        values = self.record["values"][point, :, member].tolist()
        return {one.name: one.setting(value) for one, value in zip(self.hyperparameters, values, strict=True)}

    def algos(self, point: int) -> Any:
        """Return the algorithms of this process's members in the interval before a point, stacked."""
        return self._many.stack([replace(self._run.algo, **self.settings(point, member)) for member in self.mine])

    def step(self, point: int, algos: Any, states: RunState, report: Report) -> RunState:
        """Let the worst members copy the best ones (exploit) and vary their settings (explore); return the new states.

        Args:
          point: the current point.
          algos: algorithms of this process's members in the interval before this point.
          states: states of these members; donated.
          report: report of these members since the previous point.
        """
        scores, failed = self._scores(point, algos, states, report)
        record = self.record
        record["scores"][point] = np.where(failed, np.nan, scores)
        if point + 1 == len(record["parents"]):
            return states
        rng = self._rng(point + 1)
        parents = self._selection.parents(rng, scores, failed)
        if point + 1 < self._selection.exploit_from * len(record["parents"]) - 1e-9:  # 0.28 * 100 is 28.000000000000004
            parents = np.where(failed, parents, np.arange(len(parents), dtype=np.int32))
        record["parents"][point], record["values"][point + 1] = parents, record["values"][point][:, parents]
        copies = [(member, int(parent)) for member, parent in enumerate(parents) if member != parent]
        for member, _ in copies:
            values = record["values"][point + 1, :, member]
            record["values"][point + 1, :, member] = self._selection.explored(rng, self.hyperparameters, values)
        # The environments and the replay buffer of a failed member may also contain values that are not finite.
        whole = [(member, parent) for member, parent in copies if failed[member]]
        part = {"learner": states.learner} | ({"buffers": states.buffers} if self._selection.copy_replay else {})
        states = states.replace(**self._many.copied(part, [copy for copy in copies if copy not in whole]))
        if not whole:
            return states
        return self._many.copied(states.replace(key=None), whole).replace(key=states.key)

    def evaluate(self, algos: Any, learners: Any, point: int) -> np.ndarray:
        """Evaluate all members of this process on the same episodes, which depend on `point`.

        Returns:
          The returns, shape (members, episodes).
        """
        key = keys.population_key(self._root, point)
        return self._many.evaluate(algos, learners, self._many.stack([key] * self._many.runs), self._run.settings)

    def _rng(self, point: int) -> np.random.Generator:
        words = np.asarray(jax.random.key_data(keys.population_key(self._root, point)))
        return np.random.default_rng(words.ravel().tolist())

    def _scores(self, point, algos, states, report):
        """Return the scores of the members of all processes, and a bool array of failed members."""
        runs = self._many.runs
        if self._selection.score == "evaluation":
            returns = self.evaluate(algos, states.learner, point)
            counts, totals = np.sum(~np.isnan(returns), axis=-1), np.nansum(returns, axis=-1)
        else:
            counts, totals = (np.asarray(x)[:runs] for x in (report.episodes.count, report.episodes.returns))
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = (totals / counts).astype(np.float32)
        failed = (np.asarray(report.failed_at)[:runs] >= 0) | np.isinf(scores)
        found = distributed.exchange("scores of the members", [scores.tolist(), failed.tolist()])
        every = [sum((one[part] for one in found), []) for part in (0, 1)]
        return np.asarray(every[0], np.float32)[: self.members], np.asarray(every[1], bool)[: self.members]
