"""Processes that die at a call as by `kill -9`, and searches and populations in such processes."""

import itertools
import os
import signal

from helpers.processes import environment, python


def at_call(owner, name, number=1, after=False):
    """Let this process die at the n-th call of a function, or right after it."""
    function, numbers = getattr(owner, name), itertools.count(1)

    def call_or_die(*arguments, **options):
        last = next(numbers) == number
        found = None if last and not after else function(*arguments, **options)
        if last:
            die()
        return found

    setattr(owner, name, call_or_die)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(call, number):
    """Call a function of `tunes` or `populations` in a process that dies at its n-th chunk, with tests' settings."""
    program = (
        "import conftest\nfrom helpers import dying, populations, tunes\n"
        "from jaxrl.sweeps.vectorized import VectorizedRuns\n"
        f"dying.at_call(VectorizedRuns, 'chunk', {number})\n{call}"
    )
    python("-c", program, env=environment(), code=-signal.SIGKILL)
