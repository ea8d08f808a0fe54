"""The fields of an RLDS dataset, and TFDS's encoding of each field in the records."""

import contextlib
import dataclasses
import math
import operator
import os
import zlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxrl.core.errors import ConfigError, DatasetError, MissingExtraError
from jaxrl.data import bounds
from jaxrl.data.episodes import STEP_FIELDS, Episode, cast, implied_discount

# TFDS's encoding "none" stores numbers as int64 or float32, and reads uint64 values above 2^63 back wrongly. "bytes"
# stores the array's memory; with "none", images would take one or two bytes per value and much more time.
_AS_NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32")
_AS_BYTES = ("float16", "bfloat16", "float64", "uint64")
_MANY = 16  # integer arrays of at least this size are stored as bytes, except uint32, which TensorFlow cannot decode


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of an episode: the name, dtype, shape and encoding of an array or a text.

    Attributes:
      name: the array's path in the record, such as `steps/observation/camera`.
      dtype: the array's dtype in memory; None for "text" and "foreign".
      shape: the shape of one step, or of the value if the episode has a single one.
      encoding: TFDS's "none", "bytes" or "zlib"; "text"; or "foreign" if only TFDS can decode the array.
      decoder: the TFDS feature that decodes a "foreign" array.
    """

    name: str
    dtype: np.dtype | None
    shape: tuple[int, ...]
    encoding: str
    decoder: Any = None

    @property
    def of_steps(self) -> bool:
        return self.name.startswith("steps/")

    @property
    def kind(self) -> tuple[Any, ...]:
        """The dtype and shape, in the format of `jaxrl.data.episodes.kind_of`."""
        return ("TFDS's decoder",) if self.dtype is None else (self.dtype, self.shape)


def tfds() -> Any:
    """Import and return `tensorflow_datasets`, without importing TensorFlow.

    Raises:
      MissingExtraError: the package is not installed.
    """
    try:
        import array_record.python.array_record_module  # noqa: F401
        import tensorflow_datasets
    except ImportError as error:
        raise MissingExtraError("RLDS", "data") from error
    return tensorflow_datasets


def new_example() -> Any:
    """Return an empty `tf.train.Example`; its `features.feature` maps names to lists of bytes, float32 or int64."""
    from tensorflow_datasets.proto import tf_example_pb2

    messages: Any = tf_example_pb2  # protobuf creates its classes at run time
    return messages.Example()


# --- writing ---------------------------------------------------------------------------------------------------------


def fields_of(episode: Episode) -> list[Field]:
    """Return the fields for writing episodes that have the arrays and metadata of `episode`.

    Raises:
      ConfigError: an array could not be read back bit for bit, or TFDS does not allow a name; the message lists all of
        them.
    """
    fields, problems = [], []
    for path, x in jax.tree.leaves_with_path({"steps": episode.steps}):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype, shape = np.asarray(x).dtype, np.shape(x)[1:]
        if name.count("/") >= len(path):
            problems.append(f"{name}: a name with / is ambiguous with a nested name; rename it")
        if dtype.name not in _AS_NUMBERS + _AS_BYTES or not dtype.isnative:
            problems.append(
                f"{name} has dtype {dtype}, which RLDS cannot restore bit for bit; supported: "
                + ", ".join(sorted(_AS_NUMBERS + _AS_BYTES))
            )
        if 0 in shape:
            problems.append(f"{name} has shape {shape}: without values, TFDS cannot determine the number of steps")
        as_bytes = dtype.name in _AS_BYTES or (
            dtype.kind in "iub" and dtype.name != "uint32" and int(np.prod(shape)) >= _MANY
        )
        fields.append(Field(name, dtype, shape, "bytes" if as_bytes else "none"))
    if problems:
        raise ConfigError(problems)
    for name, value in episode.metadata.items():
        if isinstance(value, str):
            fields.append(Field(name, None, (), "text"))
        elif isinstance(value, float):
            fields.append(Field(name, np.dtype(np.float64), (), "bytes"))
        else:
            fields.append(Field(name, np.dtype(np.int64), (), "none"))
    return fields


def described(fields: list[Field]) -> Any:
    """Convert the fields to TFDS features."""
    tf = tfds().features
    found = {
        field.name: tf.Text()
        if field.encoding == "text"
        else tf.Tensor(shape=field.shape, dtype=field.dtype, encoding=field.encoding)
        for field in fields
    }
    tree = unflatten_dict(found, sep="/")
    return tf.FeaturesDict(tree | {"steps": tf.Dataset(tree["steps"])})


def serialized(episode: Episode, fields: list[Field]) -> bytes:
    """Encode an episode with these fields as a serialized `tf.train.Example`.

    Raises:
      ConfigError: the types of the episode's metadata differ from `fields`, or the episode is larger than 2 GB.
    """
    example, steps = new_example(), iter(jax.tree.leaves(episode.steps))
    features = example.features.feature
    for field in fields:
        if field.of_steps:
            _write_steps(features[field.name], field, next(steps))
        else:
            _write_value(features[field.name], field, episode.metadata[field.name])
    try:
        return example.SerializeToString(deterministic=True)
    except Exception as error:  # protobuf's EncodeError, which is not imported
        raise ConfigError(
            f"an episode of {episode.length:,} transitions exceeds the 2 GB limit of a TFDS record: "
            "use a smaller max_steps"
        ) from error


def _write_steps(feature, field, x):
    if field.encoding == "bytes":
        feature.bytes_list.value.extend(one.tobytes() for one in x)
    elif field.dtype.kind == "f":
        # Packed floats have the wire format of one bytes value, and writing bytes is a hundred times faster.
        packed = type(feature.bytes_list)(value=[x.tobytes()])
        feature.float_list.ParseFromString(packed.SerializeToString())
    else:
        feature.int64_list.value.extend(x.ravel().astype(np.int64).tolist())


def _write_value(feature, field, value):
    kind, meant = {"text": (str, "text"), "none": (int, "an integer of 64 bits")}.get(
        field.encoding, (float, "a float")
    )
    if not isinstance(value, kind) or kind is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"the metadata field {field.name}={value!r:.80} must be {meant}, as in the first episode")
    if field.encoding == "none":
        feature.int64_list.value.append(operator.index(value))
    else:
        text = value.encode() if field.encoding == "text" else np.asarray(value, field.dtype).tobytes()
        feature.bytes_list.value.append(text)


# --- reading ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def records(path: str | os.PathLike) -> Generator[Callable[[int, int], list[bytes]]]:
    """Open an ArrayRecord file; yield a function `read(start, stop)` that returns the records in this range.

    Raises:
      DatasetError: the file is incomplete or damaged.
    """
    from array_record.python import array_record_module

    try:
        reader = array_record_module.ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0")
    except RuntimeError as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error

    def read(start, stop):
        try:
            return reader.read(range(start, stop))
        except (RuntimeError, IndexError) as error:
            raise DatasetError(f"{path}: records {start} to {stop - 1} cannot be read: {error}") from error

    try:
        yield read
    finally:
        with contextlib.suppress(RuntimeError):  # the file is damaged, which `read` has already reported
            reader.close()


def read_fields(features: Any) -> list[Field]:
    """Convert a dataset's TFDS features to fields."""
    tf = tfds().features
    found = []

    def visit(feature, names):
        if isinstance(feature, tf.FeaturesDict):
            for name, child in feature.items():
                visit(child, [*names, name])
        elif isinstance(feature, tf.Dataset) and names == ["steps"]:
            visit(feature.feature, names)
        elif isinstance(feature, tf.Text):
            found.append(Field("/".join(names), None, (), "text"))
        elif (
            type(feature) in (tf.Tensor, tf.Scalar)
            and np.dtype(feature.np_dtype).kind not in "OSU"
            and None not in feature.shape
        ):
            encoding = feature.to_json_content().encoding or "none"
            found.append(Field("/".join(names), np.dtype(feature.np_dtype), tuple(feature.shape), encoding))
        else:
            found.append(Field("/".join(names), None, (), "foreign", feature))

    visit(features, [])
    return found


