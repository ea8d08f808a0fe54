"""Registrations that a test makes are undone."""

import contextlib
from collections.abc import Callable, Generator

from jaxrl.core import registry

# jaxrl's algorithms by name: files of tests that were imported before may have registered some of their own.
OWN_ALGORITHMS = {
    name: cls for name, cls in sorted(registry.registered("algorithm").items()) if cls.__module__.startswith("jaxrl.")
}


def nothing_registered_for_good() -> contextlib.AbstractContextManager[None]:
    """Forget at the end what was registered within, but for what jaxrl's own modules registered at their import."""
    return _without(lambda kind, thing: False)


def only_what_jaxrl_registers() -> contextlib.AbstractContextManager[None]:
    """Register only what jaxrl does, as in a new process; everything else comes back at the end."""
    return _without(lambda kind, thing: not _is_jaxrls(kind, thing))


def only_registered_by(module: str) -> contextlib.AbstractContextManager[None]:
    """Hide what other files of tests registered; it comes back at the end."""

    def by_another_file(kind, thing):
        home = getattr(thing, "__module__", None) or ""
        return home.rpartition(".")[2].startswith("test_") and home != module

    return _without(by_another_file)


def _is_jaxrls(kind, thing):
    return kind not in ("environment", registry.USER) and thing.__module__.startswith("jaxrl.")


@contextlib.contextmanager
def _without(foreign: Callable[[str, object], bool]) -> Generator[None]:
    table = {kind: dict(known) for kind, known in registry._TABLE.items()}
    names = dict(registry._NAMES)
    for kind, known in table.items():
        for name, thing in known.items():
            if foreign(kind, thing):
                del registry._TABLE[kind][name]
                registry._NAMES.pop(thing, None)
    try:
        yield
    finally:
        for kind, known in registry._TABLE.items():
            lasting = {name: thing for name, thing in known.items() if _is_jaxrls(kind, thing)}
            known.clear()
            known.update(lasting | table[kind])
        lasting = {thing: name for thing, name in registry._NAMES.items() if _is_jaxrls(name.partition(":")[0], thing)}
        registry._NAMES.clear()
        registry._NAMES.update(lasting | names)
