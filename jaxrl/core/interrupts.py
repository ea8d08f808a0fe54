"""Handling of Ctrl-C, SIGTERM and a closing terminal, in one place for the whole lifetime of a process.

An exception from a signal handler interrupts the main thread at an arbitrary point: during an import, whose lock stays
held, or in a weak reference's callback, where the exception is lost. While C code runs, as XLA does for minutes, the
exception is not raised at all. In the process of a command (`own`), handlers therefore never raise. A thread reads the
received signals, which Python records even while the main thread runs C code, and either ends the process or passes
the signal to a handler that has something to save (`receiving`). Signals are thus handled at any time.

In a process that jaxrl does not own, such as a notebook, Ctrl-C remains a KeyboardInterrupt in the main thread:
`interruptible` ensures that it is raised outside of imports, and not lost. This module does not import JAX.
"""

import _thread
import atexit
import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FAREWELL = 3.0  # seconds for clean-up before the process ends
_LAST = 5.0  # seconds for threads and libraries to end after an interrupted command has returned
_AGAIN = 0.05  # seconds until an interrupt is retried
_IMPORTS = "<frozen importlib"

_pipe: list[int] = []  # read and write ends, once `own` was called
_acting = threading.RLock()  # held while a signal is handled
_receivers: list[Callable[[int], None]] = []  # innermost last
_cleanups: list[Callable[[], object]] = []
_received: list[int] = []  # all signals so far
_exit_codes: list[int] = []  # exit code of the command, once it has returned
_UNFLUSHED = 120  # Python's exit code if its output cannot be written


# --- the process of a command ------------------------------------------------------------------------------------


def own() -> None:
    """Install signal handlers for the process of a command; SIGHUP remains ignored under `nohup`.

    Call this early in the main thread, and again after a library has replaced the handlers.
    """
    if not _pipe:
        _pipe.extend(os.pipe())
        os.set_blocking(_pipe[1], False)
        threading.Thread(target=_act, args=(_pipe[0],), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_disown)
        atexit.register(_end)  # registered first, so that it runs last
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    for number in _handled():
        signal.signal(number, _note)
    unblock()


def owned() -> bool:
    """Return whether `own` was called in this process."""
    return bool(_pipe)


