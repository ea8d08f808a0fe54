"""The summary of a run printed by `jaxrl train`, and the summary line of an evaluation."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.run.loop.timing import described


def report(record: Mapping[str, Any], algorithm: str, environment: str, run_dir: Path | None, *notes: str) -> list[str]:
    """Return the summary of a run as lines; the last one has the returns of the evaluation and of training.

    Args:
      record: contents of `result.json`.
      algorithm: name of the algorithm's class.
      environment: "suite:name".
      run_dir: absolute path of the run directory, or None.
      *notes: additional lines.
    """
    lines = [f"{algorithm} on {environment}: {record['total_steps']:,} steps{_time(record)}"]
    if record["steps_per_second"] > 0:
        speed = f"speed: {record['steps_per_second']:,.0f} steps/s while training"
        overall = record.get("run_steps_per_second", 0)
        lines.append(f"{speed}, {overall:,.0f} including start-up and evaluation" if overall else speed)
    if spent := described(record.get("seconds", {})):
        lines.append(f"seconds: {spent}")
    if run_dir is not None:
        here = Path.cwd()
        lines.append(f"run directory: {run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir}")
    if record["stopped"] == "target_return":
        lines.append("stopped early: the target return was reached")
    return [*lines, *notes, *_returns(record)]


def _returns(record):
    found = record["evaluation"]
    if "training_return" not in record:  # written by an earlier version
        return [f"evaluation: {score(found)}"] if found else []
    trained, actions = record["training_return"], "exploring" if record["explored"] else "greedy"
    evaluated = score(found, count=False) if found else "none"
    training = "no episode ended" if trained is None else f"{trained:.4g}"
    return [f"evaluation ({actions}): {evaluated}; in training {training}"]


def _time(record):
    """Return the total time of all sessions, and that of this session if the run was resumed."""
    here, total = record["wall_seconds"], record.get("total_seconds", record["wall_seconds"])
    steps = record.get("session_steps", record["total_steps"])
    if steps == record["total_steps"] or not steps:
        return f" in {total:,.0f} s"
    return f" in {total:,.0f} s; since resuming, {steps:,} steps in {here:,.0f} s"


def score(metrics: Mapping[str, float], *, count: bool = True) -> str:
    """Return the metrics of an evaluation as one line, with the number of episodes if `count`."""
    if not metrics["episodes"]:
        return f"no episode ended; {metrics['unfinished']} reached the step limit"
    mean, deviation = metrics["return_mean"], metrics["return_std"]
    size = max(abs(mean), deviation)
    places = 3 - math.floor(math.log10(size)) if 1e-9 < size < 1 else 2  # small returns have four significant digits
    line = f"{mean:.{places}f} ± {deviation:.{places}f}"
    line = f"return {line} over {metrics['episodes']} episodes" if count else line
    return line + (f"; {metrics['unfinished']} more did not end" if metrics["unfinished"] else "")
