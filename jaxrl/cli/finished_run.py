"""A run that has ended, and is started again by the same command, is answered from its files, before JAX is imported.

`jaxrl train` writes into `result.json` by which flags it came about. The same flags of the same jaxrl would do nothing
more, so the result is printed again. Whatever differs goes the ordinary way, which compares configurations.
"""

import contextlib
import math
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.cli import multihost, table
from jaxrl.cli.flags import written
from jaxrl.cli.runs import ParsedCommand
from jaxrl.cli.values import ReadPart, ReadRegistered, ReadSchedule
from jaxrl.core import files
from jaxrl.run.run_status import is_finished, read_result
from jaxrl.run.timing import described

# Flags that make no other run.
_NO_OTHER_RUN = ("run_dir", "overwrite", "progress", "wandb", "resources", "launch")
ALREADY_FINISHED = "it had ended before; more --total-steps continue it, --overwrite starts again"
_AT_ITS_END = ("finished", "target_return")


def print_finished_run(parsed: ParsedCommand) -> bool:
    """Prints the result of a run that this command has brought to its end before; whether there is one."""
    run = parsed.values["run"]
    path = run["run_dir"]
    if run["import_"] is not None or multihost.has_evaluator(run):
        return False  # the user's own code may be another by now; what an evaluator has left may not be all
    if path is None or run["overwrite"] or multihost.is_one_of_several(run) or not is_finished(path):
        return False
    try:
        record, environment = read_result(path), files.read_json(path / "config.json")["environment"]
        if record.get("stopped") not in _AT_ITS_END or record.get("command") != _command(parsed):
            return False
        name = ":".join(part for part in (environment.get("suite"), environment.get("name")) if part)
        lines = report(record, parsed.groups[1].title, name, path.absolute(), ALREADY_FINISHED)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # the ordinary way says what is wrong with them
    print(files.escape_for_terminal("\n".join(lines)))
    return True


def save_command(parsed: ParsedCommand, path: Path) -> None:
    """Writes into the result of a run by which flags it came about."""
    file = path / "result.json"
    try:
        times, record = file.stat(), files.read_json(file) | {"command": _command(parsed)}
        with files.replacing(file) as new:
            new.write(files.to_json(record, indent=2))
            new.flush()
            # As old as it was: should another process have started the run again by now, this is not its result.
            os.utime(new.name, ns=(times.st_atime_ns, times.st_mtime_ns))
    except (OSError, ValueError) as error:  # a full disk: the ordinary way remains
        print(f"warning: {file} could not be written: {error}", file=sys.stderr)


def report(record: Mapping[str, Any], algorithm: str, environment: str, run_dir: Path | None, *notes: str) -> list[str]:
    """Return how a run ended, in lines; the last one has the returns of its evaluation and of training.

    Args:
      record: what `result.json` holds.
      algorithm: the name of its class.
      environment: "suite:name".
      run_dir: absolute.
      *notes: further lines.
    """
    lines = [f"{algorithm} on {environment}: {record['total_steps']:,} steps{_time(record)}"]
    if record["steps_per_second"] > 0:
        speed = f"speed: {record['steps_per_second']:,.0f} steps/s while training"
        overall = record.get("run_steps_per_second", 0)
        lines.append(f"{speed}, {overall:,.0f} including start-up and evaluation" if overall else speed)
    if spent := described(record.get("seconds", {})):
        lines.append(f"seconds: {spent}")
    if run_dir is not None:
        lines.append(f"run directory: {_short(run_dir)}")
    if record["stopped"] == "target_return":
        lines.append("stopped early: the target return was reached")
    return [*lines, *notes, *_returns(record)]


def _returns(record):
    found = record["evaluation"]
    if "training_return" not in record:  # of an earlier version
        return [f"evaluation: {score(found)}"] if found else []
    trained, actions = record["training_return"], "exploring" if record["explored"] else "greedy"
    evaluated = score(found, count=False) if found else "none"
    training = "no episode ended" if trained is None else f"{trained:.4g}"
    return [f"evaluation ({actions}): {evaluated}; in training {training}"]


def _time(record):
    """How long that took: this session, and all of them."""
    here, total = record["wall_seconds"], record.get("total_seconds", record["wall_seconds"])
    steps = record.get("session_steps", record["total_steps"])
    if steps == record["total_steps"] or not steps:
        return f" in {total:,.0f} s"
    return f" in {total:,.0f} s, of which {steps:,} in {here:,.0f} s since it was resumed"


def score(metrics: Mapping[str, float], *, count: bool = True) -> str:
    """Return the metrics of an evaluation in a line, with its number of episodes if `count`."""
    if not metrics["episodes"]:
        return f"no episode ended; {metrics['unfinished']} reached the limit of steps"
    mean, deviation = metrics["return_mean"], metrics["return_std"]
    size = max(abs(mean), deviation)
    places = 3 - math.floor(math.log10(size)) if 1e-9 < size < 1 else 2  # small returns to four digits
    line = f"{mean:.{places}f} ± {deviation:.{places}f}"
    line = f"return {line} over {metrics['episodes']} episodes" if count else line
    return line + (f"; {metrics['unfinished']} more did not end" if metrics["unfinished"] else "")


def _command(parsed: ParsedCommand) -> dict[str, Any]:
    """What the result of a run depends on, as JSON values: the flags, and the defaults that they were not given."""
    flags = {
        f"{group.title}.{name}": _text(value)
        for group in parsed.groups
        for name, value in parsed.values[group.title].items()
        if group.title != "run" or name not in _NO_OTHER_RUN
    }
    return {"algorithm": parsed.algorithm.lower(), "flags": flags, "defaults": zlib.crc32(repr(table.load()).encode())}


def _text(value: Any) -> Any:
    if isinstance(value, ReadPart):
        return [value.part.name, {name: _text(argument) for name, argument in value.arguments.items()}]
    if isinstance(value, tuple):
        return [_text(item) for item in value]
    if isinstance(value, bool | int | float | None):
        return value
    return value.text if isinstance(value, ReadSchedule | ReadRegistered) else written(value)


def _short(path: Path) -> Path:
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path
