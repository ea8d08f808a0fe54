"""Runs with several processes: JAX's multi-controller runtime, and decisions that all processes make together.

Every process runs the same program. Therefore, decisions about the run (the length of the next chunk, whether to stop,
the checkpoint to resume from) are made jointly with `exchange`, never from the state of only one process: processes
that disagree would wait for each other in different collectives.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict

# The key-value store of the coordination service has no public name. Unlike a collective, it needs no device, has a
# timeout, and works between processes of different versions.
from jax._src import distributed as _engine

from jaxrl.core import errors
from jaxrl.core.errors import ConfigError, JaxrlError, PeerError
from jaxrl.core.versions import installed_version
from jaxrl.parallel.multihost import addresses
from jaxrl.parallel.multihost.place import Place, is_evaluator

ANSWER_SECONDS = 600.0  # timeout for values of the other processes, which should arrive at about the same time
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object; differs between processes
_LOST = re.compile(r"\b(Gloo|NCCL)\b")  # in the error of a broken collective
_VERSIONS = ("jaxrl", "jax", "jaxlib", "flax", "optax")
_FAILED = "failed"  # a process that failed sends this in place of the name of an exchange
_exchanges = itertools.count()


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = 100,
    start_seconds: int = 300,
    end_seconds: int = 300,
) -> int:
    """Join the processes of a run; call this before JAX creates its devices.

    Without arguments, the cluster is detected: TPU pods, Slurm, Open MPI, Kubernetes.

    Args:
      coordinator: address of process 0 as HOST:PORT. Other machines cannot reach a loopback address.
      num_processes: number of processes of the run.
      process_id: index of this process, from 0.
      heartbeat_seconds: time without a heartbeat after which a process counts as dead, and all others end.
      start_seconds: time to wait for the others at the start; afterwards, JAX aborts this process.
      end_seconds: time for which a process that has finished or raised waits for the others; afterwards, all end with
        an error.

    Returns:
      The number of processes.

    Raises:
      ConfigError: no cluster was detected, the arguments are invalid, or versions differ between processes.
    """
    if found := problems(coordinator, num_processes, process_id):
        raise ConfigError(found)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM in place of `core.interrupts`
    bind = None
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        bind = coordinator if host in _LOOPBACK else f"[::]:{port}"
        if process_id == 0 and addresses.is_taken(bind):
            raise ConfigError(f"coordinator={coordinator!r}: the port is in use on this machine; use another port")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=start_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=end_seconds,
            coordinator_bind_address=bind,
        )
    except ValueError as error:  # a parameter was neither given nor detected
        raise ConfigError(
            f"no cluster was detected ({error}); pass coordinator=HOST:PORT, num_processes=N and process_id=I, with "
            "process_id=0 on the machine HOST"
        ) from error
    here = _engine.global_state
    _check_count(here)
    versions = {f"version of {name}": installed_version(name) or "unknown" for name in _VERSIONS}
    _raise_differences(exchange("versions", versions))
    if here.coordinator_address is not None and (address := addresses.own(here.coordinator_address, exchange)):
        addresses.use(address)
    return here.num_processes


def join(place: Place) -> int:
    """Join the learners of a run if the process at `place` is one of them.

    Returns:
      The number of learners.
    """
    if place.role == "evaluator":
        return place.num_processes
    return initialize(place.coordinator, place.num_processes, place.process_id)


def problems(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> list[str]:
    """Return the errors in these arguments of `initialize`, one line each."""
    found = []
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        found.append(f"coordinator={coordinator!r} must be HOST:PORT")
    if num_processes is not None and num_processes < 1:
        found.append(f"num_processes={num_processes} must be at least 1")
    elif process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        found.append(f"process_id={process_id} must be between 0 and {(num_processes or 1) - 1}")
    return found


def is_leader() -> bool:
    """Return whether this process writes the files of a run: process 0, unless it is a launched evaluator."""
    return jax.process_index() == 0 and not is_evaluator()


def is_several() -> bool:
    """Return whether this is one of several processes."""
    return jax.process_count() > 1


def exchange(what: str, value: Any) -> list[Any]:
    """Return the values of all processes, by process index; all processes must make the same calls in the same order.

    Args:
      what: the name of the value.
      value: this process's value, a JSON value.

    Raises:
      PeerError: a process failed, did not answer, or sent a value with another name.
    """
    here, client = _engine.global_state, _engine.global_state.client
    if client is None and jax.process_count() > 1:
        raise JaxrlError("the processes were not joined; call jaxrl.launch('cluster') before JAX creates its devices")
    if client is None or here.num_processes == 1:
        return [value]
    number, index = next(_exchanges), here.process_id
    client.key_value_set(_key(number, index), json.dumps([what, value]))
    if number > 1:
        client.key_value_delete(_key(number - 2, index))  # all processes have read it, as they have sent later values
    found = []
    for other in range(here.num_processes):
        try:
            answer = client.blocking_key_value_get(_key(number, other), int(ANSWER_SECONDS * 1000))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerError(f"process {other} did not answer process {index} ({what}): {reason}") from error
        doing, theirs = json.loads(answer)
        if doing == _FAILED:
            raise PeerError(f"process {other} failed: {theirs}")
        if doing != what:
            raise PeerError(
                f"run the same code on all processes: process {other} sent {doing!r}; process {index} expected {what!r}"
            )
        found.append(theirs)
    return found


def from_leader(what: str, value: Any) -> Any:
    """Return process 0's value; all processes must call this."""
    return exchange(what, value)[0]


