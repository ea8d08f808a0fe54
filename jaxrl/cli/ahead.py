"""The command `jaxrl compile`."""

import jax

from jaxrl.cli import training
from jaxrl.cli.runs import ParsedCommand
from jaxrl.parallel import targets
from jaxrl.parallel.memory import readable
from jaxrl.parallel.multihost import distributed
from jaxrl.run.ahead import Compiled, compile_ahead
from jaxrl.run.compile_cache import cache_folder
from jaxrl.sweeps.compile_for import report_for
from jaxrl.sweeps.tables import aligned

_COLUMNS = ("program", "times", "cached", "seconds", "arguments", "outputs", "temporary", "peak", "FLOPs")


def compile_(parsed: ParsedCommand) -> int:
    """Compile the programs of `jaxrl train` with these flags, for this machine or a target, and print a report.

    Returns:
      The exit code.
    """
    settings, target = training.train_settings(parsed), parsed.run["target"]
    if target is not None:
        print(report_for(targets.get(target), settings))
        return 0
    compiled = compile_ahead(settings)
    if distributed.is_leader():
        print("\n".join(_report(compiled)))
    return 0


def _report(compiled: list[Compiled]) -> list[str]:
    lines = [aligned([_COLUMNS, *map(_row, compiled)])]
    most = max(compiled, key=lambda one: one.peak_bytes or 0, default=None)
    if most is not None and most.peak_bytes is not None:
        lines.append(f"peak memory per device: {readable(most.peak_bytes)}, in program {most.name}")
    count, misses = sum(one.count for one in compiled), sum(one.misses for one in compiled)
    lines.append(f"{count} programs: {misses} compiled, {count - misses} in the cache; stored in {cache_folder()}")
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    if misses and least > 0:
        lines.append(
            f"programs compiled in <{least:g} s are not stored; JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 stores all"
        )
    return lines


def _row(one: Compiled) -> tuple[str, ...]:
    sizes = (one.argument_bytes, one.output_bytes, one.temp_bytes, one.peak_bytes)
    memory = ("-" if size is None else readable(size) for size in sizes)
    counts = (str(one.count), str(one.count - one.misses))
    return one.name, *counts, f"{one.seconds:.2f}", *memory, "-" if one.flops is None else f"{one.flops:.3g}"
