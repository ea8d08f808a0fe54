"""Registrations that a test makes are undone."""

import contextlib
from collections.abc import Callable, Generator

from jaxrl.core import registry

# jaxrl's algorithms by name: files of tests that were imported before may have registered some of their own.
OWN_ALGORITHMS = {
    name: cls for name, cls in sorted(registry.registered("algorithm").items()) if cls.__module__.startswith("jaxrl.")
}


def nothing_registered_for_good() -> contextlib.AbstractContextManager[None]:
    """Forgets at the end what was registered within, but for what jaxrl's own modules entered as they were imported."""
    return _without(lambda kind, thing: False)


def only_what_jaxrl_registers() -> contextlib.AbstractContextManager[None]:
    """As in a process that has imported nothing of a user's; at the end everything is as before."""
    return _without(lambda kind, thing: not _is_jaxrls(kind, thing))


def only_registered_by(module: str) -> contextlib.AbstractContextManager[None]:
    """As in a process that has imported this file of tests and no other; at the end everything is as before."""

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
