"""Files that are never rewritten: run directories of e170f74, and its presets."""

import atexit
import functools
import pathlib
import shutil
import tempfile

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
E170F74 = FOLDER / "e170f74"


@functools.cache
def old_runs() -> pathlib.Path:
    """Return a folder with the run directories of e170f74 by kind, unpacked once in a process. Read only."""
    path = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path)
    shutil.unpack_archive(E170F74 / "runs.tar.xz", path, filter="data")
    return path
