"""Values of flags as text, and back.

A part of a network or an optimizer is written as its name and arguments with colons between, in order or by name:
`mlp:256,256`, `mlp:256,256:activation=relu`, `gru:128`, `adam:eps=1e-8`.
"""

import ast
import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.algos.optimizers import OPTIMIZERS, Optimizer
from jaxrl.core import schedules
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.sources import FrameStack
from jaxrl.networks import (
    GRU,
    LSTM,
    MLP,
    ActionValues,
    CategoricalValues,
    Core,
    ImpalaCNN,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    QHead,
    QuantileValues,
    Torso,
)
from jaxrl.parallel.ray.remote import Remote

# What a field of these annotations may hold. A part of your own is given in Python.
PARTS: dict[Any, tuple[type, ...]] = {
    Optimizer: OPTIMIZERS,
    Torso: (MLP, MinAtarCNN, NatureCNN, ImpalaCNN, ImpalaResNet),
    Core: (GRU, LSTM),
    QHead: (ActionValues, CategoricalValues, QuantileValues),
    Remote: (Remote,),
    FrameStack: (FrameStack,),
}


def usage(cls: Any) -> str:
    """How a part is written: `mlp:widths:activation:normalization`."""
    return ":".join([cls.__name__.lower(), *(field.name for field in dataclasses.fields(cls))])


def _alternatives(annotation) -> tuple[Any, ...]:
    """The members of a union, without None."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return (annotation,)


def _optional(annotation):
    return types.NoneType in typing.get_args(annotation)


def parts_of(annotation: Any) -> tuple[type, ...]:
    """The dataclasses that a field of this annotation may hold, if it is for a part of a network or an optimizer."""
    kinds = _alternatives(annotation)
    if len(kinds) == 1:
        return PARTS.get(kinds[0], ())
    described = all(isinstance(kind, type) and dataclasses.is_dataclass(kind) for kind in kinds)
    return kinds if described else ()


def metavar(annotation: Any) -> str:
    """What stands for a value in the help."""
    kinds = _alternatives(annotation)
    if schedules.Schedule in kinds:
        name = "NUMBER|SCHEDULE"
    elif parts_of(annotation):
        name = "|".join(cls.__name__.lower() for cls in parts_of(annotation))
    elif typing.get_origin(kinds[0]) is tuple:
        name = "N,N,..."
    else:
        name = {int: "N", float: "NUMBER", bool: "True|False"}.get(kinds[0], "PATH" if Path in kinds else "TEXT")
    return f"{name}|None" if _optional(annotation) else name


def read(annotation: Any, text: str) -> Any:
    """The value that `text` stands for.

    Raises:
      ConfigError: it stands for none; says what is allowed.
    """
    if _optional(annotation) and text.lower() == "none":
        return None
    kinds = _alternatives(annotation)
    if schedules.Schedule in kinds:
        return schedules.parse(text)
    if parts := parts_of(annotation):
        return _read_part(parts, text)
    if typing.get_origin(kinds[0]) is tuple:
        return tuple(_whole(part) for part in text.split(",") if part)
    if kinds[0] is bool:
        return _truth(text)
    if kinds[0] is int:
        return _whole(text)
    if kinds[0] is float:
        return _real(text)
    return Path(text) if Path in kinds else text


def written(value: Any) -> str:
    """The text that `read` would take for it."""
    if schedules.is_schedule(value):
        return str(schedules.to_config(value))
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    if isinstance(value, float):
        return f"{value:g}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        arguments = (f"{field.name}={written(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return ":".join([type(value).__name__.lower(), *arguments])
    return str(value)


def literal(text: str) -> Any:
    """A number, True, False, None or a tuple where `text` is one; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def read_field(algo: Any, name: str, text: str) -> Any:
    """The value of an algorithm's field that `text` stands for.

    Raises:
      ConfigError: there is no such field, or `text` stands for no value of it.
    """
    hints = typing.get_type_hints(type(algo))
    known = [field.name for field in dataclasses.fields(algo)]
    if name not in known:
        raise unknown(f"field of {type(algo).__name__}", name, known)
    return read(hints[name], text)


def assignments(label: str, words: Sequence[str]) -> dict[str, str]:
    """`key=value` words as a dictionary.

    Raises:
      ConfigError: naming every word that is none.
    """
    wrong = [word for word in words if not word.partition("=")[0] or "=" not in word]
    if wrong:
        raise ConfigError([f"{label}: {word!r} is not of the form key=value" for word in wrong])
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _read_part(parts, text):
    name, *words = text.split(":")
    by_name = {cls.__name__.lower(): cls for cls in parts}
    if name.lower() not in by_name:
        raise unknown("part", name, by_name, "write " + " or ".join(map(usage, parts)))
    cls = by_name[name.lower()]
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for position, word in enumerate(words):
        field, equals, value = word.partition("=")
        if not equals:
            if position >= len(fields):
                raise ConfigError(f"{text!r} has too many arguments; write {usage(cls)}")
            field, value = fields[position], word
        if field not in fields:
            raise unknown(f"argument of {name.lower()}", field, fields)
        values[field] = read(hints[field], value)
    return cls(**values)


def _whole(text):
    try:
        return int(text)
    except ValueError:
        number = _real(text)  # 1e6
        if not number.is_integer():
            raise ConfigError(f"{text!r} is not a whole number") from None
        return int(number)


def _real(text):
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{text!r} is not a finite number")
    return number


def _truth(text):
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"{text!r} is neither True nor False")
    return text.lower() == "true"
