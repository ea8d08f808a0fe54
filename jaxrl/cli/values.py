"""Conversion of flag values from and to text, without JAX.

A part of a network or an optimizer is written as its name and arguments, separated by colons, in order or by name:
`mlp:256,256`, `mlp:256,256:activation=relu`, `gru:128`, `adam:eps=1e-8`. Parts and schedules are converted in two
steps: `read` validates the text, and `build` imports the defining module and creates the object.
"""

import ast
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.core import files, registry, schedule_text
from jaxrl.core.errors import ConfigError, unknown


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a flag's value.

    Attributes:
      name: "bool", "int", "float", "text", "path", or "ints", "floats" and "texts" for tuples; "number", which may be a
        schedule; "part"; "network" or "function", registered by the user.
      parts: for "part", the allowed parts.
      optional: whether None is allowed.
    """

    name: str
    parts: tuple["Part", ...] = ()
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """A dataclass that can be named on the command line, with the kinds of its fields in order.

    Attributes:
      made_by: its "kind:name" in the registry, or the class if it is not registered.
    """

    name: str
    fields: Mapping[str, Kind]
    made_by: Any

    def usage(self) -> str:
        """Return the syntax of the part: `mlp:widths:activation:normalization`."""
        return ":".join([self.name, *self.fields])


@dataclasses.dataclass(frozen=True)
class Unmade:
    """A parsed value that is created later, by `build`, since creating it imports JAX.

    Attributes:
      make: function of the value that the flag replaces.
    """

    make: Callable[[Any], Any]


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, or the type itself."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return list(typing.get_args(annotation)) if union else [annotation]


def kind_of(annotation: Any) -> Kind:
    """Return the kind of value for an annotation of plain types or tuples of them."""
    names, kinds = {int: "int", float: "float", bool: "bool", str: "text", Path: "path"}, alternatives(annotation)
    elements = next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is tuple), ())
    if elements:
        name = f"{names.get(elements[0], 'int')}s"
    else:
        name = "path" if Path in kinds else names.get(kinds[0], "text")
    return Kind(name, optional=types.NoneType in kinds)


def metavar(kind: Kind) -> str:
    """Return the placeholder of a value in the help."""
    names = {
        "bool": "True|False",
        "int": "N",
        "float": "NUMBER",
        "path": "PATH",
        "text": "TEXT",
        "ints": "N,N,...",
        "floats": "NUMBER,NUMBER,...",
        "texts": "TEXT,TEXT,...",
        "number": "NUMBER|SCHEDULE",
        "part": "|".join(part.name for part in kind.parts) if len(kind.parts) != 1 else ":".join(kind.parts[0].fields),
        "network": "NAME",
        "function": "NAME",
    }
    return f"{names[kind.name]}|None" if kind.optional else names[kind.name]


def read(kind: Kind, text: str) -> Any:
    """Parse `text`; parts and schedules are created later, by `build`.

    Raises:
      ConfigError: `text` is not a valid value; lists the allowed ones.
    """
    if kind.optional and text.lower() == "none":
        return None
    if kind.name == "number":
        number = schedule_text.split(text)
        return number if isinstance(number, float) else Unmade(partial(_schedule, text))
    if kind.name == "part":
        return _read_part(kind.parts, text)
    if kind.name in ("network", "function"):
        known = registry.registered(registry.USER)
        if text not in known:
            raise unknown(kind.name, text, known, "register it with jaxrl.register and pass its module to --import")
        return Unmade(partial(_network, text) if kind.name == "network" else lambda _: known[text])
    readers = {"bool": _truth, "int": _whole, "float": _real, "path": files.expand, "text": str}
    if kind.name in readers:
        return readers[kind.name](text)
    return tuple(readers[kind.name.removesuffix("s")](part) for part in text.split(",") if part)


def build(value: Any, current: Any = None) -> Any:
    """Return a parsed value, creating it if it is a part, a schedule or an object registered by the user.

    If a field allows only one class of parts, the arguments that are not given have the values of `current`.

    Raises:
      ConfigError: the numbers of a schedule or the arguments of a part are invalid.
    """
    return value.make(current) if isinstance(value, Unmade) else value


def then(first: Any, second: Any) -> Any:
    """Return the value of two flags: the second one, which changes the first one if both are parts."""
    if not isinstance(second, Unmade):
        return second
    return Unmade(lambda current: second.make(build(first, current)))


def _schedule(text, current):
    from jaxrl.core import schedules

    return schedules.parse(text)


def _part(made_by, arguments, alone, current):
    cls = registry.find(made_by) if isinstance(made_by, str) else made_by
    arguments = {name: build(argument) for name, argument in arguments.items()}
    return dataclasses.replace(current, **arguments) if alone and isinstance(current, cls) else cls(**arguments)


def _network(name, current):
    from jaxrl.algos.base import Readable

    thing, why = registry.registered(registry.USER)[name], ""
    try:
        made = thing()
        if not isinstance(made, Readable):
            why = f"it returned {made!r:.80}"
    except TypeError as error:
        why = str(error)
    if why:
        raise ConfigError(
            f"{name!r} called without arguments did not return a network: {why}; register a function that does, such "
            "as lambda: jaxrl.networks.from_linen(...)"
        )
    return made


def literal(text: str) -> Any:
    """Return `text` parsed as a number, True, False, None or a tuple, otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def assignments(label: str, words: Sequence[str]) -> dict[str, str]:
    """Return `key=value` arguments as a dictionary.

    Raises:
      ConfigError: an argument has another form; the message lists all such arguments.
    """
    wrong = [word for word in words if not word.partition("=")[0] or "=" not in word]
    if wrong:
        raise ConfigError([f"{label}: {word!r} is not of the form key=value" for word in wrong])
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _read_part(parts, text):
    field, _, value = text.removeprefix(".").partition("=")
    if text.startswith(".") and len(parts) == 1 and field in parts[0].fields:  # one field of the only part
        return Unmade(partial(_part, parts[0].made_by, {field: read(parts[0].fields[field], value)}, True))
    usage = "use " + " or ".join(part.usage() for part in parts)
    if text.lower() == "none":
        raise ConfigError(f"this part cannot be None, which would switch it off; {usage}")
    name, *words = text.split(":")
    by_name = {part.name: part for part in parts}
    if name.lower() not in by_name:
        if len(parts) > 1 or not ("=" in name or _fits(next(iter(parts[0].fields.values())), name)):
            raise unknown("part", name, by_name, usage)
        name, words = parts[0].name, [name, *words]  # the name of the only part may be omitted
    part = by_name[name.lower()]
    fields = list(part.fields)
    values: dict[str, Any] = {}
    position, arguments = -1, list(words)
    while words:
        position, word = position + 1, words.pop(0)
        field, equals, value = word.partition("=")
        if not equals:
            if position >= len(fields):
                raise ConfigError(f"{text!r} has too many arguments; use {part.usage()}")
            field, value = fields[position], word
            if part.fields[field].name == "text" and word.isdecimal():
                raise ConfigError(_with_commas(part, arguments, position))
        if field not in fields:
            raise unknown(f"argument of {name.lower()}", field, fields)
        while value.partition(":")[0].lower() in schedule_text.USAGE and words and "=" not in words[0]:
            value = f"{value}:{words.pop(0)}"  # the numbers of a schedule
        values[field] = read(part.fields[field], value)
    return Unmade(partial(_part, part.made_by, values, len(parts) == 1))