def read_example(record: bytes, fields: list[Field], where: str) -> dict[str, Any]:
    """Decode a record into arrays, keyed by field name.

    Args:
      record: a serialized `tf.train.Example`.
      fields: the fields to decode.
      where: the name of the episode, for error messages.

    Raises:
      DatasetError: a field is missing or cannot be read; the message names the episode and the field.
    """
    example = new_example()
    try:
        example.ParseFromString(record)
    except Exception as error:  # protobuf's DecodeError, which is not imported
        raise DatasetError(f"{where}: the record is not a tf.train.Example: {error}") from error
    features = example.features.feature
    found = {}
    for field in fields:
        if field.name not in features:
            raise DatasetError(f"{where}: {field.name} is missing")
        try:
            found[field.name] = _read(field, features[field.name])
        except Exception as error:  # image decoders raise errors of many types
            raise DatasetError(f"{where}: {field.name} cannot be read: {error!s:.500}") from error
    return found


def _read(field, feature):
    kind = feature.WhichOneof("kind")
    if kind is None:
        raise ValueError("the feature is not a list of bytes, floats or integers")
    values = getattr(feature, kind).value
    if kind != "bytes_list":
        values = np.asarray(values)
    if field.encoding == "foreign":
        if kind == "bytes_list":
            _check_foreign(field.decoder, values)
        decoded = [field.decoder.decode_example_np(x) for x in values]
        return np.stack([np.asarray(x) for x in decoded]) if field.of_steps else decoded[0]
    if (kind == "bytes_list") != (field.encoding != "none"):
        raise ValueError(f"the declared encoding is {field.encoding}, but values are encoded differently")
    if field.encoding == "text":
        texts = [x.decode() for x in values]
        return np.asarray(texts) if field.of_steps else texts[0]
    if field.encoding == "none":
        if field.dtype == np.uint64:
            values = values.view(np.uint64)
        values = cast(values, field.dtype, "it", np.ones(len(values), np.bool_))
    else:
        size = field.dtype.itemsize * math.prod(field.shape)
        if field.encoding == "zlib":
            values = [_inflated(x, size) for x in values]
        elif any(len(x) != size for x in values):
            raise ValueError(f"a string does not have {size} bytes")
        values = np.frombuffer(bytearray().join(values), field.dtype)
    values = values.reshape(-1, *field.shape)
    if field.of_steps:
        return values
    if len(values) != 1:
        raise ValueError(f"the feature has {len(values)} values instead of one")
    return values[0] if field.shape else values[0].item()


