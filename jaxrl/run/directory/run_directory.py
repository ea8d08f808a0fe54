"""Run directories: the files of one run with one configuration, locked during training."""

import contextlib
import difflib
import fcntl
import fnmatch
import itertools
import os
import secrets
import socket
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from jaxrl.core import files, ownership
from jaxrl.core.config import check_sizes, decode, encode, not_written
from jaxrl.core.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.run.directory.run_status import read_result

# Fields and groups of fields that may differ in a resumed run. With the same number of shards, the number of devices
# affects only rounding.
MAY_CHANGE = ("total_steps", "logging", "native", "topology.devices")

FORMAT = 1  # format of config.json; incremented by changes that make earlier files unreadable

LOG = "log.txt"  # messages of the run
EVALUATIONS = "evaluations.jsonl"  # written by an evaluator that follows the run
_FOLDERS = ("checkpoints", "tensorboard", "videos")
SWEEP = "sweep.json"  # written when a sweep is complete; see jaxrl.run.directory.sweep_directory
_MOST_FOLDERS = 10_000  # maximum number of folders to search for runs with a similar name
_ABSENT = object()


class RunDirectory:
    """The directory of a run, which is locked until it is closed.

    Args:
      path: the directory; created if missing.
      config: the resolved configuration as JSON values, stored in `config.json`.
      overwrite: whether to delete the files of an earlier run of any configuration; only files that jaxrl wrote are
        deleted.
      launch: the `start` of the launch that this process belongs to, if any; written to the lock file once the
        directory contains only this run.

    Attributes:
      path: the directory.
      metrics_jsonl, result, checkpoints, study: paths in the directory.
      resumed: whether the directory already contained a run of this configuration.
      start: random text that identifies this run; if it has ended, the lock file and the result contain the same text.

    Raises:
      RunDirectoryError: another process has locked the directory; it contains a run of another configuration (the
        message shows the differences), something other than a run, or a foreign file with a name that jaxrl uses;
        or it cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        launch: str | None = None,
    ):
        self.path = files.expand(path).absolute()
        self.metrics_jsonl, self.result = self.path / "metrics.jsonl", self.path / "result.json"
        self.checkpoints, self.study = self.path / "checkpoints", self.path / "study.journal"
        check_no_pattern(self.path)
        self.config: dict[str, Any] = files.as_read_back(config)
        self._lock: IO[str] | None = None
        self.start = secrets.token_hex(8)
        kind = ownership.config_kind(config)
        # A directory with a lock file is checked only once it is locked, because its files may change until then.
        if not ownership.is_own(self.path / ".lock", "lock"):
            ownership.check_folder(self.path, kind)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            _probe(self.path)
            ownership.check_folder(self.path, kind)
            files.clear_temporaries(self.path, ownership.OF_RUNS)
            replaces = overwrite and ownership.folder_kind(self.path) == kind
            self.resumed = not replaces and self._compare()
            self._lock.truncate(0)  # from now on, this is the last run in the directory
            self._write_lock(f"process {os.getpid()} on {socket.gethostname()}\nstart {self.start}\n")
            if replaces:
                ownership.remove(self.path, kind)
            files.write_json(self.path / "config.json", {"format": FORMAT} | self.config)
            for line in dict.fromkeys(not_written(self.config)):
                warnings.warn(line, RuntimeWarning, stacklevel=2)
            if launch is not None:
                self._write_lock(f"launch {launch}\n")
        except OSError as error:
            self.close()
            raise RunDirectoryError(f"cannot write to the run directory {self.path}: {error}") from error
        except RunDirectoryError:
            self.close()
            raise

    def check(self) -> None:
        """Check that the directory still exists and has not been replaced.

        Raises:
          CheckpointError: the directory was deleted or moved, so nothing more can be saved.
        """
        if not self._is_there():
            raise CheckpointError(
                f"the run directory {self.path} was deleted or moved during the run, so the run can no longer be saved"
            )

    def _is_there(self):
        try:
            return self._lock is None or os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self._lock.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # unknown; the next write raises an error if the directory is missing

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self._lock is not None:
            if not self._is_there() and not (self.path / "config.json").exists():
                _clear_remains(self.path)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_lock(self, text: str) -> None:
        assert self._lock is not None  # set until `close`
        self._lock.write(text)
        self._lock.flush()

    def _compare(self) -> bool:
        """Return whether the directory contains an earlier run, after checking that its configuration is the same."""
        if not (self.path / "config.json").exists():
            return False
        before = read_config(self.path)
        lines = difference(with_new_fields(before), self.config, MAY_CHANGE)
        if lines:
            learned = f" (and --init-from {self.path} to start from its learner state)" if "algorithm" in before else ""
            raise RunDirectoryError(
                f"{self.path} contains a run of another configuration (stored -> now):\n  " + "\n  ".join(lines) + "\n"
                f"use its settings to resume it, another --run-dir{learned}, or --overwrite to delete it and restart"
            )
        self._check_checkpoints()
        return True

    def _check_checkpoints(self) -> None:
        """Check that a run with metrics has checkpoints to resume from, because otherwise its metrics would be lost."""
        # A run that was killed before its first checkpoint has an empty folder but no result; the result of a run that
        # could not save is "unsaved".
        ended = self.result.exists() and read_result(self.path).get("stopped") != "unsaved"
        lost = not self.checkpoints.is_dir() or (ended and not any(self.checkpoints.glob("*[0-9]")))
        if lost and self.metrics_jsonl.is_file() and self.metrics_jsonl.stat().st_size:
            raise RunDirectoryError(
                f"{self.path} contains the metrics of a run without its checkpoints, so it cannot be resumed; restore "
                f"{self.checkpoints.name}/, use another --run-dir, or --overwrite to delete the run and restart"
            )


def check_below(root: str | os.PathLike, path: str | os.PathLike) -> None:
    """Check that no part of `path` below `root` is a symbolic link, because files would be written elsewhere.

    Raises:
      RunDirectoryError: `path`, or a folder between it and `root`, is a link.
    """
    folder = files.expand(root)
    for name in files.expand(path).relative_to(folder).parts:
        folder /= name
        if folder.is_symlink():
            raise RunDirectoryError(
                f"{folder} is a link to {os.readlink(folder)!r}, but a run writes only to its own directory; replace "
                "the link with the folder, or use another --run-dir"
            )


def read_config(path: str | os.PathLike) -> dict[str, Any]:
    """Return the configuration of a run, without the file's format number.

    Raises:
      RunDirectoryError: `path` is not a run directory, or its configuration has another format.
    """
    path = files.expand(path)
    file = path / "config.json"
    try:
        config = files.read_json(file)
        check_sizes(config)
    except (FileNotFoundError, NotADirectoryError):
        raise RunDirectoryError(f"{path} is not a run directory: {_why_none(files.expand(path))}") from None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RunDirectoryError(f"{file} is not a configuration: it contains a {type(config).__name__}")
    found = config.pop("format", None)
    if found != FORMAT or isinstance(found, bool):
        raise RunDirectoryError(
            f"{file} has format {found!r}, but this jaxrl reads format {FORMAT}; use the version that wrote it"
        )
    return config


def close_runs(path: str | os.PathLike) -> list[Path]:
    """Return directories of runs and sweeps whose paths are similar to the missing `path`, most similar first."""
    there = missing = files.expand(path)
    while not there.is_dir() and there.name:
        there = there.parent
    names = missing.relative_to(there).parts
    folders = itertools.islice(there.glob("/".join("*" for _ in names)), _MOST_FOLDERS) if names else ()
    runs = {str(one.relative_to(there)).lower(): one for one in folders if _is_run(one)}
    return [runs[name] for name in difflib.get_close_matches("/".join(names).lower(), runs, n=3, cutoff=0.6)]


def _why_none(path: Path) -> str:
    """Return the reason why a path is not a run directory, with suggestions of similar paths."""
    if path.is_file():
        return "it is a file"
    if not path.is_dir():
        close = " or ".join(map(str, close_runs(path)))
        return "there is no such folder" + (f"; did you mean {close}?" if close else "")
    if list(path.glob("program-*/config.json")):
        return "it contains a sweep that has not ended; the same command continues it"
    runs = sorted(filter(_is_run, path.glob("*")))
    return "it has no config.json" + (f", but contains {len(runs)} runs, such as {runs[0]}" if runs else "")


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", SWEEP))


def difference(
    before: Mapping[str, Any], now: Mapping[str, Any], may_change: Iterable[str] = (), prefix: str = ""
) -> list[str]:
    """Return one line for each setting that differs between two configurations; nested names are dotted.

    Objects of different types, and different environments, count as one setting.
    """
    lines = []
    for key in sorted(before.keys() | now.keys()):
        name, there, here = f"{prefix}{key}", before.get(key, _ABSENT), now.get(key, _ABSENT)
        if there == here or any(name == field or name.startswith(f"{field}.") for field in may_change):
            continue
        if isinstance(there, Mapping) and isinstance(here, Mapping) and _kind(there) == _kind(here):
            lines += difference(there, here, may_change, f"{name}.")
        else:
            lines.append(f"{name}: {_abridged(there)} -> {_abridged(here)}")
    return lines


def _kind(config: Mapping[str, Any]) -> list[Any]:
    return [config.get(name) for name in ("type", "suite", "name")]


def _abridged(value: Any) -> str:
    """Return a setting as JSON, shortened to 100 characters."""
    if value is _ABSENT:
        return "(absent)"
    text = files.to_json(value)
    return f"{text[:97]}..." if len(text) > 100 else text


def with_new_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with defaults for fields that were added to jaxrl after it was written.

    These are fields of algorithms, networks and topologies, at the top level and in the entries "sweep" and "tune".
    """
    below = (name for name in ("sweep", "tune") if isinstance(config.get(name), dict))
    filled = {**config, **{name: with_new_fields(config[name]) for name in below}}
    for name in ("algorithm", "topology"):
        with contextlib.suppress(ConfigError, KeyError):  # values that cannot be decoded are compared as written
            filled[name] = encode(decode(config[name]))
    return filled


