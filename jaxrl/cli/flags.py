"""Flags, groups of flags, and the one parser of every command. Nothing here imports JAX.

tyro lays out the help and suggests close flags. All values are read here, so that every wrong one is reported at once
and in the words of `jaxrl.core.errors`.
"""

import dataclasses
import itertools
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jaxrl.cli.values import Kind, build, metavar, read
from jaxrl.core import limits
from jaxrl.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BOOL, INT, FLOAT, TEXT, PATH, INTS = (Kind(name) for name in ("bool", "int", "float", "text", "path", "ints"))


def optional(kind: Kind) -> Kind:
    """Return the kind that also allows None."""
    return dataclasses.replace(kind, optional=True)


@dataclasses.dataclass(frozen=True)
class DefaultText:
    """The text shown in the help for a default made elsewhere; a flag that still has it was not given."""

    text: str


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
      name: name in Python; `total_steps` is `--total-steps`.
      kind: kind of the value, which determines how text is read.
      default: the value if the flag is not given.
      help: one line.
      hint: shown in the help instead of the default ("required").
      choices: the only allowed values, if not empty.
      many: any number of values, a tuple.
      positional: given without its name.
      limits: limits of a number, as in `jaxrl.core.limits`.
    """

    name: str
    kind: Kind
    default: Any = None
    help: str = ""
    hint: str | None = None
    choices: tuple[Any, ...] = ()
    many: bool = False
    positional: bool = False
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def word(self) -> str:
        """The name as typed, `total-steps`, without the trailing "_" of names that are keywords in Python."""
        return self.name.rstrip("_").replace("_", "-")

    def type(self) -> Any:
        """Return the annotation for tyro."""
        hint = "none" if self.hint is None and self.default == () else self.hint
        hint, help_ = None if hint is None else f"({hint})", self.help
        if hint is None and written(self.default) == "None" and "None: " in help_:  # the help explains None
            hint, help_ = "", help_.replace("None: ", "None (default): ", 1)
        argument = tyro.conf.arg(name=self.word, help=help_, help_behavior_hint=hint)
        if isinstance(self.default, bool) and not self.kind.optional:
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
        name = "|".join(map(str, self.choices)) or metavar(self.kind)
        return f"{name} ..." if self.many else name

    def _read(self, text):
        try:
            value = read(self.kind, text)
        except (ConfigError, ValueError) as error:
            return InvalidValue(str(error), text)
        if self.choices and value not in self.choices:
            return InvalidValue(str(unknown("value", text, map(str, self.choices))), text)
        return value


# The checkpoint of a run, in every command that reads one.
CHECKPOINT = (
    Flag("step", optional(INT), None, "step of the checkpoint; None: the newest"),
    Flag("best", BOOL, False, "use the checkpoint with the highest evaluation"),
)


@dataclasses.dataclass(frozen=True)
class InvalidValue:
    """A placeholder for a value that could not be read."""

    problem: str
    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of flags in the help, under `title`.

    Attributes:
      title: title of the group.
      flags: its flags.
      help: one line.
      prefix: whether its flags are named `--title.flag`.
      rare: whether only `--help-all` shows them.
    """

    title: str
    flags: Sequence[Flag]
    help: str = ""
    prefix: bool = False
    rare: bool = False

    def option(self, flag: Flag) -> str:
        """Return the flag as it is typed: `--network.torso`."""
        prefix = f"{self.title}." if self.prefix else ""
        return f"--{prefix}{flag.word}"


