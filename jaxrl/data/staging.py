"""A directory that appears only when it is complete."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, DatasetError, JaxrlError
from jaxrl.core.interrupts import cleaning_up


def as_dataset_errors[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a writer's method to reraise errors of the file system and libraries as a DatasetError."""

    @functools.wraps(method)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return method(*arguments, **options)
        except JaxrlError:
            raise
        except (OSError, RuntimeError) as error:
            staging, said = getattr(arguments[0], "_staging", None), " ".join(str(error).split())
            where = "" if staging is None else f" {staging.path}"
            raise DatasetError(f"the dataset{where} could not be written: {said:.500}") from error

    return wrapped


class Staging:
    """A directory that appears at `path` when it is complete; until then it is `.NAME.partial` in the same folder.

    Files left there by a killed process are deleted by the next one that writes to the same path.

    Args:
      path: the directory to create; it must be empty if it exists.

    Attributes:
      partial: where to write.

    Raises:
      ConfigError: something is at `path`, or another process writes to it.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = files.expand(path).absolute()
        self._check_free()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial, self._lock = _claim(self.path.with_name(f".{self.path.name}.partial"))
        self._leaving = contextlib.ExitStack()
        self._leaving.enter_context(cleaning_up(self.discard))

    def publish(self) -> Path:
        """Flush everything to the disk and move the directory to its place.

        Raises:
          ConfigError: something else appeared at the path meanwhile.
        """
        for found in [*self.partial.rglob("*"), self.partial]:
            _sync(found)
        self._check_free()
        os.rename(self.partial, self.path)
        _sync(self.path.parent)
        self._release()
        return self.path

    def discard(self) -> None:
        """Delete the written files, unless they were published."""
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._release()

    def _check_free(self):
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise ConfigError(f"path={str(self.path)!r} already exists; use another path, or move it away")

    def _release(self):
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            self._leaving.close()


def _claim(path: Path) -> tuple[Path, int]:
    """Return an empty directory that no other process writes to, and its lock, which is freed when the process ends."""
    while True:
        path.mkdir(exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # the target of a link would be emptied
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(f"another process writes to {path}; wait for it, or use another path") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                break
        os.close(lock)  # it was renamed or deleted since
    found = list(path.iterdir())
    if others := [left for left in found if not re.fullmatch(r"data|.+\.json|.+-train\..+", left.name)]:
        os.close(lock)
        raise ConfigError(f"{others[0]} was not written by jaxrl; move it away, or use another path")
    for left in found:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path, lock


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
