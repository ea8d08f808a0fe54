"""Rows of `benchmarks/zoo.toml`: their commands and target scores, training, and records."""

import contextlib
import dataclasses
import json
import pathlib
import shlex
import shutil
import time
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import _record
import numpy as np

ZOO = _record.HERE / "zoo.toml"
MOST_POINTS = 50  # of a curve in a record
_REQUIRED = {"algorithm": {"algorithm", "environment", "steps"}, "preset": {"preset"}}
_OPTIONAL = {"settings", "variant", "published", "source", "worst", "mean", "worst_missed", "mean_missed"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Arguments of `jaxrl sweep` and target scores: `worst` for the worst seed, `mean` for the mean over seeds.

    `worst_missed` and `mean_missed` describe by how much a target is currently missed; the other target still applies.
    `variant` is the name in tables of an algorithm with non-default settings.
    """

    name: str
    command: str
    published: str
    worst: float = -np.inf
    mean: float = -np.inf
    worst_missed: str = ""
    mean_missed: str = ""
    variant: str = ""

    @property
    def kind(self) -> str:
        return "preset" if self.command.startswith("--preset ") else "defaults"

    @property
    def record(self) -> str:
        """The name of the row's record in a results folder."""
        return f"learning-{self.kind}-{self.name}"


class Missed(AssertionError):
    """Only targets are missed that the row marks as missed."""


def check(row: Row, scores: np.ndarray) -> None:
    """Check that the seeds' scores reach the row's targets.

    Raises:
      Missed: only targets marked as missed are missed.
      AssertionError: another target is missed.
    """
    reached = {"worst": scores.min() >= row.worst, "mean": scores.mean() >= row.mean}
    missed = {"worst": row.worst_missed, "mean": row.mean_missed}
    assert np.isfinite(scores).all() and all(reached[name] for name in reached if not missed[name]), scores
    if not all(reached.values()):
        raise Missed(scores)


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A table of rows, by name.

    Attributes:
      path: path of the file; records are in the folder `results` next to it.
      rows: rows in order.
      rates: estimated environment steps per second by algorithm, by suite, and for all others ("other").
    """

    path: pathlib.Path
    rows: dict[str, Row]
    rates: dict[str, float]

    def held(self, row: Row) -> dict[str, Any] | None:
        """Return the row's record, or None."""
        path = self.path.parent / "results" / f"{row.record}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def runs(self, name: str) -> pathlib.Path:
        """Return the folder of unfinished runs; for the project's own table, there is one per commit."""
        return _record.kept_path(f"zoo-{name}") if self.is_own else self.path.parent / "runs" / name

    def begin(self, name: str) -> pathlib.Path:
        """Return `runs(name)` for starting or resuming training; with uncommitted changes, training starts over."""
        return _record.kept_folder(f"zoo-{name}") if self.is_own else self.runs(name)

    @property
    def is_own(self) -> bool:
        return self.path.resolve() == ZOO.resolve()

    def minutes(self, row: Row) -> float:
        """Return the duration of a row, from its record or estimated."""
        if seconds := (self.held(row) or {}).get("wall_seconds"):
            return seconds / 60
        algorithm, environment, steps, seeds = trained(row)
        suite = environment.partition(":")[0]
        rate = next(self.rates[key] for key in (algorithm, suite, "other") if key in self.rates)
        return steps * seeds / rate / 60

    def save(self, row: Row, outcome: "Outcome") -> pathlib.Path:
        """Write the record of a row: every seed's score and curve, and the published score."""
        return save(row, outcome, self.path.parent / "results")


def read(path: pathlib.Path = ZOO) -> Zoo:
    """Read a table of rows.

    Raises:
      ValueError: a row misses a key, has an unknown one, or the name of another.
    """
    table = tomllib.loads(path.read_text())
    rows: dict[str, Row] = {}
    for found in table["rows"]:
        name, way = found.get("name"), "preset" if "preset" in found else "algorithm"
        needed = {"name", "seeds"} | _REQUIRED[way]
        missing, unknown = sorted(needed - found.keys()), sorted(found.keys() - needed - _OPTIONAL)
        if missing or unknown or name in rows:
            problems = [f"it needs {', '.join(missing)}"] * bool(missing)
            problems += [f"there is no {', '.join(unknown)}"] * bool(unknown)
            raise ValueError(f"{path}: row {name!r}: {'; '.join(problems or ['an earlier row has this name'])}")
        rows[name] = _row(found)
    return Zoo(path, rows, table["steps_per_second"])


def _row(found):
    words = ["--preset", found["preset"]] if "preset" in found else [found["algorithm"], "--env", found["environment"]]
    words += ["--total-steps", str(found["steps"])] if "steps" in found else []
    words += ["--seeds", str(found["seeds"]), *shlex.split(found.get("settings", ""))]
    published = found.get("published", "") + (f" ({found['source']})" if "source" in found else "")
    figures = {name: float(found[name]) for name in ("worst", "mean") if name in found}
    notes = {name: found[name] for name in ("worst_missed", "mean_missed", "variant") if name in found}
    return Row(found["name"], shlex.join(words), published, **figures, **notes)


def trained(row: Row) -> tuple[str, str, int, int]:
    """Return the algorithm, the environment, the steps and the number of seeds of a row."""
    from jaxrl.run.presets import preset

    words = shlex.split(row.command)
    seeds = int(_after(words, "--seeds"))
    if row.kind == "preset":
        found = preset(words[1])
        steps = int(_after(words, "--total-steps")) if "--total-steps" in words else found.total_steps
        return type(found.algorithm).__name__.lower(), found.env, steps, seeds
    return words[0], _after(words, "--env"), int(_after(words, "--total-steps")), seeds


def _after(words, flag):
    return words[words.index(flag) + 1]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a row.

    Attributes:
      scores: mean return of the final evaluation, (seeds,).
      steps: environment steps at each point of the curves, (points,).
      returns: mean return of the episodes that ended while training, (seeds, points); NaN where none did.
      wall_seconds: training time, over all processes if it was killed and resumed.
    """

    scores: np.ndarray
    steps: np.ndarray
    returns: np.ndarray
    wall_seconds: float


def train(row: Row, folder: pathlib.Path, seeds: Sequence[int] | None = None) -> Outcome:
    """Train a row with its command, resuming from the folder if a previous process was killed.

    Args:
      row: the row; if its command differs from the folder's last one, training starts over.
      folder: folder used only for this row; the caller deletes it.
      seeds: seeds to use instead of the row's.

    Raises:
      SystemExit: the command exited with a nonzero code, such as 143 after SIGTERM.
    """
    from jaxrl.cli.main import main
    from jaxrl.plots.labels import EVALUATION, TRAINING
    from jaxrl.run.directory import sweep_directory

    words = ["sweep", *shlex.split(row.command)]
    if seeds is not None:
        words[words.index("--seeds") + 1] = ",".join(map(str, seeds))
    command, path = folder / "command.txt", folder / "run"
    if not command.exists() or command.read_text() != shlex.join(words):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command.write_text(shlex.join(words))
    if not sweep_directory.is_sweep(path):
        with _clock(folder):
            if code := main([*words, "--run-dir", str(path)]):
                raise SystemExit(code)
    runs = [rows for _, _, rows in sweep_directory.read_curves(path)]
    scores = np.asarray([rows[-1].get(EVALUATION, np.nan) for rows in runs])
    curves = [{row["step"]: row.get(TRAINING, np.nan) for row in reversed(rows)} for rows in runs]
    steps = sorted(curves[0])
    returns = np.asarray([[curve[step] for step in steps] for curve in curves])
    return Outcome(scores, np.asarray(steps), returns, _seconds(folder)["seconds"])


@contextlib.contextmanager
def _clock(folder: pathlib.Path) -> Iterator[None]:
    """Add the time of the context to the folder's total; a killed process counts until its last written file."""
    held = _seconds(folder)
    if held["began"] is not None:
        last = max(path.stat().st_mtime for path in folder.rglob("*"))
        held["seconds"] += max(last - held["began"], 0.0)
    path, began = folder / "time.json", time.time()
    path.write_text(json.dumps({**held, "began": began}))
    try:
        yield
    finally:
        path.write_text(json.dumps({"seconds": held["seconds"] + time.time() - began, "began": None}))


def _seconds(folder):
    path = folder / "time.json"
    return json.loads(path.read_text()) if path.exists() else {"seconds": 0.0, "began": None}


def save(row: Row, outcome: Outcome, results: pathlib.Path | None = None) -> pathlib.Path:
    """Write the record of a row, by default to `benchmarks/results`."""
    from scipy import stats

    places = np.unique(np.linspace(0, len(outcome.steps) - 1, min(MOST_POINTS, len(outcome.steps)), dtype=int))
    curves = outcome.returns[:, places]
    found = {
        "scores": [round(float(score), 2) for score in outcome.scores],
        "mean": round(float(np.mean(outcome.scores)), 2),
        "interquartile_mean": round(float(stats.trim_mean(outcome.scores, 0.25)), 2),
        "worst": round(float(np.min(outcome.scores)), 2),
    }
    return _record.save(
        row.record,
        [found],
        folder=results,
        run=f"jaxrl sweep {row.command}",
        published=row.published,
        wall_seconds=round(outcome.wall_seconds),
        curve={
            "steps": outcome.steps[places].tolist(),
            "returns": [[round(float(x), 2) if np.isfinite(x) else None for x in curve] for curve in curves],
        },
    )
