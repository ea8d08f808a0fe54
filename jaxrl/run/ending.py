"""Whether a run has ended, from its files alone. Nothing here imports JAX."""

import os
from pathlib import Path


def has_ended(path: str | os.PathLike) -> bool:
    """Whether a run has written its result, and was not started again since; also from another machine."""
    try:
        # The lock's file is written whenever a run starts.
        return (Path(path) / "result.json").stat().st_mtime_ns >= (Path(path) / ".lock").stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return False
