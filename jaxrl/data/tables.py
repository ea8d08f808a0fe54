"""Arrow and Parquet files of somebody else's, looked at before they are decoded.

pyarrow believes what a file says of itself: of how many rows, how long a page is once decompressed, where a buffer
lies. So the schema, the footer and the header of every page are read here first; the formats of these are
https://arrow.apache.org/docs/format/Columnar.html and https://parquet.apache.org/docs/file-format/.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.core import files
from jaxrl.data import bounds

_MOST_FILES = 1000  # of an episode
_MOST_FIELDS = 10_000
_DEEPEST = 20  # lists and structures within one another
_MOST_PAGES = 1_000_000
_ROW = 256  # bytes that a row takes as an object of Python's
_CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP")  # of which a byte makes a thousand at most
_PACKED = 1100


def check_episode(folder: Path, kind: str, pictures: bool) -> None:
    """Whether the files of an episode are tables that can be decoded.

    Args:
      folder: of the episode.
      kind: "arrow" or "parquet".
      pictures: columns of bytes are pictures.

    Raises:
      ValueError, OSError: they are not; says why.
    """
    import pyarrow as pa

    files.read_json(folder / "metadata.json")
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "metadata.json"]
    if len(found) > _MOST_FILES:
        raise ValueError(f"it has {len(found):,} files; at most {_MOST_FILES:,} are read")
    look = _arrow if kind == "arrow" else _parquet
    for path in found:
        if path.name.startswith(("_", ".")):
            continue  # nor are they read
        try:
            for batch in look(path, pictures):
                batch.validate(full=True)
                if pictures:
                    bounds.check_pictures(_bytes_in(batch))
        except (pa.ArrowException, struct.error, IndexError, RecursionError, EOFError) as error:
            raise ValueError(f"{path.name} is no such table: {error!s:.300}") from error


def _check_schema(schema) -> int:
    """The bytes of a row in memory; of texts, what stands for them.

    Raises:
      ValueError: it has types that Minari does not write.
    """
    import pyarrow as pa

    seen = 0

    def visit(kind, name, depth):
        nonlocal seen
        seen += 1
        if depth > _DEEPEST or seen > _MOST_FIELDS:
            raise ValueError(f"its columns are nested too deeply, or too many: {name!r:.80}")
        if pa.types.is_struct(kind) and kind.num_fields:
            return sum(visit(kind.field(i).type, kind.field(i).name, depth + 1) for i in range(kind.num_fields))
        if pa.types.is_fixed_size_list(kind) and kind.list_size > 0:
            return kind.list_size * visit(kind.value_type, name, depth + 1)
        if pa.types.is_list(kind):
            return 8 + visit(kind.value_type, name, depth + 1)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return 8
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            return _ROW
        raise ValueError(f"column {name!r:.80} has the type {kind!s:.80}, which Minari does not write")

    for field in schema:
        if field.metadata and any(key.startswith(b"ARROW:extension") for key in field.metadata):
            raise ValueError(f"column {field.name!r:.80} has a type of somebody else's")
    return sum(visit(field.type, field.name, 0) for field in schema)


def _bytes_in(batch) -> Iterator[bytes]:
    """Every value of every column of bytes, those within structures too."""
    import pyarrow as pa

    waiting = list(batch.columns)
    while waiting:
        column = waiting.pop()
        if pa.types.is_struct(column.type):
            waiting += column.flatten()
        elif pa.types.is_binary(column.type):
            yield from (value.as_py() for value in column if value.is_valid)


# --- Arrow -----------------------------------------------------------------------------------------------------------


def _arrow(path, pictures) -> Iterator[Any]:
    """The batches of a file, which lie in it as they are."""
    import pyarrow as pa

    size = path.stat().st_size
    with files.open_to_read(path) as file:
        lengths = _arrow_lengths(file, size)
    with pa.memory_map(os.fspath(path)) as source:
        reader = pa.ipc.open_file(source)
        row = _check_schema(reader.schema)
        if len(lengths) != reader.num_record_batches:
            raise ValueError("its footer contradicts itself")
        if sum(lengths) > 8 * size:  # the least is a bit
            raise ValueError(f"it promises {sum(lengths):,} rows, and has {size:,} bytes")
        bounds.check_memory(sum(lengths) * (row + _ROW), "the table")
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _arrow_lengths(file, size) -> list[int]:
    """The rows of each batch that the footer of an Arrow file tells of.

    Raises:
      ValueError: a batch is compressed, or there are dictionaries.
    """
    file.seek(max(size - 10, 0))
    footer_length, magic = struct.unpack("<i6s", file.read(10))
    if magic != b"ARROW1" or not 0 < footer_length <= min(size - 10, files.LARGEST):
        raise ValueError("it is no Arrow file")
    file.seek(size - 10 - footer_length)
    footer = _Flat(file.read(footer_length))
    if footer.vector(footer.root, 2)[1]:
        raise ValueError("it has dictionaries, which Minari does not write")
    start, count = footer.vector(footer.root, 3)
    lengths = []
    for number in range(count):
        offset, length = struct.unpack_from("<qi", footer.data, start + 24 * number)
        if not (0 <= offset <= size and 0 < length <= files.LARGEST):
            raise ValueError("a batch lies outside of it")
        file.seek(offset)
        head = file.read(length)
        message = _Flat(head[8 if head[:4] == b"\xff\xff\xff\xff" else 4 :])
        batch = message.table(message.root, 2)
        if message.place(batch, 3) is not None:
            raise ValueError("it is compressed, which Minari's are not")
        at = message.place(batch, 0)
        lengths.append(0 if at is None else struct.unpack_from("<q", message.data, at)[0])
    if any(length < 0 for length in lengths):
        raise ValueError("a batch has fewer rows than none")
    return lengths


class _Flat:
    """A buffer of FlatBuffers: tables whose fields are found by number (https://flatbuffers.dev/internals/)."""

    def __init__(self, data: bytes):
        self.data, self.root = data, struct.unpack_from("<I", data)[0]

    def place(self, table: int, field: int) -> int | None:
        """Where a field of a table begins; None where it is left out."""
        names = table - struct.unpack_from("<i", self.data, table)[0]
        if names < 0 or 4 + 2 * field >= struct.unpack_from("<H", self.data, names)[0]:
            return None
        offset = struct.unpack_from("<H", self.data, names + 4 + 2 * field)[0]
        return table + offset if offset else None

    def table(self, table: int, field: int) -> int:
        """Where the table begins that a field holds."""
        at = self.place(table, field)
        if at is None:
            raise ValueError("it lacks a part")
        return at + struct.unpack_from("<I", self.data, at)[0]

    def vector(self, table: int, field: int) -> tuple[int, int]:
        """Where the items of a field begin, and how many there are."""
        if self.place(table, field) is None:
            return 0, 0
        at = self.table(table, field)
        return at + 4, struct.unpack_from("<I", self.data, at)[0]


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _parquet(path, pictures) -> Iterator[Any]:
    """The batches of a file, once their pages are known to be bounded; decoded for pictures alone."""
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with pq.ParquetFile(path) as table:
        about, row, needed = table.metadata, _check_schema(table.schema_arrow), 0
        with files.open_to_read(path) as file:
            for group in range(about.num_row_groups):
                for number in range(about.num_columns):
                    needed += _check_column(file, size, about.row_group(group).column(number))
        bounds.check_memory(needed + about.num_rows * (row + _ROW), "the table")
        if pictures:
            yield from table.iter_batches()


def _check_column(file, size, column) -> int:
    """The bytes that a column of a row group takes.

    Raises:
      ValueError: it is compressed otherwise, lies outside of the file, or its pages are not as it says.
    """
    if column.compression not in _CODECS:
        raise ValueError(f"it is compressed with {column.compression}; {', '.join(_CODECS)} are read")
    begins = column.data_page_offset
    if column.dictionary_page_offset is not None and 0 < column.dictionary_page_offset < begins:
        begins = column.dictionary_page_offset
    ends = begins + column.total_compressed_size
    if not 0 <= begins <= ends <= size:
        raise ValueError(f"column {column.path_in_schema!r:.80} lies outside of it")
    file.seek(begins)
    data, at, values, dictionary, needed = file.read(ends - begins), 0, 0, 0, 0
    for _ in range(_MOST_PAGES):
        if at >= len(data):
            break
        page, at = _thrift(data, at, 0)
        unpacked, packed = page.get(2, -1), page.get(3, -1)
        if not 0 <= packed <= len(data) - at or not 0 <= unpacked <= _PACKED * packed + 4096:
            raise ValueError(f"a page of {packed:,} bytes is said to hold {unpacked:,}")
        at += packed
        needed += unpacked
        if 7 in page:
            dictionary = max(dictionary, unpacked)
        else:
            count = (page.get(5) or page.get(8) or {}).get(1, -1)
            if count < 0:
                raise ValueError("a page does not say how many values it has")
            values += count
    if at != len(data) or values != column.num_values:
        raise ValueError(f"the pages of column {column.path_in_schema!r:.80} have {values:,} values, not as it says")
    each = 16 + (dictionary if column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY") else 0)
    return needed + values * each


def _thrift(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """A structure in Thrift's compact protocol: its numbers and structures by field, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("a page's header is nested too deeply")
    found, field = {}, 0
    while head := data[at]:
        at += 1
        kind, step = head & 15, head >> 4
        if step:
            field += step
        else:
            number, at = _varint(data, at)
            field = (number >> 1) ^ -(number & 1)
        found[field], at = _thrift_value(data, at, kind, depth)
    return found, at + 1


def _thrift_value(data, at, kind, depth):
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        number, at = _varint(data, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:  # the statistics of a page
        length, at = _varint(data, at)
        return None, at + length
    if kind == 12:
        return _thrift(data, at, depth + 1)
    raise ValueError("a page's header has lists, which none has")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")
