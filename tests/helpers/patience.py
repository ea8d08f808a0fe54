"""What takes too long ends by an exception here, and not by the limit of CI."""

import contextlib
import signal

# Seconds that anything may take before it counts as hung: a hundred times what it takes on two idle cores, because the
# tests also run beside other work. What is made to hang does so for this long.
PATIENCE = 900


class Clock:
    """A clock that stands until a test sets it."""

    now = 100.0

    def __call__(self):
        return self.now


@contextlib.contextmanager
def within(seconds, error=TimeoutError):
    """Raises `error` in the main thread after that many whole seconds."""

    def late(*_):
        raise error(f"nothing came of it within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
