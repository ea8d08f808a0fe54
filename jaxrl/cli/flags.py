"""Flags of all commands, with a parser and a help formatter. This module does not import JAX.

It parses all values, so that all wrong values are reported at once, in the format of `jaxrl.core.errors`.
"""

import dataclasses
import functools
import inspect
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.cli import values
from jaxrl.cli.values import Kind
from jaxrl.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Help sections that only --help-all shows, at the end, as it does those of networks.
_RARE = ("recording, logging and checkpoints", "host environments", "devices and machines")
_NARROW = 50  # characters


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
      name: name in Python; `total_steps` is `--total-steps`, `network.torso` the field of a network.
      kind: kind of the value, which determines how text is parsed.
      default: text of the default value.
      help: one line of help.
      required: whether the help marks it as required.
      choices: allowed values; empty for any.
      many: whether the flag takes any number of values, as a tuple that is empty by default.
      positional: whether it is a positional argument.
      limits: limits of a number, as in `jaxrl.core.limits`.
      title: section in the help.
    """

    name: str
    kind: Kind
    default: str = "None"
    help: str = ""
    required: bool = False
    choices: tuple[Any, ...] = ()
    many: bool = False
    positional: bool = False
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    title: str = ""

    @property
    def option(self) -> str:
        """The flag as typed on the command line."""
        return option(self.name)

    @property
    def switches(self) -> dict[str, str]:
        """The forms of a boolean flag without a value, such as `--network.no-shared`, and the values they stand for."""
        if self.kind.name != "bool":
            return {}
        place = max(self.option.rfind(".") + 1, len("--"))
        return {self.option: "True", f"{self.option[:place]}no-{self.option[place:]}": "False"}

    @property
    def bare(self) -> str:
        """The value of the flag of an algorithm's part if none is given: the part with its defaults; "" for others."""
        made_by = ("part:", "exploration:")
        return next((part.name for part in self.kind.parts if str(part.made_by).startswith(made_by)), "")

    @property
    def dotted(self) -> dict[str, "Flag"]:
        """The flags of the fields of an algorithm's part, such as `--memory.burn-in`, by the names of the fields."""
        fields = self.kind.parts[0].fields if self.bare and len(self.kind.parts) == 1 else {}
        return {field: Flag(f"{self.name}.{field}", kind) for field, kind in fields.items()}

    @property
    def usage(self) -> str:
        """The flag with a placeholder for its value."""
        if self.positional:
            word = self.option.removeprefix("--").upper()
            return word if self.required else f"[{word}]"
        if self.switches and not self.kind.optional:
            return ", ".join(self.switches)
        words = [self.option, "|".join(map(str, self.choices)) or values.metavar(self.kind)]
        return " ".join([*words, "..."] if self.many else words)

    @property
    def value(self) -> Any:
        """The parsed default value, which applies if the flag is not given."""
        if self.default == "None":
            return () if self.many else None
        return self.read(self.default)

    def read(self, text: str) -> Any:
        """Parse `text`; parts and schedules are built later, by `build_parts`.

        Raises:
          ConfigError: `text` is not a valid value; lists the allowed ones.
        """
        value = values.read(self.kind, text)
        if self.choices and value not in self.choices:
            raise unknown("value", text, map(str, self.choices))
        return value

    def described(self) -> str:
        """Return the help with the default value."""
        if self.required:
            return f"{self.help} (required)"
        if self.default != "None":
            default = self.default
            if self.bare:  # its usage lists the fields, in the order of their values
                default = re.sub(r"(^|:)\w+=", r"\1", default.removeprefix(f"{self.bare}:"))
            return f"{self.help} (default: {default})"
        if self.many:
            return f"{self.help} (none)"
        return self.help.replace("None: ", "None (default): ", 1)


