"""A small search, and what may become of trials."""

import dataclasses
import os
import pathlib
import signal
import time
import uuid

import jaxrl
from helpers import programs
from helpers.programs import ROWS
from jaxrl.core.errors import NonFiniteError

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