def unblock() -> None:
    """Unblock SIGINT in a process that was started within `blocked`, once this process can handle the signal."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def blocked() -> Generator[None]:
    """Block SIGINT in processes started within the context until they call `own` or `unblock`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def receiving(receive: Callable[[int], None]) -> Generator[None]:
    """Pass signals to `receive` within the block, instead of to the earlier handlers.

    Args:
      receive: function called with the number of each signal. If this process called `own`, the function runs in a
        separate thread, even while the main thread is busy; otherwise in the signal handler of the main thread. It may
        call `leave`. It is not called after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
    elif owned():
        own()  # a library may have replaced a handler in the meantime
        with _acting:
            _receivers.append(receive)
        try:
            yield
        finally:
            with _acting:
                _receivers.remove(receive)
    else:
        before: dict[int, Any] = {}
        try:
            for number in _handled():
                before[number] = signal.signal(number, lambda number, _: receive(number))
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # None: installed by C code, so Python cannot restore it
                    signal.signal(number, handler)


@contextlib.contextmanager
def cleaning_up(clean: Callable[[], object]) -> Generator[None]:
    """Call `clean`, which has a few seconds to finish, if a signal ends this process within the context."""
    _cleanups.append(clean)
    try:
        yield
    finally:
        _cleanups.remove(clean)


def leave(number: int) -> None:
    """End the process of a command immediately; in other processes, raise KeyboardInterrupt after any running import.

    Child processes detect that the process ended, and end too.

    Args:
      number: the signal's number.
    """
    if not owned():
        _interrupt()
        return
    with contextlib.suppress(RuntimeError):  # no new threads can be started when the interpreter ends
        _exit_after(_FAREWELL, 128 + number)
    for clean in _cleanups[::-1]:
        with contextlib.suppress(Exception):
            clean()
    with contextlib.suppress(Exception):
        if select.select([], [2], [], 0)[1]:  # a terminal may be stopped, or a pipe full
            os.write(2, b"interrupted\n")
    _exit(128 + number)


def returned(code: int) -> int:
    """Return the process's exit code for a command that returned `code`; after a signal, limit the time until exit.

    The process ends after its exit hooks, without finalizing the interpreter: finalization would end daemon threads
    that wait for JAX in C++ code, which aborts the process.

    Args:
      code: the command's exit code. If it is 0 although a signal was received, the signal's exit code replaces it.
    """
    if owned():
        code = code or (128 + _received[-1] if _received else 0)
        _exit_codes.append(code)
        if _received:
            _flush()
            _exit_after(_LAST, code)
    return code


def _handled() -> list[int]:
    """Return the signals to handle: all of `ENDING`, except SIGHUP under `nohup`."""
    return [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _note(number: int, _: FrameType | None) -> None:
    """Handle a signal in the main thread by waking the thread that runs `_act`."""
    if (other := signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)) != _pipe[1]:  # set by an event loop
        signal.set_wakeup_fd(other)
        os.write(_pipe[1], bytes([number]))


def _act(pipe: int) -> None:
    while True:
        for number in os.read(pipe, 256):
            if number in ENDING:
                with _acting:
                    _received.append(number)
                    try:
                        (_receivers[-1] if _receivers else leave)(number)
                    except Exception:
                        leave(number)


def _disown() -> None:
    """Reset a forked child's handlers to Python's defaults, because the parent's handlers are not meant for it."""
    signal.set_wakeup_fd(-1)
    for number in ENDING:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _exit_after(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _exit(code: int) -> NoReturn:
    flushed = _flush()
    os._exit(code if flushed else code or _UNFLUSHED)


def _flush() -> bool:
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:  # None: closed when the process started
                stream.flush()
        except Exception:
            flushed = False
    return flushed


def _end() -> None:
    """Exit with the exit code of the command if it has returned; otherwise restore the default signal handlers."""
    if _exit_codes:
        _exit(_exit_codes[-1])
    for number in ENDING:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_DFL)


# --- processes that jaxrl does not own ---------------------------------------------------------------------------


def interruptible[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that Ctrl-C raises KeyboardInterrupt outside of imports, and again if the exception was lost.

    This has no effect if Python's own handler is not installed, as in the process of a command.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return function(*args, **kwargs)
        hook = sys.unraisablehook
        sys.unraisablehook = functools.partial(_lost, hook)
        signal.signal(signal.SIGINT, lambda *_: _interrupt())
        try:
            result = function(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = hook
            interrupted = _stop_trying()
        if interrupted:
            raise KeyboardInterrupt
        return result

    _calls.add(call.__code__)
    return functools.wraps(function)(call)


_calls: set[Any] = set()  # code objects of the wrappers `call`
_tries: list[object] = []  # the pending retry of an interrupt, if any


def _interrupt() -> None:
    """Raise KeyboardInterrupt in the main thread: now, or after a short delay if it is importing a module."""
    if _is_importing(sys._getframe()):
        _interrupt_again()
    else:
        _stop_trying()
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the outermost `interruptible` function, or the program if there is none, is importing a module."""
    importing, found = False, None
    while frame is not None:
        importing = importing or frame.f_code.co_filename.startswith(_IMPORTS)
        if frame.f_code in _calls:
            found = importing
        frame = frame.f_back
    return importing if found is None else found


def _lost(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Retry the interrupt if a weak reference's callback or a finalizer lost it; pass other errors to `hook`."""
    if unraisable.exc_type is KeyboardInterrupt:
        _interrupt_again()
    else:
        hook(unraisable)


def _interrupt_again() -> None:
    if not _tries:
        _tries.append(object())
        _thread.start_new_thread(_try, (_tries[0],))  # `threading` has a lock that the interrupted code may hold


def _try(this: object) -> None:
    time.sleep(_AGAIN)
    if this in _tries:
        _tries.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _stop_trying() -> bool:
    """Cancel a pending retry of an interrupt; return whether there was one."""
    trying = bool(_tries)
    _tries.clear()
    return trying
