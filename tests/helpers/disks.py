"""Disks that refuse to make or write files whose path holds some words."""

import builtins
import contextlib
import io
import os
import resource
import sys

_MADE = {"open": (0,), "os.mkdir": (0,), "os.rename": (0, 1)}  # audit events, and which of their arguments are paths


class Disk:
    """While `on`, an act upon a file below `folder` whose path holds one of `words` calls `then`, which may raise.

    Args:
      patch: pytest's monkeypatch.
      how: "made": files and folders are made, opened to be written to, or renamed; "written": bytes go into them. What
        libraries write in C++ is not seen: for that there is `nothing_fits`.

    Attributes:
      count: how often it was called.
    """

    def __init__(self, patch, folder, words, how, then):
        self.on, self.count, self._folder, self._words, self._then = False, 0, str(folder), words, then
        if how == "made":
            sys.addaudithook(self._see)  # which Python never removes again, hence `on`
            return
        write, disk = os.write, self

        def os_write_or_not(descriptor, data):
            path = None
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path is not None:
                disk.meets(path)
            return write(descriptor, data)

        patch.setattr(os, "write", os_write_or_not)
        opened = builtins.open

        def open_(file, mode="r", buffering=-1, *arguments, **options):
            writes = isinstance(file, str | os.PathLike) and set(mode) & set("wxa+")
            if not writes or not disk._is_one(os.fspath(file)):
                return opened(file, mode, buffering, *arguments, **options)
            buffered = io.BufferedWriter(_Refusing(file, mode.replace("b", "").replace("t", ""), disk))
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **options)

        patch.setattr(builtins, "open", open_)
        patch.setattr(io, "open", open_)

    def _is_one(self, path):
        return str(path).startswith(self._folder) and any(word in str(path) for word in self._words)

    def meets(self, path):
        if self.on and self._is_one(path):
            self.count += 1
            self._then()

    def _see(self, event, arguments):
        if not self.on or event not in _MADE:
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        for place in _MADE[event]:
            if isinstance(arguments[place], str | os.PathLike):
                self.meets(os.fspath(arguments[place]))


class _Refusing(io.FileIO):
    def __init__(self, file, mode, disk):
        self._disk = disk
        super().__init__(file, mode)

    def write(self, data):
        self._disk.meets(os.fspath(self.name))
        return super().write(data)


def refuse(number):
    """Return a function that raises this error of the system."""

    def then():
        raise OSError(number, os.strerror(number))

    return then


@contextlib.contextmanager
def nothing_fits(most=0):
    """No file of this process grows beyond `most` bytes, whatever writes to it, in Python or not (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
