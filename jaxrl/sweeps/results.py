"""Results of sweeps: scores, tables and curves, and the directory that contains them and the best policy."""

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import numpy as np

from jaxrl.core import files, ownership
from jaxrl.core.config import encode
from jaxrl.core.errors import JaxrlError, NonFiniteError, RunDirectoryError
from jaxrl.core.types import PyTree
from jaxrl.plots.curves import EVALUATION, TRAINING, interquartile_mean, plot_runs
from jaxrl.plots.labels import Group
from jaxrl.run.directory import sweep_directory
from jaxrl.run.loggers import JSONLLogger
from jaxrl.run.plotting import as_run
from jaxrl.run.result import opened, origin
from jaxrl.sweeps.records import Record, compared, table_of
from jaxrl.sweeps.tables import Tabulated, short, write_tables

if TYPE_CHECKING:
    import pandas

    from jaxrl.plots.chart import Chart


@dataclasses.dataclass(kw_only=True)
class Results(Tabulated):
    """The configurations of a sweep, each with the same seeds, and their scores.

    Attributes:
      configurations: the settings of each configuration.
      seeds: the seeds of each configuration.
      failed: whether a value in a run was not finite or the run raised an error, bool (configurations, seeds).
      steps_per_second: environment steps of all runs per second of training, in the last call that trained any of them.
      wall_seconds: wall time of the same call.
      configs: the contents of `config.json` for each configuration, without the seed.
      origin: the command, the machine and the package versions of the same call.
    """

    _MEMBER = ""  # format of a member's name in plots, for populations

    configurations: list[dict[str, Any]]
    seeds: list[int]
    failed: np.ndarray
    steps_per_second: float
    wall_seconds: float
    configs: list[dict[str, Any]]
    origin: dict[str, Any] = dataclasses.field(default_factory=origin)

    _kind: ClassVar = "a sweep"

    def __repr__(self) -> str:
        runs = f"{len(self.configurations)} configurations x {len(self.seeds)} seeds"
        steps = f"{max((record.steps for record in self.records()), default=0):,} steps"
        if np.isfinite(self.scores).any():
            best = ", ".join(f"{name}={short(value)}" for name, value in self.best.items()) or "the only one"
            found = f"best: {best[:200]}, interquartile mean {np.nanmax(self.interquartile_means):.4g}"
        else:
            found = "no score"
        return f"{type(self).__name__}({runs}, {steps}; {found})"

    def records(self) -> list[Record]:
        """Return the runs with their curves and scores, configuration by configuration."""
        raise NotImplementedError

    @property
    def scores(self) -> np.ndarray:
        """The mean final return of every run, (configurations, seeds); NaN for runs that failed."""
        return np.reshape([record.score for record in self.records()], self.failed.shape)

    @property
    def interquartile_means(self) -> np.ndarray:
        """The interquartile means of the scores over seeds, (configurations,); a failed run counts as the worst."""
        worst = np.nanmin(self.scores) if np.isfinite(self.scores).any() else np.nan
        filled = np.where(np.isnan(self.scores), worst, self.scores)
        return np.asarray([interquartile_mean(row[:, None])[0] for row in filled])

    @property
    def best(self) -> dict[str, Any]:
        """The settings of the configuration with the highest interquartile mean.

        Raises:
          NonFiniteError: no run has a score.
        """
        if (found := self.best_run()) is None:
            raise NonFiniteError("there is no best configuration: every run had NaN or Inf, or finished no episode")
        return self.configurations[found[0]]

    def plot(self, path: str | Path | None = None, *, metric: str = TRAINING) -> "Chart":
        """Plot the interquartile mean over seeds of each configuration, with its bootstrap interval.

        Args:
          path: image file to write, or None; its suffix sets the format.
          metric: the metric to plot; the default is the return in training, with stars for the final evaluations.

        Raises:
          ConfigError: no run has values of the metric, or the format is not supported.
        """
        return plot_runs(self.records(), path, metric=metric)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame with one row per run, as `jaxrl.to_pandas`.

        Raises:
          MissingExtraError: pandas is not installed.
        """
        return table_of(self.records())

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the curves, the table as CSV and Markdown, a plot, and the best policy to a directory.

        `jaxrl.load` and `jaxrl eval` read the best policy from the directory, and `jaxrl plot` reads the curves. The
        best policy is from the configuration with the highest interquartile mean, and from its seed with the highest
        score.

        Args:
          path: the directory, created if missing.
          overwrite: replace the results of another sweep in the directory.

        Returns:
          The directory.

        Raises:
          RunDirectoryError: the directory contains a run, a link, another sweep, or a foreign file with a name that
            jaxrl uses; or it cannot be written to.
          CheckpointError: the policy could not be saved.
        """
        path = files.expand(path)
        sweep_directory.check(path, self._kind, self.configs, self.seeds, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
            ownership.remove(path, self._kind)
            best = None
            if found := self.best_run():
                number, place = found
                best = {"configuration": number, "seed": self.seeds[place], "run": self._save_best(path, number, place)}
            record = {"configurations": encode(self.configurations), "configs": self.configs, "seeds": self.seeds}
            record |= {"scores": self.scores.tolist(), "origin": self.origin, "best": best}
            record |= {name: getattr(self, name) for name in sweep_directory.OF_THE_CALL}
            write_tables(path / "table", self._rows())
            record |= self._draw(path)
            runs = [(at // len(self.seeds), run) for at, run in enumerate(self.records())]
            rows = [{"configuration": number, "seed": run.seed, **row} for number, run in runs for row in run.rows]
            sweep_directory.write(path, record, rows, list(map(self._settings, range(len(self.configurations)))))
        except OSError as error:
            raise RunDirectoryError(f"the results of the sweep cannot be written to {path}: {error}") from error
        return path

    def _draw(self, path: Path) -> dict[str, Any]:
        """Write plots to the directory of the sweep; return additional entries of `sweep.json`."""
        if any(record.rows for record in self.records()):
            self.plot(path / "curves.png")
        return {}

    def best_run(self) -> tuple[int, int] | None:
        """Return the indices of the best configuration and of its best seed; None if no run has a score."""
        has_score = np.isfinite(self.scores)
        if not has_score.any():
            return None
        number = int(np.nanargmax(np.where(has_score.any(axis=1), self.interquartile_means, -np.inf)))
        return number, int(np.nanargmax(self.scores[number]))

    def _save_best(self, path: Path, number: int, place: int) -> str:
        """Write a run directory for the best run if it has none, and return its path relative to `path`."""
        raise NotImplementedError

    def record(self, number: int, place: int, rows: list[dict[str, Any]], score: float) -> Record:
        """Return a run of configuration `number`, with its rows of metrics and its score, NaN if it failed."""
        seed, ended = self.seeds[place], "finished" if np.isfinite(score) else "failed"
        name, member = f"configuration {number}, seed {seed}", self._MEMBER.format(number)
        if np.isfinite(score):
            rows[-1] |= {EVALUATION: float(score)}
        run = as_run(name, self.configs[number] | {"seed": seed}, rows, member=member)
        return Record(**vars(run), family=run.title, settings=self._settings(number), ended=ended)

    def _settings(self, number: int) -> dict[str, Any]:
        found = self.configurations[number].items()
        return {name: value if isinstance(value, int | float | str) else short(value) for name, value in found}

    def _settings_and_scores(self) -> tuple[list[dict[str, Any]], list[float]]:
        records = self.records()
        return [record.settings for record in records], [record.score for record in records]

    def _rows(self) -> list[dict[str, Any]]:
        """Return one row per configuration with the score of every seed, sorted from best to worst."""
        records, each = self.records(), len(self.seeds)
        ranked = compared([Group(list(records[first : first + each])) for first in range(0, len(records), each)])
        return [row | {f"seed {run.seed}": cast("Record", run).score for run in group.runs} for row, group in ranked]


@dataclasses.dataclass(kw_only=True, repr=False)
class SweepResult(Results):
    """The result of a sweep.

    Attributes:
      steps: environment steps at each point of the curves, shape (configurations, points).
      metrics: curves by name, float32 (configurations, seeds, points); NaN where no episode ended.
      returns: returns of the final evaluations, (configurations, seeds, episodes); NaN for unfinished episodes.
      learners: the final learner states, one tree per configuration, with leaves of shape (seeds, ...).
    """

    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    returns: np.ndarray
    learners: list[Any]

    @property
    def scores(self) -> np.ndarray:
        """The mean final return of every run, (configurations, seeds); NaN for runs that failed."""
        with np.errstate(invalid="ignore"):
            means = np.nanmean(np.where(np.isnan(self.returns).all(-1, keepdims=True), 0.0, self.returns), axis=-1)
        return np.where(self.failed | np.isnan(self.returns).all(-1), np.nan, means)

    def records(self) -> list[Record]:
        """Return the runs with their curves and scores, configuration by configuration."""
        found, scores = [], self.scores
        for number, steps in enumerate(self.steps):
            for place in range(len(self.seeds)):
                rows = [
                    {"step": int(step)}
                    | {
                        name: float(x)
                        for name, curve in self.metrics.items()
                        if np.isfinite(x := curve[number, place, at])
                    }
                    for at, step in enumerate(steps)
                ]
                found.append(self.record(number, place, rows, scores[number, place]))
        return found

    def _save_best(self, path: Path, number: int, place: int) -> str:
        """Write a run directory for the best run, and return its path relative to `path`."""
        seed = self.seeds[place]
        run = self.records()[number * len(self.seeds) + place]
        config = self.configs[number] | {"seed": seed, "sweep": {"configuration": number}}
        learner = jax.tree.map(lambda x: x[place], self.learners[number])
        save_policy(path, config, learner, run.rows, float(self.scores[number, place]))
        return sweep_directory.BEST


def save_policy(
    path: Path, config: Mapping[str, Any], learner: PyTree, rows: Sequence[Mapping[str, Any]], score: float
) -> None:
    """Write the policy of the best run in the directory of a sweep or a search, as a run directory within it.

    Args:
      path: the directory of the sweep or the search.
      config: the contents of `config.json` for the run.
      learner: the final learner state.
      rows: rows of metrics of the run; the last one is for the final step.
      score: the return of the final evaluation.

    Raises:
      CheckpointError: the policy could not be saved.
      RunDirectoryError: the path of the run directory contains something else.
    """
    best = path / sweep_directory.BEST
    with opened(best, config, overwrite=True) as (_, checkpointer):
        logger = JSONLLogger(best / sweep_directory.METRICS)
        for row in rows:
            logger.write(row["step"], {name: value for name, value in row.items() if name != "step"})
        logger.close()
        checkpointer.save(rows[-1]["step"], {"learner": jax.device_get(learner)}, score=score)
        checkpointer.wait(last=True)


def leave[Result: Results](result: Result, path: Path | None, *, trained: bool) -> Result:
    """Save a result in the directory of its sweep; warn if this fails, for example on a full disk.

    Args:
      result: the result of this call.
      path: the directory; None: nothing is saved.
      trained: whether this call trained any of the runs. If not, the speed, duration and origin recorded by the
        earlier call are kept.

    Returns:
      The saved result.
    """
    if path is None:
        return result
    if not trained:
        with contextlib.suppress(RunDirectoryError):  # the record is that of another sweep, or is damaged
            sweep_directory.check_same(path, result.configs, result.seeds)
            result = dataclasses.replace(result, **sweep_directory.read_call(path))
    try:
        result.save(path, overwrite=True)
    except JaxrlError as error:
        what = f"the results of the sweep could not be saved: {error}; repeat the same call to try again"
        warnings.warn(what, RuntimeWarning, stacklevel=3)
    return result
