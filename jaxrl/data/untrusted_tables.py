"""Validation of untrusted Arrow and Parquet files.

pyarrow allocates any size that the headers of compressed batches and of pages declare (1.6 GB for a Parquet file of 514
bytes), and does not expose these headers. So this module reads the headers before pyarrow decodes a file; see
https://arrow.apache.org/docs/format/Columnar.html and https://parquet.apache.org/docs/file-format/ for the formats.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.core import files
from jaxrl.data import bounds

_MOST_FILES = 1000  # maximum number of files of an episode
_MOST_FIELDS = 10_000
_DEEPEST = 20  # maximum depth of nested lists and structures
_MOST_PAGES = 1_000_000
_ROW = 256  # estimated bytes of a row as a Python object
_CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP")  # codecs with a compression ratio of about a thousand at most
_PACKED = 1100
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # size in bytes of Thrift's true, false, byte and double, by type code


def check_episode(folder: Path, kind: str, pictures: bool) -> None:
    """Check that the files of an episode are valid tables that are safe to decode.

    Args:
      folder: the episode's directory.
      kind: the file format, "arrow" or "parquet".
      pictures: whether columns of bytes contain encoded images.

    Raises:
      ValueError, OSError: a file is not such a table; the message states the reason.
    """
    import pyarrow as pa

    files.read_json(folder / "metadata.json")
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "metadata.json"]
    found = [path for path in found if not path.name.startswith(("_", "."))]  # Minari does not read hidden files either
    if len(found) > _MOST_FILES:
        raise ValueError(f"the dataset has {len(found):,} files; at most {_MOST_FILES:,} are supported")
    look = _arrow if kind == "arrow" else _parquet
    for path in found:
        try:
            for batch in look(path, pictures):
                batch.validate(full=True)
                if pictures:
                    bounds.check_pictures(_bytes_in(batch))
        except (pa.ArrowException, struct.error, IndexError, RecursionError, EOFError) as error:
            raise ValueError(f"{path.name} is not a valid table: {error!s:.300}") from error


def _check_schema(schema) -> int:
    """Check a schema and return the size of a row in memory in bytes, with an estimate for strings.

    Raises:
      ValueError: the schema has types that Minari does not write, or its columns are nested too deeply or too many.
    """
    import pyarrow as pa

    seen = 0

    def visit(kind, name, depth):
        nonlocal seen
        seen += 1
        if depth > _DEEPEST or seen > _MOST_FIELDS:
            raise ValueError(f"the table has too many columns, or nests them too deeply: {name!r:.80}")
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
            raise ValueError(f"column {field.name!r:.80} has an Arrow extension type, which is not supported")
    return sum(visit(field.type, field.name, 0) for field in schema)


def _bytes_in(batch) -> Iterator[bytes]:
    """Yield every value of all columns of bytes, including columns within structures."""
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
    """Check that an Arrow file is uncompressed and fits in memory, and yield its batches from a memory map."""
    import pyarrow as pa

    with files.open_to_read(path) as file:
        _check_uncompressed(file, path.stat().st_size)
    with pa.memory_map(os.fspath(path)) as source:
        reader = pa.ipc.open_file(source)
        row, rows = _check_schema(reader.schema), 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            rows += batch.num_rows
            bounds.check_memory(rows * (row + _ROW), "the table")
            yield batch


def _check_uncompressed(file, size) -> None:
    """Check the headers of an Arrow file's batches, because pyarrow allocates any size that they declare.

    Field numbers are those of Footer, Message and RecordBatch in Arrow's File.fbs and Message.fbs.

    Raises:
      ValueError: a batch is compressed or outside the file, or the file is not an Arrow file.
    """
    from flatbuffers.number_types import Int32Flags, Int64Flags
    from flatbuffers.table import Table

    def root(data):
        return Table(data, struct.unpack_from("<I", data)[0])

    file.seek(max(size - 10, 0))
    length, magic = struct.unpack("<i6s", file.read(10))
    if magic != b"ARROW1" or not 0 < length <= min(size - 10, files.LARGEST):
        raise ValueError("a table is not an Arrow file")
    file.seek(size - 10 - length)
    footer = root(file.read(length))
    field = footer.Offset(4 + 2 * 3)  # recordBatches
    for number in range(footer.VectorLen(field) if field else 0):
        block = footer.Vector(field) + 24 * number
        offset, length = footer.Get(Int64Flags, block), footer.Get(Int32Flags, block + 8)
        if not (0 <= offset <= size and 0 < length <= files.LARGEST):
            raise ValueError("a batch is outside the file")
        file.seek(offset)
        head = file.read(length)
        message = root(head[8 if head[:4] == b"\xff\xff\xff\xff" else 4 :])
        batch = Table(message.Bytes, message.Indirect(message.Pos + message.Offset(4 + 2 * 2)))  # header
        if batch.Offset(4 + 2 * 3):  # compression
            raise ValueError("a table is compressed; save it uncompressed, as Minari does")


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _parquet(path, pictures) -> Iterator[Any]:
    """Check the size of a Parquet file's pages, then yield the file's batches if they may contain images."""
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
    """Check one column of a row group and return the memory in bytes for decoding it.

    Raises:
      ValueError: the codec is not supported, the column is outside the file, or its pages contradict its metadata.
    """
    if column.compression not in _CODECS:
        raise ValueError(f"a column is compressed with {column.compression}; supported codecs: {', '.join(_CODECS)}")
    begins = column.data_page_offset
    if column.dictionary_page_offset is not None and 0 < column.dictionary_page_offset < begins:
        begins = column.dictionary_page_offset
    ends = begins + column.total_compressed_size
    if not 0 <= begins <= ends <= size:
        raise ValueError(f"column {column.path_in_schema!r:.80} is outside the file")
    file.seek(begins)
    data, at, values, dictionary, needed = file.read(ends - begins), 0, 0, 0, 0
    for _ in range(_MOST_PAGES):
        if at >= len(data):
            break
        page, at = _thrift(data, at, 0)
        unpacked, packed = page.get(2, -1), page.get(3, -1)
        if not 0 <= packed <= len(data) - at or not 0 <= unpacked <= _PACKED * packed + 4096:
            raise ValueError(f"a page of {packed:,} bytes declares {unpacked:,} unpacked bytes")
        at += packed
        needed += unpacked
        if 7 in page:
            dictionary = max(dictionary, unpacked)
        else:
            count = (page.get(5) or page.get(8) or {}).get(1, -1)
            if count < 0:
                raise ValueError("a page does not declare its number of values")
            values += count
    if at != len(data) or values != column.num_values:
        raise ValueError(f"the pages of column {column.path_in_schema!r:.80} have {values:,} values, not as declared")
    each = 16 + (dictionary if column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY") else 0)
    return needed + values * each


def _thrift(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Parse a structure in Thrift's compact protocol; return its numbers and structures by field id, and its end."""
    if depth > _DEEPEST:
        raise ValueError("a page's header is nested too deeply")
    found, field = {}, 0
    while head := data[at]:
        at, kind = at + 1, head & 15
        if head >> 4:
            field += head >> 4
        else:
            field, at = _integer(data, at)
        found[field] = None
        if kind in _FIXED:
            at += _FIXED[kind]
        elif kind in (4, 5, 6):
            found[field], at = _integer(data, at)
        elif kind == 8:  # the statistics of a page
            length, at = _varint(data, at)
            at += length
        elif kind == 12:
            found[field], at = _thrift(data, at, depth + 1)
        else:
            raise ValueError("a page's header has lists, which are not supported")
    return found, at + 1


def _integer(data: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    return (number >> 1) ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number is not terminated")
