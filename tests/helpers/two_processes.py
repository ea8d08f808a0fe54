"""Two processes of two CPU devices each, on loopback, that do a job of `one_of_two.py`."""

import contextlib
import json
import sys
import time
from pathlib import Path

from helpers.patience import wait_for
from helpers.processes import environment, free_port, running

SCRIPT = Path(__file__).parents[1] / "parallel" / "multihost" / "one_of_two.py"
HEARTBEAT = 10  # seconds, as there


def together(job, folder):
    """Run a job in two processes; return what each returned, its exit code, its output, and when it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    processes, ended, port = [], [None, None], str(free_port())
    with contextlib.ExitStack() as stack:
        for index in range(2):
            words = [sys.executable, str(SCRIPT), job, port, str(index), str(folder)]
            processes.append(stack.enter_context(running(words, folder / f"{index}.log", env=environment())))

        def have_ended():
            for index, process in enumerate(processes):
                if ended[index] is None and process.poll() is not None:
                    ended[index] = time.monotonic()
            return None not in ended

        wait_for(have_ended)
        codes = [process.returncode for process in processes]
    said = [(folder / f"{index}.log").read_text() for index in range(2)]
    found = [folder / f"{index}.json" for index in range(2)]
    return [json.loads(path.read_text()) if path.exists() else None for path in found], codes, said, ended


def both(job, folder):
    """Return what each of two processes returned; both must end well."""
    found, codes, said, _ = together(job, folder)
    assert codes == [0, 0], "\n".join(said)
    return found