def _check_foreign(decoder, values):
    """Check the sizes that images and compressed bytes declare, which TFDS would trust when it decodes them."""
    if isinstance(decoder, tfds().features.Image):
        bounds.check_pictures(values, decoder.shape)
    elif getattr(decoder.to_json_content(), "encoding", "") == "zlib":
        bounds.check_inflated(values)


def _inflated(data, size):
    """Decompress the bytes of one step to exactly `size` bytes; stop decompressing beyond this size."""
    found = (decoder := zlib.decompressobj()).decompress(data, size + 1)
    if len(found) != size or not decoder.eof:
        raise ValueError(f"the data does not decompress to the {size} bytes of its shape")
    return found


def as_episode(values: Mapping[str, Any]) -> Episode:
    """Create an episode from arrays keyed by field name, filling in the fields that RLDS allows to be absent.

    Missing observations and actions become empty dictionaries, and missing rewards become 0. Without `is_terminal`, the
    discounts determine whether the episode terminated; missing discounts follow from `is_terminal`.
    """
    metadata = {name: x for name, x in values.items() if not name.startswith("steps/")}
    steps = unflatten_dict({name: x for name, x in values.items() if name not in metadata}, sep="/")["steps"]
    own = {name: steps.pop(name) for name in list(steps) if name in STEP_FIELDS}
    count = len(own["is_last"])
    if "is_terminal" not in own:
        own["is_terminal"] = np.zeros(count, np.bool_)
        own["is_terminal"][-1:] = not np.all(own.get("discount", np.ones(count))[-2:-1])
    if "discount" not in own:
        own["discount"] = implied_discount(own["is_terminal"])
    absent: dict[str, Any] = {"observation": {}, "action": {}, "reward": np.zeros(count, np.float32)}
    return Episode(**(absent | own), metadata=metadata, extras=steps)
