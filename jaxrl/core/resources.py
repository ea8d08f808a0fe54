"""Limits on the processor cores of a run's parts and on the memory of its workers, and a check for JAX devices.

Linux has a core mask for each thread, inherited by the threads and processes that it starts, and memory limits for each
process. `applied` puts the settings into effect, and every part of the run is started within `on`.
"""

import contextlib
import dataclasses
import os
import platform
import re
import tempfile
from collections.abc import Collection, Generator, Mapping, Sequence, Set
from pathlib import Path

from jaxrl.core import files, registry
from jaxrl.core.errors import ConfigError

PARTS = ("learner", "actors", "environments", "evaluator")
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Resources:
    """Processor cores of the parts of a run, and memory of worker processes, on Linux.

    Cores are written as "0-3,8" and numbered from 0 among the cores that this process may use. If several processes
    share a machine (`jaxrl.launch` or Slurm), each process numbers its own cores; with `own_cores`, only the reserved
    cores are numbered.

    Args:
      learner: cores of all threads of this process except those of the parts below. On a CPU, this includes the threads
        of XLA, which all parts share. None: all cores.
      actors: cores of the actor threads. None: the learner's cores.
      environments: cores of EnvPool's threads, of worker processes and of actor processes. None: the cores of the
        thread that starts them.
      evaluator: cores of the evaluation thread (`async_evaluation`). None: the learner's cores.
      worker_memory: maximum GiB of data per worker process; allocating more raises a `MemoryError` in the worker, which
        ends the run. None: no limit.
      own_cores: number of cores to reserve until the run ends. Other runs with `own_cores` on this machine, such as
        experiments of a sweep or several commands, do not use them if they have the same user and temporary folder
        (TMPDIR). None: all cores are shared.
    """

    learner: str | None = None
    actors: str | None = None
    environments: str | None = None
    evaluator: str | None = None
    worker_memory: float | None = None
    own_cores: int | None = None


registry.add("topology", Resources)


@dataclasses.dataclass(frozen=True)
class _Applied:
    """Applied limits: cores of the machine by part, and the memory limit of a worker in bytes."""

    cores: Mapping[str, Set[int]]
    worker_bytes: int | None


_applied = _Applied({}, None)


def problems(resources: Resources, absent: dict[str, str], workers: int) -> list[str]:
    """Return problems of `resources` on this machine, one line each.

    Args:
      resources: the settings to check.
      absent: parts that the run lacks, with the reason.
      workers: number of worker processes of the run.
    """
    settings = {field.name: getattr(resources, field.name) for field in dataclasses.fields(resources)}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and not hasattr(os, "sched_setaffinity"):
        return [
            f"resources: {', '.join(settings)}: cores and memory can be limited only on Linux; remove these settings"
        ]
    found = [f"resources: {name}={settings[name]!r}: {why}" for name, why in absent.items() if name in settings]
    count = len(os.sched_getaffinity(0)) if settings else 0
    if (own := resources.own_cores) is not None:
        if type(own) is not int or not 1 <= own <= count:
            found.append(f"resources: own_cores={own!r} must be a number from 1 to {count}, the cores of this process")
        else:
            count = own
    for name in PARTS:
        if name in settings:
            found += _core_problems(name, settings[name], count)
    memory = resources.worker_memory
    if memory is None:
        return found
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    if not isinstance(memory, int | float) or not memory > 0:
        found.append(f"resources: worker_memory={memory!r} must be more than 0 GiB")
    elif workers and memory * workers > there:
        found.append(
            f"resources: worker_memory={memory:g} GiB for each of {workers} workers is more than the {there:.1f} GiB "
            f"of this machine; use at most {int(there / workers * 10) / 10:g}"
        )
    return found


@contextlib.contextmanager
def applied(resources: Resources | None) -> Generator[None]:
    """Apply `resources` to the parts of a run that are started within the block.

    All existing threads of this process are moved to the learner's cores, and back afterwards.

    Args:
      resources: valid according to `problems`; None: no changes.

    Raises:
      ConfigError: fewer than `own_cores` cores are left by other runs.
    """
    if resources is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        here = before = sorted(os.sched_getaffinity(0))
        settings = {part: getattr(resources, part) for part in PARTS}
        if resources.own_cores is not None:
            here = stack.enter_context(_owned(before, resources.own_cores))
            settings["learner"] = settings["learner"] or f"0-{len(here) - 1}"
        cores = {part: {here[index] for index in _indices(text)} for part, text in settings.items() if text is not None}
        memory = resources.worker_memory
        stack.enter_context(_in_force(_Applied(cores, None if memory is None else int(memory * _GIB)), set(before)))
        yield


