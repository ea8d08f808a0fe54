"""Limits on the processor cores of the parts of a run, and on the memory of its worker processes.

Linux has both: a mask of cores for each thread, which the threads and processes that it starts inherit, and limits of a
process. What is in force is known in one place, `applied`; every part is started within `on`.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection, Generator, Mapping, Set

from jaxrl.core import registry

PARTS = ("learner", "actors", "environments", "evaluator")
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Resources:
    """Processor cores of the parts of a run, and memory of worker processes, on Linux.

    Cores are written as "0-3,8". They count those that this process may use, from 0 on: where several processes share a
    machine, by `jaxrl.launch` or by Slurm, each counts its own.

    Args:
      learner: cores of this process with all its threads, but for those below. On a CPU that includes the threads of
        XLA, which all parts share. None: all.
      actors: cores of the actor threads. None: the learner's.
      environments: cores of EnvPool's threads, and of worker processes. None: those of the thread that makes them.
      evaluator: cores of the thread that evaluates (`async_evaluation`). None: the learner's.
      worker_memory: GiB of data that each worker process may hold; allocating more is a `MemoryError` there, which
        ends the run. None: no limit.
    """

    learner: str | None = None
    actors: str | None = None
    environments: str | None = None
    evaluator: str | None = None
    worker_memory: float | None = None


registry.add("topology", Resources)


@dataclasses.dataclass(frozen=True)
class _Applied:
    """The machine's cores by part, and the memory limit of a worker in bytes."""

    cores: Mapping[str, Set[int]]
    worker_bytes: int | None


_applied = _Applied({}, None)


def problems(resources: Resources, absent: dict[str, str], workers: int) -> list[str]:
    """Return problems of `resources` on this machine, one line each.

    Args:
      resources: the settings to check.
      absent: parts that the run does not have, and why.
      workers: how many worker processes the run has.
    """
    settings = {field.name: getattr(resources, field.name) for field in dataclasses.fields(resources)}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and not hasattr(os, "sched_setaffinity"):
        return [f"resources: {', '.join(settings)}: only Linux has cores and memory for parts of a run; leave them out"]
    found = [f"resources: {name}={settings[name]!r}: {why}" for name, why in absent.items() if name in settings]
    here = sorted(os.sched_getaffinity(0)) if settings else []
    for name in PARTS:
        if name in settings:
            found += _core_problems(name, settings[name], len(here))
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
    """Apply `resources` to the parts of a run that are started within.

    All threads of this process that are there get the learner's cores, and on leaving those that they had.

    Args:
      resources: of which `problems` has found none; None: nothing is changed.
    """
    global _applied
    if resources is None:
        yield
        return
    here, before = sorted(os.sched_getaffinity(0)), _applied
    settings = {part: getattr(resources, part) for part in PARTS}
    cores = {part: {here[index] for index in _indices(text)} for part, text in settings.items() if text is not None}
    memory = resources.worker_memory
    _applied = _Applied(cores, None if memory is None else int(memory * _GIB))
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
            _move(thread, own.get(thread, set(here)))


@contextlib.contextmanager
def on(part: str) -> Generator[None]:
    """Give threads and processes that the caller's thread starts within the cores of `part`, permanently.

    Args:
      part: one of `PARTS`.
    """
    with on_cores(_applied.cores.get(part)):
        yield


@contextlib.contextmanager
def on_cores(cores: Collection[int] | None) -> Generator[None]:
    """Give threads and processes that the caller's thread starts within these cores; none: those it has."""
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
    """Limit the memory of a worker process, by its process id, to the applied `worker_memory`."""
    limit = _applied.worker_bytes
    if limit is not None:
        import resource  # there is none on Windows

        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
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
        return [f"resources: {name}={text!r}: this process may use {count} cores, which are {last} here"]
    return []


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _mask_of(thread: int) -> Set[int]:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has ended
        return set()


def _move(thread: int, cores: Set[int]) -> None:
    with contextlib.suppress(ProcessLookupError, OSError):
        os.sched_setaffinity(thread, cores)
