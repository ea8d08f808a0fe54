"""A population that can be killed at any chunk; the tests run it in another process, and whole in their own."""

import itertools
import os
import signal
import sys

import jaxrl
from helpers import programs
from helpers.programs import ROWS
from jaxrl.sweeps.vectorized import VectorizedRuns

POINTS, MEMBERS, COPIES = 6, 6, 2
SPACE = {"learning_rate": jaxrl.LogUniform(1e-4, 1e-1), "clip": jaxrl.Uniform(0.1, 0.4), "gamma": [0.9, 0.95, 0.99]}
FIXED = {"gae_lambda": 0.95, "value_cost": 0.5, "max_grad_norm": 0.5}  # of the table of `jaxrl.tune`


def population(run_dir=None, algo=programs.PPO, points=POINTS, members=MEMBERS, **settings):
    """Six members, two of which copy others at each of five points, with three hyperparameters."""
    settings = {"fraction": COPIES / MEMBERS, "exploit_from": 0.0, "evaluation_episodes": 8, "devices": 1} | settings
    if algo is programs.PPO:
        settings = SPACE | FIXED | settings
    return jaxrl.pbt(
        algo,
        programs.ENV,
        population=members,
        total_steps=2 * points * ROWS,
        exploit_every=2 * ROWS,
        topology=programs.anakin(),
        mapping="in_turn",
        run_dir=run_dir,
        progress=False,
        **settings,
    )


def main(run_dir, number):
    """Trains, and dies at the beginning of the n-th chunk as by `kill -9`."""
    chunk, numbers = VectorizedRuns.chunk, itertools.count(1)

    def chunk_or_die(self, *arguments):
        if next(numbers) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return chunk(self, *arguments)

    VectorizedRuns.chunk = chunk_or_die
    population(run_dir, checkpoint_every=2 * ROWS)


def command(*arguments):
    """What runs `main`: the settings and devices of the tests come first."""
    program = "import conftest, sys; from helpers import populations; populations.main(*sys.argv[1:])"
    return [sys.executable, "-c", program, *arguments]
