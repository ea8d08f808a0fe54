"""Tasks in background threads: compiling, importing, evaluating and recording."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

# Modules that log, save and plot, which are not needed before the first chunk has ended.
_LATER = ("tensorboardX", "orbax.checkpoint", "jaxrl.plots.chart")


class BackgroundTask:
    """A task in a separate daemon thread, which does not keep the process alive.

    Args:
      work: the task.
      name: name of the thread.

    Attributes:
      error: the error of a task that failed; raised only by `result`.
    """

    def __init__(self, work: Callable[[], Any], name: str = "background"):
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._result = self._work()
        except BaseException as error:
            self.error = error

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the task is done, for at most `seconds`. May be called twice."""
        self._thread.join(seconds)

    def result(self) -> Any:
        """Wait for the task, and return its result.

        Raises:
          BaseException: any error that the task raised.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result


def import_later_modules() -> None:
    """Import the modules that a run with a directory needs after its first chunk."""
    for name in _LATER:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # the code that needs the module reports the error
                importlib.import_module(name)
