"""A writer and a reader of RLDS datasets in the layout of `tfds.builder_from_directory`, without TensorFlow."""

import contextlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, DatasetError, NoDatasetError, unknown
from jaxrl.data import episodes as rules
from jaxrl.data import features, tfrecord
from jaxrl.data.episodes import Episode
from jaxrl.data.metadata import check_files, check_tfds
from jaxrl.data.order import runs
from jaxrl.data.staging import Writer

_VERSION = "1.0.0"
_SPLIT = "train"
_SHARD_EPISODES = 10_000  # limited because the writer keeps an index of its file in memory
# Approximate number of bytes per read. ArrayRecord reads in threads, which do not return freed memory: with 4 MB per
# read, the process kept 18 MB more, independently of the number of episodes.
_READ_BYTES = 1 << 20
FILE_FORMATS = ("array_record", "tfrecord")
_HOST = re.compile(r"host-(\d{5})-of-(\d{5})")
_NEEDED = ("dataset_info.json", "features.json")
_MANDATORY = ("is_first", "is_last")  # https://github.com/google-research/rlds#dataset-format
_SUMMARISED = ("steps/reward", "steps/is_last")


class RldsWriter(Writer):
    """A writer of an RLDS dataset; use it as a context manager. The dataset is moved to `path` when it is complete.

    Args:
      path: the directory to create; it must be empty if it exists.
      name: the dataset's name, any text; TFDS's name and the file names are derived from it.
      shard_bytes: size in bytes at which a file is closed and the next one begins.
      file_format: "array_record", or "tfrecord" for programs that can only read TFRecord files.

    Raises:
      ConfigError: `path` already exists, or another process writes to it.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def __init__(
        self, path: str | os.PathLike, name: str, *, shard_bytes: int = 1 << 28, file_format: str = "array_record"
    ):
        if file_format not in FILE_FORMATS:
            raise unknown("file format", file_format, FILE_FORMATS)
        self._tfds = features.tfds()
        self.name = _dataset_name(name)
        self._shard_bytes, self._file_format = shard_bytes, file_format
        super().__init__(path)
        self._fields: list[features.Field] = []
        self._shard: Any = None
        self._shard_lengths: list[int] = []
        self._shard_size = self._bytes = 0
        self._template = self._tfds.core.ShardedFileTemplate(
            dataset_name=self.name,
            data_dir=self._partial,
            split=_SPLIT,
            filetype_suffix=file_format,
            template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}",
        )

    def __exit__(self, *_: object) -> None:
        """Delete the written files, unless `close` has published them."""
        with contextlib.suppress(Exception):
            self._close_shard()
        super().__exit__()

    def _add(self, episode):
        self._fields = self._fields or features.fields_of(episode)
        record = features.serialized(episode, self._fields)
        if self._shard is None:
            path = self._template.sharded_filepath(shard_index=len(self._shard_lengths), num_shards=None)
            self._shard, self._shard_size = _writer(path, self._file_format), 0
            self._shard_lengths.append(0)
        self._shard.write(record)
        self._checksum = zlib.crc32(record, self._checksum)
        self._shard_lengths[-1] += 1
        self._shard_size += len(record)
        self._bytes += len(record)
        if self._shard_size >= self._shard_bytes or self._shard_lengths[-1] >= _SHARD_EPISODES:
            self._close_shard()

    def _complete(self):
        self._close_shard()
        core = self._tfds.core
        identity = core.DatasetIdentity(
            name=self.name, version=core.Version(_VERSION), data_dir=os.fspath(self._partial), module_name=""
        )
        info = core.DatasetInfo(
            builder=identity,
            features=features.described(self._fields),
            description="Episodes in the RLDS format, written by jaxrl.",
        )
        split = core.SplitInfo(
            name=_SPLIT,
            shard_lengths=self._shard_lengths,
            num_bytes=self._bytes,
            filename_template=self._template,
        )
        info.set_file_format(self._file_format)
        info.set_splits(core.SplitDict([split]))
        info.write_to_directory(os.fspath(self._partial))

    def _close_shard(self):
        if self._shard is not None:
            shard, self._shard = self._shard, None
            shard.close()

    def _stored(self):
        reader, checksum = RldsReader(self._partial), 0
        for record in reader.records(range(len(reader))):
            checksum = zlib.crc32(record, checksum)
        return len(reader), checksum


class RldsReader:
    """A reader of the episodes of one RLDS dataset, in their stored order.

    Attributes:
      path: the dataset's directory.
      name: TFDS's name of the dataset.
      fields: the fields of an episode.
      absent: names of the optional RLDS fields that the steps do not have.

    Raises:
      ConfigError: jaxrl does not read the dataset's file format, or the dataset has no such split.
      DatasetError: the directory is not an RLDS dataset, the steps lack a required field, or a feature is not allowed;
        the message names the problem.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def __init__(self, path: str | os.PathLike, *, split: str = _SPLIT):
        tfds = features.tfds()
        self.path = path = files.expand(path)
        missing = [name for name in _NEEDED if not (self.path / name).is_file()]
        if missing:
            where = "it has no " + " and no ".join(missing) if self.path.exists() else "there is no such directory"
            raise NoDatasetError(f"{path} is not a TFDS dataset: {where} (jaxrl export-rlds writes one from a run)")
        check_files(self.path)
        check_tfds(self.path)
        try:
            builder = tfds.builder_from_directory(os.fspath(self.path))
            info = builder.info
            splits = dict(info.splits)
            self._files = [os.fspath(file) for file in splits[split].filepaths] if split in splits else []
            file_format = "tfrecord" if info.file_format is None else info.file_format.value  # TFDS's default
        except Exception as error:  # TFDS passes on any error of its parsers
            raise DatasetError(f"{path} cannot be opened by TFDS: {error!s:.500}") from error
        if file_format not in FILE_FORMATS:
            raise ConfigError(
                f"{path} has {file_format} files, which jaxrl does not read; convert it with TFDS to "
                + " or ".join(FILE_FORMATS)
            )
        self._open = tfrecord.records if file_format == "tfrecord" else features.records
        if split not in splits:
            raise ConfigError(f"{path} has no split {split!r}; it has {', '.join(sorted(splits))}")
        self.name = builder.name
        self.fields = features.read_fields(info.features)
        names = {field.name.split("/")[1] for field in self.fields if field.of_steps}
        self.absent = tuple(name for name in rules.STEP_FIELDS if name not in names)
        if lacking := [name for name in self.absent if name in _MANDATORY]:
            raise DatasetError(f"{path}: the steps have no {', no '.join(lacking)}; RLDS requires them")
        if gone := [file for file in self._files if not os.path.isfile(file)]:
            raise DatasetError(f"{path} is incomplete: {gone[0]} is missing")
        for file, count in zip(self._files, splits[split].shard_lengths, strict=True):
            size = os.path.getsize(file)
            if not 0 <= count <= size:
                raise DatasetError(f"{path} declares {count:,} episodes in {file}, which has {size:,} bytes")
        self._starts = np.append(0, np.cumsum(splits[split].shard_lengths)).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def records(self, places: Iterable[int]) -> Iterator[bytes]:
        """Yield the records of the episodes at `places`, in the given order.

        A file is opened once for consecutive episodes in the same file.

        Raises:
          DatasetError: a file is damaged.
        """
        places = np.asarray(places, np.int64)
        number = np.searchsorted(self._starts, places, side="right") - 1
        for begin, end in runs(number):
            file, here = self._files[number[begin]], int(number[begin])
            first, last = self._starts[here : here + 2].tolist()
            at_once = max(1, (last - first) * _READ_BYTES // max(os.path.getsize(file), 1))
            local = places[begin:end] - first
            with self._open(file) as read:
                for low, high in runs(local - np.arange(len(local))):
                    for at in range(low, high, at_once):
                        count = min(at_once, high - at)
                        yield from read(int(local[at]), int(local[at]) + count)

    def episode(self, record: bytes, where: str) -> Episode:
        """Decode a record.

        Args:
          record: an item that `records` yielded.
          where: the name of the episode, for error messages.

        Raises:
          DatasetError: the record cannot be read; the message names the field.
        """
        return features.as_episode(features.read_example(record, self.fields, where))

    def summary(self, record: bytes, where: str) -> dict[str, Any]:
        """Return a record's `Episode.summary`, decoding only part of the record."""
        needed = [field for field in self.fields if not field.of_steps or field.name in _SUMMARISED]
        values = features.read_example(record, needed, where)
        reward, is_last = (values.pop(name, np.zeros(0)) for name in _SUMMARISED)
        return values | {"return": float(np.sum(reward[:-1], dtype=np.float64)), "length": len(is_last) - 1}


def open_directory(path: str | os.PathLike, *, split: str = _SPLIT) -> list[RldsReader]:
    """Open the dataset at `path`, or all datasets in its subdirectories, which are read as one dataset.

    Raises:
      ConfigError: see `RldsReader`.
      DatasetError: see `RldsReader`; or the datasets have different fields, or the directory of a host is missing.
    """
    whole = path = files.expand(path)
    found = _datasets(whole, _HOST) if whole.is_dir() and not (whole / _NEEDED[0]).exists() else []
    if not found:
        return [RldsReader(path, split=split)]
    names = {child.name for child in whole.iterdir()}
    hosts = {int(match[2]) for name in names if (match := _HOST.fullmatch(name))}
    expected = {host_directory(index, count) for count in hosts for index in range(count)}
    if gone := sorted(expected - names):
        raise DatasetError(f"{path} is incomplete: {', '.join(gone)} is missing")
    readers = [RldsReader(child, split=split) for child in found]
    kinds = [{field.name: field.kind for field in reader.fields if field.of_steps} for reader in readers]
    for reader, kind in zip(readers, kinds, strict=True):
        if lines := rules.differences(kind, kinds[0]):
            raise DatasetError(f"{reader.path}: {lines[0]} as in {readers[0].path}")
    return readers


def _datasets(folder, hosts=None):
    """Return the directories of datasets in a directory, and in its subdirectories whose names match `hosts`."""
    below = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    found = []
    for child in below:
        if (child / _NEEDED[0]).is_file():
            found.append(child)
        elif hosts is not None and hosts.fullmatch(child.name):
            found += _datasets(child)
    return found


def host_directory(index: int, count: int) -> str:
    """Return the name of the directory to which process `index` of `count` processes writes."""
    return f"host-{index:05d}-of-{count:05d}"


def check_hosts(path: Path, count: int) -> None:
    """Check that `path` contains only directories of an export by `count` processes.

    Raises:
      ConfigError: `path` contains something else.
    """
    allowed = {host_directory(index, count) for index in range(count)}
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        if child.name.removeprefix(".").removesuffix(".partial") not in allowed:
            raise ConfigError(f"path={str(path)!r} already contains {child.name}; use another path, or move it away")


def _dataset_name(text):
    """Convert text to a name that TFDS allows: a letter, followed by letters, digits and underscores."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return name if re.match(r"[a-zA-Z]", name) else f"dataset_{name}"


def _writer(path, file_format):
    if file_format == "tfrecord":
        return tfrecord.TfRecordWriter(path)
    from array_record.python import array_record_module

    return array_record_module.ArrayRecordWriter(os.fspath(path), "group_size:1")