def option(name: str) -> str:
    """Return the flag for a name in Python, without the trailing "_" that avoids Python's keywords."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def as_typed(name: str, text: str) -> list[str]:
    """Return a flag and its value as typed, for a text that may begin with the field of a part, as in ".length=9"."""
    field, _, value = text.partition("=") if re.match(r"\.\w+=", text) else ("", "", text)
    return [option(name + field), value]


def parse(
    command: str,
    description: str,
    flags: Sequence[Flag],
    argv: Sequence[str],
    *,
    helps: Mapping[str, str] = {},
    known_elsewhere: Callable[[Flag, str], str | None] = lambda flag, text: None,
) -> tuple[dict[str, Any], dict[str, list[str]], list[str]]:
    """Parse a command line. Return the given values and their texts, both by flag name, and all problems.

    A flag whose value could not be parsed counts as not given. `--help`, `--help-all` and flags that lack a value exit
    the program.

    Args:
      command: the command as typed.
      description: description of the command.
      flags: flags of the command.
      argv: the arguments after the command.
      helps: descriptions of the help's sections, by title.
      known_elsewhere: function that returns a more specific message for a value that a flag rejects, or None.
    """
    if not {"-h", "--help", "--help-all"}.isdisjoint(argv):
        print(_help(command, description, flags, helps, whole="--help-all" in argv))
        raise SystemExit(0)
    texts, problems = _texts(command, flags, argv)
    parsed: dict[str, Any] = {}
    for flag in flags:
        found = []
        for text in texts.get(flag.name, ()):
            try:
                found.append(flag.read(text))
            except (ConfigError, ValueError) as error:
                problems.append(f"{as_typed(flag.name, text)[0]}: {known_elsewhere(flag, text) or error}")
        if flag.name in texts and len(found) == len(texts[flag.name]):
            # All flags of a part change it, one after the other.
            parsed[flag.name] = tuple(found) if flag.many else functools.reduce(values.then, found)
    return parsed, texts, problems


def _texts(command, flags, argv):
    """Return the texts of every given flag, by name, and the problems with unexpected arguments.

    An argument after an unknown flag is treated as that flag's value.
    """
    positional = [flag for flag in flags if flag.positional]
    typed = [(flag, "", flag) for flag in flags if not flag.positional]
    typed += [(flag, f".{field}=", own) for flag in flags for field, own in flag.dotted.items()]
    named = {own.option: (flag, None, field) for flag, field, own in typed}
    known = [*named]
    named |= {word: (flag, value, field) for flag, field, own in typed for word, value in own.switches.items()}
    words, texts, problems = [*argv], {}, []
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("-"):
            places = [flag.name for flag in positional if flag.many or flag.name not in texts]
            if places:
                texts.setdefault(places[0], []).append(word)
            else:
                problems.append(f"unexpected argument {word!r}; {command} --help lists the flags")
            continue
        flag, implied, field = named.get(name.replace("_", "-"), (None, None, ""))
        many = flag is not None and flag.many
        found = [text] if equals else []
        while words and not words[0].startswith("--") and (many or not found):
            if implied == "False" or (implied and words[0].lower() not in ("true", "false", "none")):
                break
            found.append(words.pop(0))
        if flag is None or (equals and implied == "False"):
            problems += unknown("flag", name, known, f"{command} --help lists them").problems
        elif many:
            texts.setdefault(flag.name, []).extend(found)
        elif found or implied or (flag.bare and not field):
            found = [field + text for text in found or [implied or flag.bare]]
            texts[flag.name] = texts.get(flag.name, []) + found if flag.bare else found
        else:
            print(f"{name} needs a value; see {command} --help", file=sys.stderr)
            raise SystemExit(2)
    return texts, problems


# --- the help ------------------------------------------------------------------------------------------------------


def _help(command, description, flags, helps, whole):
    sections: dict[str, list[tuple[str, str]]] = {"positional": [], "required": []}
    for flag in flags:
        title = "positional" if flag.positional else "required" if flag.required else flag.title
        sections.setdefault(title, []).append((flag.usage, flag.described()))
    networks = {flag.title: None for flag in flags if "." in flag.name}
    rare = {title: sections.pop(title) for title in (*networks, *_RARE) if title in sections}
    if rare and not whole:
        description += f"\n\n--help-all also shows the flags of: {', '.join(rare)}."
    words = [command, *(usage for usage, _ in sections["positional"])]
    parts = [wrapped(description), f"usage: {' '.join(words)} [-h] [FLAGS]"]
    for title, rows in (sections | (rare if whole else {})).items():
        if rows:
            header = [f"{title} {'arguments' if title == 'positional' else 'options'}:"]
            header += [wrapped(helps[title])] if title in helps else []
            parts.append("\n".join([*header, columns([(f"  {usage}", text) for usage, text in rows])]))
    return "\n\n".join(parts)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows to the terminal's width; if the last column would be too narrow, it moves below the others."""
    width = shutil.get_terminal_size().columns
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    place = sum(widths) + 2 * len(widths)
    below = width - place < _NARROW
    indent = " " * (6 if below else place)
    lines = []
    for *cells, text in rows:
        line = "  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        first = indent if below else f"{line}  "
        lines += textwrap.wrap(line, width, subsequent_indent="    ") if below else []
        lines += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False) or [
            first
        ] * (not below)
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str) -> str:
    """Wrap each line of a text to the terminal's width."""
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.split("\n"))


