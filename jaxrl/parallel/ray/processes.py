"""Processes of one run on a Ray cluster (Moritz et al., 2018, arXiv:1712.05889): `--launch ray:4`.

Each process has a Ray actor, which starts the process on the actor's machine, passes signals on to it, and returns its
output and exit code. If the actor, its machine or the connection is lost, the process counts as lost and ends by
itself.
"""

import collections
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.core.errors import ConfigError, JaxrlError
from jaxrl.parallel.multihost.local import ON_PROCESSORS, Local, Started, free_port, places
from jaxrl.parallel.multihost.place import Place, RayProcesses
from jaxrl.parallel.ray.cluster import START_TIMEOUT, actor_class, connect, free, kill

# Prefixes of the environment variables that are passed on to the processes.
_PASSED_ON = ("JAX", "XLA", "PYTHONPATH", "OMP_NUM_THREADS")
_PATIENCE = 60.0  # seconds without an answer from an actor after which its process counts as lost
_TO_KILL = 5.0  # seconds for an actor to kill its process
_TAIL_BYTES = 20_000  # bytes of output to keep for a process whose output is not shown
_LOST = 1  # exit code of a process that was lost


class Holder(Local):
    """A Ray actor that starts and controls a process on its machine.

    Args:
      command: the command; the Python of the actor's machine replaces its first word.
      place: the place of the process; if it has no coordinator, a free port of the actor's machine is used.
      variables: environment variables in addition to those of the actor.
      directory: the working directory.
    """

    def __init__(self, command: Sequence[str], place: Place, variables: Mapping[str, str], directory: str):
        from ray.util import get_node_ip_address

        self._coordinator = place.coordinator or f"{get_node_ip_address()}:{free_port('')}"
        place = dataclasses.replace(place, coordinator=self._coordinator)
        self._files = [tempfile.TemporaryFile(prefix="jaxrl-launch-") for _ in ("stdout", "stderr")]
        environment = dict(os.environ)
        environment.pop("OMP_NUM_THREADS", None)  # Ray sets it to the actor's number of CPUs
        super().__init__([sys.executable, *command[1:]], place, {**environment, **variables}, *self._files, directory)

    def coordinator(self) -> str:
        """Return the coordinator's address, HOST:PORT."""
        return self._coordinator

    def look(self, since: tuple[int, int]) -> tuple[int | None, tuple[bytes, bytes]]:
        """Return the exit code or None, and the bytes written to stdout and stderr after the offsets `since`."""
        code = self.poll()  # before reading the files, so that they contain the last output
        # The process shares the files' offsets, which `pread` leaves unchanged.
        new = [
            os.pread(file.fileno(), max(os.fstat(file.fileno()).st_size - start, 0), start)
            for file, start in zip(self._files, since, strict=True)
        ]
        return code, (new[0], new[1])

    def end(self, since: tuple[int, int]) -> tuple[int | None, tuple[bytes, bytes]]:
        """Kill the process, and return its exit code and last output in the format of `look`."""
        self.kill()
        return self.look(since)


