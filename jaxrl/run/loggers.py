"""Loggers of metrics to JSON lines (which other parts of jaxrl read), CSV, TensorBoard and Weights & Biases."""

import collections
import contextlib
import csv
import errno
import math
import os
import re
import secrets
import socket
import struct
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxrl.core import files, ownership
from jaxrl.core.errors import MissingExtraError, RunDirectoryError
from jaxrl.data.tfrecord import TfRecordWriter
from jaxrl.run.directory.run_directory import check_below
from jaxrl.run.directory.run_status import is_number

_MOST_WAITING = 10_000  # maximum number of rows that wait for a failing logger
_LONGEST_PAUSE = 64  # maximum number of new rows between two attempts to write
_MOST_REFUSALS = 5  # after this many failures in a row, each attempt tries this many rows instead of only one
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_LINE = 1 << 20  # bytes
WANDB_ID = "wandb_run.json"  # file in a run directory


@runtime_checkable
class Logger(Protocol):
    """The interface of a logger of scalar metrics. Steps are ascending, except those of evaluations in a thread."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class VideoLogger(Logger, Protocol):
    """A logger that also accepts videos, which `train(video_every=...)` writes."""

    def show(self, step: int, video: Path) -> None: ...


class JSONLLogger:
    """A logger that writes one JSON object per line: `{"step": 8192, "train/return_mean": 23.1}`.

    NaN and infinities are written as null. When `write` returns, the operating system has received the whole row.

    Args:
      path: the file. Existing rows are kept, except for incomplete ones.
      last: the last step to keep; later rows are deleted, because a resumed run writes them again.

    Raises:
      RunDirectoryError: the path is not a writable file with rows of this format.
    """

    def __init__(self, path: str | os.PathLike, *, last: float = math.inf):
        self.path = files.expand(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._clean(last)
            self._file = files.open_to_append(self.path)
        except OSError as error:
            raise RunDirectoryError(f"metrics cannot be written to {self.path}: {error}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": int(step)} | {name: _finite(value) for name, value in metrics.items()}
        end = os.lseek(self._file.fileno(), 0, os.SEEK_END)
        line = (files.to_json(row) + "\n").encode()
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)  # remove the partial line, which is written again later
            raise

    def close(self) -> None:
        self._file.close()

    def _clean(self, last: float) -> None:
        """Delete incomplete rows and the rows after step `last`, atomically."""
        if not self.path.is_file():
            return
        if not ownership.is_own(self.path, "rows"):
            raise OSError(errno.EEXIST, "the file contains something other than metrics")
        whole_rows, changed = [], False
        for line, row in _lines(self.path):
            keep = row is not None and row["step"] <= last
            whole_rows += [files.to_json(row) + "\n"] if keep else []
            changed |= not keep or whole_rows[-1].encode() != line
        if changed:
            with files.replacing(self.path) as file:
                file.writelines(whole_rows)


class CSVLogger:
    """A logger that converts a `metrics.jsonl` file to a CSV table with one column per metric.

    Because new columns may appear at any time, the table is rewritten, atomically, when the number of rows has doubled
    and at the end.
    """

    def __init__(self, path: str | os.PathLike, source: str | os.PathLike):
        self.path = files.expand(path)
        self._source = files.expand(source)
        self._rows = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows += 1
        if self._rows.bit_count() == 1:  # 1, 2, 4, ...
            self.close()

    def close(self) -> None:
        if self._source.exists():  # otherwise, the run directory was deleted
            write_csv(self.path, read_metrics(self._source))


class TensorBoardLogger:
    """A logger that writes TensorBoard events, built from the protobuf messages of tensorboardX.

    It does not use tensorboardX's SummaryWriter, whose `flush` does not wait for queued rows, and whose thread ends if
    the disk is full, so that further writes block.

    Args:
      directory: the directory of the event files.
      resumed_at: the step at which a resumed run starts; the viewer hides events of earlier sessions after this step.
      config: configuration of the run, whose numbers and strings are shown as hyperparameters.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        resumed_at: int | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        self._directory, self._config = files.expand(directory), config
        self._purge = None if resumed_at is None else resumed_at + 1
        self._file: TfRecordWriter | None = None  # opened by the first row, and again after a failure

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX import summary  # imported late, so that the run starts sooner

        finite = {name: float(x) for name, x in metrics.items() if x is not None and math.isfinite(x)}
        self._write(_event(step, [value for name, x in finite.items() for value in summary.scalar(name, x).value]))

    def show(self, step: int, video: Path) -> None:
        """Write a GIF as an image, which TensorBoard plays."""
        from tensorboardX.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]  # made at run time

        data = video.read_bytes()
        width, height = struct.unpack("<HH", data[6:10])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
        self._write(_event(step, [Summary.Value(tag="video", image=image)]))

    def _write(self, row):
        first, file = self._file is None, self._file or self._opened()
        self._file = None
        try:
            file.write(row)
            file.flush()
        except BaseException:
            file.abandon()
            if first:
                file.path.unlink(missing_ok=True)
            raise
        self._file, self._purge = file, None  # a second purge would hide the rows written since

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> TfRecordWriter:
        """Open a new event file, and write the events that precede the first row of metrics."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # ty: ignore[missing-module-member]  # as above

        self._directory.mkdir(exist_ok=True)
        earlier = len(list(self._directory.glob("events.out.tfevents.*")))  # names are unique within a second
        now = time.time()
        path = self._directory / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{earlier}"
        file = TfRecordWriter(path)
        file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        if self._purge is not None:
            started = SessionLog(status=SessionLog.START)
            file.write(Event(step=self._purge, wall_time=now, session_log=started).SerializeToString())
        if self._config is not None and not earlier:
            for summary in _hyperparameters(self._config):
                file.write(_event(0, summary.value))
        return file


def _event(step: int, values: Sequence[Any]) -> bytes:
    from tensorboardX.proto.event_pb2 import Event  # ty: ignore[missing-module-member]  # made at run time
    from tensorboardX.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]  # made at run time

    return Event(step=step, wall_time=time.time(), summary=Summary(value=values)).SerializeToString()


def _hyperparameters(config: Mapping[str, Any]) -> Sequence[Any]:
    """Return the summaries for TensorBoard's hyperparameter page, which lists the settings and the compared metrics."""
    from flax.traverse_util import flatten_dict
    from tensorboardX import summary

    flat = flatten_dict(dict(config), sep=".")
    flat = {name: value for name, value in flat.items() if isinstance(value, bool | int | float | str)}
    compared = {"evaluation/return_mean": 0.0, "train/return_mean": 0.0}
    experiment, begins, _ = summary.hparams(flat, compared)
    return experiment, begins


