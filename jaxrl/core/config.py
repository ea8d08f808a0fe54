"""Conversion to JSON and back of configurations: trees of dataclasses, such as algorithms, networks and topologies.

A file refers to classes and functions by their registered names (`jaxrl.core.registry`): reading a configuration
creates instances of registered dataclasses, but never imports or runs anything else that the file names.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.spaces import is_bounded_shape

# Metadata key of a part whose fields were fields of the algorithm: what enabled it, and its fields by those names.
WAS = "was"
_MOST_NUMBERS = 1 << 28  # maximum count of numbers in all arrays and spaces of a configuration
_NUMBERS = "fiub"  # kinds of dtypes that are allowed in files


def encode(value: Any) -> Any:
    """Return `value` as JSON values; dataclasses become JSON objects with the key "type".

    Values of other types become JSON objects with a tag, such as {"float": "inf"}. A value that cannot be decoded (an
    instance of an unregistered class, or an unregistered function) becomes {"opaque": its repr}.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item) for key, item in value.items()}}
        return {"items": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"dtype": np.dtype(value).name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = registry.name_of(type(value))
        return opaque(value) if name is None else {"type": name} | encode_fields(value)
    if callable(value) and registry.name_of(value) is not None:
        return {"registered": registry.name_of(value)}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and np.asarray(value).dtype.kind in _NUMBERS:
        return _encode_array(np.asarray(value))
    return opaque(value)


def encode_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, each encoded by `encode`."""
    return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}


def opaque(value: Any) -> dict[str, str]:
    """Return the placeholder for a value that cannot be decoded: its repr, without memory addresses."""
    return {"opaque": re.sub(r" at 0x[0-9a-f]+", "", repr(value))}


def not_written(config: Any) -> list[str]:
    """Return one error line for each part of an encoded configuration that is a placeholder from `opaque`."""
    if isinstance(config, Mapping) and set(config) == {"opaque"}:
        return [
            f"{config['opaque']:.200} could not be written to config.json, so it cannot be read back; register its "
            "class or function with jaxrl.register before training, or pass the algorithm or environment: "
            "jaxrl.load(path, algo=..., env=...), or --import MODULE --env NAME on the command line"
        ]
    parts = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    return [line for part in parts for line in not_written(part)]


def decode(value: Any) -> Any:
    """Return the value that was encoded by `encode`; lists become tuples.

    Raises:
      ConfigError: a name is not registered, a value does not fit its field, or a part could not be written as JSON.
    """
    try:
        return _decode(value)
    except RecursionError:
        raise ConfigError("the configuration is nested too deeply; jaxrl did not write it") from None


def decode_fields(cls: Any, fields: Mapping[str, Any], **overrides: Any) -> Any:
    """Build an instance of the dataclass `cls` from the output of `encode_fields`, with some fields overridden.

    Raises:
      ConfigError: the class has no such field, or a value does not fit it.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{registry.name_of(cls) or cls!r} is not a dataclass, so it cannot be created from a file")
    cls, fields = _translated(cls, fields)
    known = {field.name for field in dataclasses.fields(cls)}
    # Null values of removed fields are ignored.
    values = {name: decode(item) for name, item in fields.items() if name in known or item is not None}
    return build(cls, values | overrides)


def _translated(cls, fields):
    """Return the class and the fields that a configuration of an older version has now."""
    for name, variant in vars(cls).get("variants", {}).items():
        cls = registry.find(variant) if fields.get(name) is True else cls
    removed, known = getattr(cls, "removed", {}), cls.__dataclass_fields__
    fields = {name: item for name, item in fields.items() if name in known or removed.get(name, ...) != item}
    for field in dataclasses.fields(cls):
        moved = field.metadata.get(WAS)
        if isinstance(moved, str) and moved in fields:  # another field, which had some of this field's choices
            value = fields[moved]
            fields = {name: item for name, item in fields.items() if name != moved}
            fields |= {field.name: value} if value in field.metadata["limits"]["choices"] else {}
        elif isinstance(moved, tuple):
            fields = _with_part(cls, field, *moved, fields)
        if isinstance(part := fields.get(field.name), Mapping) and (kind := field.metadata.get("part")):
            # A part without a type, or of a base class, is read as the class that the field declares.
            if "opaque" not in part and part.get("type") in [None, *map(registry.name_of, kind.__mro__)]:
                fields = {**fields, field.name: {**part, "type": registry.name_of(kind)}}
    return cls, fields


def _with_part(cls, field, switch, was, fields):
    """Return a configuration's fields with those of an older version that `was` names within one part."""
    name, _, value = (switch or field.name).partition("=")
    now, part = fields.get(name), fields.get(field.name)
    number = not isinstance(part, Mapping) or "array" in part or str(part.get("type")).startswith("schedule:")
    own = {was[old]: item for old, item in fields.items() if old in was and (number or old not in _hints(cls))}
    if not own and (now is None or not number):
        return fields
    on = not number or not _fits(None, _hints(cls).get(field.name)) or (now == value if value else now)
    part = ({} if number else part) | own if on else None
    return {old: item for old, item in fields.items() if old not in (name, *was)} | {field.name: part}


def build(cls: Any, values: Mapping[str, Any]) -> Any:
    """Build an instance of the dataclass `cls`, after checking each value against its field's annotation.

    Raises:
      ConfigError: the class has no such field, or a value does not fit it.
    """
    name = registry.name_of(cls) or cls.__name__
    known = {field.name for field in dataclasses.fields(cls)}
    if strange := sorted(set(values) - known):
        raise ConfigError(f"{name} has no field {', '.join(strange):.80}; a different version of jaxrl wrote the run")
    hints = _hints(cls)
    for field, item in values.items():
        if not _fits(item, hints.get(field, Any)):
            raise ConfigError(f"{name} has a value of the wrong type: {field}={item!r:.80}")
    if not cls.__dataclass_params__.init:  # `__init__` does not accept the fields as arguments
        if lacking := sorted(known - set(values)):
            raise ConfigError(f"{name} lacks values for {', '.join(lacking)}")
        bare = cls.__new__(cls)
        for field, item in values.items():
            object.__setattr__(bare, field, item)
        return bare
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:
        raise ConfigError(f"{name} cannot be created from its fields: {error}") from error


def check_sizes(config: Any) -> None:
    """Check that all arrays and spaces of a configuration together have at most 2^28 numbers, before they are created.

    Raises:
      ValueError: the arrays and spaces have more numbers.
    """
    total, waiting = 0, [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            shape = value.get("shape")
            if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape):
                total += math.prod(shape) if is_bounded_shape(shape) else 0  # larger shapes are rejected elsewhere
            waiting += value.values()
        elif isinstance(value, list):
            waiting += (item for item in value if isinstance(item, list | dict))
        if total > _MOST_NUMBERS:
            raise ValueError(f"the arrays and spaces have more than {_MOST_NUMBERS:,} numbers in total")


def _encode_array(array):
    flat = array.ravel()
    if flat.size > 1 and (flat.view(np.uint8).reshape(flat.size, -1) == flat[:1].view(np.uint8)).all():
        flat = flat[:1]  # a constant array, such as the bounds of an image space, is stored as one number
    return {"array": [encode(x) for x in flat.tolist()], "shape": list(array.shape), "dtype": array.dtype.name}


def _decode(value):
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if isinstance(name := value.get("type"), str):  # first, because a class may have fields with the names below
        return decode_fields(registry.find(name), {field: item for field, item in value.items() if field != "type"})
    if set(value) <= {"array", "shape", "dtype"} and "array" in value:
        return _decode_array(**{"shape": None, "dtype": None} | value)
    if len(value) == 1:
        [(kind, item)] = value.items()
        if kind == "float" and item in ("nan", "inf", "-inf"):
            return float(item)
        if kind == "dict" and isinstance(item, dict):
            return {key: _decode(part) for key, part in item.items()}
        if kind == "items" and isinstance(item, list) and all(isinstance(pair, list) for pair in item):
            return _decode_items(item)
        if kind == "dtype":
            return _dtype(item)
        if kind == "registered" and isinstance(item, str):
            return registry.find(item)
        if kind == "opaque":
            raise ConfigError(not_written(value))
    raise ConfigError(
        f"a configuration cannot contain an object with these keys: {', '.join(sorted(value)) or 'none':.80}"
    )


def _decode_items(pairs):
    try:
        return {_decode(key): _decode(item) for key, item in pairs}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"invalid dictionary in a configuration: {error}") from error


