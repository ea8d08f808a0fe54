"""Where metrics go: `metrics.jsonl` is the truth; CSV, TensorBoard and Weights & Biases are views of it."""

import contextlib
import csv
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from jaxrl.core.errors import MissingExtraError


class Logger(Protocol):
    """Takes rows of scalar metrics, in ascending steps but for evaluations that are played in a thread."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JSONLLogger:
    """One JSON object a line: `{"step": 8192, "train/return_mean": 23.1}`; NaN and infinities as null.

    Rows of an earlier run are kept; a last line that was cut short is removed. Every row is on disk, as far as the
    process is concerned, when `write` returns.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(math.inf)
        self._file: IO[str] = open(self.path, "a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": int(step)} | {name: _finite(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drops the rows later than `step`: those that a run killed after that checkpoint will write again."""
        self._file.close()
        self._rewrite(step)
        self._file = open(self.path, "a")

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, last: float) -> None:
        """Leaves the whole rows up to step `last`, in one replacement; nothing where that changes nothing."""
        if not self.path.is_file():
            return
        text = self.path.read_text()
        rows = [row for row in _rows(text) if row["step"] <= last]
        kept = "".join(json.dumps(row) + "\n" for row in rows)
        if kept != text:
            _replace(self.path, kept)


class CSVLogger:
    """Keeps a table of a `metrics.jsonl`, a column a metric, empty where a row lacks it.

    The table is written anew, in one piece, when the rows have doubled and at the end: columns may appear at any time.
    """

    def __init__(self, path: str | os.PathLike, source: str | os.PathLike):
        self.path = Path(path)
        self._source = Path(source)
        self._rows = 0
        self._next = 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows += 1
        if self._rows >= self._next:
            self._next = 2 * self._rows
            write_csv(self.path, read_metrics(self._source))

    def close(self) -> None:
        write_csv(self.path, read_metrics(self._source))


class TensorBoardLogger:
    """TensorBoard events, written by tensorboardX.

    Args:
      directory: where the event files go.
      resumed_at: the step that a resumed run starts from; what an earlier run wrote later than that is hidden.
    """

    def __init__(self, directory: str | os.PathLike, *, resumed_at: int | None = None):
        self._directory = Path(directory)
        self._purge = None if resumed_at is None else resumed_at + 1
        self._writer: Any = None  # opened by the first row, before which its import has time

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            earlier = len(list(self._directory.glob("events.out.tfevents.*")))  # the names have whole seconds only
            suffix = f".{earlier}"
            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge, filename_suffix=suffix)
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):  # it has no null, and tensorboardX complains of the others
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """Weights & Biases. A resumed run continues the one of the same `run_id`.

    Raises:
      MissingExtraError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        *,
        config: Mapping[str, Any] | None = None,
        directory: str | os.PathLike | None = None,
        name: str | None = None,
        run_id: str | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("Weights & Biases", "wandb") from error
        self._run = wandb.init(
            project=project,
            config=dict(config or {}),
            dir=None if directory is None else str(directory),
            name=name,
            id=run_id,
            resume="allow" if run_id else None,
        )
        self._run.define_metric("*", step_metric="step")  # the service's own counter must not go back

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step} | dict(metrics))

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """Writes to several loggers. One that fails is named in one warning and switched off; training goes on."""

    def __init__(self, loggers: Sequence[Logger]):
        self.active: list[Logger] = list(loggers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in list(self.active):
            try:
                logger.write(step, metrics)
            except Exception as error:  # whatever a backend raises
                self._switch_off(logger, error)

    def close(self) -> None:
        for logger in list(self.active):
            try:
                logger.close()
            except Exception as error:
                self._switch_off(logger, error)
        self.active = []

    def _switch_off(self, logger: Logger, error: Exception) -> None:
        self.active.remove(logger)
        with contextlib.suppress(Exception):
            logger.close()
        warnings.warn(
            f"{type(logger).__name__} failed and is disabled; training continues: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, less what was cut short; none where there is no such file."""
    path = Path(path)
    return _rows(path.read_text()) if path.is_file() else []


def write_csv(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as a table, in one piece; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def _rows(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) or (hasattr(value, "dtype") and value.dtype.kind in "iub") else number
