"""Writes a dataset again and again, each time in a process of its own that is killed at another moment.

`python kill_writers.py FOLDER rlds|minari N` prints a line a moment: what it was, the signal that ended the process and
what is at the final path. After the moments that have a name come N by chance: such a moment is a line of Python, of
ours or of what ours calls, and their numbers are drawn once and for all. JAX computes nothing here, so that processes
can be forked.
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

from helpers import dying, recorded
from jaxrl.data import features, minari, minari_reader, rlds

EPISODES = [recorded.episode(seed, 3) for seed in range(4)]


class Lines:
    """Counts the lines that this thread executes; at the line `fatal` the process is killed."""

    def __init__(self, fatal=None):
        self.count, self._fatal = 0, fatal

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.count == self._fatal:
                dying.die()
        return self._trace


def moments(writer, metadata):
    """The calls, by name, at which a writer dies; `after` them if so said. `metadata` writes one of several files."""
    after = {"after": True}
    return {
        "first write": ((writer, "write"), after),
        "third write": ((writer, "write", 3), after),
        "closing": ((writer, "close"), {}),
        "metadata half written": (metadata, after),
        "before reading again": ((writer, "_read_again"), {}),
        "after reading again": ((writer, "_read_again"), after),
        "before renaming": ((os, "rename"), {}),
        "after renaming": ((os, "rename"), after),
    }


def main(folder, kind, by_chance):
    folder = Path(folder)
    path, counted = folder / "data-v0", folder / "lines"
    if kind == "rlds":
        write = partial(recorded.write_rlds, path, EPISODES)
        named = moments(rlds.RldsWriter, (features.tfds().features.FeaturesDict, "save_config"))
    else:
        minari_reader.package()
        from minari.dataset.minari_storage import MinariStorage

        minari._AT_ONCE = 1  # every episode is handed over at once
        write = partial(recorded.write_minari, folder, EPISODES, "data-v0")
        named = moments(minari.MinariWriter, (MinariStorage, "update_metadata", 3))

    def see(moment, fatal=None):
        """Writes in a child, and tells what came of it."""
        child = os.fork()
        if child == 0:
            if moment in named:
                call, how = named[moment]
                dying.at_call(*call, **how)
            with Lines(fatal) as lines:
                write()
            counted.write_text(str(lines.count))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        left = ",".join(sorted(x.name for x in path.iterdir())) if path.exists() else "nothing"
        print(moment, os.WTERMSIG(status), left, sep=": ", flush=True)
        if path.exists():
            path.rename(path.with_name(moment.replace(" ", "_")))

    for moment in ("never", *named):
        see(moment)
    for number in np.random.default_rng(0).integers(1, int(counted.read_text()) + 1, int(by_chance)).tolist():
        see(f"line {number}", number)


if __name__ == "__main__":
    main(*sys.argv[1:])
