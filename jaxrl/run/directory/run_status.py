"""Status of a run, read from its files. This module does not import JAX."""

import contextlib
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.core import files

# Lines of the lock file: the `start` of the last run, and the `start` of the launch that the run belongs to.
_START = re.compile(r"^start ([0-9a-f]{16})$", re.MULTILINE)
_LAUNCH = re.compile(r"^launch ([0-9a-f]{16})$", re.MULTILINE)
_NUMBERS = ("total_steps", "steps_per_second", "wall_seconds", "session_steps", "run_steps_per_second", "total_seconds")


def is_finished(path: str | os.PathLike) -> bool:
    """Return whether a run, on any machine, has written its result and was not started again afterwards."""
    start = _START.search(_read_lock(path))  # written when a run starts
    return start is not None and read_result(path).get("start") == start[1]


def is_of_launch(path: str | os.PathLike, launch: str) -> bool:
    """Return whether the last run in a directory belongs to the given launch.

    Args:
      path: the directory.
      launch: the `start` of the launch's `Place`.
    """
    found = _LAUNCH.search(_read_lock(path))
    return found is not None and found[1] == launch


def _read_lock(path):
    with contextlib.suppress(OSError), files.open_to_read(files.expand(path) / ".lock") as file:
        return file.read(400).decode(errors="replace")
    return ""


def read_result(path: str | os.PathLike) -> dict[str, Any]:
    """Return the contents of `result.json` in a run directory, with NaN instead of null in the evaluation.

    The dictionary is empty if there is no valid result.
    """
    try:
        record = files.read_json(files.expand(path) / "result.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    evaluation = record.get("evaluation") or {}
    fits = (
        isinstance(record.get("stopped"), str)
        and isinstance(record.get("problem"), str | None)
        and all(is_number(record[name]) for name in _NUMBERS if name in record)
        and isinstance(record.get("seconds", {}), Mapping)
        and all(map(is_number, record.get("seconds", {}).values()))
        and isinstance(evaluation, Mapping)
        and all(value is None or isinstance(value, float) or is_number(value) for value in evaluation.values())
    )
    if not fits:
        return {}
    return record | {"evaluation": {name: math.nan if value is None else value for name, value in evaluation.items()}}


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number that a float can represent."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
