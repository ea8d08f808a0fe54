"""Signals that ask a run to end."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

from jaxrl.core import interrupts
from jaxrl.envs.host.watchdog import ask_to_end
from jaxrl.parallel.multihost import distributed

PATIENCE = 4.0  # seconds that a run has to save by itself where it could be left


class Signals:
    """Ctrl-C, SIGTERM and a terminal that closes ask for an end after the running chunk; a second Ctrl-C ends at once.

    Only from `hold` on, when there is something to save: before, they end the process of a command at once, and do in
    another process what they do there without a run.

    A step of host environments that does not return within seconds then ends the run with its error.

    Args:
      announce: called at the first Ctrl-C, whatever the main thread is doing.

    Attributes:
      received: the signal that this process got.
      agreed: the one that some process got, as of the last moment at which they spoke of it.
    """

    def __init__(self, announce: Callable[[], None] = lambda: None):
        self._announce = announce
        self.received: int | None = None
        self.agreed: int | None = None
        self._stack = contextlib.ExitStack()
        self._held = False
        self._leaving = threading.Lock()
        self._save: Callable[[], None] | None = None  # what to do before leaving, while at rest

    def __enter__(self):
        return self

    def hold(self) -> None:
        """Have signals wait from here on until the run has saved what it has learned. May be called again."""
        if not self._held:
            self._held = True
            self._stack.enter_context(interrupts.receiving(self._ask))

    @contextlib.contextmanager
    def at_rest(self, save: Callable[[], None] | None) -> Generator[None]:
        """Leave after some seconds if a signal comes while entered, as an evaluation in one program can take minutes.

        Only the process of a command leaves so: elsewhere the main thread goes on until it looks for itself.

        Args:
          save: saves what the run has learned, called before in another thread; None: signals wait for the block.
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
            return  # a moment before it is raised
        ask_to_end(True)
        if not interrupts.owned():
            self.received = number
            self._tell()
            return
        with self._leaving:
            self.received = number
            self._leave_soon()
        threading.Thread(target=self._tell, daemon=True).start()  # a stopped terminal holds up whoever writes to it

    def _tell(self):
        if self.received == signal.SIGINT:
            with contextlib.suppress(RuntimeError):  # it came in the middle of another line
                self._announce()

    @property
    def exit_code(self) -> int | None:
        """With which the process ends once all is saved; None where a result is returned."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in (self.agreed, self.received):
                return 128 + number
        return None

    def agree(self, *, with_leader: Any = None) -> Any:
        """Brings `agreed` up to date on all processes alike; gives what the first process has `with_leader`."""
        found = distributed.exchange("signals", [self.received or 0, with_leader])
        self.agreed = max(received for received, _ in found) or None
        return found[0][1]

    def __exit__(self, *_):
        self._stack.close()
        ask_to_end(False)
