"""A run that `test_launch.py` starts: launched.py HOW FOLDER. Of several processes the second kills itself, once."""

import os
import signal
import sys
import time
from pathlib import Path

import jaxrl

# The folder before anything that needs JAX: the process that only starts others comes no further than this call.
how, folder = sys.argv[1], Path(sys.argv[2])
processes = jaxrl.launch(how)

import jax  # noqa: E402
from helpers.programs import ENV, PPO, ROWS  # noqa: E402

from jaxrl.run.callbacks import FunctionCallback  # noqa: E402
from jaxrl.run.directory.checkpoint import complete_steps  # noqa: E402


def kill(moment):
    once = folder / "killed"
    if jax.process_index() == 1 and moment.step >= 4 * ROWS and not once.exists():
        while not complete_steps(folder / "run" / "checkpoints"):
            time.sleep(0.05)
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


result = jaxrl.train(
    PPO,
    ENV,
    total_steps=8 * ROWS,
    topology=jaxrl.Anakin(num_envs=8, devices=2),
    callbacks=[FunctionCallback(kill)],
    callback_every=2 * ROWS,
    checkpoint_every=2 * ROWS,
    evaluate_every=0,
    evaluation_episodes=4,
    run_dir=folder / "run",
    seed=3,
    progress=False,
)
print(f"process {jax.process_index()} of {processes}: {result.stopped} {sorted(os.sched_getaffinity(0))}")
