"""A study of Optuna, kept as a journal: which settings are tried next, which trial is pruned, and what came of each.

Importing this imports Optuna, an extra; so `jaxrl.tune` does when it is called.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, NonFiniteError, RunDirectoryError
from jaxrl.sweeps.search import LogUniform, Uniform
from jaxrl.sweeps.spaces import Range

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


class Journal(BaseJournalBackend):
    """Optuna's log, a line of JSON each, in a file that no other process writes to meanwhile.

    Raises:
      OSError, ValueError: it is a link or no regular file, too large, or not of JSON.
    """

    def __init__(self, path: Path):
        self._path = path
        with files.open_to_append(path) as file, files.open_to_read(path) as before:
            data = before.read(files.LARGEST + 1)
            if len(data) > files.LARGEST:
                raise ValueError(f"it has more than {files.LARGEST >> 20} MiB")
            whole = data[: data.rfind(b"\n") + 1]
            file.truncate(len(whole))  # a process that is killed may leave part of a line
        self._logs = [files.parse_json(line) for line in whole.splitlines()]

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log) for log in logs]
        with files.open_to_append(self._path) as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self._logs += [json.loads(line) for line in lines]


class Study:
    """The trials so far, and how the next one is chosen. A trial that a process left unfinished does not count.

    The draws for a trial depend on the seed and on how many came before it, so a study that was killed and goes on is
    the study that was not.

    Args:
      path: of the journal; None: nothing is kept.
      ranges: what is searched.
      fixed: settings that all trials have.
      sampler, pruner: names in `SAMPLERS` and `PRUNERS`.
      search_seed: of the sampler.

    Raises:
      RunDirectoryError: what is at `path` is no study.
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
        self._fixed, self._sampler, self._search_seed = dict(fixed), sampler, search_seed
        self._distributions = {name: _distribution(values) for name, values in ranges.items()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                storage=InMemoryStorage() if path is None else JournalStorage(Journal(path)),
                study_name="tune",
                direction="maximize",
                pruner=PRUNERS[pruner](),
                load_if_exists=True,
            )
            for lost in self._study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING)):
                self._study.tell(lost.number, state=TrialState.FAIL)
            self.trials()
        except Exception as error:  # whatever Optuna meets in a log that is none of its own
            raise RunDirectoryError(f"{path} is no study that could be read: {error!r}; move it away") from error

    def trials(self) -> list[Trial]:
        """Those that came to an end, in their order."""
        ended = self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
        return [self._trial(frozen) for frozen in ended]

    def run(self, evaluations: Callable[[dict[str, Any]], Iterator[tuple[float, bool]]]) -> Trial:
        """Tries settings.

        Args:
          evaluations: of a run with these settings: the score, and whether it was the last one. Not asked for more once
            the trial is pruned. ConfigError: the settings do not go together; NonFiniteError: the run failed.
        """
        done = len(self.trials())
        seed = int(np.random.SeedSequence([self._search_seed, done]).generate_state(1)[0])
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
        return self._trial(frozen)

    def _trial(self, frozen: FrozenTrial) -> Trial:
        problem = frozen.user_attrs.get("problem")
        ended = "failed" if problem else "pruned" if frozen.state == TrialState.PRUNED else "finished"
        returns = [value for _, value in sorted(frozen.intermediate_values.items())]
        return Trial(self._fixed | frozen.params, returns, ended, problem)


def _distribution(values: Range) -> BaseDistribution:
    if isinstance(values, Uniform | LogUniform):
        return FloatDistribution(values.low, values.high, log=isinstance(values, LogUniform))
    return CategoricalDistribution(list(values))