class WandbLogger:
    """A logger to a Weights & Biases run, which is independent of other open runs.

    A resumed training run continues the Weights & Biases run with the same `run_id`.

    Args:
      project, config, name: as in `wandb.init`.
      directory: the run directory, for wandb's files and, unless `run_id` is passed, the run's id.
      run_id: id of the Weights & Biases run, which is continued if it exists; None: the id saved in `directory`.
      resume: whether to continue the run whose id is saved in `directory`.

    Raises:
      MissingExtraError: wandb is not installed.
      RunDirectoryError: the folder `wandb` in the directory is a symbolic link.
    """

    _by_id: ClassVar[dict[str, "WandbLogger"]] = {}  # the last logger with each id

    def __init__(
        self,
        project: str,
        *,
        config: Mapping[str, Any] | None = None,
        directory: str | os.PathLike | None = None,
        name: str | None = None,
        run_id: str | None = None,
        resume: bool = True,
    ):
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("Weights & Biases", "wandb") from error
        directory = None if directory is None else files.expand(directory)
        if directory is not None:
            check_below(directory, directory / "wandb")
        self._to_keep: Path | None = None
        if directory is not None and run_id is None:
            self._to_keep = directory / WANDB_ID
            run_id = _saved_id(self._to_keep) if resume else None
        self._id = run_id = run_id or secrets.token_hex(8)
        if run_id in self._by_id:  # wandb rejects an id that is open, for example after a `train` with invalid settings
            self._by_id[run_id].close()
        self._run = wandb.init(
            project=project,
            config=dict(config or {}),
            dir=None if directory is None else str(directory),
            name=name,
            id=run_id,
            resume="allow",
            reinit="create_new",  # independent of the runs of other loggers and of the user
        )
        self._by_id[run_id] = self
        self._run.define_metric("*", step_metric="step")  # wandb's own counter must not decrease

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._keep_id()
        self._run.log({"step": step} | dict(metrics))

    def show(self, step: int, video: Path) -> None:
        import wandb

        self._run.log({"step": step, "video": wandb.Video(str(video), format="gif")})

    def _keep_id(self):
        """Save the id with the first row, because the run owns its directory only once it has begun."""
        if self._to_keep is not None:
            files.write_json(self._to_keep, {"id": self._id})
            self._to_keep = None

    def close(self) -> None:
        self._run.finish()


