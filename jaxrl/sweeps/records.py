"""Records of saved runs, including the runs of sweeps and searches, which can be shown as a table."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.plots.labels import EVALUATION, TRAINING, Group, Run, differing_settings, once
from jaxrl.plots.statistics import bootstrap_interval, interquartile_mean
from jaxrl.run.directory import run_directory, run_status, sweep_directory
from jaxrl.run.plotting import as_run, named, read_runs
from jaxrl.sweeps.tables import data_frame

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Run):
    """A saved run and its result.

    Attributes:
      family: name shared by comparable runs: the algorithm and the environment, and for trials and members also their
        search or population.
      settings: the settings that differ between runs of the family; values other than numbers are converted to text.
      ended: the outcome of the run: "finished", "pruned", "failed" or the reason in `result.json`; empty if unknown.
      result: the contents of `result.json`, or an empty mapping. Runs of a sweep have the sweep's "origin" instead, and
        members of a population also its "lineage".
    """

    family: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended: str = ""
    result: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def score(self) -> float:
        """The mean return of the final evaluation; NaN without an evaluation, and for pruned and failed trials."""
        _, values = self.curve(EVALUATION)
        return float(values[-1]) if len(values) and self.ended not in ("pruned", "failed") else math.nan

    @property
    def steps(self) -> int:
        """The number of environment steps at the last row of metrics; 0 without rows."""
        return max((int(row["step"]) for row in self.rows), default=0)


def read_records(paths: Sequence[str | os.PathLike]) -> list[Record]:
    """Read the runs in directories of runs, sweeps and searches, in the order of the paths.

    The runs of a search are its trials, whose metrics are mean returns over seeds. A run that is passed twice, through
    its own directory and its sweep's, is returned once (see `Run.place`). Members of a population are listed with
    their last settings.

    Raises:
      ConfigError: there are no paths.
      RunDirectoryError: a path is not the directory of a run, a sweep or a search.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not paths:
        raise ConfigError("no runs: pass at least one run directory")
    records = once((record.place, record) for path, name in named(paths) for record in _read(path, name))
    families: dict[str, list[Record]] = {}
    for record in records:
        families.setdefault(record.family, []).append(record)
    for members in families.values():
        for record, settings in zip(members, differing_settings([one.config for one in members]), strict=True):
            last = "last " * bool(record.member)
            record.settings.update({last + name: value for name, value in settings.items()})
    return records


def to_pandas(paths: Sequence[str | os.PathLike]) -> "pandas.DataFrame":
    """Return a data frame of saved runs, including those of sweeps and searches, with one row per run.

    The columns are the run, the algorithm, the environment, the settings that differ between runs, the seed, the
    environment steps, and the last value of every metric ("evaluation/return_mean" is from the final evaluation).

    Args:
      paths: directories of runs, sweeps and searches, or a single directory.

    Raises:
      ConfigError: there are no paths.
      MissingExtraError: pandas is not installed.
      RunDirectoryError: a path is not the directory of a run, a sweep or a search.
    """
    return table_of(read_records(paths))


def table_of(records: Sequence[Record]) -> "pandas.DataFrame":
    """Return the data frame of `to_pandas` for records that were read before.

    Raises:
      MissingExtraError: pandas is not installed.
    """
    rows = []
    for record in records:
        first = {"run": record.name, "algorithm": record.algorithm, "environment": record.environment}
        last = first | {"seed": record.seed, "steps": record.steps, "ended": record.ended}
        rows.append(first | record.settings | last | record.final_metrics())
    return data_frame(rows)


def compared(groups: Sequence[Group]) -> list[tuple[dict[str, Any], Group]]:
    """Return pairs (row, group) for groups of records, the best first.

    A row has the settings and statistics of the scores over seeds. In the interquartile mean and its 95 % interval, a
    run that failed counts as the worst of all; "training" is the interquartile mean of the last training returns.
    """
    found, records = [], [cast("list[Record]", group.runs) for group in groups]
    lowest = min(filter(math.isfinite, (record.score for some in records for record in some)), default=math.nan)
    for group, some in zip(groups, records, strict=True):
        known = np.asarray([*filter(math.isfinite, (record.score for record in some))])
        filled = np.append(known, [lowest] * (sum(record.ended != "pruned" for record in some) - len(known)))
        row = dict(some[0].settings) | {"IQM": _middle(filled)}
        if max(map(len, records)) > 1:
            ends = bootstrap_interval([filled]) if len(filled) > 1 and known.size else (math.nan, math.nan)
            values = known if known.size else np.asarray([math.nan])
            row |= {"low": float(ends[0]), "high": float(ends[1]), "mean": float(values.mean())}
            row |= {"std": float(values.std()), "min": float(values.min()), "max": float(values.max())}
        last = [final[TRAINING] for record in some if TRAINING in (final := record.final_metrics())]
        row |= {"training": _middle(np.asarray(last)), "no score": len(some) - len(known)}
        found.append((row, group))
    return sorted(found, key=lambda pair: -np.nan_to_num(pair[0]["IQM"], nan=-np.inf))


def _middle(values):
    return float(interquartile_mean(values)) if len(values) else math.nan


def _read(path: str | os.PathLike, name: str) -> list[Record]:
    """Read the runs of a directory, which are named after `name`; `settings` are filled in later."""
    if sweep_directory.is_search(path):
        config, trials = sweep_directory.read_trials(path)
        config, most = run_directory.with_new_fields(config), max((len(trial.returns) for trial in trials), default=1)
        total, algorithm = config.get("total_steps"), config.get("algorithm")
        steps = total if type(total) is int and run_status.is_number(total) else most
        fields = algorithm if isinstance(algorithm, dict) else {}
        found = []
        for number, trial in enumerate(trials):
            rows = [
                {"step": round(steps * place / most), EVALUATION: value} for place, value in enumerate(trial.returns, 1)
            ]
            whole = {key: config[key] for key in ("environment", "topology") if key in config}
            whole |= {"algorithm": fields | trial.settings, "seeds": config.get("seeds")}
            run = as_run(f"{name}, trial {number}", whole, rows)
            found.append(Record(**vars(run), family=f"{run.title} ({name})", ended=trial.ended))
        return found
    if sweep_directory.is_sweep(path):
        origin, lineage = sweep_directory.read_call(path)["origin"], sweep_directory.read_lineage(path)
        result, family = {"origin": origin, "lineage": lineage}, f" ({name})" * (lineage is not None)
        found = [Record(**vars(run), family=run.title + family, result=result) for run in read_runs(path, name)]
        return [dataclasses.replace(one, ended="finished" if _has_score(one) else "failed") for one in found]
    [run] = read_runs(path, name)
    result = run_status.read_result(path)
    record = Record(**vars(run), family=run.title, ended=str(result.get("stopped", "")), result=result)
    evaluated = result.get("evaluation", {}).get("return_mean")
    if isinstance(evaluated, float) and math.isfinite(evaluated) and not _has_score(run):  # not logged in the metrics
        record = dataclasses.replace(record, rows=[*run.rows, {"step": record.steps, EVALUATION: evaluated}])
    return [record]


def _has_score(run: Run) -> bool:
    return bool(len(run.curve(EVALUATION)[0]))
