"""Text log of a run directory: the messages that the run prints, with time stamps, without the progress display."""

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator
from pathlib import Path

from jaxrl.core import files
from jaxrl.core.errors import RunStoppedWarning
from jaxrl.run.directory.run_directory import LOG

_MOST = 2**20  # bytes; in a larger log, the older half is deleted
_MOST_HELD = 1_000  # maximum number of lines kept in memory until the directory is open
_TIME = "%Y-%m-%d %H:%M:%S "


class RunLog:
    """A log of lines, written to `log.txt` once the run directory is open.

    Lines that cannot be written are lost, because a failing log must not end the run.
    """

    def __init__(self):
        self._file: Path | None = None
        self._held: deque[str] = deque(maxlen=_MOST_HELD)
        self._lock = threading.RLock()  # reentrant: a signal handler may write while its thread is writing

    def open(self, directory: Path) -> None:
        """Open the log of a run directory and append the lines kept in memory so far."""
        with self._lock:
            self._file = directory / LOG
            self._append("".join(self._held))
            self._held.clear()

    def write(self, text: str) -> None:
        """Write one or more lines with one time stamp."""
        lines = files.escape_for_terminal(text).replace("\n", "\n" + " " * 20)
        line = f"{time.strftime(_TIME)}{lines}\n"
        with self._lock:
            if self._file is None:
                self._held.append(line)
            else:
                self._append(line)

    def close(self) -> None:
        """Stop writing, because the run has ended or its directory was deleted."""
        with self._lock:
            self._file = None

    def _append(self, text):
        assert self._file is not None
        with contextlib.suppress(OSError):
            with files.open_to_append(self._file) as file:
                file.write(text)
            if self._file.stat().st_size > _MOST:
                lines = self._file.read_text(encoding="utf-8", errors="replace")
                half = lines[len(lines) // 2 :]
                with files.replacing(self._file) as file:
                    file.write(half.partition("\n")[2] or half)


@contextlib.contextmanager
def logged() -> Generator[RunLog]:
    """Yield a log that also records the warnings and the error of the `with` block."""
    log, previous, ended = RunLog(), warnings.showwarning, False

    def show(message, category, filename, lineno, file=None, line=None):
        if not ended:
            log.write(f"{'error' if issubclass(category, RunStoppedWarning) else 'warning'}: {message}")
        previous(message, category, filename, lineno, file, line)

    setattr(warnings, "showwarning", show)  # noqa: B010  replaced as documented, which its type does not allow
    try:
        yield log
    except BaseException as error:
        log.write(f"error: {str(error) or type(error).__name__}")
        raise
    finally:
        ended = True
        if warnings.showwarning is show:  # otherwise, a run in another thread has replaced it
            setattr(warnings, "showwarning", previous)  # noqa: B010  as above
        log.close()
