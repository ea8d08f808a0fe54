"""A run directory: one run's files, locked while it trains, tied to one configuration."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from jaxrl.core.config import decode, encode, flatten
from jaxrl.core.errors import ConfigError, RunDirectoryError

MAY_CHANGE = ("total_steps", "logging")  # fields, or groups of them, that a resumed run may have otherwise

FORMAT = 1  # of config.json; a change that earlier files do not survive takes the next number

_FILES = ("config.json", "metrics.jsonl", "metrics.csv", "learning_curve.png", "result.json")
_ABSENT = object()


class RunDirectory:
    """Opens or makes the directory of a run, and holds its lock until closed.

    Args:
      path: the directory; made if missing.
      config: the resolved configuration, JSON values only; lies in `config.json`.
      overwrite: delete what an earlier run left here, whatever its configuration. Only files that jaxrl makes go.
      may_change: dotted fields of `config` that may differ when a run is resumed.

    Attributes:
      resumed: whether a run of this configuration was here before.

    Raises:
      RunDirectoryError: another process holds it; a run of another configuration is here (the difference is shown);
        or it cannot be written to (read-only, full).
    """

    def __init__(
        self,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        may_change: Iterable[str] = MAY_CHANGE,
    ):
        self.path = Path(path).absolute()
        self.config: dict[str, Any] = json.loads(json.dumps(config))
        self._lock: IO[str] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            _probe(self.path)
            for left in self.path.glob(".*.json.*.tmp"):  # by a process that was killed
                left.unlink()
            if overwrite:
                _delete_run(self.path)
            self.resumed = self._compare(tuple(may_change))
            write_json(self.path / "config.json", {"format": FORMAT} | self.config)
        except OSError as error:
            self.close()
            raise RunDirectoryError(f"cannot write to the run directory {self.path}: {error}") from error
        except RunDirectoryError:
            self.close()
            raise

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics_csv(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def learning_curve(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def close(self) -> None:
        """Gives the lock back. May be called twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self, may_change: tuple[str, ...]) -> bool:
        """Whether there is a run to resume."""
        if (self.path / "config.json").exists():
            before = read_config(self.path)
        else:
            ours = [name for name in _FILES if (self.path / name).exists()]
            ours += ["checkpoints"] if any(_steps(self.path)) else []
            if ours:
                raise RunDirectoryError(
                    f"{self.path} holds {', '.join(ours)} but no config.json, so it is no run that can be resumed; use "
                    "another --run-dir, or move these away"
                )
            return False
        lines = difference(with_new_fields(before), self.config, may_change)
        if lines:
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration (there -> now):\n  " + "\n  ".join(lines) + "\n"
                "use the same settings to resume it, another --run-dir, or --overwrite to delete it and start again"
            )
        return True


def read_config(path: str | os.PathLike) -> dict[str, Any]:
    """The configuration of a run, without the number of the file's format.

    Raises:
      RunDirectoryError: `path` is no run directory, or its configuration is of another format.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} is not a run directory: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RunDirectoryError(f"{file} is not a configuration: it holds a {type(config).__name__}")
    found = config.pop("format", None)
    if found is None:
        raise RunDirectoryError(f"{file} has no format number: an earlier jaxrl wrote it, and this one cannot read it")
    if found != FORMAT or isinstance(found, bool):
        raise RunDirectoryError(
            f"{file} has format {found!r}, and this jaxrl reads format {FORMAT}; use the jaxrl that wrote it"
        )
    return config


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one piece: readers see the old contents or the new, never a part."""
    # A new file under a random name: what the directory holds may be a link to elsewhere.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def difference(before: Mapping[str, Any], now: Mapping[str, Any], may_change: Iterable[str] = ()) -> list[str]:
    """The fields in which two configurations differ, one line each, nested fields dotted."""
    old, new = flatten(before), flatten(now)
    free = tuple(may_change)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        values = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if values[0] == values[1] or any(name == field or name.startswith(f"{field}.") for field in free):
            continue
        there, here = ("(absent)" if value is _ABSENT else json.dumps(value) for value in values)
        lines.append(f"{name}: {there} -> {here}")
    return lines


def with_new_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the defaults of fields that algorithm and topology have now and had not when it was written."""
    filled = dict(config)
    for name in ("algorithm", "topology"):
        with contextlib.suppress(ConfigError, KeyError):  # what cannot be read back is compared as it is written
            filled[name] = encode(decode(config[name]))
    return filled


def _lock(path: Path) -> IO[str]:
    """The open lock file. The system gives the lock back when the process ends, however it does."""
    # A link would have another file overwritten.
    file = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunDirectoryError(
            f"the run directory {path} is in use by {holder}; wait for it to end, or use another --run-dir"
        ) from None
    file.seek(0)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _probe(path: Path) -> None:
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(65536))
        file.flush()
        os.fsync(file.fileno())


def _steps(path: Path) -> list[Path]:
    """The checkpoints of a run, complete or not; names as `jaxrl.run.checkpoint` gives them."""
    return [
        step
        for step in (path / "checkpoints").glob("*")
        if step.is_dir() and (step.name.isdecimal() or step.name.startswith((".saving-", ".replaced-")))
    ]


def _delete_run(path: Path) -> None:
    if not (path / "config.json").exists():
        return  # no run of ours; what is in the way is named by the comparison
    for name in _FILES[1:]:
        (path / name).unlink(missing_ok=True)
    for step in _steps(path):
        shutil.rmtree(step)
    for events in (path / "tensorboard").glob("events.out.tfevents.*"):
        events.unlink()
    for folder in (path / "checkpoints", path / "tensorboard"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    (path / "config.json").unlink()  # last, so that an interrupted deletion can be taken up again
