"""Background preparation of a run: imports and compiled programs, in a thread while the main one waits for XLA."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable

# Modules that log, save and plot; none is needed before the first chunk has ended.
_LATER = ("tensorboardX", "orbax.checkpoint", "jaxrl.plots.chart")


class BackgroundTask:
    """A task that runs once in a separate thread.

    Args:
      work: prepares something that the main thread makes itself if this failed: an error here is therefore dropped, and
        the main thread raises its own.
      name: name of the thread.
    """

    def __init__(self, work: Callable[[], object], name: str = "background"):
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self):
        with contextlib.suppress(Exception):
            self._work()

    def wait(self) -> None:
        """Wait until the task is done. May be called twice."""
        self._thread.join()


def import_later_modules() -> None:
    """Import the modules that a run with a directory needs after its first chunk.

    Code that needs one sooner imports it as usual.
    """
    for name in _LATER:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # reported by the code that needs it
                importlib.import_module(name)
