"""Fields of dataclasses and arguments of functions as command-line flags, so that each is documented once, at home.

tyro lays out the help and suggests close flags. The values are read here, all of them, so that every wrong one is
told at once and in the words of `jaxrl.errors`.

A part of a network or an optimiser is written as its name and arguments with colons between, in order or by name:
`mlp:256,256`, `mlp:256,256:activation=relu`, `gru:128`, `adam:eps=1e-8`.
"""

import ast
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jaxrl import schedules
from jaxrl.errors import ConfigError, unknown
from jaxrl.networks import GRU, LSTM, MLP, ActionValues, Core, ImpalaResNet, MinAtarCNN, NatureCNN, QHead, Torso

PARTS: dict[Any, tuple[type, ...]] = {
    Torso: (MLP, MinAtarCNN, NatureCNN, ImpalaResNet),
    Core: (GRU, LSTM),
    QHead: (ActionValues,),
}
_LIMITS = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
      name: as in Python; `total_steps` is `--total-steps`.
      annotation: of the value; decides how text is read.
      default: the value where the flag is not given.
      help: one line.
      shown: what the help says instead of the default ("required").
      choices: the only values, if not empty.
      many: any number of values, a tuple; without a name if `positional`.
      positional: given without its name.
    """

    name: str
    annotation: Any
    default: Any = None
    help: str = ""
    shown: str | None = None
    choices: tuple[Any, ...] = ()
    many: bool = False
    positional: bool = False

    def type(self) -> Any:
        """The annotation that tyro is given."""
        shown = "none" if self.shown is None and self.default == () else self.shown
        hint = None if shown is None else f"({shown})"
        argument = tyro.conf.arg(name=self.name.replace("_", "-"), help=self.help, help_behavior_hint=hint)
        if isinstance(self.default, bool):
            return Annotated[bool, argument]
        spec: PrimitiveConstructorSpec = PrimitiveConstructorSpec(
            nargs="*" if self.many else 1,
            metavar=self._metavar(),
            instance_from_str=lambda words: tuple(map(self._read, words)) if self.many else self._read(words[0]),
            is_instance=lambda value: True,
            str_from_instance=lambda value: list(map(written, value)) if self.many else [written(value)],
        )
        if self.positional:
            return tyro.conf.Positional[Annotated[Any, spec, argument]]
        return Annotated[Any, spec, argument]

    def _metavar(self):
        name = "|".join(map(str, self.choices)) or metavar(self.annotation)
        return f"{name} ..." if self.many else name

    def _read(self, text):
        try:
            value = read(self.annotation, text)
        except (ConfigError, ValueError) as error:
            return Wrong(str(error))
        if self.choices and value not in self.choices:
            return Wrong(str(unknown("value", text, map(str, self.choices))))
        return value


@dataclasses.dataclass(frozen=True)
class Wrong:
    """In place of a value that could not be read."""

    problem: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Flags that stand together in the help, under `title`; with `prefix` they are called `--title.flag`."""

    title: str
    flags: Sequence[Flag]
    help: str = ""
    prefix: bool = False


