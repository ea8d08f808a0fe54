"""The directories of sweeps and searches: their curves, and where the policy of the best run lies.

sweep.json       what was tried, the scores, and the best run; written last, once all else is there
metrics.jsonl    a row for every configuration, seed and point; what `jaxrl plot` reads
curves.csv       the same as a table, with the settings
table.csv, table.md, curves.png
best/            a run directory with the learner state of the best run, unless that has a directory of its own
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from jaxrl.core import files
from jaxrl.core.errors import RunDirectoryError
from jaxrl.run.directory import SWEEP, read_config, with_new_fields
from jaxrl.run.loggers import read_metrics, write_csv
from jaxrl.run.run_status import is_number

METRICS, BEST, JOURNAL = "metrics.jsonl", "best", "study.journal"
_FORMAT = 1


def write(
    path: Path, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: Sequence[Mapping]
) -> None:
    """Write what was tried and its curves.

    Args:
      path: the directory of the sweep, which is there.
      record: "configs", the configuration of each as `config.json` has it, and what else is to be known of the sweep.
      rows: the metrics of all runs, each with "configuration", its number, "seed" and "step".
      settings: of each configuration, as columns of the table.

    Raises:
      OSError: it cannot be written.
    """
    with files.replacing(path / METRICS) as file:
        file.writelines(files.to_json(dict(row)) + "\n" for row in rows)
    write_csv(path / "curves.csv", [{"configuration": None} | settings[row["configuration"]] | row for row in rows])
    files.write_json(path / SWEEP, {"format": _FORMAT} | dict(record))


def clear(path: Path) -> None:
    """Delete what an earlier sweep of this directory came to."""
    for name in (SWEEP, METRICS, "curves.csv", "table.csv", "table.md", "curves.png"):
        (path / name).unlink(missing_ok=True)


def check_same(path: str | os.PathLike, configs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> None:
    """Refuse a directory with the results of another sweep, which would be lost.

    Args:
      path: the directory.
      configs: the configuration of each kind of run of this sweep.
      seeds: of each configuration.

    Raises:
      RunDirectoryError: it holds the results of other configurations or seeds.
    """
    if not is_sweep(path):
        return
    record = _read(files.expand(path))
    if [record.get("configs"), record.get("seeds")] != files.as_read_back([list(configs), list(seeds)]):
        raise RunDirectoryError(
            f"{path} holds the results of another sweep; use another directory, or overwrite=True (--overwrite) to "
            "delete them"
        )


def is_sweep(path: str | os.PathLike) -> bool:
    """Whether a sweep was completed in this directory."""
    return (files.expand(path) / SWEEP).is_file()


def read_curves(path: str | os.PathLike) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the configuration and the rows of metrics of every run of a sweep, in the order of configurations.

    Raises:
      RunDirectoryError: `path` holds no sweep that could be read.
    """
    path = files.expand(path)
    configs = _read(path).get("configs")
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise RunDirectoryError(f"{path / SWEEP} does not say what was tried, under 'configs'")
    configs = [with_new_fields(config) for config in configs]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in read_metrics(path / METRICS):
        number, seed = row.pop("configuration", None), row.pop("seed", None)
        if type(number) is int and 0 <= number < len(configs) and type(seed) is int:
            rows.setdefault((number, seed), []).append(row)
    return [(configs[number] | {"seed": seed}, found) for (number, seed), found in sorted(rows.items())]


def best_run(path: str | os.PathLike) -> Path:
    """Return the run directory of the best run of a sweep or a search; of any other directory itself.

    Raises:
      RunDirectoryError: there is no best run, or the record of the sweep cannot be read.
    """
    path = files.expand(path)
    if not is_sweep(path):
        return _best_of_search(path) if is_search(path) else path
    best = _read(path).get("best")
    if best is None:
        raise RunDirectoryError(f"{path} holds a sweep without a best run: no run of it has a score")
    place = best.get("run") if isinstance(best, dict) else None
    if not isinstance(place, str) or PurePath(place).is_absolute() or ".." in PurePath(place).parts:
        raise RunDirectoryError(f"{path / SWEEP} does not say where the best run lies, under 'best'")
    return path / place


def is_search(path: str | os.PathLike) -> bool:
    """Whether `jaxrl.tune` keeps a search in this directory."""
    return (files.expand(path) / JOURNAL).is_file()


def read_scores(path: str | os.PathLike) -> tuple[dict[str, Any], list[float]]:
    """Return the settings of a search and the score of every trial, NaN of those that did not finish.

    Raises:
      RunDirectoryError: `path` holds no search that could be read.
    """
    path = files.expand(path)
    config = read_config(path).get("tune")
    scores: dict[int, float] = {}
    try:
        with files.open_to_read(path / JOURNAL) as file:
            for line in file.read(files.LARGEST).splitlines():
                trial = files.parse_json(line)
                last = trial["returns"][-1] if trial["ended"] == "finished" else math.nan
                scores[int(trial.get("number", len(scores)))] = float(last) if is_number(last) else math.nan
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise RunDirectoryError(f"{path / JOURNAL} cannot be read: {error!r:.200}") from error
    return config if isinstance(config, dict) else {}, [scores[number] for number in sorted(scores)]


def _best_of_search(path: Path) -> Path:
    best = path / BEST
    if not (best / "config.json").is_file():
        raise RunDirectoryError(
            f"{path} holds a search without a policy: no trial has finished in this process, or they were on Ray; "
            "train with the best settings, which the end of the search prints"
        )
    return best


def _read(path: Path) -> dict[str, Any]:
    try:
        record = files.read_json(path / SWEEP)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path / SWEEP} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT or isinstance(record["format"], bool):
        raise RunDirectoryError(f"{path / SWEEP} is no record of a sweep that this jaxrl reads")
    return record
