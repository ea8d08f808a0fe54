"""Time limits of tests, which end by an exception and not by the limit of CI."""

import contextlib
import signal
import time

# Seconds that anything may take before it counts as hung: a hundred times what it takes on two idle cores, because the
# tests also run beside other work. What is made to hang does so for this long.
PATIENCE = 900


class Clock:
    """A clock that stands until a test sets it."""

    now = 100.0

    def __call__(self):
        return self.now


def wait_for(condition):
    """Wait until a condition holds; fail after half of the patience, before what is made to hang ends."""
    until = time.monotonic() + PATIENCE / 2
    while not condition():
        assert time.monotonic() < until, "what is waited for did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def within(seconds, error=TimeoutError):
    """Raise `error` in the main thread after that many whole seconds."""

    def late(*_):
        raise error(f"nothing came of it within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