def parse(
    command: str, description: str, groups: Sequence[Group], argv: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The values of every flag, by the title of its group, and what is wrong with those that could not be read.

    Those keep their defaults. `--help` and flags that do not exist end the program, as command lines do.
    """
    made = [_dataclass(group) for group in groups]
    first, *rest = zip(groups, made, strict=True)
    fields = [*_fields(first[0])]
    for group, cls in rest:
        kind = Annotated[cls, tyro.conf.arg(help=group.help)]
        fields.append((group.title, kind if group.prefix else tyro.conf.OmitArgPrefixes[kind], _default(cls)))
    # Whole groups are fields of the first, whose flags stand at the top.
    top = dataclasses.make_dataclass("Flags", fields, kw_only=True)
    several = {f"--{flag.name.replace('_', '-')}" for flag in first[0].flags if flag.many and not flag.positional}
    found = tyro.cli(top, prog=command, description=description, args=_together(argv, several))
    values, problems = {}, []
    for group in groups:
        parsed = found if group is first[0] else getattr(found, group.title)
        values[group.title] = {}
        for flag in group.flags:
            value = getattr(parsed, flag.name)
            wrong = [v for v in (value if flag.many else [value]) if isinstance(v, Wrong)]
            name = f"--{group.title}." if group.prefix else "--"
            problems += [f"{name}{flag.name.replace('_', '-')}: {v.problem}" for v in wrong]
            values[group.title][flag.name] = flag.default if wrong else value
    return values, problems


def _together(argv, names):
    """`--grid a --grid b` as `--grid a b`, of which tyro would keep the last alone."""
    others: list[str] = []
    words: dict[str, list[str]] = {}
    into = others
    for word in argv:
        name, equals, value = word.partition("=")
        if name in names:
            into = words.setdefault(name, [])
            into += [value] if equals else []
            continue
        if word.startswith("--"):
            into = others
        into.append(word)
    return others + [word for name, values in words.items() for word in (name, *values)]


def _fields(group):
    return [
        (flag.name, flag.type(), dataclasses.field(default_factory=_constant(flag.default))) for flag in group.flags
    ]


def _dataclass(group):
    return dataclasses.make_dataclass(group.title, _fields(group), kw_only=True)


def _constant(value):
    return lambda: value


def _default(cls):
    return dataclasses.field(default_factory=cls)


# --- where flags come from ----------------------------------------------------------------------------------------


def algorithm_groups(algo: Any) -> list[Group]:
    """The flags of every field of an algorithm; those of its network, and of other such fields, in groups of their own.

    Args:
      algo: an instance, whose values are the defaults.
    """
    own, nested = [], []
    hints = typing.get_type_hints(type(algo))
    for field in dataclasses.fields(algo):
        value, limits = getattr(algo, field.name), field.metadata.get("limits", {})
        help_ = field.metadata.get("help", "")
        if _is_group(hints[field.name], value):
            nested.append(Group(field.name, _network_flags(value), _first_line(value), prefix=True))
            continue
        bounds = " and ".join(f"{_LIMITS[name]} {limit:g}" for name, limit in limits.items() if name in _LIMITS)
        if not help_:
            help_ = ", ".join(_usage(cls) for cls in _parts(hints[field.name]))
        if bounds:
            help_ += f"; {bounds}" if help_ else bounds
        own.append(Flag(field.name, hints[field.name], value, help_, choices=limits.get("choices", ())))
    return [Group(type(algo).__name__, own, _first_line(algo)), *nested]


def with_flags(algo: Any, values: Mapping[str, Mapping[str, Any]]) -> Any:
    """`algo` with what `parse` found for its `algorithm_groups`."""
    changes = dict(values[type(algo).__name__])
    for field in dataclasses.fields(algo):
        if field.name in values:
            changes[field.name] = dataclasses.replace(getattr(algo, field.name), **values[field.name])
    return dataclasses.replace(algo, **changes)


def argument_flags(function: Callable, leave_out: Sequence[str] = (), **defaults: Any) -> list[Flag]:
    """The flags of a function's keyword-only arguments, with the help of its docstring.

    Args:
      function: whose docstring has a section "Args:".
      leave_out: arguments that are no flags.
      defaults: others than the function's own; an argument without any is shown as required.
    """
    hints, help_ = typing.get_type_hints(function), documented(function)
    flags = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in leave_out or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        needed = parameter.default is inspect.Parameter.empty and defaults.get(name) is None
        default = defaults.get(name, None if needed else parameter.default)
        flags.append(Flag(name, hints[name], default, help_.get(name, ""), "required" if needed else None))
    return flags


def documented(thing: Any) -> dict[str, str]:
    """The entries of a docstring's section "Args:", by name; an entry of several names counts for each."""
    section = inspect.getdoc(thing).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {
        name: " ".join(text.split()).rstrip(".") for names, text in entries for name in names.split(", ")
    }


def _network_flags(network):
    hints, help_ = typing.get_type_hints(type(network)), documented(network)
    flags = []
    for field in dataclasses.fields(network):
        parts = ", ".join(_usage(cls) for cls in _parts(hints[field.name]))
        text = "; ".join(part for part in (help_.get(field.name, ""), parts) if part)
        flags.append(Flag(field.name, hints[field.name], getattr(network, field.name), text))
    return flags


def _is_group(annotation, value):
    return dataclasses.is_dataclass(value) and not _parts(annotation) and not schedules.is_schedule(value)


def _first_line(thing):
    return inspect.getdoc(thing).partition("\n")[0]


def _usage(cls):
    """`mlp:widths:activation:layer_norm`."""
    return ":".join([cls.__name__.lower(), *(field.name for field in dataclasses.fields(cls))])


# --- values as text and back --------------------------------------------------------------------------------------


def _alternatives(annotation) -> tuple[Any, ...]:
    """The members of a union, without None."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return (annotation,)


def _optional(annotation):
    return types.NoneType in typing.get_args(annotation)


def _parts(annotation) -> tuple[type, ...]:
    """The dataclasses that a field of this annotation may hold, if it is for a part of a network or an optimiser."""
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
    elif _parts(annotation):
        name = "|".join(cls.__name__.lower() for cls in _parts(annotation))
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
    if parts := _parts(annotation):
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
        return schedules.to_config(value)
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
        raise unknown("part", name, by_name, "write " + " or ".join(map(_usage, parts)))
    cls = by_name[name.lower()]
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for position, word in enumerate(words):
        field, equals, value = word.partition("=")
        if not equals:
            if position >= len(fields):
                raise ConfigError(f"{text!r} has too many arguments; write {_usage(cls)}")
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
