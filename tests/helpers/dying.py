"""Searches and populations of other processes, which die at a chunk as by `kill -9`."""

import itertools
import os
import signal
import subprocess
import sys

from helpers.patience import PATIENCE
from helpers.processes import environment
from jaxrl.sweeps.vectorized import VectorizedRuns


def at_chunk(number):
    """Let this process die at the beginning of its n-th chunk."""
    chunk, numbers = VectorizedRuns.chunk, itertools.count(1)

    def chunk_or_die(self, *arguments):
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return chunk(self, *arguments)

    VectorizedRuns.chunk = chunk_or_die


def killed(call, number):
    """Call a function of `tunes` or `populations` in a process that dies; settings and devices are those of tests."""
    program = f"import conftest\nfrom helpers import dying, populations, tunes\ndying.at_chunk({number})\n{call}"
    command = [sys.executable, "-c", program]
    dead = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert dead.returncode == -signal.SIGKILL, dead.stdout + dead.stderr
