"""Flags from the fields of dataclasses, so that each is documented only once, in its class."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from jaxrl.algos.base import Readable
from jaxrl.algos.optimizers import OPTIMIZERS, Optimizer
from jaxrl.algos.ppo import PolicyLoss
from jaxrl.algos.rnd import RND
from jaxrl.cli import flags
from jaxrl.cli.flags import DefaultText, Flag, Group
from jaxrl.cli.values import Kind, Part, build, read
from jaxrl.core import limits, registry, schedules
from jaxrl.core.errors import unknown
from jaxrl.core.resources import Resources
from jaxrl.core.settings import field_help
from jaxrl.core.sources import FrameStack, View
from jaxrl.core.types import Algorithm
from jaxrl.networks import (
    GRU,
    LRU,
    LSTM,
    MLP,
    ActionValues,
    BroNet,
    CategoricalValues,
    Core,
    GTrXL,
    ImpalaCNN,
    ImpalaResNet,
    ImplicitQuantileValues,
    InvertedResidual,
    MinAtarCNN,
    MinGRU,
    NatureCNN,
    QHead,
    QuantileValues,
    SelfPredictiveValues,
    SimBa,
    SimBaV2,
    Torso,
    UnitMLP,
)
from jaxrl.parallel.ray.remote import Remote

# Annotations of functions; a user's own functions are given by their registered names.
FUNCTIONS = (PolicyLoss,)
_OWN_NETWORK = "a network that you registered, in place of what --{}.* say"
# Classes allowed in fields of these annotations. A user's own part is given in Python.
PARTS: dict[Any, tuple[type, ...]] = {
    Optimizer: OPTIMIZERS,
    RND: (RND,),
    Torso: (MLP, MinAtarCNN, NatureCNN, ImpalaCNN, ImpalaResNet, UnitMLP, InvertedResidual, SimBa, SimBaV2, BroNet),
    Core: (GRU, LSTM, MinGRU, LRU, GTrXL),
    QHead: (ActionValues, CategoricalValues, QuantileValues, ImplicitQuantileValues, SelfPredictiveValues),
    Remote: (Remote,),
    Resources: (Resources,),
    FrameStack: (FrameStack,),
    View: (View,),
}


def algorithm_groups(algo: Algorithm) -> list[Group]:
    """Return the flags of every field of an algorithm.

    The flags of its networks, and of other dataclasses in its fields, form separate groups.

    Args:
      algo: an instance; its values are the defaults.
    """
    own, nested = [], []
    hints = typing.get_type_hints(type(algo))
    for field in dataclasses.fields(algo):
        value, allowed = getattr(algo, field.name), field.metadata.get("limits", {})
        kind = kind_of(hints[field.name])
        if dataclasses.is_dataclass(value) and not kind.parts and not schedules.is_schedule(value):
            nested.append(Group(field.name, _network_flags(value), first_line(value), prefix=True))
            if isinstance(value, Readable):
                own.append(Flag(field.name, Kind("network", optional=True), None, _OWN_NETWORK.format(field.name)))
            continue
        help_ = field_help(field) or ", ".join(part.usage() for part in kind.parts)
        numbers = {name: limit for name, limit in allowed.items() if name in limits.WORDS}
        choices = tuple(allowed.get("choices", ()))
        own.append(Flag(field.name, kind, _default(value), help_, choices=choices, limits=numbers))
    return [Group(type(algo).__name__, typed(own), first_line(algo)), *nested]


def typed(flags: Sequence[Flag]) -> list[Flag]:
    """Return flags whose help names other flags and parts as they are typed: --run-dir for `run_dir`."""
    names = {flag.name for flag in flags}
    return [dataclasses.replace(flag, help=_typed(flag.help, names)) for flag in flags]


_QUOTED_PART, _QUOTED_FLAG = r"`([A-Z]\w*)\((.*?)\)`", r"`([a-z]\w*)()(?:=\"?(\w+)\"?)?`"
_CONDITION = r"(?<![\w.-])([a-z_]+)(\.[a-z]+)?(?:=(\w+))?"  # clip, objective=kl or network.head=actionvalues
_NAME = r"(?<![\w.:=-])([a-z]+(?:_[a-z]+)+)()()(?![\w.=]|:\w)"


def _typed(text: str, names: Set[str]) -> str:
    def known(found):
        return _option(found) if found[1] in names or found[2] else found[0]

    text = re.sub(r"`jaxrl\.(\w+)`", r"jaxrl \1", text)
    text = re.sub(_QUOTED_PART, lambda part: ":".join(filter(None, (part[1].lower(), part[2]))), text)
    text = re.sub(_QUOTED_FLAG, _option, text).replace("`", "")
    text, only, condition = text.partition("only with ")
    condition = re.sub(r"\.recurrent\b", ".core", condition)
    return re.sub(_NAME, known, text) + only + re.sub(_CONDITION, known, condition)


def _option(found: re.Match[str]) -> str:
    """Return the flag for a name, with the part of a network and the value that follow it."""
    value = f" {found[3]}" if found[3] else ""
    return f"--{found[1].replace('_', '-')}{found[2] or ''}{value}"


def _network_flags(network):
    hints, help_ = typing.get_type_hints(type(network)), documented(network)
    found = []
    for field in dataclasses.fields(network):
        kind = kind_of(hints[field.name])
        parts = ", ".join(part.usage() for part in kind.parts)
        text = "; ".join(part for part in (help_.get(field.name, ""), parts) if part)
        found.append(Flag(field.name, kind, _default(getattr(network, field.name)), text))
    return typed(found)


def _default(value):
    return value if isinstance(value, bool) else DefaultText(written(value))


def read_field(algo: Algorithm, name: str, text: str) -> Any:
    """Return the value of an algorithm's field that `text` represents.

    Raises:
      ConfigError: there is no such field, or `text` is not a value of it.
    """
    hints = typing.get_type_hints(type(algo))
    known = [field.name for field in dataclasses.fields(algo)]
    if name not in known:
        raise unknown(f"field of {type(algo).__name__}", name, known)
    return build(read(kind_of(hints[name]), text))


def documented(thing: Any) -> dict[str, str]:
    """Return the entries of a docstring's section "Args:", by name; an entry of several names counts for each."""
    section = (inspect.getdoc(thing) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for names, text in entries for name in names.split(", ")}


