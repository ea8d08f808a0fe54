"""Signals that ask a run to end."""

import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

from jaxrl.envs.host.watchdog import ask_to_end
from jaxrl.parallel.multihost import distributed


class Signals:
    """Ctrl-C, SIGTERM and a terminal that closes ask for an end after the running chunk; a second Ctrl-C ends at once.

    A step of host environments that does not return within seconds then ends the run with its error.

    Args:
      told: called at the first Ctrl-C, in the signal's handler.

    Attributes:
      asked: the signal that this process got.
      agreed: the one that some process got, as of the last moment at which they spoke of it.
    """

    def __init__(self, told: Callable[[], None] = lambda: None):
        self._told = told
        self.asked: int | None = None
        self.agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # by nohup, say
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number, frame):
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number
        ask_to_end(True)
        if number == signal.SIGINT:
            with contextlib.suppress(RuntimeError):  # it came in the middle of another line
                self._told()

    @property
    def exit_code(self) -> int | None:
        """With which the process ends once all is saved; None where a result is returned."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in (self.agreed, self.asked):
                return 128 + number
        return None

    def agree(self, *, with_leader: Any = None) -> Any:
        """Brings `agreed` up to date on all processes alike; gives what the first process has `with_leader`."""
        found = distributed.exchange("signals", [self.asked or 0, with_leader])
        self.agreed = max(asked for asked, _ in found) or None
        return found[0][1]

    def __exit__(self, *_):
        ask_to_end(False)
        for number, handler in self._before.items():
            if handler is not None:  # None: not from Python, and cannot be put back
                signal.signal(number, handler)
