"""Actors in processes of this machine, which exchange arrays with this process through shared memory.

A call and its answer are pickled with their arrays left out (PEP 574). The arrays are in a file in memory that both
processes have open, so sending arrays does not wait for the receiver to read, as it would with a pipe.
"""

import contextlib
import os
import pickle
import tempfile
import threading
import time
import traceback
import weakref
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.envs.host.workers import WorkerProcess, exit_reason
from jaxrl.parallel.remote.backend import ActorRaisedError, LostActorError

_LOOK = 1.0  # seconds between two checks of processes that do not answer


class LocalProcesses:
    """The `Backend` of actors in processes of this machine, on the environments' cores of `Resources`."""

    kind = "actor process"

    def start(self, cls: type, arguments: tuple[Any, ...]) -> "_Actor":
        return _Actor(cls, arguments)

    def call(self, actor: "_Actor", method: str, arguments: tuple[Any, ...]) -> "_Actor":
        message = _stored(actor.memory, (method, arguments))
        with contextlib.suppress(OSError):  # the actor has ended, which `answer` reports
            actor.connection.send(message)
        return actor

    def answer(self, reference: "_Actor", timeout: float) -> Any:
        return reference.answer(timeout)

    def shared(self, value: Any) -> Any:
        return value

    def kill(self, actor: "_Actor") -> None:
        actor.kill()


class _Actor(WorkerProcess):
    """A process with an actor."""

    def __init__(self, cls: type, arguments: tuple[Any, ...]):
        self.memory, self._lock = _memory(), threading.RLock()
        weakref.finalize(self, os.close, self.memory)
        setup = self.memory, cloudpickle.dumps((cls, arguments))
        super().__init__("environments", __name__, setup, files=(self.memory,))

    def kill(self) -> int:
        with self._lock:  # the thread that waits for an answer and the one that closes the run may both call this
            return super().kill()

    def _release(self) -> None:
        # The connection is closed with this object, as another thread may be reading from it.
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def answer(self, timeout: float) -> Any:
        """Return the answer of the last call; see `Backend.answer`."""
        until = time.monotonic() + timeout
        try:
            while not self.connection.poll(min(max(until - time.monotonic(), 0.0), _LOOK)):
                # Processes that the environments started may keep a dead actor's end of the pipe open.
                if self.ended(0.0) and not self.connection.poll():
                    raise EOFError
                if time.monotonic() >= until:
                    raise TimeoutError
            failure, error, answer = _receive(self.connection, self.memory)
        except (EOFError, OSError) as lost:
            if isinstance(lost, TimeoutError):
                raise
            raise LostActorError(f"died ({exit_reason(self.kill())})") from None
        if failure:
            raise ActorRaisedError(failure) from error
        return answer


def _memory() -> int:
    """Return the descriptor of an empty file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jaxrl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _stored(memory: int, message: Any) -> tuple[bytes, list[int]]:
    """Write the arrays of a message to `memory`; return the rest, and the sizes of the arrays in bytes."""
    buffers: list[pickle.PickleBuffer] = []
    content = cloudpickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    start, sizes = 0, []
    for buffer in (one.raw() for one in buffers):
        sizes.append(buffer.nbytes)
        while buffer.nbytes:
            written = os.pwrite(memory, buffer, start)
            buffer, start = buffer[written:], start + written
    return content, sizes


def _receive(connection: Connection, memory: int) -> Any:
    content, sizes = connection.recv()
    start, buffers = 0, []
    for size in sizes:
        buffer = memoryview(bytearray(size))
        buffers.append(buffer)
        while buffer.nbytes:
            read = os.preadv(memory, [buffer], start)
            buffer, start = buffer[read:], start + read
    return pickle.loads(content, buffers=buffers)


def serve(connection: Connection, setup: tuple[int, bytes]) -> None:
    """Make the actor and answer calls until the connection is closed; runs in the actor's process."""
    memory, recipe = setup

    def attempt(function, *arguments):
        try:
            return "", None, function(*arguments)
        except (Exception, SystemExit) as error:  # `sys.exit` in an environment must not end the process
            return traceback.format_exc(), error if isinstance(error, EnvironmentFailedError) else None, None

    def make():
        cls, arguments = pickle.loads(recipe)
        return cls(*arguments)

    *failure, actor = attempt(make)  # before the first call, so that actors start at the same time
    while True:
        method, arguments = _receive(connection, memory)
        answer = (*failure, None) if failure[0] else attempt(getattr(actor, method), *arguments)
        connection.send(_stored(memory, answer))