@contextlib.contextmanager
def _owned(cores: Sequence[int], count: int) -> Generator[list[int]]:
    """Lock `count` of `cores` that no other run owns, until the block or the process ends."""
    folder = Path(tempfile.gettempdir()) / f"jaxrl-cores-{os.getuid()}-{platform.node()}"
    with contextlib.ExitStack() as stack:
        owned = []
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with _locked(folder / "choosing", wait=True):  # if two runs choose at once, one must find enough cores
                for core in cores:
                    if len(owned) < count and stack.enter_context(_locked(folder / str(core), wait=False)):
                        owned.append(core)
        except OSError as error:
            raise ConfigError(
                f"resources: own_cores={count}: cores are reserved with lock files in {folder}, which cannot be "
                f"created: {error}; set TMPDIR to a local folder, or remove own_cores"
            ) from None
        if len(owned) < count:
            raise ConfigError(
                f"resources: own_cores={count}: only {len(owned)} of {len(cores)} cores are not reserved by other runs "
                "with own_cores; wait for one to end, or use fewer"
            )
        yield owned


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Generator[bool]:
    """Try to lock a file for the duration of the block; yield whether the file was locked."""
    import fcntl  # not available on Windows

    with files.open_to_append(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # explicit, because a forked process also has the file open


@contextlib.contextmanager
def _in_force(applies: _Applied, here: Set[int]) -> Generator[None]:
    """Move this process's threads to the learner's cores; afterwards, move them back, and new threads to `here`."""
    global _applied
    before, cores = _applied, applies.cores
    _applied = applies
    own: dict[int, Set[int]] = {}
    if "learner" in cores:
        while new := [thread for thread in _threads() if thread not in own]:
            for thread in new:
                own[thread] = _mask_of(thread)
                _move(thread, cores["learner"])
    try:
        yield
    finally:
        _applied = before
        for thread in _threads() if own else ():
            _move(thread, own.get(thread, here))


@contextlib.contextmanager
def on(part: str) -> Generator[None]:
    """Assign the cores of `part` to threads and processes that this thread starts within the block.

    Args:
      part: one of `PARTS`.
    """
    with on_cores(_applied.cores.get(part)):
        yield


@contextlib.contextmanager
def on_cores(cores: Collection[int] | None) -> Generator[None]:
    """Assign cores to threads and processes that this thread starts within the block; None changes nothing."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def limit_worker(process: int) -> None:
    """Limit the memory of the worker process with id `process` to the applied `worker_memory`."""
    limit = _applied.worker_bytes
    if limit is not None:
        import resource  # not available on Windows

        with contextlib.suppress(ProcessLookupError):  # it has already ended
            resource.prlimit(process, resource.RLIMIT_DATA, (limit, limit))


def _indices(text: str) -> list[int]:
    """Parse core numbers such as "0-3,8"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _core_problems(name, text, count):
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text, re.ASCII):
        return [f"resources: {name}={text!r} is not a list of cores; write them as 0-3,8"]
    indices = _indices(text)
    if not indices or max(indices) >= count:
        last = f"0 to {count - 1}" if count > 1 else "0"
        return [f"resources: {name}={text!r}: this process may use {count} cores, numbered {last}"]
    return []


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _mask_of(thread: int) -> Set[int]:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has ended
        return set()


def _move(thread: int, cores: Set[int]) -> None:
    with contextlib.suppress(OSError):  # it may have ended
        os.sched_setaffinity(thread, cores)


def device_problem() -> str | None:
    """Return the reason why JAX has no device, in one line; None if it has one. This starts JAX if necessary."""
    import jax

    try:
        jax.devices()
    except Exception as error:  # an empty AssertionError if JAX_PLATFORMS is a platform that is not installed
        platforms = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms
        reason = " ".join(str(error).split())
        return (
            f"JAX has no device of JAX_PLATFORMS={platforms!s}{': ' if reason else ''}{reason:.300}; unset it to use "
            "the available devices, or install the missing packages, for NVIDIA GPUs: pip install 'jaxrl[cuda13]'"
        )
    return None