def _saved_id(path: Path) -> str | None:
    """Return the id saved in a file, or None if the file is missing or invalid."""
    try:
        found = files.read_json(path)["id"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) and re.fullmatch(r"[\w-]{1,64}", found, re.ASCII) else None


class Loggers:
    """A logger that passes metrics to several loggers. A failing logger causes one warning, and training continues.

    Up to a limit, the rows of a failing logger are kept until it works again; beyond the limit, the oldest rows are
    lost. A row that a logger repeatedly rejects is lost as soon as the logger accepts a later row. A warning at the end
    reports the number of lost rows.
    """

    def __init__(self, loggers: Sequence[Logger]):
        self._outlets = [_Outlet(logger) for logger in loggers]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for outlet in self._outlets:
            outlet.write(step, metrics)

    def show(self, step: int, video: Path) -> None:
        """Pass a video to the loggers that accept videos."""
        for outlet in self._outlets:
            if isinstance(outlet.logger, VideoLogger):
                outlet.show(outlet.logger, step, video)

    def abandon(self) -> None:
        """Close all loggers without a warning about lost rows, because their files were deleted or moved."""
        outlets, self._outlets = self._outlets, []
        for outlet in outlets:
            with contextlib.suppress(Exception):
                outlet.logger.close()

    def close(self) -> None:
        """Close all loggers; may be called twice."""
        outlets, self._outlets = self._outlets, []
        for outlet in outlets:
            outlet.close()


class _Outlet:
    """A logger, and the queue of rows that it has not written yet."""

    def __init__(self, logger: Logger):
        self.logger = logger
        self._waiting: collections.deque[tuple[int, Mapping[str, float]]] = collections.deque()
        self._lost = self._failures = self._pause = 0
        self._has_warned = self._has_warned_of_videos = False

    def write(self, step, metrics):
        self._waiting.append((step, metrics))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._pause -= 1
        if self._pause <= 0:
            self._attempt(self._empty)

    def show(self, logger, step, video):
        try:
            logger.show(step, video)
        except Exception as error:  # any error of a backend; rows are still written
            if not self._has_warned_of_videos:
                self._warn(f"could not write a video; training continues: {type(error).__name__}: {error}")
            self._has_warned_of_videos = True

    def close(self):
        self._failures = _MOST_REFUSALS  # the last attempt tries several rows
        self._attempt(self._empty)
        self._attempt(self.logger.close)
        if lost := self._lost + len(self._waiting):
            self._warn(f"could not write {lost} rows of metrics, which are lost")

    def _empty(self):
        refused, most = 0, _MOST_REFUSALS if self._failures >= _MOST_REFUSALS else 1
        while self._waiting:
            try:
                self.logger.write(*self._waiting[refused])
            except Exception as error:
                refused += 1
                # On a full disk, stop at the first row: skipping it for a shorter row that fits would lose it.
                if refused >= min(most, len(self._waiting)) or getattr(error, "errno", None) in _FULL:
                    raise
            else:
                for _ in range(refused + 1):
                    self._waiting.popleft()
                self._lost, refused = self._lost + refused, 0
        self._failures = 0

    def _attempt(self, work):
        try:
            work()
        except Exception as error:  # any error of a backend
            self._failures += 1
            self._pause = min(2**self._failures, _LONGEST_PAUSE)
            if not self._has_warned:
                self._warn(f"failed; training continues, and writing is retried: {type(error).__name__}: {error}")
            self._has_warned = True

    def _warn(self, what):
        warnings.warn(f"{type(self.logger).__name__} {what}", RuntimeWarning, stacklevel=5)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` file, without incomplete lines and without values that are not numbers.

    The list is empty if the file does not exist.

    Raises:
      RunDirectoryError: the file cannot be read.
    """
    path = files.expand(path)
    try:
        return [row for _, row in _lines(path) if row is not None] if path.is_file() else []
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error


def write_csv(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV table, atomically, with columns in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
    with files.replacing(files.expand(path)) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line and the row in it, or None if it is not a valid row; overlong lines are yielded in pieces."""
    with files.open_to_read(path) as file:
        begins = True
        while line := file.readline(_LONGEST_LINE):
            ends = line.endswith(b"\n")
            yield line, _row(line) if begins and (ends or len(line) < _LONGEST_LINE) else None
            begins = ends


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = files.parse_json(line)
    except ValueError:
        return None
    if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2**63:
        return {name: value for name, value in row.items() if value is None or is_number(value)}
    return None


def _finite(value: Any) -> Any:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) or (hasattr(value, "dtype") and value.dtype.kind in "iub") else number
