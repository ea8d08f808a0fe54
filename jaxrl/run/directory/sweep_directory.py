"""Directories of sweeps and searches: their results, and the location of the best policy.

sweep.json       the configurations, the scores, and the best run; written last
metrics.jsonl    one row for each configuration, seed and point of the curves; read by `jaxrl plot`
curves.csv       the same rows as a table, with the settings
table.csv, table.md, curves.png   the summary table, and a plot of the learning curves
lineage.csv, lineage.png          the lineage of a population and its plot, instead of curves.png
best/            a run directory with the learner state of the best run, unless that run has its own directory
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from jaxrl.core import files, ownership
from jaxrl.core.errors import RunDirectoryError
from jaxrl.plots.labels import EVALUATION
from jaxrl.plots.lineage import Lineage
from jaxrl.run.directory.run_directory import SWEEP, check_below, read_config, with_new_fields
from jaxrl.run.directory.run_status import is_number
from jaxrl.run.loggers import read_metrics, write_csv

METRICS, BEST, JOURNAL = "metrics.jsonl", "best", "study.journal"
OF_THE_CALL = ("steps_per_second", "wall_seconds")  # values of the last call that trained, like "origin"
_FORMAT = 1


def write(
    path: Path, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: Sequence[Mapping]
) -> None:
    """Write the record of a sweep and its curves.

    Args:
      path: the existing directory of the sweep.
      record: "configs", the configurations as in `config.json`, and further entries of `sweep.json`.
      rows: the metrics of all runs, each with "configuration" (its number), "seed" and "step".
      settings: settings of each configuration, as columns of the table.

    Raises:
      OSError: a file cannot be written.
    """
    with files.replacing(path / METRICS) as file:
        file.writelines(files.to_json(dict(row)) + "\n" for row in rows)
    write_csv(path / "curves.csv", [{"configuration": None} | settings[row["configuration"]] | row for row in rows])
    files.write_json(path / SWEEP, {"format": _FORMAT} | dict(record))


def check(
    path: Path, kind: str, configs: Sequence[Mapping[str, Any]], seeds: Sequence[int], *, overwrite: bool
) -> None:
    """Check that the results of a sweep can be saved in a directory without replacing or deleting other files.

    Args:
      path: the directory, which may be missing.
      kind: "a sweep" or "a population".
      configs, seeds: see `check_same`.
      overwrite: whether the results of another sweep of this kind may be replaced.

    Raises:
      RunDirectoryError: the directory contains something else, or a foreign file with a name that jaxrl uses.
    """
    ownership.check_folder(path, kind)
    for program in path.glob("program-[0-9]*"):
        check_below(path, program)
        ownership.check_folder(program, "a program of a sweep")
    check_best(path)
    if not overwrite:
        check_same(path, configs, seeds)


def check_best(path: Path) -> None:
    """Check that the best policy of a sweep or a search can be saved in its directory.

    Raises:
      RunDirectoryError: `best` is a link or a run, or contains a foreign file with a name that jaxrl uses.
    """
    best = path / BEST
    check_below(path, best)
    copied = ownership.folder_kind(best) == "a run" and is_sweep(path)  # a copy of the best run directory
    ownership.check_folder(best, "a run" if copied else "the best policy of a sweep or a search")


def check_same(path: str | os.PathLike, configs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> None:
    """Check that a directory does not contain the results of another sweep, because these would be lost.

    Args:
      path: the directory.
      configs: the configurations of this sweep.
      seeds: the seeds of each configuration.

    Raises:
      RunDirectoryError: the directory contains the results of other configurations or seeds.
    """
    if not is_sweep(path):
        return
    record = _read(path)
    if [record.get("configs"), record.get("seeds")] != files.as_read_back([list(configs), list(seeds)]):
        raise RunDirectoryError(
            f"{path} contains the results of another sweep; use another directory, or overwrite=True (--overwrite) to "
            "delete them"
        )


def is_sweep(path: str | os.PathLike) -> bool:
    """Return whether a sweep was completed in this directory."""
    return (files.expand(path) / SWEEP).is_file()


def place_of(path: Path) -> Hashable:
    """Return a key that identifies the run in the directory `path`, an absolute path without links.

    The key is the path or, for a run in the directory of a sweep, the sweep's path, the number of the configuration and
    the seed.
    """
    for root in path.parents[:2]:  # a run on Ray is two folders below its sweep
        where = str(path.relative_to(root))
        with contextlib.suppress(Exception):  # not a valid record, so the run does not belong to a sweep
            record = _read(root)
            if (best := record["best"]) and best["run"] == where:
                return root, int(best["configuration"]), int(best["seed"])
            for number, runs in enumerate(record["runs"]):
                if where in runs:
                    return root, number, int(record["seeds"][runs.index(where)])
    return path


def read_curves(path: str | os.PathLike) -> list[tuple[int, dict[str, Any], list[dict[str, Any]]]]:
    """Return (number of the configuration, configuration, rows of metrics) for each run of a sweep.

    The last row contains the final evaluation, unless the run failed.

    Raises:
      RunDirectoryError: `path` does not contain a readable sweep.
    """
    path = files.expand(path)
    record = _read(path)
    configs = record.get("configs")
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise RunDirectoryError(f"{path / SWEEP} has no list of configurations under 'configs'")
    configs = [with_new_fields(config) for config in configs]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in read_metrics(path / METRICS):
        number, seed = row.pop("configuration", None), row.pop("seed", None)
        if type(number) is int and 0 <= number < len(configs) and type(seed) is int:
            rows.setdefault((number, seed), []).append(row)
    for (number, seed), found in rows.items():
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            if is_number(score := record["scores"][number][record["seeds"].index(seed)]):
                found.append({"step": found[-1]["step"], EVALUATION: score})
    return [(number, configs[number] | {"seed": seed}, found) for (number, seed), found in sorted(rows.items())]


def read_call(path: str | os.PathLike) -> dict[str, Any]:
    """Return the speed, seconds and "origin" of the call that trained a sweep; empty for other directories.

    The origin consists of the command, the machine and the versions.

    Raises:
      RunDirectoryError: the record of the sweep cannot be read.
    """
    if not is_sweep(path):
        return {}
    found = _read(path)
    origin = found.get("origin")
    numbers = {name: found[name] for name in OF_THE_CALL if is_number(found.get(name))}
    return numbers | {"origin": origin if isinstance(origin, dict) else {}}


def read_lineage(path: str | os.PathLike) -> Lineage | None:
    """Return the lineage of a population (the copies between its members), or None for any other directory.

    Raises:
      RunDirectoryError: the record of the sweep cannot be read.
    """
    found = _read(path).get("lineage") if is_sweep(path) else None
    try:
        return None if found is None else Lineage.from_json(found)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        where = files.expand(path) / SWEEP
        raise RunDirectoryError(f"{where} has an invalid lineage under 'lineage': {error}") from error


def best_run(path: str | os.PathLike) -> Path:
    """Return the directory of the best run of a sweep or search; other directories are returned unchanged.

    Raises:
      RunDirectoryError: there is no best run, or the record of the sweep cannot be read.
    """
    path = files.expand(path)
    if not is_sweep(path):
        return _best_of_search(path) if is_search(path) else path
    best = _read(path).get("best")
    if best is None:
        raise RunDirectoryError(f"{path} contains a sweep without a best run, because none of its runs has a score")
    place = best.get("run") if isinstance(best, dict) else None
    if not isinstance(place, str) or PurePath(place).is_absolute() or ".." in PurePath(place).parts:
        raise RunDirectoryError(f"{path / SWEEP} has an invalid path of the best run under 'best'")
    return path / place


def is_search(path: str | os.PathLike) -> bool:
    """Return whether this directory contains a search of `jaxrl.tune`."""
    return (files.expand(path) / JOURNAL).is_file()


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a search that has ended, with its result.

    Attributes:
      settings: the searched and fixed fields of the algorithm; for a saved trial, only the searched fields.
      returns: the mean return over seeds at each evaluation; may be NaN.
      ended: "finished", "pruned" or "failed" (a value was not finite, the settings are incompatible, or the process was
        lost).
      problem: the reason for a failure.
    """

    settings: dict[str, Any]
    returns: list[float]
    ended: str
    problem: str | None = None

    @property
    def score(self) -> float:
        """The mean return of the last evaluation; NaN for a trial that did not finish."""
        return self.returns[-1] if self.ended == "finished" and self.returns else math.nan


