"""Fields of dataclasses and arguments of functions as command-line flags, so that each is documented once, at home.

tyro lays out the help and suggests close flags. The values are read here, all of them, so that every wrong one is
told at once and in the words of `jaxrl.errors`.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jaxrl.cli.values import metavar, parts_of, read, usage, written
from jaxrl.core import schedules
from jaxrl.core.errors import ConfigError, unknown

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

    def option(self, flag: Flag) -> str:
        """How the flag is written: `--network.torso`."""
        prefix = f"{self.title}." if self.prefix else ""
        return f"--{prefix}{flag.name.replace('_', '-')}"


def parse(
    command: str, description: str, groups: Sequence[Group], argv: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The values of every flag, by the title of its group, and everything that is wrong with the command line.

    A flag whose value could not be read keeps its default. `--help` and flags without a value end the program.
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
    found, rest = tyro.cli(
        top, prog=command, description=description, args=_together(argv, several), return_unknown_args=True
    )
    values, problems = {}, _unexpected(rest, groups, f"{command} --help lists them")
    for group in groups:
        parsed = found if group is first[0] else getattr(found, group.title)
        values[group.title] = {}
        for flag in group.flags:
            value = getattr(parsed, flag.name)
            wrong = [v for v in (value if flag.many else [value]) if isinstance(v, Wrong)]
            problems += [f"{group.option(flag)}: {v.problem}" for v in wrong]
            values[group.title][flag.name] = flag.default if wrong else value
    return values, problems


def _unexpected(words, groups, listing):
    """What is wrong with words that are no flags; the word after one is taken for its value."""
    known = [group.option(flag) for group in groups for flag in group.flags if not flag.positional]
    problems, value_next = [], False
    for word in words:
        if word.startswith("--"):
            problems += unknown("flag", word.partition("=")[0], known, listing).problems
            value_next = "=" not in word
        elif not value_next:
            problems.append(f"unexpected {word!r}; {listing.replace('them', 'the flags')}")
        else:
            value_next = False
    return problems


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
            help_ = ", ".join(usage(cls) for cls in parts_of(hints[field.name]))
        if bounds:
            help_ += f"; {bounds}" if help_ else bounds
        if field.metadata.get("only_with"):
            help_ += f"; only with {field.metadata['only_with']}"
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
    section = (inspect.getdoc(thing) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for names, text in entries for name in names.split(", ")}


def _network_flags(network):
    hints, help_ = typing.get_type_hints(type(network)), documented(network)
    flags = []
    for field in dataclasses.fields(network):
        parts = ", ".join(usage(cls) for cls in parts_of(hints[field.name]))
        text = "; ".join(part for part in (help_.get(field.name, ""), parts) if part)
        flags.append(Flag(field.name, hints[field.name], getattr(network, field.name), text))
    return flags


def _is_group(annotation, value):
    return dataclasses.is_dataclass(value) and not parts_of(annotation) and not schedules.is_schedule(value)


def _first_line(thing):
    return (inspect.getdoc(thing) or "").partition("\n")[0]
