"""Writers of datasets, which move a dataset to its path only when it is complete."""

import abc
import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.core.interrupts import cleaning_up
from jaxrl.data.episodes import Episode, Kind, check_kind, kind_of


class Writer(abc.ABC):
    """A writer of a dataset, which is moved to `path` when it is complete; use it as a context manager.

    The files are written to a hidden directory next to `path` (see `Staging`). `close` reads them again and renames the
    directory.

    Attributes:
      episodes: the number of episodes written.
    """

    def __init__(self, path: str | os.PathLike):
        with as_dataset_errors(path):
            self._staging = Staging(path)
        self._partial = self._staging.partial
        self.episodes = self._checksum = 0
        self._kind: Kind | None = None  # of the arrays and metadata

    def write(self, episode: Episode, metadata: dict[str, Any] | None = None) -> None:
        """Add an episode; its return, length and number are added to its metadata.

        Args:
          episode: the episode to write.
          metadata: metadata to add to the episode's metadata.

        Raises:
          ConfigError: an array would not be read back bit for bit, or differs in dtype or shape from earlier episodes.
          DatasetError: the disk is full, or cannot be written to.
        """
        own = {"episode_id": self.episodes, "return": episode.episode_return, "length": episode.length}
        metadata = {**episode.metadata, **(metadata or {}), **own}
        metadata = {name: x.item() if isinstance(x, np.generic) else x for name, x in metadata.items()}
        kind = kind_of({"steps": episode.steps}, axes=1) | dict.fromkeys(metadata, ("a metadata field",))
        check_kind(kind, self._kind, ConfigError)
        with as_dataset_errors(self._staging.path):
            self._add(dataclasses.replace(episode, metadata=metadata))
        self._kind = kind
        self.episodes += 1

    def close(self) -> Path:
        """Complete the dataset, verify it by reading it again, and move it to `path`.

        Returns:
          The path of the dataset.

        Raises:
          ConfigError: there are no episodes, or something else has appeared at `path`.
          DatasetError: the data read differ from the data written, or writing failed.
        """
        if not self.episodes:
            raise ConfigError("there are no episodes to write; a dataset needs at least one")
        with as_dataset_errors(self._staging.path):
            self._complete()
            self._read_again()
            return self._staging.publish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the written files, unless `close` has published them."""
        self._staging.discard()

    @abc.abstractmethod
    def _add(self, episode: Episode) -> None:
        """Write or buffer an episode, whose metadata are complete, and update the checksum."""

    @abc.abstractmethod
    def _complete(self) -> None:
        """Write the buffered episodes and the dataset's metadata."""

    @abc.abstractmethod
    def _stored(self) -> tuple[int, int]:
        """Read the files and return the number and the checksum of their episodes."""

    def _read_again(self):
        if self._stored() != (self.episodes, self._checksum):
            raise DatasetError(f"{self._partial} does not contain the episodes that were written to it; check the disk")


@contextlib.contextmanager
def as_dataset_errors(path: str | os.PathLike) -> Generator[None]:
    """Reraise errors of the file system and libraries as a DatasetError that names the dataset's path."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise DatasetError(f"the dataset {path} could not be written: {said:.500}") from error


class Staging:
    """A directory that is moved to `path` when it is complete; until then, it is `.NAME.partial` next to `path`.

    If a process is killed, its partial files are deleted by the next process that writes to the same path.

    Args:
      path: the directory to create; it must be empty if it exists.

    Attributes:
      partial: the directory to write to until it is complete.

    Raises:
      ConfigError: `path` already exists, or another process writes to it.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = files.expand(path).absolute()
        self._check_free()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial, self._lock = _claim(self.path.with_name(f".{self.path.name}.partial"))
        self._leaving = contextlib.ExitStack()
        self._leaving.enter_context(cleaning_up(self.discard))

    def publish(self) -> Path:
        """Flush all files to the disk and move the directory to `path`.

        Raises:
          ConfigError: something else has appeared at `path`.
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
    """Create or empty a directory and lock it against other processes; the lock is released when the process ends.

    Returns:
      The directory, and the file descriptor of the lock.

    Raises:
      ConfigError: another process writes to the directory, or it contains files that jaxrl did not write.
    """
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
        os.close(lock)  # the directory was renamed or deleted in the meantime
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
