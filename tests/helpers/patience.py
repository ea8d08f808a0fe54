"""What takes too long ends by an exception here, and not by the limit of CI."""

import contextlib
import signal


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
