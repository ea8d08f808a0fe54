"""Configurations as JSON and back: algorithms, networks, environments and topologies are dataclasses, hence trees.

Only classes of jaxrl itself, of the environment suites it adapts, and those that a user registered, are made again
from a file: reading a configuration runs no other code that the file names.
"""

import dataclasses
import importlib
import math
from typing import Any

import numpy as np

from jaxrl.errors import ConfigError

_PACKAGES = ("jaxrl", "gymnax", "brax")  # an environment of a suite holds the suite's own parameters
_REGISTERED: dict[str, type] = {}


def register_class(cls: type) -> type:
    """Lets a dataclass of your own (a network, say) be read back from a run's `config.json`; usable as a decorator."""
    _REGISTERED[_class_name(cls)] = cls
    return cls


def _class_name(cls):
    return f"{cls.__module__}:{cls.__qualname__}"


def encode(value: Any) -> Any:
    """`value` as JSON values: dataclasses become objects with a "type"; what JSON lacks becomes an object too.

    A value that cannot be read back (a function, an instance of a foreign class) becomes {"opaque": its repr}.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"items": [[encode(key), encode(item)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"type": _class_name(type(value))} | fields
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"dtype": np.dtype(value).name}
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            return {"array": [encode(item) for item in array.ravel().tolist()], "shape": list(array.shape)} | {
                "dtype": array.dtype.name
            }
    return {"opaque": repr(value)}


def decode(value: Any) -> Any:
    """What `encode` was given.

    Raises:
      ConfigError: a class is neither jaxrl's nor registered, or a part could not be written as JSON.
    """
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "type" in value:  # first: a class may have fields of the names below
        return _decode_instance(value)
    if "float" in value:
        return float(value["float"])
    if "items" in value:
        return {decode(key): decode(item) for key, item in value["items"]}
    if "array" in value:
        return np.asarray([decode(item) for item in value["array"]], value["dtype"]).reshape(value["shape"])
    if "dtype" in value:
        return np.dtype(value["dtype"])
    if "opaque" in value:
        raise ConfigError(
            f"{value['opaque']} could not be written to config.json, so it cannot be read back; "
            "give the algorithm or environment itself: jaxrl.load(path, algo=..., env=...)"
        )
    raise ConfigError(f"no value of a configuration has the keys {', '.join(sorted(value))}")


def _decode_instance(value):
    cls = _find_class(value["type"])
    fields = {name: decode(item) for name, item in value.items() if name != "type"}
    known = {field.name for field in dataclasses.fields(cls)}
    if strange := sorted(set(fields) - known):
        raise ConfigError(f"{value['type']} has no field {', '.join(strange)}; the run is of another version of jaxrl")
    if cls.__dataclass_params__.init:
        return cls(**fields)
    made = cls.__new__(cls)  # its __init__ takes something else than its fields
    for name, item in fields.items():
        object.__setattr__(made, name, item)
    return made


def _find_class(name):
    if name in _REGISTERED:
        return _REGISTERED[name]
    module, _, path = name.partition(":")
    if module.split(".")[0] not in _PACKAGES:
        raise ConfigError(
            f"class {name} is not one that jaxrl knows; register it with jaxrl.config.register_class before loading, "
            "or give the algorithm or environment itself: jaxrl.load(path, algo=..., env=...)"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"class {name} is not here ({error}); the run is of another version of jaxrl, or needs an extra"
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{name} is not a dataclass")
    return found
