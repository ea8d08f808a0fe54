"""A search that can be killed at any chunk; the tests run it in another process, and whole in their own."""

import dataclasses
import itertools
import os
import pathlib
import signal
import sys
import time
import uuid

import jaxrl
from helpers import programs
from helpers.programs import ROWS
from jaxrl.core.errors import NonFiniteError
from jaxrl.sweeps.vectorized import VectorizedRuns

EVALUATIONS = 3
SPACE = {"learning_rate": jaxrl.LogUniform(1e-4, 1e-1), "clip": jaxrl.Uniform(0.1, 0.4)}
SPACE |= {"gamma": 0.99, "gae_lambda": 0.95, "value_cost": 0.5, "max_grad_norm": 0.5}


def search(run_dir=None, **settings):
    """Four trials of three evaluations, each after two iterations; none is pruned."""
    settings = {"trials": 4, "seeds": [4], "pruner": "none", "evaluation_episodes": 8} | SPACE | settings
    return jaxrl.tune(
        programs.PPO,
        programs.ENV,
        total_steps=2 * EVALUATIONS * ROWS,
        evaluate_every=2 * ROWS,
        topology=programs.anakin(),
        devices=1,
        run_dir=run_dir,
        progress=False,
        **settings,
    )


@dataclasses.dataclass
class Fates:
    """Evaluations without training: what becomes of a trial is a setting of it. The first two wait for each other."""

    folder: pathlib.Path

    def __call__(self, settings):
        (self.folder / uuid.uuid4().hex).touch()
        until = time.monotonic() + 100
        while len(list(self.folder.iterdir())) < 2:
            assert time.monotonic() < until, "no other trial was begun"
            time.sleep(0.01)
        yield 1.0, False
        if settings["fate"] == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        if settings["fate"] == "raises":
            raise ValueError("out of cheese")
        if settings["fate"] == "diverges":
            raise NonFiniteError("a value was not finite")
        yield settings["rate"], True


class Unreadable:
    """Evaluations that no other process can read."""

    def __reduce__(self):
        return int, ("no number",)


def main(run_dir, number):
    """Searches, and dies at the beginning of the n-th chunk as by `kill -9`."""
    chunk, numbers = VectorizedRuns.chunk, itertools.count(1)

    def chunk_or_die(self, *arguments):
        if next(numbers) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return chunk(self, *arguments)

    VectorizedRuns.chunk = chunk_or_die
    search(run_dir)


def command(*arguments):
    """What runs `main`: the settings and devices of the tests come first."""
    program = "import conftest, sys; from helpers import tunes; tunes.main(*sys.argv[1:])"
    return [sys.executable, "-c", program, *arguments]