def check_no_pattern(path: str | os.PathLike) -> None:
    """Check that Orbax can use a path: it supports only UTF-8, and interprets paths as glob patterns.

    Raises:
      RunDirectoryError: the path is not UTF-8, or a part of it contains `**` or, as a pattern, does not match itself.
    """
    place = files.expand(path).absolute()
    try:
        os.fspath(place).encode()
    except UnicodeEncodeError:
        raise RunDirectoryError(
            f"the name of the run directory {os.fsencode(place)!r} is not UTF-8, so no checkpoint can be saved there; "
            "use another --run-dir"
        ) from None
    for part in place.parts:
        if "**" in part or not fnmatch.fnmatchcase(part, part):
            raise RunDirectoryError(
                f"{part!r} in the path of the run directory {place} is a pattern for Orbax, so it would not find the "
                "checkpoints; rename it, or use another --run-dir"
            )


def _lock(path: Path) -> IO[str]:
    """Lock the directory until this process ends; return the open lock file."""
    file = files.open_to_append(path / ".lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        with files.open_to_read(path / ".lock") as found:
            holder = found.readline(200).decode(errors="replace").strip() or "another process"
        raise RunDirectoryError(
            f"the run directory {path} is in use by {holder}; wait for it to end, or use another --run-dir"
        ) from None
    return file


def _probe(path: Path) -> None:
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(65536))
        file.flush()
        os.fsync(file.fileno())


def _clear_remains(path: Path) -> None:
    """Remove files that were written after the run directory was deleted or moved.

    A save may have recreated the folders, and the log or the metrics may have been written to them.
    """
    with contextlib.suppress(OSError):
        if {found.name for found in path.iterdir()} <= {"metrics.csv", LOG, *_FOLDERS}:
            for view in [path / "metrics.csv", path / LOG, *(path / "tensorboard").glob("events.out.tfevents.*")]:
                view.unlink(missing_ok=True)
    for folder in (*(path / name for name in _FOLDERS), path):
        with contextlib.suppress(OSError):
            folder.rmdir()