def check_same(settings: Mapping[str, Any]) -> None:
    """Check that settings are the same in all processes; all processes must call this.

    Args:
      settings: JSON values, nested mappings allowed.

    Raises:
      ConfigError: settings differ; the error lists them with the processes.
    """
    if jax.process_count() == 1:
        return
    devices = {"local devices": f"{jax.local_device_count()} of {jax.local_devices()[0].device_kind}"}
    flat = flatten_dict({**settings, **devices}, sep=".")
    mine = {name: _ADDRESS.sub("", json.dumps(value)) for name, value in flat.items()}
    _raise_differences(exchange("settings", mine))


@contextlib.contextmanager
def collective_errors(what: str) -> Generator[None]:
    """Raise an error in all processes if the block raises an error in any of them."""
    if jax.process_count() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    described = None if failure is None else [type(failure).__name__, str(failure)]
    found = exchange(f"error of {what}", described)
    if failure is not None:
        raise failure
    for index, theirs in enumerate(found):
        if theirs is not None:
            name, text = theirs
            cls = getattr(errors, name, None)
            if cls in (errors.ConfigError, errors.RunDirectoryError, errors.CheckpointError):
                raise cls(f"process {index}: {text}")
            raise PeerError(f"process {index} failed ({what}): {name}: {text}")


@contextlib.contextmanager
def report_errors() -> Generator[None]:
    """Report an error of the block to the other processes, which raise a PeerError at their next `exchange`.

    Raises:
      PeerError: the connection to another process broke during a collective.
    """
    try:
        with _losses_named():
            yield
    except BaseException as error:
        here = _engine.global_state
        if here.client is not None and here.num_processes > 1:
            message = json.dumps([_FAILED, f"{type(error).__name__}: {error}"])
            with contextlib.suppress(RuntimeError):  # the service and the other processes have ended
                here.client.key_value_set(_key(next(_exchanges), here.process_id), message)
        raise


@contextlib.contextmanager
def _losses_named():
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise PeerError(
            "another process of the run was lost; see its output. With --run-dir, the same commands resume from the "
            f"last checkpoint ({str(error).splitlines()[0]})"
        ) from error


def _check_count(here):
    """Check that all processes have the same `num_processes` before they wait for each other."""
    name = "jaxrl/num_processes"
    if here.process_id == 0:
        here.client.key_value_set(name, str(here.num_processes))
    theirs = here.client.blocking_key_value_get(name, int(ANSWER_SECONDS * 1000))
    if theirs != str(here.num_processes):
        found = f"{theirs} on process 0, {here.num_processes} on process {here.process_id}"
        raise ConfigError(f"num_processes must be the same on all processes: {found}")


def _key(number, index):
    return f"jaxrl/{number}/{index}"


def _raise_differences(found):
    names = dict.fromkeys(name for theirs in found for name in theirs)
    problems = []
    for name in names:
        holders: dict[Any, list[str]] = {}
        for index, theirs in enumerate(found):
            holders.setdefault(theirs.get(name, "(absent)"), []).append(str(index))
        if len(holders) > 1:
            listing = ", ".join(f"{value} on process {' and '.join(who)}" for value, who in holders.items())
            problems.append(f"{name} must be the same on all processes: {listing}")
    if problems:
        raise ConfigError(problems)
