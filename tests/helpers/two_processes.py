"""Two processes of two CPU devices each, on loopback, that do a job of `one_of_two.py`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from helpers.patience import PATIENCE

SCRIPT = Path(__file__).parents[1] / "parallel" / "multihost" / "one_of_two.py"
HEARTBEAT = 10  # seconds, as there


def together(job, folder):
    """Runs a job in two processes; what each returned, its exit code, its output, and when it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    tests, root = SCRIPT.parents[2], SCRIPT.parents[3]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{root}{os.pathsep}{tests}"}
    processes, until = [], time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        for index in range(2):
            words = [sys.executable, str(SCRIPT), job, str(port), str(index), str(folder)]
            output = stack.enter_context(open(folder / f"{index}.log", "w"))
            process = subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT)
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)  # does nothing where it has ended
        ended = [None, None]
        while None in ended and time.monotonic() < until:
            for index, process in enumerate(processes):
                if ended[index] is None and process.poll() is not None:
                    ended[index] = time.monotonic()
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    said = [(folder / f"{index}.log").read_text() for index in range(2)]
    found = [folder / f"{index}.json" for index in range(2)]
    return [json.loads(path.read_text()) if path.exists() else None for path in found], codes, said, ended


def both(job, folder):
    """What each of two processes returned that ended well."""
    found, codes, said, _ = together(job, folder)
    assert codes == [0, 0], "\n".join(said)
    return found
