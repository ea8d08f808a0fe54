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
    total, steps = record["total_steps"], record["session_steps"]
    spent = f" in {record['total_seconds']:,.0f} s"
    if 0 < steps < total:
        spent += f"; since resuming, {steps:,} steps in {record['wall_seconds']:,.0f} s"
    lines = [f"{algorithm} on {environment}: {total:,} steps{spent}"]
    if record["steps_per_second"] > 0:
        overall = f"{record['run_steps_per_second']:,.0f} including start-up and evaluation"
        lines.append(f"speed: {record['steps_per_second']:,.0f} steps/s while training, {overall}")
    if spent := described(record["seconds"]):
        lines.append(f"seconds: {spent}")
    if run_dir is not None:
        here = Path.cwd()
        lines.append(f"run directory: {run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir}")
    if record["stopped"] == "target_return":
        lines.append("stopped early: the target return was reached")
    found, trained = record["evaluation"], record["training_return"]
    evaluated = score(found, count=False) if found else "none"
    training = "no episode ended" if trained is None else f"{trained:.4g}"
    actions = "exploring" if record["explored"] else "greedy"
    return [*lines, *notes, f"evaluation ({actions}): {evaluated}; in training {training}"]


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