def read_trials(path: str | os.PathLike) -> tuple[dict[str, Any], list[Trial]]:
    """Return the configuration of a search and its trials, in the order of their numbers.

    Raises:
      RunDirectoryError: `path` does not contain a readable search.
    """
    path = files.expand(path)
    config = read_config(path).get("tune")
    trials: dict[int, Trial] = {}
    try:
        with files.open_to_read(path / JOURNAL) as file:
            for line in file.read(files.LARGEST).splitlines():
                trial = files.parse_json(line)
                returns = [float(value) if is_number(value) else math.nan for value in trial["returns"]]
                found = Trial(dict(trial["settings"]), returns, str(trial["ended"]))
                trials[int(trial.get("number", len(trials)))] = found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise RunDirectoryError(f"{path / JOURNAL} cannot be read: {error!r:.200}") from error
    return config if isinstance(config, dict) else {}, [trials[number] for number in sorted(trials)]


def _best_of_search(path: Path) -> Path:
    best = path / BEST
    if not (best / "config.json").is_file():
        raise RunDirectoryError(
            f"{path} contains a search without a policy: no trial has finished, or trials ran on Ray; train with the "
            "best settings, which the search prints at its end"
        )
    return best


def _read(path: str | os.PathLike) -> dict[str, Any]:
    file = files.expand(path) / SWEEP
    try:
        record = files.read_json(file)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT or isinstance(record["format"], bool):
        raise RunDirectoryError(f"{file} is not the record of a sweep in format {_FORMAT}, which this jaxrl reads")
    return record
