"""The devices that share a batch, for layers that normalize by all of it."""

import contextlib
import contextvars
from collections.abc import Generator

from jaxrl.core.types import PyTree, Replicas

_replicas: contextvars.ContextVar[Replicas | None] = contextvars.ContextVar("replicas", default=None)


@contextlib.contextmanager
def shared_batch(replicas: Replicas) -> Generator[None]:
    """Declare that what is traced inside sees one device's part of a batch that `replicas` share."""
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


def mean_over_devices(tree: PyTree) -> PyTree:
    """Return the mean over the devices that share the batch; outside `shared_batch` the tree itself."""
    replicas = _replicas.get()
    return tree if replicas is None else replicas.mean(tree)
