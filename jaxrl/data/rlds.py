"""Episodes written as an RLDS dataset that `tfds.builder_from_directory` opens, without TensorFlow."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl import envs
from jaxrl.config import encode
from jaxrl.data import features, recording
from jaxrl.data.episodes import Episode, EpisodeCutter
from jaxrl.errors import ConfigError, DatasetError
from jaxrl.policy import Policy, check_spaces
from jaxrl.progress import ProgressBar
from jaxrl.types import Environment, HostRecipe

_VERSION = "1.0.0"
_SPLIT = "train"
_SHARD_EPISODES = 10_000  # the writer keeps an index of its file in memory
_READ_BYTES = 1 << 22  # at once, about


def export_rlds(
    policy: Policy,
    env: Environment | HostRecipe | str,
    path: str | os.PathLike,
    *,
    episodes: int,
    seed: int = 0,
    explore: bool = False,
    num_envs: int | None = None,
    max_steps: int = 27_000,
    policy_version: int = 0,
    progress: bool = True,
) -> Path:
    """Plays episodes with a policy and writes them as an RLDS dataset in TFDS's layout.

    Every environment plays its share of the episodes, the same number but for one, so that short ones are not
    favoured; with the same seed and environments they are those that `evaluate` plays. `path` appears when the
    dataset is complete and was read again; until then it is written to a hidden directory beside it. Memory is that of
    the unfinished episodes.

    Args:
      policy: of a `Result`, or from `jaxrl.load`.
      env: where to play; what `jaxrl.make` gives, or its name. Its spaces are those that the policy was trained on.
      path: the directory to make; `.../cartpole/1.0.0` is what `tfds.load("cartpole", data_dir=...)` looks for.
      episodes: how many.
      seed: of episodes and of action sampling.
      explore: sample actions as in training instead of taking the best.
      num_envs: environments side by side; None: as many as episodes, at most 128.
      max_steps: an episode that is longer is cut off there.
      policy_version: written with every episode; the command line gives the rows that the policy had learnt from.
      progress: show a progress bar.

    Returns:
      The path.

    Raises:
      ConfigError: there is something at `path` already, the environment is another than the policy's, or it shows
        arrays that would not come back bit for bit (says which).
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    env = envs.prepared(envs.make(env) if isinstance(env, str) else env)
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in (("episodes", episodes), ("num_envs", num_envs), ("max_steps", max_steps))
        if value is not None and value < 1
    ]
    if problems:
        raise ConfigError(problems)
    check_spaces(policy.spec, env)
    num_envs = min(episodes, 128 if num_envs is None else num_envs)
    left = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    limit = int(left.max()) * (max_steps + 1)
    common = {
        "algorithm": type(policy.algo).__name__,
        "environment": env.name,
        "seed": seed,
        "policy_version": policy_version,
        "configuration_hash": configuration_hash(policy.algo, env),
    }
    cutter, rows, written = EpisodeCutter(num_envs, max_steps), 0, 0
    with RldsWriter(path, env.name) as writer, contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar(unit="episodes")) if progress else None
        if bar is not None:
            bar.start(episodes)
        stream = recording.play(policy, env, num_envs=num_envs, seed=seed, explore=explore)
        stack.callback(stream.close)

        def write(found):
            nonlocal written
            for index, episode in found:
                if left[index]:
                    left[index] -= 1
                    writer.write(episode, common | {"env_index": index})
                    written += 1

        for stretch in stream:
            write(cutter.add(stretch))
            rows += len(stretch.first)
            if bar is not None:
                bar.update(written)
            if not left.any():
                break
            if rows >= limit:
                write(cutter.finish())
                break
        if left.any():
            warnings.warn(
                f"{env.name} gave {written} of {episodes} episodes in {rows:,} steps of each environment; "
                "with a larger max_steps there may be more",
                stacklevel=2,
            )
        return writer.close()


def configuration_hash(algo: Any, env: Any) -> str:
    """16 hexadecimal digits of the algorithm's and the environment's settings."""
    text = json.dumps(encode({"algorithm": algo, "environment": env}), sort_keys=True)
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]


