"""A training as fast as it goes, for so many minutes, that writes down what its process holds.

`python endurance.py anakin|sebulba RUN_DIR MINUTES` trains, evaluates, saves and logs as a run of a user's does, and
leaves `RUN_DIR/held.json`: a list of [seconds, resident bytes, open files, threads].
"""

import json
import os
import sys
import time
from pathlib import Path

import jaxrl
from jaxrl.run.callbacks import Decision, FunctionCallback

# Environment steps between two looks at the clock; evaluations and checkpoints are ten and five times as far apart.
LOOK = {"anakin": 200_000, "sebulba": 5_000}
ENOUGH = 10**11  # environment steps; none gets there


def held():
    """Return the resident bytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Looking:
    """A logger: once a row, which is about once a second."""

    def __init__(self):
        self.began, self.seen = time.monotonic(), []

    def write(self, step, metrics):
        self.seen.append([time.monotonic() - self.began, *held()])

    def close(self):
        pass


def main(kind, run_dir, minutes):
    looking, look = Looking(), LOOK[kind]
    until = looking.began + 60 * float(minutes)
    stop = FunctionCallback(lambda moment: Decision(stop="time") if time.monotonic() > until else None)
    jaxrl.train(
        "ppo",
        "gymnax:CartPole-v1" if kind == "anakin" else jaxrl.make("gymnasium:CartPole-v1", workers=2),
        topology=jaxrl.Anakin(64) if kind == "anakin" else jaxrl.Sebulba(16, actors=2),
        total_steps=ENOUGH,
        evaluate_every=10 * look,
        evaluation_episodes=16,
        checkpoint_every=5 * look,
        callbacks=[stop],
        callback_every=look,
        loggers=[looking],
        run_dir=run_dir,
        progress=False,
    )
    (Path(run_dir) / "held.json").write_text(json.dumps(looking.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