def _decode_array(array, shape, dtype):
    kind = _dtype(dtype)
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ConfigError(f"an array in a configuration has the invalid shape {shape!r:.80}")
    bounded = is_bounded_shape(shape)
    size = math.prod(shape) if bounded else 0
    if not bounded or not isinstance(array, list) or len(array) not in (1, size):
        found = f"{len(array)} values" if isinstance(array, list) else f"the values {array!r:.80}"
        raise ConfigError(f"an array in a configuration has shape {shape!r:.80}, but {found}")
    try:
        values = np.asarray([_decode(item) for item in array], kind)
        return np.broadcast_to(values, (size,)).reshape(shape)  # a single number is not expanded in memory
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the values of a {dtype} array in a configuration cannot be read: {error}") from error


def _dtype(name):
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in _NUMBERS or dtype.itemsize > 8:
        raise ConfigError(f"a configuration cannot have the dtype {name!r:.80}")
    return dtype


def _hints(cls):
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a user's class may use types that are imported only for type checkers
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether `value` has the type of a field's annotation; NumPy arrays are accepted for `jax.Array`."""
    if isinstance(hint, typing.TypeAliasType):
        return _fits(value, hint.__value__)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is not None:  # a function, a dictionary or a generic class
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is jax.Array:
        return isinstance(value, (np.ndarray, np.generic))
    try:
        return isinstance(value, hint)
    except TypeError:  # not a class, or a protocol without `runtime_checkable`
        return True
