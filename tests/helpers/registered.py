"""Registrations that a test makes are undone."""

import contextlib
from collections.abc import Generator

from jaxrl.core import registry


@contextlib.contextmanager
def nothing_registered_for_good() -> Generator[None]:
    """Forgets at the end what was registered within, but for what jaxrl's own modules entered as they were imported."""
    table = {kind: dict(known) for kind, known in registry._TABLE.items()}
    names = dict(registry._NAMES)

    def stays(kind, thing):
        return kind not in ("environment", registry.USER) and thing.__module__.startswith("jaxrl.")

    try:
        yield
    finally:
        for kind, known in registry._TABLE.items():
            lasting = {name: thing for name, thing in known.items() if stays(kind, thing)}
            known.clear()
            known.update(lasting | table[kind])
        lasting = {thing: name for thing, name in registry._NAMES.items() if stays(name.partition(":")[0], thing)}
        registry._NAMES.clear()
        registry._NAMES.update(lasting | names)


@contextlib.contextmanager
def only_what_jaxrl_registers() -> Generator[None]:
    """As in a process that has imported nothing of a user's; at the end everything is as before."""
    table = {kind: dict(known) for kind, known in registry._TABLE.items()}
    names = dict(registry._NAMES)
    for kind, known in registry._TABLE.items():
        for name, thing in table[kind].items():
            if kind in ("environment", registry.USER) or not thing.__module__.startswith("jaxrl."):
                del known[name]
                registry._NAMES.pop(thing, None)
    try:
        with nothing_registered_for_good():
            yield
    finally:
        for kind, known in registry._TABLE.items():
            known.update(table[kind])
        registry._NAMES.update(names)