def _fits(kind, text):
    """Return whether a text can be read, or is the name of a schedule, whose numbers follow."""
    try:
        read(kind, text)
    except ConfigError:
        return kind.name == "number" and text.lower() in schedule_text.USAGE
    return True


def _with_commas(part, words, position):
    """Explain that a number is in the place of a name, since numbers of an argument must be separated by commas."""
    names = [kind.name for kind in part.fields.values()]
    text = ":".join([part.name, *words])
    if "ints" not in names[:position]:
        return f"{text!r}: {words[position]} is not a valid {list(part.fields)[position]}; use {part.usage()}"
    first = names.index("ints")
    joined = re.sub(r"(?<=\d):(?=\d+(:|$))", ",", ":".join(words[first:]))
    meant = ":".join([part.name, *words[:first], joined])
    return f"{text!r}: separate numbers with commas; did you mean {meant!r}?"


def _whole(text):
    try:
        number = int(text)
    except ValueError:
        real = _real(text)  # 1e6
        if not real.is_integer():
            raise ConfigError(f"{text!r} is not an integer") from None
        number = int(real)
    if abs(number) >= 2**63:
        raise ConfigError(f"{text[:80]!r} is too large; integers must be less than 2^63")
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
        raise ConfigError(f"{text!r} must be True or False")
    return text.lower() == "true"
