"""Processes of a run on this machine, each with its own environment variables, cores and GPUs."""

import contextlib
import dataclasses
import glob
import importlib.util
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from jaxrl.core import interrupts
from jaxrl.core.resources import on_cores
from jaxrl.parallel.multihost.place import VARIABLE, Place, Processes, Several

ON_PROCESSORS = {"JAX_PLATFORMS": "cpu"}  # environment variables of a process without an accelerator


class Started(Protocol):
    """A started process, on this machine or another. Its methods do not block for long."""

    def poll(self) -> int | None:
        """Return the exit code, 128 + n if signal n ended the process; None while it runs."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended. May be called from a signal handler."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...

    def stderr_tail(self) -> str:
        """Return the last output of the process; empty for a process whose output is shown immediately."""
        ...

    def notify_training_finished(self) -> None:
        """Notify an evaluator that there will be no more checkpoints."""
        ...


class Local:
    """A process on this machine in its own session, so that Ctrl-C in the terminal only reaches its parent.

    Args:
      command: the program and its arguments.
      place: the place of the process in the run.
      environment: environment variables of the process, without the variable for its place.
      stdout, stderr: files for the output of the process; None: the same as in this process.
      directory: working directory of the process; None: the same as in this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        environment: Mapping[str, str],
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        directory: str | None = None,
    ):
        watched, self._alive = os.pipe()  # the kernel closes the write end if this process is killed
        description = json.dumps(dataclasses.asdict(place) | {"pipe": watched})
        try:
            with interrupts.blocked():  # until the process has read its place; before that, signals print a traceback
                self._process = subprocess.Popen(
                    command,
                    env={**environment, VARIABLE: description},
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(watched,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(watched)
        self._output = stdout

    def poll(self) -> int | None:
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    def stderr_tail(self) -> str:
        return "" if self._output is None else Path(self._output.name).read_text(errors="replace")

    def notify_training_finished(self) -> None:
        if self._alive is not None:
            with contextlib.suppress(BrokenPipeError):  # the process has ended
                os.write(self._alive, b".")


def places(how: Several, coordinator: str = "") -> list[Place]:
    """Return the places of all processes that are started together: first the learners, then the evaluators."""
    start = secrets.token_hex(8)
    return [Place(coordinator, how.count, index, how.evaluators, start) for index in range(how.count + how.evaluators)]


def start(command: Sequence[str], how: Processes, folder: Path, stack: contextlib.ExitStack) -> Iterator[Started]:
    """Start the processes of a run and yield them; all but process 0 write their output to files in `folder`."""
    all_places, gpus = places(how, f"127.0.0.1:{free_port('127.0.0.1')}"), gpus_here()
    for index, place in enumerate(all_places):
        environment = dict(os.environ)
        learns = place.role == "learner"
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_share(gpus, index, how.count) if learns else [])
        if not learns:
            environment |= ON_PROCESSORS
        output = stack.enter_context(open(folder / str(index), "wb")) if index else None
        with on_cores(_share(_cores(), index, len(all_places))):
            process = Local(command, place, environment, output, output)
        yield process


def free_port(host: str) -> int:
    """Return a port that is free at an address of this machine; "" means all addresses."""
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def _share[T](things: Sequence[T], index: int, count: int) -> list[T]:
    """Return the part of `things` for process `index` of `count`; all things if there are fewer than processes."""
    if len(things) < count:
        return list(things)
    return list(things[index * len(things) // count : (index + 1) * len(things) // count])


def _cores() -> list[int]:
    """Return the cores that this process may use; [] if the system cannot restrict processes to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def gpus_here() -> list[str]:
    """Return the GPUs that JAX would use in this process, named as in CUDA_VISIBLE_DEVICES, without loading JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if "cpu" in platforms.split(",")[:1] or not any(importlib.util.find_spec(name) for name in plugins):
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]
