"""Writes a dataset again and again, each time in a process of its own that is killed at another moment.

`python kill_writers.py FOLDER rlds|minari N` prints a line a moment: what it was, the signal that ended the process and
what is at the final path. After the moments that have a name come N by chance: such a moment is a line of Python, of
ours or of what ours calls, and their numbers are drawn once and for all. JAX computes nothing here, so that processes
can be forked.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np

from helpers import recorded
from jaxrl.data import features, minari, minari_reader, rlds

EPISODES = [recorded.episode(seed, 3) for seed in range(4)]
SPACES = recorded.spaces_of(EPISODES[0])


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Counted:
    """A file of records that kills its process at the n-th write, or when it is closed."""

    def __init__(self, writer, writes=None, at_close=False):
        self._writer, self._writes, self._at_close = writer, writes, at_close

    def write(self, record):
        self._writer.write(record)
        if self._writes is not None:
            self._writes -= 1
            if self._writes == 0:
                die()

    def close(self):
        if self._at_close:
            die()
        self._writer.close()


def at_write(n):
    real = rlds._writer
    rlds._writer = lambda *where: Counted(real(*where), writes=n)


def at_close():
    real = rlds._writer
    rlds._writer = lambda *where: Counted(real(*where), at_close=True)


def before(owner, name):
    setattr(owner, name, die)


def after(owner, name):
    real = getattr(owner, name)

    def then_die(*arguments, **options):
        real(*arguments, **options)
        die()

    setattr(owner, name, then_die)


def in_the_middle_of_the_metadata():
    core = features.tfds().core
    real = core.DatasetInfo.write_to_directory

    def half(info, directory):
        real(info, directory)
        (Path(directory) / "features.json").unlink()
        die()

    core.DatasetInfo.write_to_directory = half


def handing_over(n):
    """Every episode is handed over at once; the process dies when it has been with the n-th."""
    minari._AT_ONCE = 1
    real = minari.MinariWriter._flush

    def flush(writer):
        real(writer)
        if writer.episodes == n:
            die()

    minari.MinariWriter._flush = flush


RLDS_MOMENTS = {
    "first write": lambda: at_write(1),
    "third write": lambda: at_write(3),
    "closing the file": at_close,
    "metadata half written": in_the_middle_of_the_metadata,
    "before reading again": lambda: before(rlds.RldsWriter, "_read_again"),
    "after reading again": lambda: after(rlds.RldsWriter, "_read_again"),
    "before renaming": lambda: before(os, "rename"),
    "after renaming": lambda: after(os, "rename"),
    "never": lambda: None,
}
MINARI_MOMENTS = {
    "first episode": lambda: handing_over(1),
    "third episode": lambda: handing_over(3),
    "before reading again": lambda: before(minari.MinariWriter, "_read_again"),
    "after reading again": lambda: after(minari.MinariWriter, "_read_again"),
    "before renaming": lambda: before(os, "rename"),
    "after renaming": lambda: after(os, "rename"),
    "never": lambda: None,
}


def rlds_writer(folder):
    return rlds.RldsWriter(folder / "data-v0", "killed")


def minari_writer(folder):
    return minari.MinariWriter("data-v0", *SPACES, data_dir=folder)


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
                die()
        return self._trace


def write(open_writer, arm=lambda: None):
    arm()
    with open_writer() as writer:
        for episode in EPISODES:
            writer.write(episode)
        writer.close()


def write_traced(open_writer, fatal=None, tell=None):
    with Lines(fatal) as lines:
        write(open_writer)
    if tell is not None:
        tell.write_text(str(lines.count))


def see(moment, path, act):
    """Acts in a child, and tells what came of it."""
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    left = ",".join(sorted(x.name for x in path.iterdir())) if path.exists() else "nothing"
    print(moment, os.WTERMSIG(status), left, sep=": ", flush=True)
    if path.exists():
        path.rename(path.with_name(moment.replace(" ", "_")))


def main(folder, kind, by_chance):
    folder = Path(folder)
    path, counted = folder / "data-v0", folder / "lines"
    features.tfds() if kind == "rlds" else minari_reader.package()
    open_writer = partial(rlds_writer if kind == "rlds" else minari_writer, folder)
    for name, arm in (RLDS_MOMENTS if kind == "rlds" else MINARI_MOMENTS).items():
        see(name, path, partial(write, open_writer, arm))
    if int(by_chance):
        see("counted", path, partial(write_traced, open_writer, tell=counted))
        lines = int(counted.read_text())
        for number in np.random.default_rng(0).integers(1, lines + 1, int(by_chance)).tolist():
            see(f"line {number}", path, partial(write_traced, open_writer, number))


if __name__ == "__main__":
    main(*sys.argv[1:])
