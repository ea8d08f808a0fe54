"""A training that can be killed at any moment; the tests run it in other processes, and whole in their own."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxrl
from helpers import programs
from helpers.populations import population
from helpers.programs import ROWS
from helpers.served import ServedFromHost
from jaxrl.algos.fields import Sampling
from jaxrl.core.errors import CheckpointError
from jaxrl.core.sources import MinHeap, Prioritized, View
from jaxrl.run.callbacks import Decision, FunctionCallback
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.checkpoint import Checkpointer
from jaxrl.run.loop import run_loop

# A ring of which the items with the lowest priority are drawn, and views of a ring, one of which holds few items of
# high priority.
UNPRIORITIZED = programs.DQN.replace(prioritized=None)
HEAP = UNPRIORITIZED.replace(sampling=Sampling(sampler=MinHeap(), max_times_sampled=3))
VIEWS = UNPRIORITIZED.replace(view=View(8, Prioritized(), programs.NUM_ENVS * 5, MinHeap()))
ITERATIONS = 12
INTERVAL = 2  # iterations between checkpoints
SEBULBA = jaxrl.Sebulba(num_envs=programs.NUM_ENVS, actors=2, shards=4, lockstep=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to kill: an algorithm in a topology, with as many devices as `programs.anakin` is asked for."""

    algo: Any
    devices: int = 1
    host: bool = False  # its environments begin new episodes when it goes on
    callbacks: Callable[[], list[Any]] = list
    stopped: str = "finished"
    iterations: int = ITERATIONS  # at its end


class Curriculum:
    """Gravity grows with every call, by more the lower the score is; it remembers how often and how high."""

    name = "curriculum"

    def __init__(self):
        self.calls, self.gravity = 0, 9.8

    def __call__(self, moment):
        self.calls += 1
        self.gravity += 1.0 / (1.0 + (moment.score or 0.0))
        harder = jaxrl.envs.with_parameters(moment.env, gravity=self.gravity)
        return Decision(env=harder, metrics={"gravity": self.gravity, "calls": self.calls})

    def state_dict(self):
        return {"calls": self.calls, "gravity": self.gravity}

    def load_state_dict(self, state):
        self.calls, self.gravity = state["calls"], state["gravity"]


class StopAtTheFifth:
    """Stops at the fifth call, which it counts."""

    name = "stop"

    def __init__(self):
        self.calls = 0

    def __call__(self, moment):
        self.calls += 1
        return Decision(stop="fifth" if self.calls == 5 else None)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def weight(moment):
    """A metric of one's own: a number of the learner's."""
    return Decision(metrics={"weight": float(abs(jax.tree.leaves(moment.state.learner)[0]).sum())})


def callbacks():
    return [Curriculum(), StopAtTheFifth(), FunctionCallback(weight, "weight")]


CASES = {
    "callbacks": Case(programs.PPO, callbacks=callbacks, stopped="fifth", iterations=5 * INTERVAL),
    "ppo": Case(programs.PPO),
    "ppo on two devices": Case(programs.PPO, devices=2),
    "recurrent ppo": Case(programs.RECURRENT_PPO),
    "recurrent ppo on two devices": Case(programs.RECURRENT_PPO, devices=2),
    "dqn": Case(programs.DQN),
    "heap": Case(HEAP),
    "views": Case(VIEWS),
    "r2d2": Case(programs.R2D2),
    "host memory": Case(programs.R2D2.replace(storage="host")),
    "sebulba": Case(programs.PPO, host=True),
    "sweep": Case(programs.PPO),
    "pbt": Case(programs.PPO),
}


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


def train(name, run_dir, loggers=(), **settings):
    """Train the run that is killed: evaluated and saved after every second of its twelve iterations."""
    if name == "sweep":
        return sweep(run_dir)
    if name == "pbt":
        return population(run_dir, checkpoint_every=INTERVAL * ROWS)
    case = CASES[name]
    settings = {"evaluate_every": INTERVAL * ROWS, "checkpoint_every": INTERVAL * ROWS} | settings
    return programs.train(
        run_dir,
        algo=case.algo,
        env=ServedFromHost(programs.ENV) if case.host else programs.ENV,
        total_steps=ITERATIONS * ROWS,
        topology=SEBULBA if case.host else programs.anakin(case.devices),
        evaluation_episodes=8,
        loggers=loggers,
        callbacks=case.callbacks(),
        **settings,
    )


def sweep(run_dir):
    """Train four runs in each of two programs, with a point of their curves for each iteration."""
    return jaxrl.sweep(
        programs.PPO,
        programs.ENV,
        total_steps=ITERATIONS * ROWS,
        topology=programs.anakin(),
        seeds=2,
        learning_rate=[1e-2, 3e-3],
        epochs=[1, 2],
        devices=1,
        points=ITERATIONS,
        evaluation_episodes=4,
        checkpoint_every=INTERVAL * ROWS,
        run_dir=run_dir,
        progress=False,
    )


def newest(run_dir):
    """Return the step of the newest complete checkpoint, or 0; for a sweep, the mean over its programs."""
    folders = list(run_dir.glob("program-*"))
    return sum(map(_newest, folders)) / len(folders) if folders else _newest(run_dir)


def _newest(run_dir):
    try:
        return checkpoint.read_manifest(run_dir / "checkpoints").step
    except CheckpointError:
        return 0


class Stopped(Exception):
    """The run was left where it had just saved."""


def train_and_stop(name, run_dir, step):
    """Train until the checkpoint of `step` is complete.

    Raises:
      Stopped: it is complete.
    """
    save = Checkpointer.save

    def save_and_stop(self, saved, *arguments, **named):
        save(self, saved, *arguments, **named)
        if saved == step:
            self.wait()
            raise Stopped

    Checkpointer.save = save_and_stop
    try:
        train(name, run_dir)
    finally:
        Checkpointer.save = save


def main(name, run_dir, moment, patient):
    """Train, and die at a moment as by `kill -9`; a patient process waits for each save."""
    run_loop._CHUNK_SECONDS = 0.0
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    if patient == "patient":
        save = Checkpointer.save
        Checkpointer.save = lambda self, *arguments, **named: (save(self, *arguments, **named), self.wait())

    def die(count):
        if count == int(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    moments = Moments(Path(run_dir), die)
    train(name, run_dir, [moments])
    print("it lived through", moments.count, "moments")


def command(*arguments):
    """Return the command that runs `main` with the settings and devices of the tests."""
    return [
        sys.executable,
        "-c",
        "import conftest, sys; from helpers import kills; kills.main(*sys.argv[1:])",
        *arguments,
    ]
