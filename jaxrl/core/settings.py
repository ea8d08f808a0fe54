"""Presentation of classes of settings: help that lists every field, short reprs, tables in notebooks."""

import dataclasses
import functools
import html
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.core.arguments import is_whole, members
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import describe, whole

_PARTS = {"Torso": "torso", "Core": "core", "QHead": "head"}  # kinds of registered names, by their protocols
_kinds: dict[type, str] = {}  # of jaxrl's own classes
_WIDTH = 100  # columns of what is written into docstrings


def finish[T](cls: type[T], kind: str | None = None) -> type[T]:
    """Give a dataclass of settings checked arguments, a short repr, a table for notebooks and complete help.

    Methods that the class defines itself stay.

    Args:
      cls: the class.
      kind: of its registered name, if it has one.
    """
    if kind is not None:
        _kinds[cls] = kind
    if not dataclasses.is_dataclass(cls):
        return cls
    own: Any = cls
    _convert_arguments(own)
    if hasattr(vars(own).get("__repr__"), "__wrapped__"):  # which dataclasses generate
        own.__repr__ = short
    if not hasattr(own, "_repr_html_"):
        own._repr_html_ = table
    _document(own)
    return cls


def short(value: Any) -> str:
    """Return the repr of a dataclass, with only the fields that differ from their defaults."""
    return f"{type(value).__name__}({', '.join(f'{name}={text(x)}' for name, x in changed(value).items())})"


def changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    fields = {field.name: field for field in dataclasses.fields(value) if field.repr}
    return {name: x for name, field in fields.items() if not _equal(x := getattr(value, name), _default(field))}