def written(value: Any) -> str:
    """Return a default as text that `read` would accept."""
    if isinstance(value, DefaultText):
        return value.text
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(
    command: str,
    description: str,
    groups: Sequence[Group],
    argv: Sequence[str],
    *,
    known_elsewhere: Callable[[Group, Flag, str], str | None] = lambda group, flag, text: None,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the values of every flag, by the title of its group, and all problems with the command line.

    A flag whose value could not be read keeps its default. `--help`, `--help-all` and flags without a value end the
    program.

    Args:
      command: the command as typed.
      description: its description.
      groups: its flags.
      argv: the words after the command.
      known_elsewhere: returns a better message for a text that a flag does not accept, or None.
    """
    argv, description, groups = _for_help(argv, description, groups)
    several_groups = len(groups) > 1
    fields = [] if several_groups else [*_fields(groups[0])]
    for number, group in enumerate(groups) if several_groups else ():
        cls = _dataclass(group)
        kind = Annotated[cls, tyro.conf.arg(name=group.title, help=group.help)]
        # Not named by its title, which may also be the name of a flag.
        fields.append((_place(number), kind if group.prefix else tyro.conf.OmitArgPrefixes[kind], _default(cls)))
    top = dataclasses.make_dataclass("Flags", fields, kw_only=True)
    several = {group.option(flag) for group in groups for flag in group.flags if flag.many and not flag.positional}
    words = _together(_with_values(argv, groups), several)
    if "--help" in argv or "-h" in argv:
        print(wrapped(description) + "\n")  # tyro would print each paragraph as one line, however long
    found, rest = tyro.cli(top, prog=command, description="", args=words, return_unknown_args=True)
    values, problems = {}, _unexpected(rest, groups, f"{command} --help lists them")
    for number, group in enumerate(groups):
        parsed = getattr(found, _place(number)) if several_groups else found
        values[group.title] = {}
        for flag in group.flags:
            value = getattr(parsed, flag.name)
            wrong = [v for v in (value if flag.many else [value]) if isinstance(v, InvalidValue)]
            problems += [f"{group.option(flag)}: {known_elsewhere(group, flag, v.text) or v.problem}" for v in wrong]
            values[group.title][flag.name] = flag.default if wrong else value
    return values, problems


def wrapped(text: str) -> str:
    """Return a text wrapped to the terminal's width; indented lines, such as commands, are unchanged."""
    width = shutil.get_terminal_size().columns
    lines = (
        [line] if line.startswith(" ") else textwrap.wrap(line, width, break_on_hyphens=False) or [""]
        for line in text.split("\n")
    )
    return "\n".join(itertools.chain.from_iterable(lines))


def _for_help(argv, description, groups):
    """Return the arguments of `parse` without the rare groups, unless `--help-all` asks for them."""
    if "--help-all" in argv:
        return ["--help"], description, groups
    left_out = [group.title for group in groups if group.rare]
    if left_out and ("--help" in argv or "-h" in argv):
        more = f"--help-all also shows the flags of: {', '.join(left_out)}."
        return argv, f"{description}\n\n{more}", [group for group in groups if not group.rare]
    return argv, description, groups


def limit_problems(group: Group, values: Mapping[str, Any]) -> list[str]:
    """Return the numbers of an algorithm outside their limits, in the words of its own check."""
    return [
        f"{group.title}.{flag.name}={value!r} {what}"
        for flag in group.flags
        if isinstance(value := values[flag.name], int | float)
        and not isinstance(value, bool)
        and (what := limits.problem(value, flag.limits))
    ]


def build_parts(
    groups: Sequence[Group], values: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the values of `parse` with their schedules and parts made, and the problems with them.

    A value with a problem keeps its default.
    """
    made, problems = {}, []
    for group in groups:
        made[group.title] = {}
        for flag in group.flags:
            try:
                made[group.title][flag.name] = build(values[group.title][flag.name])
            except (ConfigError, ValueError) as error:
                problems.append(f"{group.option(flag)}: {error}")
                made[group.title][flag.name] = flag.default
    return made, problems


def with_flags[T: "DataclassInstance"](algo: T, values: Mapping[str, Mapping[str, Any]]) -> T:
    """Return `algo` with the values of its flags and their parts made; fields not given are unchanged."""

    def set_fields(group):
        return {name: value for name, value in values[group].items() if not isinstance(value, DefaultText)}

    changes = set_fields(type(algo).__name__)
    for field in dataclasses.fields(algo):
        if field.name in values and changes.get(field.name) is None:  # otherwise the user's own network
            changes[field.name] = dataclasses.replace(getattr(algo, field.name), **set_fields(field.name))
    return dataclasses.replace(algo, **changes)


def _unexpected(words, groups, listing):
    """Return the problems with words that are not flags; a word after an unknown flag is taken as its value."""
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


def _with_values(argv, groups):
    """Return `--switch` as `--switch true` and `--no-switch` as `--switch false`, for flags that may also be None."""
    positive, refused = {}, {}
    for group in groups:
        for flag in group.flags:
            if flag.kind == optional(BOOL):
                option = group.option(flag)
                start, name = (f"--{group.title}.", flag.word) if group.prefix else ("--", flag.word)
                positive[option], refused[f"{start}no-{name}"] = option, option
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], "-"], strict=False):
        name = word.replace("_", "-")
        bare = name in positive and following.startswith("-")
        words += [refused[name], "False"] if name in refused else [name, "True"] if bare else [word]
    return words


def _together(argv, names):
    """Return `--grid a --grid b` as `--grid a b`; tyro would keep only the last one."""
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


def _place(number):
    return f"group_{number}"


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
