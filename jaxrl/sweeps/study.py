"""An Optuna study stored as lines of JSON, which chooses settings, prunes trials and records their results.

This module imports Optuna, an optional dependency, so `jaxrl.tune` imports this module only when it is called.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, JaxrlError, NonFiniteError, RunDirectoryError
from jaxrl.run.directory.run_status import is_number
from jaxrl.run.directory.sweep_directory import Trial
from jaxrl.sweeps.distributions import MOST_TRIALS, Distribution, LogUniform
from jaxrl.sweeps.search_spaces import Range

SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    # Running trials count as poor, so that new trials are not close to them.
    "tpe": functools.partial(optuna.samplers.TPESampler, constant_liar=True),
    "random": optuna.samplers.RandomSampler,
}
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "none": optuna.pruners.NopPruner,
}


@dataclasses.dataclass
class UnderWay:
    """A running trial.

    Attributes:
      number: index among all trials, in the order in which they started.
      settings: the values of the algorithm's fields.
      trial: the trial in Optuna.
      rung: number of evaluations so far.
    """

    number: int
    settings: dict[str, Any]
    trial: optuna.trial.Trial
    rung: int = 0


class Study:
    """The trials of a search so far, with the method that chooses the settings of new trials.

    The settings of a trial depend on the seed, its number, and the trials that have ended or are running. A trial whose
    process was killed is discarded and its number is used again. Therefore, if trials run one at a time, a study that
    was killed and resumed equals an uninterrupted one.

    Args:
      path: file with one JSON line per trial that ended; None: nothing is stored.
      ranges: the ranges to search, by field.
      fixed: settings of all trials.
      sampler, pruner: names in `SAMPLERS` and `PRUNERS`.
      search_seed: the sampler's seed.

    Raises:
      RunDirectoryError: the file at `path` is not a study of these ranges.
    """

    def __init__(
        self,
        path: Path | None,
        ranges: Mapping[str, Range],
        fixed: Mapping[str, Any],
        sampler: str,
        pruner: str,
        search_seed: int,
    ):
        self._path, self._fixed, self._sampler, self._search_seed = path, dict(fixed), sampler, search_seed
        self._distributions = {name: _distribution(values) for name, values in ranges.items()}
        self._trials: dict[int, Trial] = {}  # by number
        self._begun: set[int] = set()  # numbers of the trials that are running or have ended
        self._lines: list[bytes] = []
        self._has_warned = False
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", pruner=PRUNERS[pruner]())
        try:
            if path is not None:
                self._resume(path)
        except Exception as error:  # Optuna may raise any error for another program's trial
            raise RunDirectoryError(
                f"{path} cannot be read as a study: {error!r:.300}; if another program or an earlier jaxrl wrote it, "
                "move it away to start a new search"
            ) from error

    def _resume(self, path: Path) -> None:
        """Read the trials of the file, which is created if missing.

        Raises:
          OSError: the file is a link or not a regular file, or cannot be written to.
          ValueError, TypeError, KeyError: the file is not a study of these ranges; it is left unchanged.
        """
        with files.open_to_append(path), files.open_to_read(path) as file:
            data = file.read(files.LARGEST + 1)
        if len(data) > files.LARGEST:
            raise ValueError(f"the file is larger than the limit of {files.LARGEST >> 20} MiB")
        self._lines = data.splitlines()
        if len(self._lines) > MOST_TRIALS:
            raise ValueError(f"the file has more than {MOST_TRIALS:,} trials")
        for line in self._lines:
            self._add(files.parse_json(line))

    def trials(self) -> list[Trial]:
        """Return the trials that ended, in the order of their numbers."""
        return [self._trials[number] for number in sorted(self._trials)]

    @property
    def begun(self) -> int:
        """The number of trials that have ended or are running."""
        return len(self._begun)

    @property
    def next_number(self) -> int:
        """The lowest number without a trial."""
        return min(set(range(len(self._begun) + 1)) - self._begun)

    def begin(self) -> UnderWay:
        """Begin a new trial and choose its settings; other trials may be running."""
        number = self.next_number
        high, low = divmod(self._search_seed, 1 << 32)  # the high word comes last, where a 0 has no effect
        seed = int(np.random.SeedSequence([low, number, high]).generate_state(1)[0])
        self._study.sampler = SAMPLERS[self._sampler](seed=seed)
        trial = self._study.ask(self._distributions)
        self._begun.add(number)
        return UnderWay(number, self._fixed | trial.params, trial)

    def take(self, under_way: UnderWay, outcome: tuple[float, bool] | JaxrlError) -> Trial | None:
        """Record the outcome of the next evaluation of a trial.

        If a trial that ended cannot be written to the file, a warning is issued once, and the trial is written again
        together with a later one.

        Args:
          under_way: the trial.
          outcome: the score and whether it was the last evaluation; or an error: `ConfigError` if the settings are
            incompatible, `NonFiniteError` if the run failed, or another error if the process was lost.

        Returns:
          The trial if it has ended, or None if its training continues.
        """
        under_way.rung += 1
        trial = under_way.trial
        if isinstance(outcome, JaxrlError):
            trial.set_user_attr("problem", "; ".join(getattr(outcome, "problems", [str(outcome)])))
            if isinstance(outcome, NonFiniteError):
                trial.report(math.nan, under_way.rung)  # the sampler treats NaN as the worst score
            frozen = self._study.tell(trial, state=TrialState.PRUNED)
        else:
            score, last = outcome
            trial.report(score, under_way.rung)
            if last:
                frozen = self._study.tell(trial, score)
            elif trial.should_prune():
                frozen = self._study.tell(trial, state=TrialState.PRUNED)
            else:
                return None
        self._trials[under_way.number] = self._trial(frozen)
        if self._path is not None:
            self._keep(self._path, under_way.number, frozen)
        return self._trials[under_way.number]

    def run(self, evaluations: Callable[[dict[str, Any]], Iterator[tuple[float, bool]]]) -> Trial:
        """Run one trial in this process.

        Args:
          evaluations: generator function that takes the settings and yields the score of each evaluation and whether it
            was the last one. It is not resumed after the trial was pruned. It raises ConfigError if the settings are
            incompatible, and NonFiniteError if the run failed.
        """
        under_way = self.begin()
        found = evaluations(under_way.settings)
        while True:
            try:
                outcome = next(found)
            except (ConfigError, NonFiniteError) as error:
                outcome = error
            if (ended := self.take(under_way, outcome)) is not None:
                return ended

    def _trial(self, frozen: FrozenTrial) -> Trial:
        """Convert a trial of Optuna that ended to a `Trial`."""
        problem = frozen.user_attrs.get("problem")
        ended = "finished" if frozen.state == TrialState.COMPLETE else "failed" if problem else "pruned"
        returns = [value for _, value in sorted(frozen.intermediate_values.items())]
        return Trial(self._fixed | frozen.params, returns, ended, problem)

    def _keep(self, path: Path, number: int, frozen: FrozenTrial) -> None:
        """Write a trial that ended, together with all earlier ones, to the file; warn once if this fails."""
        record = dataclasses.asdict(self._trials[number]) | {"settings": frozen.params}
        if number != len(self._trials) - 1:  # otherwise it equals the line's index
            record["number"] = number
        self._lines.append(files.to_json(record).encode())
        try:
            with files.replacing(path, "wb") as file:
                file.writelines(line + b"\n" for line in self._lines)
        except OSError as error:
            if not self._has_warned:
                what = f"a trial could not be written to {path}: {error}; the search continues and tries again"
                warnings.warn(what, RuntimeWarning, stacklevel=4)
            self._has_warned = True

    def _add(self, record: Any) -> None:
        """Add the trial stored in a line of the file.

        Raises:
          ValueError, TypeError, KeyError: the line is not a trial of this search.
        """
        frozen, number = self._read(record), record.get("number", len(self._trials))
        if type(number) is not int or not 0 <= number < MOST_TRIALS or number in self._trials:
            raise ValueError(f"the trial number {number!r:.80} is invalid, or occurs twice")
        self._study.add_trial(frozen)
        self._trials[number] = self._trial(frozen)
        self._begun.add(number)

    def _read(self, record: Any) -> FrozenTrial:
        """Convert the trial stored in a line of the file to a trial of Optuna.

        Raises:
          ValueError, TypeError, KeyError: the line is not a trial of this search.
        """
        params, returns, problem = (record[name] for name in ("settings", "returns", "problem"))
        finished, failed = record["ended"] == "finished", record["ended"] == "failed"
        numbers = [math.nan if value is None else value for value in returns]
        if not all(value is None or is_number(value) for value in returns):
            raise ValueError("a return of a trial is not a number")
        if record["ended"] not in ("finished", "pruned", "failed") or failed != isinstance(problem, str):
            raise ValueError("the outcome of a trial must be finished, pruned, or failed with a problem")
        if set(params) != set(self._distributions):
            raise ValueError("a trial does not have the same settings as this search")
        params = {  # converted to the types of the ranges
            name: values.to_external_repr(values.to_internal_repr(params[name]))
            for name, values in self._distributions.items()
        }
        last = numbers[-1] if numbers and not math.isnan(numbers[-1]) else None
        return optuna.trial.create_trial(
            state=TrialState.COMPLETE if finished else TrialState.PRUNED,
            value=last,
            params=params,
            distributions=self._distributions,
            user_attrs={"problem": problem} if failed else {},
            intermediate_values=dict(enumerate(numbers, 1)),
        )


def _distribution(values: Range) -> BaseDistribution:
    """Convert a range to a distribution of Optuna."""
    if isinstance(values, Distribution):
        return FloatDistribution(values.low, values.high, log=isinstance(values, LogUniform))
    return CategoricalDistribution(list(values))