def made(name: str, parameters: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the call of `jaxrl.make` that makes an environment, with only the parameters that differ from `usual`."""
    different = [f"{key}={text(x)}" for key, x in parameters.items() if key not in usual or not _equal(x, usual[key])]
    return f"make({', '.join([repr(name), *different])})"


def text(value: Any) -> str:
    """Return the repr of a setting: numbers in arrays as numbers, larger arrays by type and shape."""
    shape = getattr(value, "shape", None)
    if hasattr(value, "__array__") and isinstance(shape, tuple):
        try:
            import numpy as np

            return str(np.asarray(value)) if shape == () else f"<{value.dtype}{list(shape)}>"
        except Exception:  # a tracer
            return f"<{value.dtype}{list(shape)}>"
    if type(value) is tuple:
        return f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})"
    if type(value) is list:
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {text(x)}' for name, x in value.items())}}}"
    return repr(value)


def field_help(field: dataclasses.Field) -> str:
    """Return a field's help, its limits, and the setting that it has an effect with."""
    limits, only_with = field.metadata.get("limits", {}), field.metadata.get("only_with")
    parts = [field.metadata.get("help", ""), describe(limits), f"only with {only_with}" if only_with else ""]
    return "; ".join(part for part in parts if part)


def table(value: Any) -> str:
    """Return an HTML table: for an environment its spaces and parameters, otherwise every field, changed ones bold."""
    if hasattr(value, "observation_space") and hasattr(value, "action_space"):
        return as_html(value.name, _about_environment(value))
    fields, different = dataclasses.fields(value), changed(value)
    rows = []
    for field in fields:
        what = text(getattr(value, field.name))
        rows.append((field.name, what, field_help(field), field.name in different))
    return as_html(type(value).__name__, rows)


def as_html(title: str, rows: list[tuple[str, str, str, bool]]) -> str:
    """Return a table in HTML of names, values, explanations, and whether a row is set in bold."""
    lines = [f"<table><caption>{html.escape(title)}</caption>"]
    for name, value, what, bold in rows:
        cells = [html.escape(name), f"<code>{html.escape(value)}</code>"]
        cells = [f"<b>{cell}</b>" if bold else cell for cell in cells] + [html.escape(what)]
        lines.append("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _about_environment(env: Any) -> list[tuple[str, str, str, bool]]:
    rows = [
        ("observation_space", repr(env.observation_space), "", False),
        ("action_space", repr(env.action_space), "", False),
    ]
    inner, wrappers = env, []
    while dataclasses.is_dataclass(inner) and any(field.name == "env" for field in dataclasses.fields(inner)):
        others = {name: x for name, x in changed(inner).items() if name != "env"}
        wrappers.append(type(inner).__name__ + "".join(f" {name}={text(x)}" for name, x in others.items()))
        inner = getattr(inner, "env")  # noqa: B009  a wrapper's
    if wrappers:
        rows.append(("wrappers", ", ".join(wrappers), "the outermost first", False))
    return rows + [(name, text(x), "", False) for name, x in getattr(inner, "parameters", {}).items()]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _equal(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if default is dataclasses.MISSING or isinstance(value, bool) != isinstance(default, bool):
        return False
    if hasattr(value, "dtype") and getattr(value, "shape", None) == () and isinstance(default, int | float):
        return text(value) in (text(default), text(value.dtype.type(default)))
    try:
        return bool(value == default)
    except Exception:  # arrays, which have no one truth value
        return text(value) == text(default)


def _document(cls: Any) -> None:
    """Write "Args:" with every field into a docstring that explains none, from the fields' help."""
    doc = cls.__doc__
    fields = [field for field in dataclasses.fields(cls) if field_help(field) or field.metadata.get("limits")]
    if not fields or not doc or "\nArgs:\n" in doc or "\n    Args:\n" in doc:
        return
    lines = []
    for field in dataclasses.fields(cls):
        choices = field.metadata.get("limits", {}).get("choices")
        known = field_help(field) or ("" if choices else type(field.default).__name__)
        known += ("; " if known else "") + f"one of {', '.join(map(repr, choices))}" if choices else ""
        line = f"{field.name}: {known} (default: {text(_default(field))})"
        lines += textwrap.wrap(
            line, _WIDTH, initial_indent="      ", subsequent_indent="        ", break_on_hyphens=False
        )
    cls.__doc__ = "\n".join([doc.rstrip(), "", "    Args:", *lines, "    "])


def _convert_arguments(cls: Any) -> None:
    """Make the constructor take whole numbers of any type for static integers, and check parts of networks.

    Tracers and placeholders of JAX are only in fields that are not static.
    """
    fields = [field for field in dataclasses.fields(cls) if field.init and _is_static(cls, field)]
    converters: dict[str, Callable[[Any], Any]] = {field.name: whole for field in fields if is_whole(field.type)}
    converters |= {field.name: _whole_entries for field in fields if tuple[int, ...] in members(field.type)}
    for field in fields:
        for declared in members(field.type):
            if getattr(declared, "__name__", None) in _PARTS:
                label, optional = f"{cls.__name__}.{field.name}", type(None) in members(field.type)
                converters[field.name] = functools.partial(_part, label, declared, optional)
    if not converters:
        return
    original, order = cls.__init__, [field.name for field in dataclasses.fields(cls) if not field.kw_only]

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        positional = [converters.get(name, _same)(x) for name, x in zip(order, args, strict=False)]
        named = {name: converters.get(name, _same)(x) for name, x in kwargs.items()}
        original(self, *positional, *args[len(order) :], **named)

    cls.__init__ = init


def _same(value: Any) -> Any:
    return value


def _part(label: str, declared: type, optional: bool, value: Any) -> Any:
    """Return `value`, of a field declared as a part of networks.

    Raises:
      ConfigError: it lacks what the protocol `declared` requires, or is another part.
    """
    if value is None and optional:
        return value
    kind, required = _PARTS[declared.__name__], [name for name in vars(declared) if not name.startswith("_")]
    if isinstance(value, type) or _kinds.get(type(value), kind) != kind or not all(hasattr(value, x) for x in required):
        allowed = ", ".join(sorted(f"{cls.__name__}(...)" for cls, own_kind in _kinds.items() if own_kind == kind))
        none = ", or None" if optional else ""
        raise ConfigError(f"{label}={value!r:.80} is not a {kind}; pass one of jaxrl.networks: {allowed}{none}")
    return value


def _whole_entries(values: Any) -> Any:
    if type(values) in (tuple, list):
        return type(values)(map(whole, values))
    return tuple(map(whole, values)) if getattr(values, "ndim", None) == 1 else values


def _is_static(cls: type, field: dataclasses.Field) -> bool:
    return not field.metadata.get("pytree_node", hasattr(cls, "_flax_dataclass"))
