"""Registry of the classes and functions that files and the command line refer to by name, grouped by kind.

jaxrl's classes are registered by the package that defines them (`add`), users' classes by `jaxrl.register`. A file
refers to a class as "kind:name", never by module, so the file stays valid when code moves, and reading the file can
only create registered objects.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, overload

from jaxrl.core import presentation, suite_modules
from jaxrl.core.errors import ConfigError, unknown

# Modules that register the names of each kind; they are imported when a name of the kind is first looked up.
_HOMES: dict[str, tuple[str, ...]] = {
    "algorithm": ("jaxrl.algos",),
    "core": ("jaxrl.networks",),
    "exploration": ("jaxrl.algos.rnd",),
    "function": ("jaxrl.algos.base",),
    "head": ("jaxrl.networks",),
    "library": ("jaxrl.networks",),
    "network": ("jaxrl.networks",),
    "optimizer": ("jaxrl.algos.optimizers",),
    "part": ("jaxrl.algos",),
    "sampler": ("jaxrl.core.sources",),
    "schedule": ("jaxrl.core.schedules",),
    "source": ("jaxrl.core.sources",),
    "space": ("jaxrl.core.spaces", "jaxrl.core.native"),
    "topology": (
        "jaxrl.core.resources",
        "jaxrl.parallel.anakin",
        "jaxrl.parallel.offline",
        "jaxrl.parallel.remote.actors",
        "jaxrl.parallel.sebulba.sebulba",
    ),
    "torso": ("jaxrl.networks",),
    "wrapper": ("jaxrl.envs.wrappers",),
}
USER = "user"  # the kind of everything that users register except environments

_TABLE: dict[str, dict[str, Any]] = {kind: {} for kind in (*_HOMES, "environment", "suite", USER)}
_NAMES: dict[Any, str] = {}  # "kind:name" of each registered object; the first one if it has several names

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_HOW = (
    "install the package that provides it, register it with jaxrl.register before loading, add --import MODULE on the "
    "command line, or pass the object: jaxrl.load(path, algo=..., env=...)"
)


def add(kind: str, *classes: type, **named: type) -> None:
    """Register jaxrl's classes under their lower-case names or keywords, and apply `presentation.finish` to them.

    Raises:
      ConfigError: a name is already registered.
    """
    for name, thing in ({cls.__name__.lower(): cls for cls in classes} | named).items():
        _enter(kind, name, thing)
        presentation.finish(thing, kind)


@overload
def register[T: Callable[..., Any]](thing: T, /) -> T: ...
@overload
def register[T: Callable[..., Any]](name: str, thing: T, /) -> T: ...
@overload
def register[T: Callable[..., Any]](name: str, /) -> Callable[[T], T]: ...
def register(name, thing=None, /):
    """Register a class or function under a name, for `jaxrl.make` and for `jaxrl.load`, which reads names from files.

        jaxrl.register("mine:Corridor-v0", Corridor)    # an environment: jaxrl.make("mine:Corridor-v0", length=5)

        @jaxrl.register                                 # a dataclass: a network, an optimizer, a schedule, a wrapper
        class Attention: ...

        jaxrl.register("warmup_adam", warmup_adam)      # a function, such as an optimizer of optax

    Algorithms are registered by `jaxrl.algos.base.algorithm`. The same definition may be registered repeatedly, for
    example when a notebook cell is run twice.

    Args:
      name: "suite:name" for an environment; otherwise a name without colon. The default is the name of the class or
        function.
      thing: for an environment, a class or function that takes the parameters of `jaxrl.make` and creates an
        `Environment` or a `HostRecipe`; it is called again with the same parameters to load a run. Otherwise a
        dataclass or a function.

    Returns:
      `thing`; a decorator if `thing` is omitted.

    Raises:
      ConfigError: the name is taken or invalid.
    """
    if not isinstance(name, str):
        return register(_own_name(name), name)
    if thing is None:
        return lambda decorated: register(name, decorated)
    if not callable(thing):
        raise ConfigError(f"{thing!r} cannot be registered as {name!r}; pass a class or a function")
    if ":" in name:
        _check_environment_name(name)
        return _enter("environment", name, thing)
    if not re.fullmatch(_WORD, name):
        raise ConfigError(f"{name!r} is not a valid name to register; use letters, digits, '_', '-' and '.'")
    if (name_of(thing) or USER).partition(":")[0] != USER:
        return thing  # an algorithm, registered by its decorator
    if isinstance(thing, type) and not dataclasses.is_dataclass(thing):
        raise ConfigError(
            f"class {thing.__qualname__} is not a dataclass, so its fields cannot be saved; make it a dataclass"
        )
    return _enter(USER, name, thing)


def registered(kind: str) -> Mapping[str, Any]:
    """Return a live view of the classes and functions registered under a kind, by name.

    Raises:
      ConfigError: there is no such kind.
    """
    if kind not in _TABLE:
        raise unknown("kind of registered name", kind, _TABLE)
    for home in _HOMES.get(kind, ()):
        importlib.import_module(home)
    return MappingProxyType(_TABLE[kind])


def find(name: str) -> Any:
    """Return the class or function registered as "kind:name".

    Raises:
      ConfigError: nothing is registered under the name; the message explains how to register it and lists close names.
    """
    kind, colon, rest = name.partition(":")
    if not colon or kind not in _TABLE:
        raise ConfigError(f"{name!r} is not a registered name: there is no kind {kind!r}; {_HOW}")
    known = registered(kind)
    if kind == "suite" and rest not in known:
        suite_modules.load(rest)  # which registers it
        if rest not in known:
            how = f'jaxrl.core.registry.add("suite", {rest}=CLASS)'
            raise ConfigError(f"the module of suite {rest!r} does not register the class of its environments: {how}")
    if rest not in known:
        what = "class or function" if kind == USER else kind
        raise unknown(what, rest, known, _HOW)
    return known[rest]


def name_of(thing: Any) -> str | None:
    """Return the "kind:name" of a class or function; None if it is not registered."""
    try:
        return _NAMES.get(thing)
    except TypeError:  # not hashable
        return None


def _enter[T](kind: str, name: str, thing: T) -> T:
    before = _TABLE[kind].get(name)
    if before is not None and not _same_definition(before, thing):
        raise ConfigError(f"{kind} name {name!r} is taken by {_described(before)}; choose another")
    _TABLE[kind][name] = thing
    if kind != "environment" or dataclasses.is_dataclass(thing):
        _NAMES.setdefault(thing, f"{kind}:{name}")
    return thing


def _place(thing: object) -> tuple[str | None, str | None]:
    """Return the module and qualified name of an object; None for callables that lack them."""
    return getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)


def _same_definition(one: object, other: object) -> bool:
    return one is other or (_place(one) == _place(other) and "<lambda>" not in str(_place(one)[1]))


def _described(thing: object) -> str:
    module, name = _place(thing)
    return f"{module or '?'}.{name or repr(thing)}"


def _own_name(thing: object) -> str:
    name = getattr(thing, "__name__", None)
    if not callable(thing) or name is None or not re.fullmatch(_WORD, name):
        raise ConfigError(f"{thing!r} has no name; pass one: jaxrl.register('name', ...)")
    return name


def _check_environment_name(name):
    suite, _, rest = name.partition(":")
    if not suite or not re.fullmatch(f"{_WORD}:.+", name):
        raise ConfigError(f"environment name {name!r} has no suite; register it as 'my:{name.strip(':') or 'Name-v0'}'")
    if suite in (*suite_modules.SUITES, USER):
        raise ConfigError(f"environment name {name!r} is taken: {suite} is one of jaxrl's suites; choose another")
    if suite in suite_modules.declared():
        raise ConfigError(f"environment name {name!r} is taken: {suite} is an installed suite; choose another")
