"""Modules of environment suites: jaxrl's suites, and suites declared by installed distributions.

A distribution declares a suite as an entry point, in its `pyproject.toml`:

    [project.entry-points."jaxrl.suites"]
    mine = "package.module"

The module has the members of `Suite`, and is imported when an environment of the suite is first looked up.
"""

import importlib
import re
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from jaxrl.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "jaxrl.suites"


class Own(NamedTuple):
    """Description of one of jaxrl's suites.

    Attributes:
      module: the module of its adapter.
      package: import name of a package that may not be installed; the extra that installs it has the suite's name.
      hint: further installation requirements.
    """

    module: str
    package: str | None = None
    hint: str = ""


_NO_LABMAZE = "on Python 3.13, for which labmaze has no wheel, also run pip install --no-deps dm-control"
# These suites are not entry points: a checkout may be newer than its metadata, and reading metadata takes time.
SUITES = {
    "brax": Own("jaxrl.envs.brax", "brax"),
    "craftax": Own("jaxrl.envs.suites.craftax", "craftax"),
    "dm_control": Own("jaxrl.envs.host.dm_env", "dm_control", _NO_LABMAZE),
    "envpool": Own("jaxrl.envs.host.envpool", "envpool"),
    "gymnasium": Own("jaxrl.envs.host.gymnasium"),
    "gymnax": Own("jaxrl.envs.gymnax"),
    "jaxmarl": Own("jaxrl.envs.suites.jaxmarl", "jaxmarl"),
    "jumanji": Own("jaxrl.envs.suites.jumanji", "jumanji"),
    "navix": Own("jaxrl.envs.suites.navix", "navix"),
    "octax": Own("jaxrl.envs.suites.octax", "octax"),
    "pgx": Own("jaxrl.envs.suites.pgx", "pgx"),
    "playground": Own("jaxrl.envs.suites.playground", "mujoco_playground"),
    "probe": Own("jaxrl.envs.probes"),
    "xminigrid": Own("jaxrl.envs.suites.xminigrid", "xminigrid"),
}
# Prefixes with another meaning: "user" for names registered by users, "dm_env" for environments passed as objects.
_RESERVED = ("dm_env", "user")


class Suite(Protocol):
    """Module of a suite; it also registers the class of its environments by `registry.add("suite", NAME=CLASS)`."""

    def names(self) -> Sequence[str]:
        """Return the names of the suite's environments, without the suite's prefix."""
        ...

    def make(self, name: str, **parameters: Any) -> Any:
        """Return the raw, episodic `Environment` of this name, or a `HostRecipe`.

        Raises:
          ConfigError: the name is unknown, or a parameter is unknown, invalid or without effect.
        """
        ...


def declared() -> dict[str, list["EntryPoint"]]:
    """Return the suites declared by installed distributions, by name, without importing them.

    Names that are jaxrl's own or invalid are skipped with a warning.
    """
    from importlib import metadata  # slow to import, and not needed for jaxrl's own suites

    found: dict[str, list[EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        if entry.name in SUITES or entry.name in _RESERVED or not re.fullmatch(r"\w[\w.\-]*", entry.name):
            why = "is one of jaxrl's suites" if entry.name in SUITES else "cannot be the name of a suite"
            warnings.warn(
                f"{_origin(entry)} declares the suite {entry.name!r}, which {why}; it is ignored", stacklevel=2
            )
        elif entry.value not in [other.value for other in found.get(entry.name, [])]:  # a path may be listed twice
            found.setdefault(entry.name, []).append(entry)
    return found


def exists(suite: Any) -> bool:
    """Return whether a suite is one of jaxrl's or is installed."""
    return suite in SUITES or suite in declared()


def load(suite: str) -> Suite:
    """Import the module of a suite.

    Raises:
      ConfigError: there is no such suite, two distributions declare it, or its module cannot be imported or lacks a
        function.
    """
    if suite in SUITES:
        return cast("Suite", importlib.import_module(SUITES[suite].module))
    installed = declared()
    if not (entries := installed.get(suite)):
        raise unknown("suite", suite, [*SUITES, *installed])
    if len(entries) > 1:
        raise ConfigError(f"the suite {suite!r} is declared by {' and by '.join(map(_origin, entries))}; uninstall one")
    (entry,) = entries
    where = f"the suite {suite!r}, of {_origin(entry)},"
    try:
        module = entry.load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in ("names", "make") if not callable(getattr(module, name, None))]
    if not isinstance(module, ModuleType) or missing:
        raise ConfigError(f"{where} must be a module with functions names() and make(name, **parameters)")
    return cast("Suite", module)


def _origin(entry: "EntryPoint") -> str:
    distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a distribution"
    return f"{distribution} ({entry.value})"