class _Held:
    """A `Started` process that a Ray actor runs."""

    def __init__(self, ray: Any, actor: Any, index: int):
        self._ray, self._actor, self._is_first = ray, actor, index == 0
        self._signals: collections.deque[int] = collections.deque()
        self._code: int | None = None
        self._looking: Any = None
        self._since = 0.0
        self._read = [0, 0]
        self._said = b""

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        while self._signals:
            self._actor.send_signal.remote(self._signals.popleft())
        if self._looking is None:
            self._looking, self._since = self._actor.look.remote(tuple(self._read)), time.monotonic()
        ready, _ = self._ray.wait([self._looking], timeout=0)
        if not ready and time.monotonic() - self._since < _PATIENCE:
            return None
        try:
            self._code = self._taken(self._ray.get(self._looking, timeout=0))
        except self._ray.exceptions.RayError as error:
            lost = f"lost together with its Ray actor: {str(error).splitlines()[0]}"
            self._said += f"\n{lost}".encode()
            if self._is_first:
                print(f"process 0: {lost}", file=sys.stderr, flush=True)
            self._code = _LOST
        self._looking = None
        return self._code

    def _taken(self, found):
        """Show or store new output, and return the exit code."""
        code, said = found
        for which, (new, stream) in enumerate(zip(said, (sys.stdout, sys.stderr), strict=True)):
            self._read[which] += len(new)
            if not self._is_first:
                self._said = (self._said + new)[-_TAIL_BYTES:]
            elif new and hasattr(stream, "buffer"):
                stream.flush()
                stream.buffer.write(new)
                stream.buffer.flush()
            elif new:  # the stream of a notebook
                stream.write(new.decode(errors="replace"))
        return code

    def send_signal(self, number: int) -> None:
        self._signals.append(number)  # sent by `poll`: a signal handler may interrupt Ray, so it must not call it

    def kill(self) -> None:
        # If the actor does not answer, killing it closes its end of the pipe, and the process ends by itself.
        if self._code is None:
            with contextlib.suppress(Exception):
                self._code = self._taken(self._ray.get(self._actor.end.remote(tuple(self._read)), timeout=_TO_KILL))
            self._code = 128 + signal.SIGKILL if self._code is None else self._code
        kill(self._ray, self._actor)

    def stderr_tail(self) -> str:
        return self._said.decode(errors="replace")

    def notify_training_finished(self) -> None:
        self._actor.notify_training_finished.remote()


def start(
    command: Sequence[str], how: RayProcesses, stack: contextlib.ExitStack, stopped: Callable[[], bool]
) -> Iterator[Started]:
    """Start the processes of a run on the cluster, one after another, until `stopped` returns True.

    Args:
      command: the program and its arguments.
      how: the number of processes, and their resources.
      stack: exit stack that releases Ray's reservation when it is closed.
      stopped: function that returns whether a signal arrived.

    Raises:
      ConfigError: the cluster does not have these resources, or they are not free.
      JaxrlError: a process could not be started on its machine.
    """
    ray = connect()
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = {"CPU": how.cpus} | ({"GPU": how.gpus} if how.gpus else {})
    group = placement_group([share] * how.count + [{"CPU": how.cpus}] * how.evaluators, strategy="SPREAD")
    stack.callback(remove_placement_group, group)

    def waited(is_done):
        """Wait until `is_done` is true and return True; return False after a signal or a timeout."""
        until = time.monotonic() + START_TIMEOUT
        while not (done := is_done()) and not stopped() and time.monotonic() < until:
            pass
        return bool(done)

    if not waited(lambda: group.wait(1)):
        if stopped():
            return
        all_of_them = f"{how.count} processes with cpus={how.cpus} and gpus={how.gpus} each"
        all_of_them += f" and an evaluator with cpus={how.cpus}" * how.evaluators
        raise ConfigError(
            f"ray: {all_of_them} did not fit on the cluster within {START_TIMEOUT:g} s; {free(ray)}; use fewer, or "
            "add machines"
        )
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    coordinator = ""
    for index, place in enumerate(places(how)):
        there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        gpus = how.gpus if place.role == "learner" else 0
        place = dataclasses.replace(place, coordinator=coordinator)
        own = variables if gpus else variables | ON_PROCESSORS
        actor = actor_class(ray, Holder, how.cpus, gpus, there).remote(list(command), place, own, os.getcwd())
        begun = actor.coordinator.remote()
        if not waited(lambda begun=begun: ray.wait([begun], timeout=1.0)[0]) and stopped():
            return
        try:
            coordinator = ray.get(begun, timeout=0)
        except ray.exceptions.RayError as error:
            raise JaxrlError(f"process {index} could not be started on its machine:\n{error}") from error
        yield _Held(ray, actor, index)
