"""Writers of datasets that appear only when they are complete."""

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
    """A writer of a dataset that appears at `path` when it is complete; use it as a context manager.

    Everything is written to a hidden directory next to it (`Staging`); `close` reads all of it again, and renames it.

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
        """Add an episode, with its own metadata, `metadata`, and its return, length and number.

        Raises:
          ConfigError: an array would not be read back bit for bit, or differs in kind from those before.
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
        """Complete the dataset, read it again, and move it to its place.

        Raises:
          ConfigError: there are no episodes, or something else appeared at the path meanwhile.
          DatasetError: the data read back differ from those written, or writing failed.
        """
        if not self.episodes:
            raise ConfigError("there are no episodes to write; a dataset has at least one")
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
        """Write or buffer an episode with all of its metadata, and update the checksum."""

    @abc.abstractmethod
    def _complete(self) -> None:
        """Write the buffered episodes and the dataset's metadata."""

    @abc.abstractmethod
    def _stored(self) -> tuple[int, int]:
        """Return the number of episodes in the files, and their checksum."""

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
