"""Scripts that stand for a run in tests of how processes are started."""

import sys
from collections.abc import Callable
from pathlib import Path

# What the scripts begin with: their place, as a run reads it.
_READ = """import os, signal, sys, time
from jaxrl.parallel.multihost.place import have_learners_ended, own_place
place = own_place()
"""


def scripts(folder: Path) -> Callable[[str], list[str]]:
    """Writes a script that knows its place into a folder, and gives the command that runs it."""

    def written(text):
        (folder / "script.py").write_text(_READ + text)
        return [sys.executable, str(folder / "script.py")]

    return written


def until_asked(number: int) -> str:
    """A script that writes PLACE.ready and waits; asked by signal `number`, it writes PLACE.asked and ends."""
    return f"""
def ask(number, frame):
    open(f"{{place.process_id}}.asked", "w").close()
    sys.exit(128 + number)
signal.signal({int(number)}, ask)
open(f"{{place.process_id}}.ready", "w").close()
"""
