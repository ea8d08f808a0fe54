"""Flags generated from the fields of dataclasses, whose docstrings document them."""

import dataclasses
import re
import typing
from collections.abc import Sequence, Set
from types import NoneType
from typing import Any

from jaxrl.algos.base import Readable, owner_at
from jaxrl.algos.optimizers import OPTIMIZERS, Optimizer
from jaxrl.algos.ppo import PolicyLoss
from jaxrl.algos.rnd import RND
from jaxrl.cli import flags, values
from jaxrl.cli.flags import Flag, documented, first_line
from jaxrl.cli.values import Kind, Part
from jaxrl.core import limits, registry, schedules
from jaxrl.core.presentation import field_help
from jaxrl.core.resources import Resources
from jaxrl.core.sources import FrameStack, View
from jaxrl.core.types import Algorithm
from jaxrl.networks import Core, DictEncoder, QHead, Torso
from jaxrl.parallel.remote.actors import Remote

_OWN_NETWORK = "name of a registered network of your own, replacing the --{}.* flags"
# Classes that flags support for fields with these annotations. User-defined parts and `DictEncoder`, which has a torso
# per entry, can only be set in Python.
PARTS: dict[Any, tuple[type, ...]] = {
    **{part: (part,) for part in (RND, Remote, Resources, FrameStack, View)},
    **{part: (part,) for part in registry.registered("part").values()},
    Optimizer: OPTIMIZERS,
    Torso: tuple(torso for torso in registry.registered("torso").values() if torso is not DictEncoder),
    Core: tuple(registry.registered("core").values()),
    QHead: tuple(registry.registered("head").values()),
}


def algorithm_flags(algo: Algorithm) -> tuple[list[Flag], dict[str, str]]:
    """Return the flags of an algorithm's fields, and a description of each help section, starting with the algorithm's.

    The fields of networks and other nested dataclasses have their own flags.

    Args:
      algo: an instance of the algorithm; its values are the defaults.
    """
    own, nested, helps = [], [], {type(algo).__name__: first_line(algo)}
    for flag, value in _field_flags(algo, type(algo).__name__):
        if not dataclasses.is_dataclass(value) or flag.kind.parts or schedules.is_schedule(value):
            own.append(flag)
            continue
        helps[flag.name] = first_line(value)
        within = typed([inner for inner, _ in _field_flags(value, flag.name)])
        nested += [dataclasses.replace(inner, name=f"{flag.name}.{inner.name}") for inner in within]
        if isinstance(value, Readable):
            help_ = _OWN_NETWORK.format(flag.name)
            own.append(Flag(flag.name, Kind("network"), help=help_, title=flag.name))
    return [*typed(own), *nested], helps


def _field_flags(thing, title):
    """Yield a flag for each field of a dataclass, and the field's value."""
    hints, help_ = typing.get_type_hints(type(thing)), documented(thing)
    for field in dataclasses.fields(thing):
        value, allowed = getattr(thing, field.name), field.metadata.get("limits", {})
        kind = kind_of(hints[field.name])
        usage = ", ".join(part.usage() for part in kind.parts)
        described = "" if field.metadata else help_.get(field.name)  # metadata holds the help of an algorithm's field
        text = field_help(field) or "; ".join(filter(None, (described, usage)))
        numbers = {name: limit for name, limit in allowed.items() if name in limits.WORDS}
        choices = tuple(allowed.get("choices", ()))
        yield Flag(field.name, kind, written(value), text, choices=choices, limits=numbers, title=title), value


def typed(flags: Sequence[Flag]) -> list[Flag]:
    """Return the flags with names in their help rewritten as typed: `run_dir` becomes --run-dir."""
    names = {flag.name for flag in flags}
    return [dataclasses.replace(flag, help=_typed(flag.help, names)) for flag in flags]


_QUOTED_PART, _QUOTED_FLAG = r"`([A-Z]\w*)\((.*?)\)`", r"`([a-z]\w*)()(?:=\"?(\w+)\"?)?`"
_CONDITION = r"(?<![\w.-])([a-z_]+)(\.[a-z]+)?(?:=(\w+))?"  # clip, kind=puct or network.head=actionvalues
_NAME = r"(?<![\w.:=-])([a-z]+(?:_[a-z]+)+)()()(?![\w.=]|:\w)"


def _typed(text: str, names: Set[str]) -> str:
    def known(found):
        return _option(found) if found[1] in names or found[2] else found[0]

    text = re.sub(r"`jaxrl\.(\w+)`", r"jaxrl \1", text)
    text = re.sub(_QUOTED_PART, lambda part: ":".join(filter(None, (part[1].lower(), part[2]))), text)
    text = re.sub(_QUOTED_FLAG, _option, text).replace("`", "")
    text, only, condition = text.partition("only with ")
    condition = re.sub(r"\.recurrent\b", ".core", condition)
    condition = re.sub(r"(--\S+) (\S+) or \1 ", r"\1 \2 or ", re.sub(_CONDITION, known, condition))
    return re.sub(_NAME, known, text) + only + condition


def _option(found: re.Match[str]) -> str:
    """Return the flag for a matched name, followed by the matched field of a network and the matched value, if any."""
    return flags.option(found[1]) + (found[2] or "") + (f" {found[3]}" if found[3] else "")


def read_field(algo: Algorithm, name: str, text: str) -> Any:
    """Return the value of an algorithm's field, parsed from `text`.

    Raises:
      ConfigError: the field is unknown, or `text` is not a valid value.
    """
    owner, name = owner_at(algo, name)
    return values.build(values.read(kind_of(typing.get_type_hints(type(owner))[name]), text), getattr(owner, name))


# --- values ------------------------------------------------------------------------------------------------------


def kind_of(annotation: Any) -> Kind:
    """Return the kind of value that a flag with this annotation takes."""
    plain = values.kind_of(annotation)
    kinds = [kind for kind in values.alternatives(annotation) if kind is not NoneType]
    if schedules.Schedule in kinds:
        return Kind("number", optional=plain.optional)
    if kinds[0] == PolicyLoss:  # the name of a function that the user registered
        return Kind("function", optional=plain.optional)
    described = all(isinstance(kind, type) and dataclasses.is_dataclass(kind) for kind in kinds)
    parts = PARTS.get(kinds[0], ()) if len(kinds) == 1 else kinds if described else ()
    return Kind("part", tuple(map(_part, parts)), plain.optional) if parts else plain


def _part(cls):
    hints = typing.get_type_hints(cls)
    fields = {field.name: kind_of(hints[field.name]) for field in dataclasses.fields(cls)}
    return Part(cls.__name__.lower(), fields, registry.name_of(cls) or cls)


def written(value: Any) -> str:
    """Return the text that `read` parses to this value."""
    if schedules.is_schedule(value):
        return str(schedules.to_config(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        arguments = (f"{field.name}={written(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return ":".join([type(value).__name__.lower(), *arguments])
    return flags.written(value)
