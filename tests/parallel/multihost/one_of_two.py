"""One of two processes of a run, with two CPU devices: `python one_of_two.py JOB PORT INDEX FOLDER`.

The jobs are the functions below; what they return is written to `FOLDER/INDEX.json`.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from jaxrl.parallel.multihost import distributed  # noqa: E402

JOB, PORT, INDEX, FOLDER = sys.argv[1:]
JOB, *DETAILS = JOB.split(":")
(Path(FOLDER) / f"{INDEX}.pid").write_text(str(os.getpid()))
HEARTBEAT = 10  # seconds
END = 60 if JOB in ("runs", "more", "goes_on", "lives") else HEARTBEAT
distributed.initialize(f"127.0.0.1:{PORT}", 2, int(INDEX), heartbeat_seconds=HEARTBEAT, end_seconds=END)

from helpers import programs  # noqa: E402 (makes an environment, for which JAX must have started)
from helpers.kills import Moments  # noqa: E402
from helpers.populations import population  # noqa: E402
from helpers.programs import ROWS  # noqa: E402
from helpers.served import JaxHostEnvironment, ServedFromHost  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.core.errors import JaxrlError  # noqa: E402
from jaxrl.parallel.program import Program  # noqa: E402
from jaxrl.run.directory.checkpoint import Checkpointer  # noqa: E402
from jaxrl.run.loop import run_loop  # noqa: E402

UPDATES = 10
SETTINGS = {"evaluation_episodes": 8, "evaluate_every": 5 * ROWS, "checkpoint_every": 5 * ROWS, "progress": False}


def train(run_dir, algo="ppo", host=False, updates=UPDATES, **settings):
    """The run that every job is about; with the same devices in one process it is the same run."""
    topology = programs.anakin(4)
    if host:
        layout = {"num_envs": programs.NUM_ENVS, "devices": 4, "shards": 4, "lockstep": True} | host
        topology = jaxrl.Sebulba(**layout)
    env = ServedFromHost(programs.ENV) if host else programs.ENV
    settings = SETTINGS | {"seed": 3} | settings
    algo = programs.ALGORITHMS[algo]
    return jaxrl.train(algo, env, total_steps=updates * ROWS, topology=topology, run_dir=run_dir, **settings)


def told(result):
    action, _ = result.policy([0.1, 0.2, 0.3, 0.4])
    return {
        "stopped": result.stopped,
        "total_steps": result.total_steps,
        "returns": result.evaluation.returns.tolist() if result.evaluation else None,
        "rows": len(result.metrics),
        "run_dir": str(result.run_dir),
        "action": int(action),
    }


def at_chunk(chunk, signal_number):
    """This process gets a signal, once, when it begins its n-th chunk."""
    begin, numbers = Program.chunk, itertools.count(1)

    def begin_or_end(self, *arguments):
        if next(numbers) == chunk:
            os.kill(os.getpid(), signal_number)
        return begin(self, *arguments)

    Program.chunk = begin_or_end


# --- jobs ------------------------------------------------------------------------------------------------------------


def runs(folder):
    """All that ends well, in one go, because most of the time goes into starting."""
    found = {"refused": refused(folder)}
    unbroken = train(folder / "unbroken")
    jaxrl.export_rlds(unbroken.policy, programs.ENV, folder / "data", episodes=10, num_envs=4, progress=False)
    found["unbroken"] = told(unbroken)
    for name in ("host", "host_again"):
        found[name] = told(train(folder / name, host={"actors": 2}))
    return found


def more(folder):
    """What needs as long again."""
    swept = jaxrl.sweep(programs.ALGORITHMS["ppo"], programs.ENV, seeds=3, **programs.SWEEP)
    evolved = population(points=3, members=5)
    found = {
        "pbt": evolved.lineage.to_json()
        | {"returns": evolved.returns.tolist(), "fresh": evolved.fresh_returns.tolist()},
        "sweep": {"returns": swept.returns.tolist(), "loss": swept.metrics["update/value_loss"].tolist()},
        "late": told(train(None, host={"lag": 1})),
        "dqn": told(train(folder / "dqn", "dqn", updates=12)),
        "unbroken": told(train(folder / "unbroken")),
    }
    tuning = {"updates": 4, "init_from": folder / "unbroken", "video_every": 2 * ROWS}
    found["tuned"] = told(train(folder / "tuned", **tuning))
    run_loop._CHUNK_SECONDS = 0.0  # an iteration a chunk
    if jax.process_index() == 1:
        at_chunk(3, signal.SIGINT)
    found["interrupted"] = told(train(folder / "resumed"))
    found["resumed"] = told(train(folder / "resumed"))
    return found


def apart(folder):
    """What needs no agreement on the order of rollouts."""
    pool = {"actors": 2, "lockstep": None, "learner_batch": programs.NUM_ENVS // 2}
    found = {
        "asynchronous": train(None, host={"actors": 2, "lockstep": False}),
        "pool": train(None, host=pool),
        "replay_pool": train(None, "dqn", host=pool | {"devices": 2, "shards": None}),
    }
    return {name: told(result) for name, result in found.items()}


def terminated(folder):
    """SIGTERM reaches the second process alone."""
    run_loop._CHUNK_SECONDS = 0.0
    if jax.process_index() == 1:
        at_chunk(3, signal.SIGTERM)
    train(folder / "run")


def refused(folder):
    """What is said where each process has another seed."""
    try:
        train(folder / "refused", seed=int(jax.process_index()))
    except JaxrlError as error:
        return {"type": type(error).__name__, "said": str(error)}


def one_dies(folder):
    """The second process is killed while both train, after the checkpoint of the fifth update."""
    if jax.process_index() == 1:
        at_chunk(8, signal.SIGKILL)
    save = Checkpointer.save
    Checkpointer.save = lambda self, *arguments, **named: (save(self, *arguments, **named), self.wait())
    run_loop._CHUNK_SECONDS = 0.0
    train(folder / "run")


def goes_on(folder):
    """What that one left is started again."""
    return told(train(folder / "run"))


def lives(folder, moment="0", victim="0"):
    """A process is killed at a moment of the run's files, 0 for never; all lives of a folder are of one run."""
    run_loop._CHUNK_SECONDS = 0.0

    def die(count):
        if count == int(moment):
            os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)

    moments = Moments(folder / "run", die)
    each = {"evaluate_every": 2 * ROWS, "checkpoint_every": 2 * ROWS}
    found = told(train(folder / "run", updates=12, loggers=[moments], **each))
    moments.stop()
    return found | {"moments": moments.count}


def one_raises(folder):
    """An environment of the second process raises while both train."""
    if jax.process_index() == 1:
        step, numbers = JaxHostEnvironment.step, itertools.count(1)

        def step_or_raise(self, actions):
            if next(numbers) == 20:
                raise ValueError("the pole broke")
            return step(self, actions)

        JaxHostEnvironment.step = step_or_raise
    train(None, host={"actors": 1}, updates=100_000)


if __name__ == "__main__":
    jobs = {"runs": runs, "more": more, "one_dies": one_dies, "goes_on": goes_on, "one_raises": one_raises}
    jobs |= {"lives": lives, "terminated": terminated, "apart": apart}
    (Path(FOLDER) / f"{INDEX}.json").write_text(json.dumps(jobs[JOB](Path(FOLDER), *DETAILS)))
