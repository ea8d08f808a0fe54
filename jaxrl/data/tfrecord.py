"""TFRecord files, written and read without TensorFlow.

A record is its length (64 bits), the checksum of those eight bytes, its bytes, and their checksum; all little-endian
(https://www.tensorflow.org/tutorials/load_data/tfrecord). The checksum is CRC-32C (RFC 3720, appendix B.4), rotated by
15 bits and with a constant added, so that the checksum of what contains checksums is sound.

By hand, because TFDS reads and writes these files with TensorFlow alone, which is never a dependency here.
"""

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Callable, Generator, Sequence

import numpy as np

from jaxrl.core.errors import DatasetError

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, the lowest bit first
_BLOCK = 64  # bytes that are looked up at once
_AT_ONCE = 1 << 20  # bytes whose checksums are computed together
_MASK_DELTA = 0xA282EAD8
_HEADERS = 1 << 14  # that are checked together
_FRAME = 16  # bytes of a record besides its own: 12 before, 4 after


class TfRecordWriter:
    """Writes records to a file; a few are kept back, because the checksums of many take little longer than of one."""

    def __init__(self, path: str | os.PathLike):
        self._file = open(path, "xb")  # a new file: what lies there may be a link to elsewhere
        self._waiting: list[bytes] = []
        self._size = 0

    def write(self, record: bytes) -> None:
        self._waiting.append(record)
        self._size += len(record)
        if self._size >= _AT_ONCE:
            self.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without what was kept back; nothing is raised where its last bytes cannot be written."""
        self._waiting = []
        with contextlib.suppress(OSError):
            self._file.close()

    def flush(self) -> None:
        """Hands what was kept back to the system."""
        lengths = [struct.pack("<Q", len(record)) for record in self._waiting]
        sums = masked_crc32c([*lengths, *self._waiting]).astype("<u4").tobytes()
        of_lengths, of_records = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        for i, (length, record) in enumerate(zip(lengths, self._waiting, strict=True)):
            at = slice(4 * i, 4 * i + 4)
            self._file.write(b"".join((length, of_lengths[at], record, of_records[at])))
        self._waiting, self._size = [], 0
        self._file.flush()


@contextlib.contextmanager
def records(path: str | os.PathLike) -> Generator[Callable[[int, int], list[bytes]]]:
    """Reads a file of records: from the first number given up to the second, without it.

    Raises:
      DatasetError: the file is incomplete or damaged.
    """
    from jaxrl.data.bounds import check_memory  # here: who writes does not wait for JAX

    path = os.fspath(path)
    status = os.stat(path)
    starts = _starts(path, status.st_size, status.st_mtime_ns)
    with open(path, "rb") as file:

        def read(start, stop):
            if stop > len(starts) - 1:
                raise DatasetError(f"{path}: records {start} to {stop - 1} cannot be read: it has {len(starts) - 1}")
            try:
                check_memory(2 * int(starts[stop] - starts[start]), f"records {start} to {stop - 1}")
            except ValueError as error:
                raise DatasetError(f"{path}: {error}") from error
            file.seek(starts[start])
            data = file.read(int(starts[stop] - starts[start]))
            bounds = (starts[start : stop + 1] - starts[start]).tolist()
            found = [data[a + 12 : b - 4] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
            stored = np.frombuffer(b"".join(data[b - 4 : b] for b in bounds[1:]), "<u4")
            if (bad := np.flatnonzero(stored != masked_crc32c(found))).size:
                raise DatasetError(f"{path}: record {start + bad[0]} cannot be read: its checksum is another")
            return found

        yield read


@functools.lru_cache(maxsize=64)
def _starts(path, size, _changed):
    """Where each record begins, and the end of the last; of a file that is as large, and was last changed then."""
    starts, headers, at = [0], [], 0
    if size:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while at < size:
                if at + _FRAME > size:
                    break
                headers.append(data[at : at + 12])
                at += _FRAME + int.from_bytes(headers[-1][:8], "little")
                starts.append(at)
                if len(headers) == _HEADERS:  # of a file of holes there would be as many as it is long
                    _check_lengths(path, headers, len(starts) - 1 - _HEADERS)
                    headers = []
    if at != size:
        raise DatasetError(f"{path} cannot be read: record {max(len(starts) - 2, 0)} goes over its end")
    _check_lengths(path, headers, len(starts) - 1 - len(headers))
    return np.asarray(starts)


def _check_lengths(path, headers, first):
    """Whether the lengths of records, of which `first` is the first, are what was written."""
    stored = np.frombuffer(b"".join(header[8:] for header in headers), "<u4")
    if (bad := np.flatnonzero(stored != masked_crc32c([header[:8] for header in headers]))).size:
        raise DatasetError(f"{path} cannot be read: the length of record {first + bad[0]} has another checksum")


# --- checksums -------------------------------------------------------------------------------------------------------


def masked_crc32c(texts: Sequence[bytes]) -> np.ndarray:
    """What TFRecord stores of the checksum of each, uint32 `[n]`."""
    crc = crc32c(texts)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK_DELTA)


def crc32c(texts: Sequence[bytes]) -> np.ndarray:
    """The CRC-32C of each, uint32 `[n]`.

    The checksum of a text is linear in its bits but for a constant, and zeros before it change nothing. So all texts
    are cut into blocks of the same size, every byte is looked up by its place in its block, and a block's sum is moved
    over the blocks that follow it.
    """
    lengths = np.asarray([len(text) for text in texts], np.int64)
    counts = -(-lengths // _BLOCK)
    zeros = bytes(_BLOCK)
    padded = [part for text in texts for part in (zeros[: -len(text) % _BLOCK], text)]
    blocks = np.frombuffer(b"".join(padded), np.uint8).reshape(-1, _BLOCK)
    sums = np.zeros(len(blocks), np.uint32)
    for place, table in enumerate(_places()):
        sums ^= table[blocks[:, place]]
    ends = np.cumsum(counts)
    following = np.repeat(ends, counts) - 1 - np.arange(len(blocks))
    moved = _append_zeros(sums, following * _BLOCK)
    found = _append_zeros(np.full(len(texts), 0xFFFFFFFF, np.uint32), lengths)
    some = counts > 0
    if some.any():
        found[some] ^= np.bitwise_xor.reduceat(moved, (ends - counts)[some])
    return ~found


def _append_zeros(sums, counts):
    """The register of each sum after as many bytes of zeros."""
    for power in range(int(counts.max(initial=0)).bit_length()):
        which = np.flatnonzero(counts >> power & 1)
        sums[which] = _look_up(_moves(power), sums[which])
    return sums


def _look_up(tables, sums):
    """A linear map of 32 bits, as a table `[4, 256]` of what each byte gives."""
    parts = [table[(sums >> np.uint32(8 * i)) & np.uint32(255)] for i, table in enumerate(tables)]
    return functools.reduce(np.bitwise_xor, parts)


@functools.cache
def _moves(power):
    """The map of a register to the one after 2^power bytes of zeros, `[4, 256]`."""
    if power:
        half = _moves(power - 1)
        return np.stack([_look_up(half, table) for table in half])
    octets = np.arange(256, dtype=np.uint32)
    first = octets
    for _ in range(8):
        first = np.where(first & np.uint32(1), first >> np.uint32(1) ^ np.uint32(_POLYNOMIAL), first >> np.uint32(1))
    return np.stack([first, *(octets << np.uint32(8 * i) for i in range(3))])


@functools.cache
def _places():
    """What a byte adds to the sum of its block, by its place there: `[_BLOCK, 256]`."""
    tables = [_moves(0)[0]]
    for _ in range(_BLOCK - 1):
        tables.append(_look_up(_moves(0), tables[-1]))
    return np.stack(tables[::-1])
