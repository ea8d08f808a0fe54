"""The flag `--import MODULE`: a user's module that registers environments, networks and algorithms.

It is imported because the user typed it, before the other words are read: they may name what it registers. No file can
cause such an import.
"""

import dataclasses
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jaxrl.core.errors import ConfigError

_OPTION = "--import"
_OF_A_MODULE = re.compile(r"\bgymnasium:[\w.]+:")  # --env gymnasium:module:id, which imports the module too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importing:
    """The flag of every command.

    Args:
      import_: import this module first, which registers your environments, networks or algorithms; several with commas
        between.
    """

    import_: str | None = None


def found(place: str) -> Any:
    """Return an object of `jaxrl.cli` by its module and its name, "training.train"."""
    module, name = place.split(".")
    return getattr(importlib.import_module(f"jaxrl.cli.{module}"), name)


def import_modules(argv: Sequence[str]) -> list[str]:
    """Import the modules of `--import`, also from the current directory.

    Return the words with a single `--import` for all.

    Raises:
      ConfigError: there is no such module, or importing it raised; the traceback is printed.
    """
    names, others = _requested(argv)
    if (names or any(map(_OF_A_MODULE.search, others))) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not names:
        return others
    for name in names:
        _import(name)
    return [*others, f"{_OPTION}={','.join(names)}"]


def _requested(argv):
    """Return the names after `--import`, and all other words."""
    names: list[str] = []
    others, words = [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != _OPTION:
            others.append(word)
            continue
        value = value if equals else next(words, "")
        modules = [name for name in value.split(",") if name]
        if not modules or value.startswith("-"):
            raise ConfigError(f"{_OPTION} needs the name of a module, such as {_OPTION} my_environments")
        names += modules
    return names, others


def _import(name):
    if name.endswith(".py") or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        stem = re.sub(r"\W+", ".", name.removesuffix(".py")).strip(".")
        raise ConfigError(f"{_OPTION} {name}: not the name of a module, as in Python's `import`; try {_OPTION} {stem}")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{_OPTION} {name}: there is no module {error.name!r} in {os.getcwd()}, nor installed"
            ) from None
        raise _raised(name, error) from error
    except Exception as error:
        raise _raised(name, error) from error


def _raised(name, error):
    if not isinstance(error, ConfigError):  # jaxrl's own errors need no traceback
        traceback.print_exception(error)
    return ConfigError(f"{_OPTION} {name}: {type(error).__name__}: {error}")