class RldsWriter:
    """Writes episodes to a dataset that appears at `path` when it is complete; use it in a `with`.

    Everything is written to `.NAME.partial` beside the path. `close` reads all of it again, and renames it. What a
    killed process left there is deleted by the next that writes to the same path.

    Args:
      path: the directory to make; nothing may be there, or an empty directory.
      name: of the dataset, any text; TFDS's name and that of the files are made of it.
      shard_bytes: a file with more than this is closed, and another begun.

    Raises:
      ConfigError: something is at `path`, or another process writes to it.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def __init__(self, path: str | os.PathLike, name: str, *, shard_bytes: int = 1 << 28):
        self._tfds = features.tfds()
        self.path = Path(path).absolute()
        self.name = _dataset_name(name)
        self._shard_bytes = shard_bytes
        self._check_free()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial, self._lock = _claim(self.path.with_name(f".{self.path.name}.partial"))
        self._serialize: features.Serializer | None = None
        self._described: Any = None
        self._shard: Any = None
        self.episodes = 0
        self._shard_lengths: list[int] = []
        self._shard_size = 0
        self._bytes = self._checksum = 0
        self._template = self._tfds.core.ShardedFileTemplate(
            dataset_name=self.name,
            data_dir=self._partial,
            split=_SPLIT,
            filetype_suffix="array_record",
            template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}",
        )

    def _check_free(self):
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise ConfigError(f"path={str(self.path)!r} exists already; use another, or move it away")

    def write(self, episode: Episode, metadata: dict[str, Any] | None = None) -> None:
        """Adds an episode; `metadata` in addition to its own, and to its return, length and number.

        Raises:
          ConfigError: an array cannot be written so that it comes back bit for bit, or is unlike those before.
        """
        own = {"episode_id": self.episodes, "return": episode.episode_return, "length": episode.length}
        episode = dataclasses.replace(episode, metadata={**episode.metadata, **(metadata or {}), **own})
        if self._serialize is None:
            fields = features.fields_of(episode)
            self._described, self._serialize = features.described(fields), features.Serializer(fields, episode)
        record = self._serialize(episode)
        if self._shard is None:
            path = self._template.sharded_filepath(shard_index=len(self._shard_lengths), num_shards=None)
            self._shard, self._shard_size = _writer(path), 0
            self._shard_lengths.append(0)
        self._shard.write(record)
        self._checksum = zlib.crc32(record, self._checksum)
        self._shard_lengths[-1] += 1
        self.episodes += 1
        self._shard_size += len(record)
        self._bytes += len(record)
        if self._shard_size >= self._shard_bytes or self._shard_lengths[-1] >= _SHARD_EPISODES:
            self._close_shard()

    def close(self) -> Path:
        """Completes the dataset, reads it again, and moves it to its place.

        Raises:
          ConfigError: there are no episodes, or something came to be at the path meanwhile.
          DatasetError: what was written is not what is read.
        """
        if not self.episodes:
            raise ConfigError("there are no episodes to write; a dataset has at least one")
        self._close_shard()
        core = self._tfds.core
        identity = core.DatasetIdentity(
            name=self.name, version=core.Version(_VERSION), data_dir=os.fspath(self._partial), module_name=""
        )
        info = core.DatasetInfo(
            builder=identity, features=self._described, description="Episodes in the RLDS format, written by jaxrl."
        )
        split = core.SplitInfo(
            name=_SPLIT,
            shard_lengths=self._shard_lengths,
            num_bytes=self._bytes,
            filename_template=self._template,
        )
        info.set_file_format("array_record")
        info.set_splits(core.SplitDict([split]))
        info.write_to_directory(os.fspath(self._partial))
        self._read_again()
        for file in self._partial.iterdir():
            _sync(file)
        _sync(self._partial)
        self._check_free()
        os.rename(self._partial, self.path)
        _sync(self.path.parent)
        self._release()
        return self.path

    def __enter__(self) -> "RldsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Deletes what was written, unless it was closed."""
        if self._lock is not None:
            with contextlib.suppress(Exception):
                self._close_shard()
            shutil.rmtree(self._partial, ignore_errors=True)
            self._release()

    def _close_shard(self):
        if self._shard is not None:
            shard, self._shard = self._shard, None
            shard.close()

    def _release(self):
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read_again(self):
        builder = self._tfds.builder_from_directory(os.fspath(self._partial))
        if builder.info.splits[_SPLIT].num_examples != self.episodes or builder.info.features is None:
            raise DatasetError(f"{self._partial} does not hold the {self.episodes} episodes that were written to it")
        checksum, at_once = 0, max(1, _READ_BYTES * self.episodes // max(self._bytes, 1))
        for path, length in zip(builder.info.splits[_SPLIT].filepaths, self._shard_lengths, strict=True):
            with features.records(path) as read:
                for start in range(0, length, at_once):
                    for record in read(start, min(start + at_once, length)):
                        checksum = zlib.crc32(record, checksum)
        if checksum != self._checksum:
            raise DatasetError(f"{self._partial} holds other bytes than were written to it; is the disk sound?")


def _dataset_name(text):
    """What TFDS allows: letters, digits and underscores, a letter first."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return name if re.match(r"[a-zA-Z]", name) else f"dataset_{name}"


def _claim(path: Path) -> tuple[Path, int]:
    """An empty directory that no other process writes to; the lock on it is gone with the process."""
    while True:
        path.mkdir(exist_ok=True)
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(f"another process writes to {path}; wait for it, or use another path") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                break
        os.close(lock)  # it was renamed or deleted since
    for left in path.iterdir():
        left.unlink()
    return path, lock


def _writer(path):
    from array_record.python import array_record_module

    return array_record_module.ArrayRecordWriter(os.fspath(path), "group_size:1")


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
