"""The flag `--import MODULE`, for a user's module that registers environments, networks and algorithms.

The module is imported before the other arguments are parsed, since they may use the names that it registers. Only the
command line can cause such an import; files cannot.
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
_OF_A_MODULE = re.compile(r"\bgymnasium:[\w.]+:")  # --env gymnasium:module:id also imports the module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importing:
    """The flag `--import`, which every command has.

    Args:
      import_: modules with your registered environments and algorithms, comma-separated.
    """

    import_: str | None = None


def found(place: str) -> Any:
    """Import an object of `jaxrl.cli`, given as its module and name, such as "training.train"."""
    module, name = place.split(".")
    return getattr(importlib.import_module(f"jaxrl.cli.{module}"), name)


def announce_jax() -> None:
    """Report in a terminal that the command imports JAX, which takes seconds."""
    if sys.stderr.isatty() and "jax" not in sys.modules:
        print("Importing JAX ...", file=sys.stderr)


def import_modules(argv: Sequence[str]) -> list[str]:
    """Import the modules named by `--import`, which may be in the current directory.

    Return the arguments with all flags `--import` merged into one.

    Raises:
      ConfigError: a module was not found, or importing it failed; the traceback is printed.
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
    """Return the module names in `--import`, and all other arguments."""
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
            raise ConfigError(f"{_OPTION} needs a module name, such as {_OPTION} my_environments")
        names += modules
    return names, others


def _import(name):
    if name.endswith(".py") or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        stem = re.sub(r"\W+", ".", name.removesuffix(".py")).strip(".")
        raise ConfigError(f"{_OPTION} {name}: not a module name, as in Python's `import`; try {_OPTION} {stem}")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{_OPTION} {name}: no module {error.name!r} in {os.getcwd()} or among the installed packages"
            ) from None
        raise _raised(name, error) from error
    except Exception as error:
        raise _raised(name, error) from error


def _raised(name, error):
    if not isinstance(error, ConfigError):  # jaxrl's own errors do not need a traceback
        traceback.print_exception(error)
    return ConfigError(f"{_OPTION} {name}: {type(error).__name__}: {error}")
