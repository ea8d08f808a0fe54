"""A writer and a reader of TFRecord files, without TensorFlow.

A record consists of its length (64 bits), the checksum of these eight bytes, its data, and the checksum of the data;
all numbers are little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord). The checksum is CRC-32C,
rotated by 15 bits and with a constant added, because a plain CRC is unreliable for data that contain CRCs.

TFDS needs TensorFlow to read and write these files, which is not a dependency of jaxrl.
"""

import contextlib
import functools
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.core.errors import DatasetError

_BUFFER = 1 << 20  # number of bytes to write together
_FRAME = 16  # number of bytes in a record besides its data: 12 before and 4 after


class TfRecordWriter:
    """A buffered writer of records to a new file."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file: Any = open(path, "xb", _BUFFER)  # only a new file, because an existing one may be a link

    def write(self, record: bytes) -> None:
        length = struct.pack("<Q", len(record))
        self._file.write(b"".join((length, _checksum(length), record, _checksum(record))))

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        """Close the file without writing the buffered records, ignoring errors."""
        with contextlib.suppress(OSError):
            self._file.raw.close()

    def flush(self) -> None:
        """Write the buffered records to the file, without forcing them to the disk."""
        self._file.flush()


@contextlib.contextmanager
def records(path: str | os.PathLike) -> Generator[Callable[[int, int], list[bytes]]]:
    """Open a TFRecord file; yield a function `read(start, stop)` that returns the records in this range.

    Raises:
      DatasetError: the file is incomplete or damaged.
    """
    from jaxrl.data.bounds import check_memory  # imported late, so that writers do not wait for the import of JAX

    path = os.fspath(path)
    status = os.stat(path)
    starts = _starts(path, status.st_size, status.st_mtime_ns)
    with open(path, "rb") as file:

        def read(start, stop):
            what = f"records {start} to {stop - 1}"
            if stop > len(starts) - 1:
                raise DatasetError(f"{path}: {what} cannot be read: the file has only {len(starts) - 1} records")
            try:
                check_memory(2 * int(starts[stop] - starts[start]), what)
            except ValueError as error:
                raise DatasetError(f"{path}: {error}") from error
            file.seek(starts[start])
            data = file.read(int(starts[stop] - starts[start]))
            ends = (starts[start : stop + 1] - starts[start]).tolist()
            found = []
            for begin, end in itertools.pairwise(ends):
                found.append(data[begin + 12 : end - 4])
                if data[end - 4 : end] != _checksum(found[-1]):
                    number = start + len(found) - 1
                    raise DatasetError(f"{path}: record {number} cannot be read: its checksum is wrong")
            return found

        yield read


@functools.lru_cache(maxsize=64)
def _starts(path, size, _changed):
    """Return the start of each record and the end of the last; cached by the file's size and modification time."""
    starts, at = [0], 0
    if size:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while at + _FRAME <= size:
                length = data[at : at + 8]
                if data[at + 8 : at + 12] != _checksum(length):
                    number = len(starts) - 1
                    raise DatasetError(f"{path} cannot be read: the length of record {number} has a wrong checksum")
                at += _FRAME + int.from_bytes(length, "little")
                starts.append(at)
    if at != size:
        raise DatasetError(f"{path} cannot be read: record {max(len(starts) - 2, 0)} exceeds the end of the file")
    return np.asarray(starts)


def _checksum(text: bytes) -> bytes:
    """Return the four bytes that TFRecord stores as the checksum of `text`."""
    from google_crc32c import value  # imported when a run writes its first events, not with jaxrl

    crc = value(text)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
