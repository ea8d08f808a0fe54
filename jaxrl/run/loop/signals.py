"""Handling of the signals that end a run."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

from jaxrl.core import interrupts
from jaxrl.envs.host.watchdog import ask_to_end
from jaxrl.parallel.multihost import distributed

PATIENCE = 4.0  # seconds that a run has to end before its process is ended


class Signals:
    """A context in which Ctrl-C, SIGTERM and SIGHUP end the run after the current chunk, and a second Ctrl-C at once.

    This applies only after `hold`, when there is something to save. Before `hold`, signals end the process of a command
    at once; in other processes, they are handled as usual. If a host environment does not return from
    a step within seconds after a signal, the run ends with its timeout error.

    Args:
      announce: function to call at the first Ctrl-C, even while the main thread is busy.

    Attributes:
      received: the signal that this process has received, or None.
      agreed: a signal that any process had received at the last exchange between the processes, or None.
    """

    def __init__(self, announce: Callable[[], None] = lambda: None):
        self._announce = announce
        self.received: int | None = None
        self.agreed: int | None = None
        self._stack = contextlib.ExitStack()
        self._held = False
        self._leaving = threading.Lock()
        self._save: Callable[[], None] | None = None  # called before the process ends, in `at_rest`

    def __enter__(self):
        return self

    def hold(self) -> None:
        """Defer signals from now on until the run has been saved. May be called several times."""
        if not self._held:
            self._held = True
            self._stack.enter_context(interrupts.receiving(self._ask))

    @contextlib.contextmanager
    def at_rest(self, save: Callable[[], None] | None) -> Generator[None]:
        """Let a signal end the process after a few seconds, even if the `with` block takes minutes.

        This applies only to the process of a command; in other processes, the main thread finishes the block.

        Args:
          save: function that saves the run, called in another thread before the process ends; None: signals wait until
            the block has ended.
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
            return  # KeyboardInterrupt follows
        ask_to_end(True)
        if not interrupts.owned():
            self.received = number
            self._tell()
            return
        with self._leaving:
            self.received = number
            self._leave_soon()
        threading.Thread(target=self._tell, daemon=True).start()  # in a thread: a stopped terminal blocks

    def _tell(self):
        if self.received == signal.SIGINT:
            with contextlib.suppress(RuntimeError):  # the signal interrupted another write to the display
                self._announce()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process after saving; None if the run returns a result instead."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in (self.agreed, self.received):
                return 128 + number
        return None

    def agree(self, *, with_leader: Any = None) -> Any:
        """Update `agreed` in all processes, and return `with_leader` of the first process."""
        found = distributed.exchange("signals", [self.received or 0, with_leader])
        self.agreed = max(received for received, _ in found) or None
        return found[0][1]

    def __exit__(self, *_):
        self._stack.close()
        ask_to_end(False)
