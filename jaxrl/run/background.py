"""What a run needs later, made ready in a thread while the main one waits for XLA: imports and compiled programs."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable

# What logs, saves and draws; none of it is needed before the first chunk has ended.
_LATER = ("tensorboardX", "orbax.checkpoint", "jaxrl.plots.chart")


class BackgroundTask:
    """Does something in a thread of its own, once.

    Args:
      work: makes ready what the main thread would otherwise make where it needs it, and still does if this failed: so
        an error here is nobody's, and whoever needs it is told of his own.
      name: of the thread.
    """

    def __init__(self, work: Callable[[], object], name: str = "background"):
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self):
        with contextlib.suppress(Exception):
            self._work()

    def wait(self) -> None:
        """Waits until it is done. May be called twice."""
        self._thread.join()


def import_later_modules() -> None:
    """Imports what a run with a directory needs after its first chunk. Who needs it sooner imports it as ever."""
    for name in _LATER:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # told where it is needed
                importlib.import_module(name)
