"""A training that can be killed at any moment; the tests run it in other processes, and whole in their own."""

import os
import signal
import sys
from pathlib import Path

import jaxrl
from helpers import programs
from helpers.programs import ROWS
from jaxrl.run import loop
from jaxrl.run.checkpoint import Checkpointer

ITERATIONS = 12
INTERVAL = 2  # iterations between checkpoints


class Moments:
    """Counts what happens to a run's files: openings, renamings, removals, from any thread, and rows of metrics.

    Calls `then(count)` before each. These are the moments at which a kill can leave something half done; between
    them a kill at one instant is like a kill at another.
    """

    _EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")

    def __init__(self, run_dir, then):
        self.count, self._prefix, self._then, self._on = 0, str(run_dir), then, True
        sys.addaudithook(self._see)  # which Python never removes again, hence `stop`

    def _see(self, event, arguments):
        if self._on and event in self._EVENTS and arguments:
            if isinstance(arguments[0], str | os.PathLike) and os.fspath(arguments[0]).startswith(self._prefix):
                self.happened()

    def happened(self):
        self.count += 1
        self._then(self.count)

    def stop(self):
        self._on = False

    def write(self, step, metrics):  # as a logger
        self.happened()

    def close(self):
        pass


def train(name, devices, run_dir, loggers=(), **settings):
    """The run that is killed: evaluated and saved every second of its twelve iterations."""
    settings = {"evaluate_every": INTERVAL * ROWS, "checkpoint_every": INTERVAL * ROWS} | settings
    return jaxrl.train(
        programs.ALGORITHMS[name],
        programs.ENV,
        total_steps=ITERATIONS * ROWS,
        topology=programs.anakin(devices),
        evaluation_episodes=8,
        run_dir=run_dir,
        loggers=loggers,
        progress=False,
        **settings,
    )


def main(name, devices, run_dir, moment, patient):
    """Trains, and dies at a moment as by `kill -9`. The patient one has saved before it goes on, as if quickly."""
    loop._CHUNK_SECONDS = 0.0
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    if patient == "patient":
        save = Checkpointer.save
        Checkpointer.save = lambda self, *arguments, **named: (save(self, *arguments, **named), self.wait())

    def die(count):
        if count == int(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    moments = Moments(Path(run_dir), die)
    train(name, int(devices), run_dir, [moments])
    print("it lived through", moments.count, "moments")


def command(*arguments):
    """What runs `main`: the settings and devices of the tests come first."""
    return [
        sys.executable,
        "-c",
        "import conftest, sys; from helpers import kills; kills.main(*sys.argv[1:])",
        *arguments,
    ]
