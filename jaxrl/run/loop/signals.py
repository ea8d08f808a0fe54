"""Signals that ask a run to end."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

from jaxrl.core import interrupts
from jaxrl.envs.host.watchdog import ask_to_end
from jaxrl.parallel.multihost import distributed

PATIENCE = 4.0  # seconds that a run has to save by itself before it is left


class Signals:
    """A context in which Ctrl-C, SIGTERM and SIGHUP stop the run after the running chunk.

    A second Ctrl-C ends the process at once.

    This applies only from `hold` on, when there is something to save. Before, signals end the process of a command at
    once, and act in another process as they do without a run.

    A step of host environments that does not return within seconds then ends the run with its error.

    Args:
      announce: called at the first Ctrl-C, whatever the main thread is doing.

    Attributes:
      received: the signal that this process received.
      agreed: a signal that some process had received at the last exchange between processes.
    """

    def __init__(self, announce: Callable[[], None] = lambda: None):
        self._announce = announce
        self.received: int | None = None
        self.agreed: int | None = None
        self._stack = contextlib.ExitStack()
        self._held = False
        self._leaving = threading.Lock()
        self._save: Callable[[], None] | None = None  # called before leaving, while at rest

    def __enter__(self):
        return self

    def hold(self) -> None:
        """Defer signals from now on until the run has saved what it has learned. May be called again."""
        if not self._held:
            self._held = True
            self._stack.enter_context(interrupts.receiving(self._ask))

    @contextlib.contextmanager
    def at_rest(self, save: Callable[[], None] | None) -> Generator[None]:
        """Leave some seconds after a signal received in this block, which may run one program for minutes.

        Only the process of a command leaves this way; elsewhere the main thread continues until it checks for itself.

        Args:
          save: saves the run, called first in another thread; None: signals wait for the block.
        """
        with self._leaving:
            self._save = save
            if self.received is not None:
                self._leave_soon()
        try:
            yield
        finally:
            with self._leaving:
                self._save = None

    def _leave_soon(self):
        if self._save is not None and interrupts.owned():
            timer = threading.Timer(PATIENCE, self._leave, [self._save])
            timer.daemon = True
            timer.start()

    def _leave(self, save):
        with self._leaving:
            if self._save is save and self.received is not None:
                save()
                interrupts.leave(self.received)

    def _ask(self, number):
        if self.received is not None and number == signal.SIGINT:
            interrupts.leave(number)
            return  # it is raised a moment later
        ask_to_end(True)
        if not interrupts.owned():
            self.received = number
            self._tell()
            return
        with self._leaving:
            self.received = number
            self._leave_soon()
        threading.Thread(target=self._tell, daemon=True).start()  # a stopped terminal blocks writes to it

    def _tell(self):
        if self.received == signal.SIGINT:
            with contextlib.suppress(RuntimeError):  # the signal interrupted the writing of another line
                self._announce()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process once everything is saved; None if a result is returned instead."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in (self.agreed, self.received):
                return 128 + number
        return None

    def agree(self, *, with_leader: Any = None) -> Any:
        """Update `agreed` on all processes, and return the first process's `with_leader`."""
        found = distributed.exchange("signals", [self.received or 0, with_leader])
        self.agreed = max(received for received, _ in found) or None
        return found[0][1]

    def __exit__(self, *_):
        self._stack.close()
        ask_to_end(False)
