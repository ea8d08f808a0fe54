"""Ahead-of-time compilation: a short training run that stores all programs in the persistent cache.

It runs the code of `train` with lower limits, so no separate list of programs has to be maintained.
"""

import contextlib
import dataclasses
import functools
import math
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
from jax.extend.backend import get_backend

from jaxrl.core import files, interrupts
from jaxrl.core.errors import ConfigError
from jaxrl.core.interrupts import interruptible
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.multihost.place import check_no_evaluator
from jaxrl.run.compile_cache import cache_folder, keep_compiled_programs
from jaxrl.run.directory.run_directory import check_no_pattern
from jaxrl.run.loop.schedule import LoopLimits
from jaxrl.run.result import Result
from jaxrl.run.settings import RunSettings
from jaxrl.run.training import run_training

_COMPILED = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
# Two iterations per chunk, because a chunk of several iterations sums their reports. Few evaluation steps, because an
# untrained policy may have long episodes; host evaluations compile a program for eight steps and one for the remainder.
_LIMITS = LoopLimits(iterations=2, evaluation_steps=24)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled programs of one function.

    Attributes:
      name: name of the function.
      count: number of programs, one for each set of shapes or settings.
      misses: number of programs that were not in the cache before.
      seconds: total time to compile them or read them from the cache.
      argument_bytes, output_bytes, temp_bytes: memory of the largest program on one device; None if not reported.
      peak_bytes: total memory on one device; an output that reuses the memory of an argument counts once.
      flops: FLOPs of the largest program as counted by XLA, which counts a loop of unknown length once; None if not
        reported.
    """

    name: str
    count: int
    misses: int
    seconds: float
    argument_bytes: int | None
    output_bytes: int | None
    temp_bytes: int | None
    peak_bytes: int | None
    flops: float | None


@interruptible
def compile_ahead(settings: RunSettings) -> list[Compiled]:
    """Compile all programs that `jaxrl.train` would compile for the same settings, and store them in the cache.

    The short run trains for a few iterations and evaluates; with a `run_dir`, it also saves and resumes. It writes only
    to a temporary directory, not to `run_dir` or the path of a recording.

    Args:
      settings: settings of the run, as passed to `train`.

    Returns:
      The programs of a run, slowest first, including those already in the cache.

    Raises:
      ConfigError: settings are invalid or incompatible, or the cache is disabled.
      KeyboardInterrupt: Ctrl-C was pressed.
    """
    check_no_evaluator("compiling ahead")
    keep_compiled_programs()
    if cache_folder() is None:
        raise ConfigError(
            f"the cache of compiled programs is disabled; unset {files.CACHE}=off, or set {files.CACHE} or "
            "JAX_COMPILATION_CACHE_DIR to a folder"
        )
    run_dir, record = settings.run_dir, settings.record
    fixed: dict[str, Any] = {"evaluate_every": 0, "checkpoint_every": 0, "progress": False, "loggers": ()}
    fixed |= {"overwrite": False, "video_every": None}
    fixed["target_return"] = None if settings.target_return is None else math.inf
    if run_dir is not None:
        check_no_pattern(run_dir)
    with _events() as events, _folder(run_dir) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # this run does not learn, and is resumed

        def run(total_steps: int, name: str) -> Result:
            changes: dict[str, Any] = fixed | {"total_steps": total_steps}
            if run_dir is not None:
                changes["run_dir"], name = folder / "run", "of_a_run"  # a resumed run continues its recording
            if record is not None:
                changes["record"] = dataclasses.replace(record, path=folder / f"recording_{name}")
            return run_training(settings.replace(**changes), _LIMITS)

        one = run(1, "first").total_steps
        # Run two chunks of two iterations; with a run directory, this resumes the first run.
        run(4 * one, "second")
        return _compiled(events)


@contextlib.contextmanager
def _events() -> Generator[list[tuple[str, float, bool]]]:
    """Yield a list to which the compilations of all threads are added: name, seconds, and whether the cache missed."""
    found, hit = [], threading.local()

    def happened(event: str, **_: Any) -> None:
        if event == _HIT:  # the event of a miss is less reliable: JAX sends it only if it writes an entry
            hit.now = True

    def took(event: str, duration_secs: float, **about: Any) -> None:
        if event == _COMPILED:
            function = re.sub(r"^\w+\((.*)\)$", r"\1", str(about.get("fun_name", "?")))
            found.append((function, duration_secs, not getattr(hit, "now", False)))
            hit.now = False

    jax.monitoring.register_event_listener(happened)
    jax.monitoring.register_event_duration_secs_listener(took)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(happened)
        jax.monitoring.unregister_event_duration_listener(took)


@contextlib.contextmanager
def _folder(run_dir: str | Path | None) -> Generator[Path]:
    """Yield a temporary directory; several processes share one, which is next to the run directory."""
    beside = None
    if distributed.is_several() and run_dir is not None:
        beside = files.expand(run_dir).absolute().parent
        beside.mkdir(parents=True, exist_ok=True)
    mine = tempfile.mkdtemp(prefix=".jaxrl-compile-", dir=beside)
    remove = functools.partial(shutil.rmtree, mine, ignore_errors=True)
    try:
        with interrupts.cleaning_up(remove):
            yield Path(distributed.from_leader("where to compile", mine) if beside is not None else mine)
    finally:
        remove()


def _compiled(events: list[tuple[str, float, bool]]) -> list[Compiled]:
    analyzed: dict[str, list[tuple[Any, float | None]]] = {}
    for executable in get_backend().live_executables():
        # Compare only letters and digits, because the module of jit(<lambda>) is named jit__lambda.
        name = _letters(executable.hlo_modules()[0].name.removeprefix("jit_"))
        analyzed.setdefault(name, []).append(_analysis(executable))
    names = dict.fromkeys(name for name, _, _ in events)
    made = []
    for name in names:
        seconds = [(took, missed) for found, took, missed in events if found == name]
        known = analyzed.get(_letters(name), [])
        memory = max((memory for memory, _ in known if memory is not None), key=lambda m: m[-1], default=(None,) * 4)
        flops = max((flops for _, flops in known if flops is not None), default=None)
        misses = sum(missed for _, missed in seconds)
        made.append(Compiled(name.strip("_"), len(seconds), misses, sum(took for took, _ in seconds), *memory, flops))
    return sorted(made, key=lambda one: -one.seconds)


def _analysis(executable: Any) -> tuple[tuple[int, int, int, int] | None, float | None]:
    """Return the argument, output, temporary and peak bytes of a program, and its FLOPs; None if not reported."""
    memory = flops = None
    with contextlib.suppress(Exception):  # backends report different parts and raise different errors
        stats = executable.get_compiled_memory_stats()
        sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
        memory = *sizes, sum(sizes) - stats.alias_size_in_bytes
    with contextlib.suppress(Exception):
        cost = executable.cost_analysis()
        flops = (cost[0] if isinstance(cost, list) else cost).get("flops")
    return memory, flops


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name)
