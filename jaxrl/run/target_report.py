"""Reports on the programs of a run, compiled for accelerators that need not be present."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.parallel import hlo
from jaxrl.parallel.memory import readable
from jaxrl.parallel.targets import Target


@dataclasses.dataclass(frozen=True)
class TargetProgram:
    """A program of a run, compiled for one of the target's devices.

    Attributes:
      name: "start", "chunk" or "evaluation".
      seconds: compile time on this machine.
      argument_bytes, output_bytes, temp_bytes: memory on one device.
      code_bytes: size of the program code.
      peak_bytes: total memory on one device; an output that reuses the memory of an argument counts once.
      flops, bytes_accessed: as counted by the compiler, which counts a loop of unknown length once; None if not
        reported.
      body: the program's kernels and collectives by loop. In a chunk, the loop of unknown length is over iterations.
    """

    name: str
    seconds: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    flops: float | None
    bytes_accessed: float | None
    body: hlo.Loop

    @property
    def iteration(self) -> hlo.Loop:
        """The body of one iteration of a chunk; for other programs, the whole body."""
        inner = [loop for loop in self.body.loops if loop.trips is None]
        return inner[0] if self.name == "chunk" and inner else self.body


@dataclasses.dataclass(frozen=True)
class TargetReport:
    """The programs of a run, compiled for a target.

    Attributes:
      target: name of the target.
      device_kind: JAX's name for the kind of the target's devices.
      devices: number of devices that the run uses.
      device_memory: memory of one device, in bytes.
      steps_per_iteration: environment steps per iteration, over all devices and runs.
      programs: the programs, in the order in which a run needs them.
    """

    target: str
    device_kind: str
    devices: int
    device_memory: int
    steps_per_iteration: int
    programs: Sequence[TargetProgram]

    def __getitem__(self, name: str) -> TargetProgram:
        """Return the program with the name `name`.

        Raises:
          KeyError: there is no such program.
        """
        return {program.name: program for program in self.programs}[name]

    def __str__(self) -> str:
        plural = "s" if self.devices > 1 else ""
        lines = [
            f"{self.target}: {self.devices} device{plural} ({self.device_kind}) with {readable(self.device_memory)} of "
            f"memory each; {self.steps_per_iteration:,} environment steps per iteration"
        ]
        for program in self.programs:
            lines += ["", f"{program.name}, compiled in {program.seconds:.1f} s", *_program_lines(self, program)]
        return "\n".join(lines)


def compiled_for(target: Target, name: str, compile_it: Callable[[], jax.stages.Compiled]) -> TargetProgram:
    """Compile a program, and return its memory, FLOPs and kernels.

    Args:
      target: the target to compile for.
      name: name of the program.
      compile_it: function that compiles the program.

    Raises:
      ConfigError: the program needs more memory than a device has.
    """
    since = time.monotonic()
    try:
        with _uncached():
            compiled = compile_it()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = " ".join(str(error).split())
        raise ConfigError(_too_much(target, name, f"more memory than {target.name} has: {message:.300}")) from error
    seconds = time.monotonic() - since
    stats: Any = compiled.memory_analysis()
    read, written = stats.argument_size_in_bytes, stats.output_size_in_bytes
    sizes = read, written, stats.temp_size_in_bytes, stats.generated_code_size_in_bytes
    peak = sum(sizes) - stats.alias_size_in_bytes
    if peak > target.memory:
        needs = f"{readable(peak)} per device, but {target.name} has {readable(target.memory)}"
        raise ConfigError(_too_much(target, name, needs))
    cost: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # backends report different parts and raise different errors
        cost = compiled.cost_analysis() or {}
    body = hlo.read(compiled.as_text() or "")
    return TargetProgram(name, seconds, *sizes, peak, cost.get("flops"), cost.get("bytes accessed"), body)


@contextlib.contextmanager
def _uncached() -> Generator[None]:
    """Disable writes to the persistent cache, because JAX cannot load cached programs for absent devices."""
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def _too_much(target, name, needs):
    return f"target={target.name!r}: the {name} program needs {needs}; use fewer environments or more devices"


def _program_lines(report, program):
    share = program.peak_bytes / report.device_memory
    rows = [
        (
            "memory per device",
            f"{readable(program.peak_bytes)} ({share:.1%}): arguments {readable(program.argument_bytes)}, outputs "
            f"{readable(program.output_bytes)}, temporary {readable(program.temp_bytes)}, code "
            f"{readable(program.code_bytes)}",
        )
    ]
    if program.flops is not None:
        rows.append(("work", f"{program.flops:.3g} FLOPs, {readable(program.bytes_accessed or 0)} read and written"))
    body = program.iteration
    totals = _counts(body.all_kernels(), body.all_collectives())
    if exchanged := body.all_exchanged():
        totals += f" of {readable(exchanged)}"
    if any(loop.trips is None for loop, _ in list(body.walk())[1:]):
        totals += "; loops of unknown length counted once"
    rows += [("an iteration" if program.name == "chunk" else "in all", totals)]
    if body.loops:
        rows += [("  outside of loops", _counts(sum(body.kernels.values()), body.collectives)), *_loop_rows(body, 1)]
    width = max(len(name) for name, _ in rows)
    return [f"  {name.ljust(width)}  {value}" for name, value in rows]


def _loop_rows(body, depth):
    for loop in body.loops:
        times = "unknown" if loop.trips is None else loop.trips
        yield f"{'  ' * depth}x {times}", _counts(sum(loop.kernels.values()), loop.collectives)
        yield from _loop_rows(loop, depth + 1)


def _counts(kernels, collectives):
    kinds = [f"{count:,} {kind}" for kind, count in collectives.most_common()]
    return ", ".join([f"{kernels:,} kernel{'' if kernels == 1 else 's'}", *kinds])
