"""Processes that tests start, which import what the tests do."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

from helpers.patience import PATIENCE


def environment(*without, **variables):
    """Return the environment of a process on the CPU.

    Args:
      without: what names of variables that it does not have begin with.
      variables: further ones.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)} | variables


def python(*words, code=0, timeout=PATIENCE, **options):
    """Return a process of Python with these arguments, after asserting that it ended with this exit code."""
    command = [sys.executable, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


@contextlib.contextmanager
def running(words, output, **options):
    """Start a process whose output goes to a file; in the end it is killed, with all that it started."""
    with open(output, "w") as said:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        process = subprocess.Popen(words, start_new_session=True, **pipes, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port():
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
