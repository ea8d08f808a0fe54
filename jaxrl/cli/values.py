"""Conversion of flag values from and to text, without JAX.

A part of a network or an optimizer is written as its name and arguments with colons between, in order or by name:
`mlp:256,256`, `mlp:256,256:activation=relu`, `gru:128`, `adam:eps=1e-8`. Parts and schedules are read in two steps:
`read` checks the text, `build` makes the object, for which it imports the module that defines it.
"""

import ast
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.core import files, registry, schedule_text
from jaxrl.core.errors import ConfigError, unknown

# "number" may be a schedule; a "network" and a "function" are registered by the user
KINDS = ("bool", "int", "float", "text", "path", "ints", "floats", "texts", "number", "part", "network", "function")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a flag's value.

    Attributes:
      name: one of `KINDS`.
      parts: for "part", the allowed ones.
      optional: whether it may be None.
    """

    name: str
    parts: tuple["Part", ...] = ()
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """A dataclass that has a name on the command line, with the kinds of its fields in order.

    Attributes:
      made_by: its "kind:name" in the registry, or the class itself if it is not registered.
    """

    name: str
    fields: Mapping[str, Kind]
    made_by: Any

    def usage(self) -> str:
        """Return the form in which it is written: `mlp:widths:activation:normalization`."""
        return ":".join([self.name, *self.fields])


@dataclasses.dataclass(frozen=True)
class ReadPart:
    """A part that was read, with its arguments."""

    part: Part
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ReadSchedule:
    """A schedule that was read."""

    text: str


@dataclasses.dataclass(frozen=True)
class ReadRegistered:
    """The name of an object that a user registered, of the kind "network" or "function"."""

    text: str
    kind: str


def metavar(kind: Kind) -> str:
    """Return the placeholder for a value in the help."""
    names = {"bool": "True|False", "int": "N", "float": "NUMBER", "path": "PATH", "text": "TEXT", "ints": "N,N,..."}
    names |= {
        "floats": "NUMBER,NUMBER,...",
        "texts": "TEXT,TEXT,...",
        "number": "NUMBER|SCHEDULE",
        "part": "|".join(part.name for part in kind.parts),
    }
    names |= {"network": "NAME", "function": "NAME"}
    return f"{names[kind.name]}|None" if kind.optional else names[kind.name]


def read(kind: Kind, text: str) -> Any:
    """Return the value that `text` represents; parts and schedules are made by `build`.

    Raises:
      ConfigError: it represents no value; lists the allowed ones.
    """
    if kind.optional and text.lower() == "none":
        return None
    if kind.name == "number":
        written = schedule_text.split(text)
        return written if isinstance(written, float) else ReadSchedule(text)
    if kind.name == "part":
        return _read_part(kind.parts, text)
    if kind.name in ("network", "function"):
        if text not in (known := registry.registered(registry.USER)):
            raise unknown(kind.name, text, known, "register it with jaxrl.register, and --import its module")
        return ReadRegistered(text, kind.name)
    if kind.name == "ints":
        return tuple(_whole(part) for part in text.split(",") if part)
    if kind.name == "floats":
        return tuple(_real(part) for part in text.split(",") if part)
    if kind.name == "texts":
        return tuple(part for part in text.split(",") if part)
    readers = {"bool": _truth, "int": _whole, "float": _real, "path": files.expand, "text": str}
    return readers[kind.name](text)


def build(value: Any) -> Any:
    """Return a value that was read, with its parts and schedules made.

    Raises:
      ConfigError: the numbers of a schedule or the arguments of a part do not fit.
    """
    if isinstance(value, ReadSchedule):
        from jaxrl.core import schedules

        return schedules.parse(value.text)
    if isinstance(value, ReadRegistered):
        function = value.kind == "function"
        return registry.registered(registry.USER)[value.text] if function else _made_network(value.text)
    if isinstance(value, ReadPart):
        made_by = value.part.made_by
        cls = registry.find(made_by) if isinstance(made_by, str) else made_by
        return cls(**{name: build(argument) for name, argument in value.arguments.items()})
    return value


def _made_network(name):
    from jaxrl.algos.base import Readable

    thing, why = registry.registered(registry.USER)[name], ""
    try:
        made = thing()
        if not isinstance(made, Readable):
            why = f"it gives {made!r:.80}"
    except TypeError as error:
        why = str(error)
    if why:
        raise ConfigError(
            f"{name!r} called without arguments gives no network: {why}; register a function that does, such as "
            "lambda: jaxrl.networks.from_linen(...)"
        )
    return made


def literal(text: str) -> Any:
    """Return a number, True, False, None or a tuple if `text` is one, otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def assignments(label: str, words: Sequence[str]) -> dict[str, str]:
    """Return `key=value` words as a dictionary.

    Raises:
      ConfigError: names every word of another form.
    """
    wrong = [word for word in words if not word.partition("=")[0] or "=" not in word]
    if wrong:
        raise ConfigError([f"{label}: {word!r} is not of the form key=value" for word in wrong])
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _read_part(parts, text):
    name, *words = text.split(":")
    by_name = {part.name: part for part in parts}
    if name.lower() not in by_name:
        raise unknown("part", name, by_name, "write " + " or ".join(part.usage() for part in parts))
    part = by_name[name.lower()]
    fields = list(part.fields)
    values: dict[str, Any] = {}
    for position, word in enumerate(words):
        field, equals, value = word.partition("=")
        if not equals:
            if position >= len(fields):
                raise ConfigError(f"{text!r} has too many arguments; write {part.usage()}")
            field, value = fields[position], word
            if part.fields[field].name == "text" and word.isdecimal():
                raise ConfigError(_with_commas(part, words, position))
        if field not in fields:
            raise unknown(f"argument of {name.lower()}", field, fields)
        values[field] = read(part.fields[field], value)
    return ReadPart(part, values)


def _with_commas(part, words, position):
    """Return a message on a number in place of a name: numbers of one argument are separated by commas."""
    text = ":".join([part.name, *words])
    first = next((n for n in reversed(range(position)) if list(part.fields.values())[n].name == "ints"), None)
    if first is None:
        return f"{text!r}: {words[position]} is no {list(part.fields)[position]}; write {part.usage()}"
    last = next((n for n in range(position, len(words)) if not words[n].isdecimal()), len(words))
    joined = ":".join([part.name, *words[:first], ",".join(words[first:last]), *words[last:]])
    return f"{text!r}: numbers have commas between them; did you mean {joined!r}?"


def _whole(text):
    try:
        number = int(text)
    except ValueError:
        real = _real(text)  # 1e6
        if not real.is_integer():
            raise ConfigError(f"{text!r} is not a whole number") from None
        number = int(real)
    if abs(number) >= 2**63:
        raise ConfigError(f"{text[:80]!r} is too large; whole numbers are less than 2^63")
    return number


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