# --- values ------------------------------------------------------------------------------------------------------


def kind_of(annotation: Any) -> Kind:
    """Return the kind of value that a flag of this annotation takes."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = typing.get_args(annotation)
    else:
        members = (annotation,)
    nullable = types.NoneType in members
    kinds = [member for member in members if member is not types.NoneType]
    if schedules.Schedule in kinds:
        return Kind("number", optional=nullable)
    if kinds[0] in FUNCTIONS:
        return Kind("function", optional=nullable)
    described = all(isinstance(kind, type) and dataclasses.is_dataclass(kind) for kind in kinds)
    found = PARTS.get(kinds[0], ()) if len(kinds) == 1 else tuple(kinds) if described else ()
    if found:
        return Kind("part", tuple(map(_part, found)), nullable)
    if typing.get_origin(kinds[0]) is tuple:
        several = {str: "texts", float: "floats"}.get(typing.get_args(kinds[0])[0], "ints")
        return Kind(several, optional=nullable)
    name = {int: "int", float: "float", bool: "bool"}.get(kinds[0], "path" if Path in kinds else "text")
    return Kind(name, optional=nullable)


def _part(cls):
    hints = typing.get_type_hints(cls)
    fields = {field.name: kind_of(hints[field.name]) for field in dataclasses.fields(cls)}
    return Part(cls.__name__.lower(), fields, registry.name_of(cls) or cls)


def written(value: Any) -> str:
    """Return the text that `read` would accept for a value."""
    if schedules.is_schedule(value):
        return str(schedules.to_config(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        arguments = (f"{field.name}={written(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return ":".join([type(value).__name__.lower(), *arguments])
    return flags.written(value)


def first_line(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]