# --- flags of Python arguments -------------------------------------------------------------------------------------


def argument_flags(
    thing: Callable, leave_out: Container[str] = (), kind_of: Callable[[Any], Kind] = values.kind_of
) -> dict[str, Flag]:
    """Return the flags of a function's arguments or a dataclass's fields, by name.

    The help is read from the docstring's section "Args:". Arguments without a default are required; tuples of strings
    or paths take any number of values.

    Args:
      thing: the function or the dataclass.
      leave_out: arguments without a flag.
      kind_of: function that returns the kind of value for an annotation.
    """
    hints, help_, flags = typing.get_type_hints(thing), documented(thing), {}
    for name, parameter in inspect.signature(thing).parameters.items():
        if name in leave_out or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        required = parameter.default is inspect.Parameter.empty
        many = hints[name] in (tuple[str, ...], tuple[Path, ...])
        annotation = typing.get_args(hints[name])[0] if many else hints[name]
        literals = [kind for kind in values.alternatives(annotation) if typing.get_origin(kind) is typing.Literal]
        choices = typing.get_args(literals[0]) if literals else ()
        default = "None" if required or many else written(parameter.default)
        flags[name] = Flag(name, kind_of(annotation), default, help_.get(name, ""), required, choices, many)
    return flags


def documented(thing: Any) -> dict[str, str]:
    """Return the entries of a docstring's section "Args:", by name; an entry with several names applies to each.

    For a class, inherited entries are included.
    """
    entries = {}
    for source in reversed(thing.__mro__) if inspect.isclass(thing) else [thing]:
        section = (inspect.getdoc(source) or "").partition("Args:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE):
            entries |= dict.fromkeys(names.split(", "), " ".join(text.split()).rstrip("."))
    return entries


def first_line(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def written(value: Any) -> str:
    """Return a default as text that parses to the same value."""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- parsed values -------------------------------------------------------------------------------------------------


def build_parts(parsed: Mapping[str, Any], algo: Any = None) -> tuple[dict[str, Any], list[str]]:
    """Return the values from `parse` with schedules and parts built, and the problems found.

    Parts of `algo` keep the values that are not given. A value with a problem is omitted.
    """
    made, problems = {}, []
    for name, value in parsed.items():
        try:
            made[name] = values.build(value, getattr(algo, name, None))
        except (ConfigError, ValueError) as error:
            problems.append(f"{option(name)}: {error}")
    return made, problems


def with_flags[T: "DataclassInstance"](algo: T, made: Mapping[str, Any]) -> T:
    """Return `algo` updated with the values from `build_parts` that belong to its fields or its networks' fields."""
    changes = {}
    for field in dataclasses.fields(algo):
        within = {name.partition(".")[2]: value for name, value in made.items() if name.startswith(f"{field.name}.")}
        if field.name in made:
            changes[field.name] = made[field.name]
        elif within:
            changes[field.name] = dataclasses.replace(getattr(algo, field.name), **within)
    return dataclasses.replace(algo, **changes)
