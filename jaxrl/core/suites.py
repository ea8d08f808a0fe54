"""Lookup of environment names, with the same error messages whether or not suites were imported."""

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence

from jaxrl.core import registry, suite_modules
from jaxrl.core.errors import ConfigError, MissingExtraError, unknown

_REGISTERED = registry.registered("environment")
# Suites that list their names without long imports; a name without a suite is looked up in these and in users' suites.
_QUICK = ("brax", "envpool", "gymnasium", "gymnax", "probe")
_YOURS = (
    "install a package that declares your suite (entry point jaxrl.suites), register a single environment with "
    "jaxrl.register, or add --import MODULE on the command line"
)


def installed(suite: str) -> bool:
    """Return whether the package of a suite is installed."""
    own = suite_modules.SUITES.get(suite)  # suites declared by other distributions are installed
    return own is None or own.package is None or importlib.util.find_spec(own.package) is not None


def environments(names: Callable[[str], Iterable[str]]) -> list[str]:
    """Return every environment as "suite:name", sorted, except those of suites that are not installed.

    Args:
      names: function that returns the names of a suite's environments.
    """
    listed = [f"{suite}:{name}" for suite in suite_modules.SUITES if installed(suite) for name in names(suite)]
    for suite in suite_modules.declared():
        try:
            listed += [f"{suite}:{name}" for name in names(suite)]
        except Exception as error:  # third-party code must not prevent listing the rest
            warnings.warn(f"{error}; the environments of {suite!r} are not listed", stacklevel=2)
    return sorted([*_REGISTERED, *listed])


def environments_of(suite: str, names: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the environments of one suite as "suite:name", sorted.

    Args:
      suite: one of jaxrl's suites, an installed suite, or the prefix of registered names before the colon.
      names: function that returns the names of a suite's environments; called only for this suite.

    Raises:
      ConfigError: there is no such suite, or it cannot be imported.
      MissingExtraError: the suite's package is not installed.
    """
    listed = [name for name in _REGISTERED if name.partition(":")[0] == suite]
    if suite_modules.exists(suite):
        _need(suite, suite)
        listed += [f"{suite}:{name}" for name in names(suite)]
    if not listed:
        raise unknown("suite", suite, _known_suites(), _YOURS)
    return sorted(listed)


def _known_suites():
    return {*suite_modules.SUITES, *suite_modules.declared(), *(name.partition(":")[0] for name in _REGISTERED)}


def _need(suite, what):
    if not installed(suite):
        raise MissingExtraError(what, suite, suite_modules.SUITES[suite].hint)


def suite_of(name: str, names: Callable[[str], Iterable[str]]) -> tuple[str, str] | None:
    """Split a name into suite and environment, for jaxrl's and installed suites; return None for a registered name.

    Args:
      name: "suite:name".
      names: function that returns the names of a suite's environments; called for a few suites if `name` has no suite.

    Raises:
      ConfigError: there is no such suite, or `name` has no suite.
      MissingExtraError: the suite's package is not installed.
    """
    if name in _REGISTERED:
        return None
    suite, colon, rest = name.partition(":")
    if not colon:
        quick = [*_QUICK, *suite_modules.declared()]
        known = [*_REGISTERED, *(f"{home}:{rest}" for home in quick if installed(home) for rest in names(home))]
        homes = [home for home in known if home.partition(":")[2].lower() == name.lower()]
        if homes:
            raise ConfigError(f"environment {name!r} has no suite; did you mean {' or '.join(map(repr, homes))}?")
        raise unknown(
            "environment", name, known, "names have the form 'suite:name'; jaxrl envs lists the names of all suites"
        )
    if suite not in suite_modules.SUITES:
        registered = {known.partition(":")[0] for known in _REGISTERED}
        if suite in registered:
            raise unknown(f"{suite} environment", name, _REGISTERED)
        if suite not in suite_modules.declared():
            raise unknown("suite", suite, _known_suites(), f"in the name {name!r}; {_YOURS}")
    _need(suite, name)
    return suite, rest


def unknown_name(suite: str, name: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a name that a suite does not have."""
    listing = "" if suite == "probe" else "jaxrl.environments() lists all"
    if suite == "gymnasium":
        example = name if name.isprintable() and ":" not in name else "Name-v0"
        listing += "; for other packages or your own, name the module that registers it (for ALE: ale_py): "
        listing += f"gymnasium:my_envs:{example}, or --import my_envs"
    return unknown(f"{suite} environment", name, names, listing)


def gymnasium_names() -> Sequence[str]:
    """Return the environments registered with Gymnasium, each in its newest version; some need other packages."""
    import gymnasium

    newest: dict[str, gymnasium.envs.registration.EnvSpec] = {}
    for spec in gymnasium.registry.values():
        if spec.entry_point is None or "shimmy" in str(spec.entry_point):
            continue  # only for batches, or adapters of other libraries
        key = f"{spec.namespace}/{spec.name}"
        if key not in newest or (spec.version or 0) > (newest[key].version or 0):
            newest[key] = spec
    return tuple(spec.id for spec in newest.values())


def dm_control_names() -> Sequence[str]:
    """Return the tasks of dm_control's suite, "domain-task"."""
    with warnings.catch_warnings(action="ignore"):  # glfw warns if there is no display
        from dm_control import suite

    return tuple(f"{domain}-{task}" for domain, task in suite.ALL_TASKS)


# Suites whose names depend on the installed packages, with functions that list them without JAX.
INSTALLED_NAMES: dict[str, Callable[[], Sequence[str]]] = {"dm_control": dm_control_names, "gymnasium": gymnasium_names}
