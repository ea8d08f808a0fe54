"""`tf.train.Example`, the record of TFDS, written and read as whole arrays.

A protocol buffer that maps names to lists of bytes, of float32 or of int64
(https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto). The protobuf package
goes through such lists value by value; here a list is one array's memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

BYTES, FLOATS, INTEGERS = b"\x0a", b"\x12", b"\x1a"  # the fields of `Feature`, each of wire type 2
_LONGEST = 10  # bytes of a variable-length 64-bit integer


class WireError(ValueError):
    """The bytes are no `tf.train.Example`, or not as its writers write it."""


# --- writing ---------------------------------------------------------------------------------------------------------


def varint(n: int) -> bytes:
    """An unsigned 64-bit integer, seven bits a byte, the lowest first; a negative one as its two's complement."""
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append((n & 127) | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def feature(name: str, kind: bytes, payload: bytes) -> bytes:
    """A named list of one of the three kinds: `payload` is packed numbers, or for `BYTES` what `byte_strings` gives."""
    return _header(name, kind, len(payload)) + payload


@functools.lru_cache(maxsize=1 << 14)
def _header(name, kind, size):
    """What stands before `size` bytes of a list: the lengths of all that they lie in."""
    header = b"" if kind == BYTES else b"\x0a" + varint(size)
    header = kind + varint(len(header) + size) + header
    text = name.encode()
    header = b"\x0a" + varint(len(text)) + text + b"\x12" + varint(len(header) + size) + header
    return b"\x0a" + varint(len(header) + size) + header


def example(features: Sequence[bytes]) -> bytes:
    """An example of these features."""
    body = b"".join(features)
    return b"\x0a" + varint(len(body)) + body


def packed_integers(x: np.ndarray) -> bytes:
    """Every integer or bool of `x`, as an int64 of variable length."""
    if x.dtype == np.bool_:
        return x.tobytes()
    values = x.astype(np.int64, copy=False).ravel().view(np.uint64)
    if values.size == 0 or values.max() < 128:
        return values.astype(np.uint8).tobytes()
    place = np.arange(_LONGEST, dtype=np.uint64)
    rest = values[:, None] >> (place * np.uint64(7))
    used = np.maximum((rest != 0).sum(axis=1), 1)[:, None]
    groups = (rest & np.uint64(127)).astype(np.uint8)
    groups[place < used - 1] |= 128
    return groups[place < used].tobytes()


def byte_strings(x: np.ndarray) -> bytes:
    """The memory of every `x[i]`, each a string of its own."""
    size = x.itemsize * int(np.prod(x.shape[1:]))
    header = np.frombuffer(b"\x0a" + varint(size), np.uint8)
    out = np.empty((len(x), len(header) + size), np.uint8)
    out[:, : len(header)] = header
    out[:, len(header) :] = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(len(x), size)
    return out.tobytes()


# --- reading ---------------------------------------------------------------------------------------------------------


def parse(record: bytes) -> dict[str, tuple[bytes, memoryview]]:
    """The features of an example: of each its kind, and the inside of its list.

    Raises:
      WireError: it is none.
    """
    features = {}
    body = _only(memoryview(record), b"\x0a")
    for tag, part in _fields(body):
        if tag != b"\x0a":
            raise WireError(f"a map of features holds tag {tag!r}")
        found = dict(_fields(part))
        name, value = found.get(b"\x0a", memoryview(b"")), found.get(b"\x12", memoryview(b""))
        lists = list(_fields(value))
        if len(lists) != 1 or lists[0][0] not in (BYTES, FLOATS, INTEGERS):
            raise WireError(f"feature {bytes(name).decode(errors='replace')!r} is no list of bytes, floats or integers")
        features[bytes(name).decode()] = lists[0]
    return features


def numbers(kind: bytes, payload: memoryview) -> np.ndarray:
    """What a list of floats (float32) or integers (int64) holds."""
    packed = _only(payload, b"\x0a") if len(payload) else payload
    if kind == FLOATS:
        if len(packed) % 4:
            raise WireError(f"{len(packed)} bytes are no float32 numbers")
        return np.frombuffer(packed, "<f4")
    octets = np.frombuffer(packed, np.uint8)
    ends = octets < 128
    if ends.all():
        return octets.astype(np.int64)
    if not ends[-1]:
        raise WireError("the last integer is incomplete")
    stops = np.flatnonzero(ends) + 1
    starts = np.concatenate([[0], stops[:-1]])
    if (stops - starts).max() > _LONGEST:
        raise WireError(f"an integer has more than {_LONGEST} bytes")
    place = np.arange(len(octets)) - np.repeat(starts, stops - starts)
    parts = (octets & 127).astype(np.uint64) << (place.astype(np.uint64) * np.uint64(7))
    return np.bitwise_or.reduceat(parts, starts).view(np.int64)


def strings(payload: memoryview) -> list[memoryview]:
    """What a list of bytes holds."""
    return [part for _, part in _fields(payload)]


def equal_strings(payload: memoryview, size: int) -> np.ndarray:
    """As `strings`, where each has `size` bytes: `[n, size]`."""
    header = b"\x0a" + varint(size)
    step = len(header) + size
    if len(payload) % step:
        raise WireError(f"a string has not {size} bytes")
    table = np.frombuffer(payload, np.uint8).reshape(-1, step)
    if not (table[:, : len(header)] == np.frombuffer(header, np.uint8)).all():
        raise WireError(f"a string has not {size} bytes")
    return table[:, len(header) :]


def _only(data: memoryview, tag: bytes) -> memoryview:
    found = list(_fields(data))
    if len(found) != 1 or found[0][0] != tag:
        raise WireError(f"{len(found)} fields where one with tag {tag!r} should be")
    return found[0][1]


def _fields(data: memoryview) -> Any:
    """(tag, contents) of every field; all that these messages have are of wire type 2, a length and that many bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, length, shift, at = data[at], 0, 0, at + 1
        if tag & 7 != 2:
            raise WireError(f"tag {tag} is not of a field with a length")
        while True:
            if at >= end or shift > 63:
                raise WireError("a length is incomplete")
            octet = data[at]
            length |= (octet & 127) << shift
            at, shift = at + 1, shift + 7
            if octet < 128:
                break
        if at + length > end:
            raise WireError(f"a field of {length} bytes goes over the end")
        yield _TAGS[tag], data[at : at + length]
        at += length


_TAGS = [bytes((n,)) for n in range(256)]
