"""A study of Optuna, kept as lines of JSON: which settings are tried next, which trial is pruned, what came of each.

Importing this imports Optuna, an extra; so `jaxrl.tune` does when it is called.
"""

import contextlib
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, NonFiniteError, RunDirectoryError
from jaxrl.run.ending import is_number
from jaxrl.sweeps.search import LogUniform, Uniform
from jaxrl.sweeps.spaces import Range

MOST_TRIALS = 20_000  # of a search: what a file may hold, and what Optuna can choose from in bearable time
_BEGINNING = b'{"settings": '  # of a line
_RUNG = "completed_rung_"  # what successive halving keeps with a trial, and compares later ones with
SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "none": optuna.pruners.NopPruner,
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """Settings that were tried, and what came of them.

    Attributes:
      settings: the fields of the algorithm.
      returns: the mean return over seeds at each evaluation.
      ended: "finished", "pruned", or "failed": a value was not finite, or the settings do not go together.
      problem: of one that failed.
    """

    settings: dict[str, Any]
    returns: list[float]
    ended: str
    problem: str | None = None

    @property
    def score(self) -> float:
        """The last mean return; NaN of a trial that did not finish."""
        return self.returns[-1] if self.ended == "finished" else math.nan


class Study:
    """The trials so far, and how the next one is chosen.

    The draws for a trial depend on the seed and on the trials before it, and one that a process left unfinished is not
    kept; so a study that was killed and goes on is the study that was not.

    Args:
      path: of the file that keeps it, a line of JSON a trial; None: nothing is kept.
      ranges: what is searched.
      fixed: settings that all trials have.
      sampler, pruner: names in `SAMPLERS` and `PRUNERS`.
      search_seed: of the sampler.

    Raises:
      RunDirectoryError: what is at `path` is no study of these ranges.
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
        self._unsaved: list[bytes] = []
        self._told = False
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", pruner=PRUNERS[pruner]())
        try:
            if path is not None:
                self._go_on(path)
        except Exception as error:  # whatever Optuna meets in a trial that is none of its own
            raise RunDirectoryError(
                f"{path} is no study that could be read: {error!r:.300}; if another program or an earlier jaxrl wrote "
                "it, move it away, and the search begins anew"
            ) from error
        self._trials = [self._trial(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def _go_on(self, path: Path) -> None:
        """Takes the trials of the file, which is made if there is none. A last line that was cut short is removed.

        Raises:
          OSError: it is a link or no regular file, or cannot be written to.
          ValueError, TypeError, KeyError: it holds something else, and is left as it is.
        """
        with files.open_to_append(path) as file, files.open_to_read(path) as before:
            data = before.read(files.LARGEST + 1)
            if len(data) > files.LARGEST:
                raise ValueError(f"it has more than {files.LARGEST >> 20} MiB")
            *lines, rest = data.split(b"\n")
            if len(lines) > MOST_TRIALS:
                raise ValueError(f"it has more than {MOST_TRIALS:,} trials")
            for line in lines:
                self._study.add_trial(self._read(files.parse_json(line)))
            if not rest:
                return
            try:
                kept = files.parse_json(rest)
            except ValueError:
                if not rest.startswith(_BEGINNING) and not _BEGINNING.startswith(rest):
                    raise
                file.truncate(len(data) - len(rest))  # a process that is killed may leave part of a line
            else:  # of which an editor took the end of the line
                self._study.add_trial(self._read(kept))
                os.write(file.fileno(), b"\n")

    def trials(self) -> list[Trial]:
        """Those that came to an end, in their order."""
        return list(self._trials)

    def run(self, evaluations: Callable[[dict[str, Any]], Iterator[tuple[float, bool]]]) -> Trial:
        """Tries settings.

        A trial that cannot be written is told once, and written with a later one.

        Args:
          evaluations: of a run with these settings: the score, and whether it was the last one. Not asked for more once
            the trial is pruned. ConfigError: the settings do not go together; NonFiniteError: the run failed.
        """
        seed = int(np.random.SeedSequence([self._search_seed, len(self._trials)]).generate_state(1)[0])
        self._study.sampler = SAMPLERS[self._sampler](seed=seed)
        trial = self._study.ask(self._distributions)
        rung, score, problem, pruned = 0, math.nan, None, False
        try:
            for rung, (score, last) in enumerate(evaluations(self._fixed | trial.params), 1):
                trial.report(score, rung)
                if not last and trial.should_prune():
                    pruned = True
                    break
        except NonFiniteError as error:
            trial.report(math.nan, rung + 1)  # to the sampler the worst of all that came as far
            problem = str(error)
        except ConfigError as error:
            problem = "; ".join(error.problems)
        if problem is not None:
            trial.set_user_attr("problem", problem)
        if pruned or problem is not None:
            frozen = self._study.tell(trial, state=TrialState.PRUNED)
        else:
            frozen = self._study.tell(trial, score)
        self._trials.append(self._trial(frozen))
        if self._path is not None:
            self._keep(self._path, frozen)
        return self._trials[-1]

    def _trial(self, frozen: FrozenTrial) -> Trial:
        problem = frozen.user_attrs.get("problem")
        ended = "finished" if frozen.state == TrialState.COMPLETE else "failed" if problem else "pruned"
        returns = [value for _, value in sorted(frozen.intermediate_values.items())]
        return Trial(self._fixed | frozen.params, returns, ended, problem)

    def _keep(self, path: Path, frozen: FrozenTrial) -> None:
        kept = {
            "settings": frozen.params,
            "returns": [value if math.isfinite(value) else None for value in self._trials[-1].returns],
            "ended": self._trials[-1].ended,
            "problem": self._trials[-1].problem,
            "rungs": {name: value for name, value in frozen.system_attrs.items() if name.startswith(_RUNG)},
        }
        self._unsaved.append((json.dumps(kept, allow_nan=False) + "\n").encode())
        try:
            _append(path, b"".join(self._unsaved))
            self._unsaved = []
        except OSError as error:
            if not self._told:
                what = f"a trial could not be written to {path}: {error}; the search goes on, and tries again"
                warnings.warn(what, RuntimeWarning, stacklevel=3)
            self._told = True

    def _read(self, kept: Any) -> FrozenTrial:
        """The trial that a line keeps.

        Raises:
          ValueError, TypeError, KeyError: it is none of this search.
        """
        params, returns, problem, rungs = (kept[name] for name in ("settings", "returns", "problem", "rungs"))
        finished, failed = kept["ended"] == "finished", kept["ended"] == "failed"
        numbers = [math.nan if value is None else value for value in returns]
        if not all(value is None or is_number(value) for value in returns) or not all(map(is_number, rungs.values())):
            raise ValueError("a return is no number")
        if not set(rungs) <= {f"{_RUNG}{number}" for number in range(len(numbers))}:
            raise ValueError("it was pruned in no way that is known")
        if kept["ended"] not in ("finished", "pruned", "failed") or failed != isinstance(problem, str):
            raise ValueError("it ended in no way that is known")
        if set(params) != set(self._distributions):
            raise ValueError("its settings are not those that are searched")
        params = {  # of the types that are searched
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
            system_attrs=rungs,
            intermediate_values=dict(enumerate(numbers, 1)),
        )


def _append(path: Path, data: bytes) -> None:
    """Adds all of `data` to the file, or nothing.

    Raises:
      OSError: it cannot be written.
    """
    with files.open_to_append(path) as file:
        end, written = os.lseek(file.fileno(), 0, os.SEEK_END), 0
        try:
            while written < len(data):
                written += os.write(file.fileno(), data[written:])
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise


def _distribution(values: Range) -> BaseDistribution:
    if isinstance(values, Uniform | LogUniform):
        return FloatDistribution(values.low, values.high, log=isinstance(values, LogUniform))
    return CategoricalDistribution(list(values))
