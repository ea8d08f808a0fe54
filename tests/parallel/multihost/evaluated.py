"""A run that `test_launch.py` starts: evaluated.py HOW FOLDER. Its evaluator kills itself, once.

It does at its second checkpoint, for which learners wait.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jaxrl

how, folder = sys.argv[1], Path(sys.argv[2])
jaxrl.launch(how)

from helpers.programs import ENV, PPO, ROWS  # noqa: E402

from jaxrl.run.callbacks import FunctionCallback  # noqa: E402
from jaxrl.run.directory import follow  # noqa: E402

played = folder / "played"  # a character for every evaluation that has begun


def count():
    return played.stat().st_size if played.exists() else 0


def wait(moment):
    while moment.step > 4 * ROWS and count() < 2:
        time.sleep(0.05)


def play_or_die(*arguments, **settings):
    with played.open("a") as file:
        file.write("x")
    if count() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return play(*arguments, **settings)


play, follow.evaluate = follow.evaluate, play_or_die
result = jaxrl.train(
    PPO,
    ENV,
    total_steps=8 * ROWS,
    topology=jaxrl.Anakin(num_envs=8),
    callbacks=[FunctionCallback(wait)],
    callback_every=2 * ROWS,
    checkpoint_every=2 * ROWS,
    keep=9,
    evaluate_every=0,
    evaluation_episodes=4,
    run_dir=folder / "run",
    seed=3,
    progress=False,
)
print(f"a learner: {result.stopped}")
