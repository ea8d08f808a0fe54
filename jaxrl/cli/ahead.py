"""The command `jaxrl compile`, after its flags are read."""

import jax

from jaxrl.cli import training
from jaxrl.cli.runs import ParsedCommand
from jaxrl.parallel import targets
from jaxrl.parallel.multihost import distributed
from jaxrl.run.ahead import Compiled, compile_ahead
from jaxrl.run.compile_cache import cache_folder
from jaxrl.sweeps.compile_for import report_for

_COLUMNS = ("program", "times", "cached", "seconds", "arguments", "outputs", "temporary", "at once", "FLOPs")
_UNITS = ("", "k", "M", "G", "T", "P")


def compile_(parsed: ParsedCommand) -> int:
    """Compile what `jaxrl train` with these flags would compile, here or for a target, and print a report.

    Returns:
      The exit code.
    """
    settings, target = training.train_settings(parsed), parsed.values["run"]["target"]
    if target is not None:
        print(report_for(targets.get(target), settings))
        return 0
    compiled = compile_ahead(settings)
    if distributed.is_leader():
        print("\n".join(_report(compiled)))
    return 0


def _report(compiled: list[Compiled]) -> list[str]:
    rows = [_COLUMNS, *map(_row, compiled)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(word.rjust(n) for word, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    taken = {one.name: one.peak_bytes for one in compiled if one.peak_bytes is not None}
    if taken:
        name, most = max(taken.items(), key=lambda item: item[1])
        lines.append(f"memory of a device: {_short(most, 'B')} at once for {name}, the program that takes most")
    count, misses = sum(one.count for one in compiled), sum(one.misses for one in compiled)
    lines.append(f"{count} programs: {misses} compiled, {count - misses} found in the cache; kept in {cache_folder()}")
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    if misses and least > 0:
        lines.append(
            f"not kept: what compiled in less than {least:g} s; JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 keeps all"
        )
    return lines


def _row(one: Compiled) -> tuple[str, ...]:
    sizes = (one.argument_bytes, one.output_bytes, one.temp_bytes, one.peak_bytes)
    cached = str(one.count - one.misses)
    memory = ("-" if size is None else _short(size, "B") for size in sizes)
    return one.name, str(one.count), cached, f"{one.seconds:.2f}", *memory, _flops(one)


def _flops(one: Compiled) -> str:
    return "-" if one.flops is None else _short(one.flops)


def _short(number: float, unit: str = "") -> str:
    """Return a number with three digits: 1.23 MB."""
    power = 0
    while number >= 999.5 and power < len(_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {_UNITS[power]}{unit}".rstrip()
