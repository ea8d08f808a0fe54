"""Recording of training episodes as RLDS datasets (like EnvLogger).

A recording is a directory of parts. Each part is a complete dataset, which is created at a checkpoint:

    recording.json                 the path of the run directory
    part-000000000000/             episodes that ended before the first checkpoint
    part-000000051200/             episodes that ended between step 51,200 and the next checkpoint

A resumed run deletes the parts that began at its checkpoint or later, and records them again. With several processes,
each process has such a directory for its own environments, for example `host-00001-of-00002`.
"""

import dataclasses
import os
import shutil
from pathlib import Path

import jax
import numpy as np

from jaxrl.core import files, presentation, spaces
from jaxrl.core.errors import ConfigError, DatasetError, JaxrlError, RecordingError
from jaxrl.core.limits import count_problems
from jaxrl.core.recorded import Fetch, Recorded
from jaxrl.core.types import Algorithm, Environment, EnvSpec, HostRecipe
from jaxrl.data import features
from jaxrl.data.episodes import CUT_OFF, Episode
from jaxrl.data.rlds import RldsWriter, check_hosts, host_directory
from jaxrl.data.rows import EpisodeCutter
from jaxrl.run.loop.background import BackgroundTask
from jaxrl.run.recording.dataset_export import provenance

_OWNER = "recording.json"
_PART = "part-"


@presentation.finish
@dataclasses.dataclass(frozen=True)
class Record:
    """A recording of training episodes, for `train(record=...)`.

    Args:
      path: the directory to create.
      every: record every n-th episode. With at least n environments, these are all episodes of every n-th environment,
        and the data of the other environments stays on the device.
      max_steps: maximum length of an episode; longer episodes are cut off.
    """

    path: str | os.PathLike
    every: int = 1
    max_steps: int = 27_000

    def folder(self) -> Path:
        """Return the directory that this process writes to."""
        path, processes = files.expand(self.path).absolute(), jax.process_count()
        return path if processes == 1 else path / host_directory(jax.process_index(), processes)

    def check(self, spec: EnvSpec, run_dir: str | os.PathLike | None, overwrite: bool) -> None:
        """Check that the run in `run_dir` can begin or continue this recording, without changing files.

        Raises:
          ConfigError: settings are invalid, arrays could not be read back bit for bit, or the path contains anything
            other than this run's recording.
          MissingExtraError: `jaxrl[data]` is not installed.
        """
        features.tfds()
        problems = count_problems(every=(self.every, 1), max_steps=(self.max_steps, 1))
        try:
            self._check_path(run_dir, overwrite)
            features.fields_of(_example(spec))
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError([f"record: {problem}" for problem in problems])

    def _check_path(self, run_dir, overwrite):
        """Check that this run can use the path.

        Raises:
          ConfigError: the path contains anything other than this run's recording.
        """
        folder, processes = self.folder(), jax.process_count()
        if processes > 1:
            check_hosts(folder.parent, processes)
        if not folder.exists() or (folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())):
            return
        where, remedy = f"path={str(folder)!r}", "use another path, or move it away"
        try:
            owner = files.read_json(folder / _OWNER)["run"]
        except (OSError, ValueError, LookupError, TypeError):
            raise ConfigError(f"{where} exists and is not a recording; {remedy}") from None
        if run_dir is None or owner != _relative(run_dir, folder):
            raise ConfigError(f"{where} contains the recording of another run; {remedy}")
        if not overwrite and not (files.expand(run_dir) / "config.json").exists():
            raise ConfigError(f"{where} contains a recording of a run whose directory {run_dir} is missing; {remedy}")
        others = [one for one in folder.iterdir() if one.is_symlink()]
        others += [one for one in folder.glob(f"{_PART}[0-9]*") if not (one / "dataset_info.json").exists()]
        if others:
            raise ConfigError(f"{others[0]} is not part of a recording; {remedy}")


class Recorder:
    """A writer of the recording of one run, which uses a separate thread; `close` must be called at the end.

    Args:
      record: the settings, already checked.
      recorded: the recorded environments.
      algo, env, seed: algorithm, environment and seed of the run, for the metadata.
      run_dir: the run directory; None: the run cannot be resumed.
    """

    def __init__(
        self,
        record: Record,
        recorded: Recorded,
        algo: Algorithm,
        env: Environment | HostRecipe,
        seed: int,
        run_dir: str | os.PathLike | None,
    ):
        self.recorded = recorded
        self._folder, self._run_dir, self._name = record.folder(), run_dir, env.name
        self._env_index = recorded.here
        self._cutter = EpisodeCutter(len(self._env_index), record.max_steps)
        # Episodes are numbered across environments, so that the selection does not depend on the chunks.
        self._stride = 1 if recorded.num_envs >= record.every else record.every
        self._ended = np.zeros(len(self._env_index), np.int64)
        self._common = provenance(algo, env, seed)
        self._begun_at = 0
        self._writer: RldsWriter | None = None
        self._pending: BackgroundTask | None = None

    def begin(self, step: int) -> None:
        """Begin or continue the recording at `step`, and delete parts that began at this step or later.

        Raises:
          RecordingError: files could not be written or deleted.
        """
        self._begun_at = step
        self._do(lambda: self._clear(step))

    def _clear(self, step):
        self._folder.mkdir(parents=True, exist_ok=True)
        files.write_json(self._folder / _OWNER, {"run": self._run_dir and _relative(self._run_dir, self._folder)})
        for path in self._folder.glob(f"{_PART}*"):
            if path.name.removeprefix(_PART).isdecimal() and int(path.name.removeprefix(_PART)) >= step:
                path.rename(path.with_name(f".{path.name}.removed"))  # so that no part remains that is partly deleted
        for path in self._folder.glob(f".{_PART}[0-9]*"):
            shutil.rmtree(path)

    def add(self, fetch: Fetch) -> None:
        """Record a chunk in the background, after waiting for the previous one.

        Raises:
          RecordingError: the previous chunk could not be written.
        """
        self._wait()
        self._pending = BackgroundTask(lambda: self._write(self._cutter.add(*fetch())), "recorder")

    def close_part(self, step: int, *, ending: bool) -> None:
        """Complete the part that ends at `step`; if `ending` is true, include unfinished episodes, as cut off.

        Raises:
          RecordingError: the part could not be written.
        """
        self._wait()
        self._do(lambda: self._close_part(ending))
        self._begun_at = step

    def close(self) -> None:
        """Delete the incomplete part. May be called twice."""
        if self._pending is not None:
            self._pending.wait()
        if self._writer is not None:
            self._writer.__exit__()
            self._writer = None

    def _wait(self):
        pending, self._pending = self._pending, None
        if pending is not None:
            self._do(pending.result)

    def _do(self, work):
        try:
            work()
        except Exception as error:  # the file system and the writer raise their own errors
            if isinstance(error, JaxrlError) and not isinstance(error, DatasetError):
                raise
            raise RecordingError(f"the recording in {self._folder} cannot be written: {error}") from error

    def _close_part(self, ending):
        if ending:
            self._write(self._cutter.finish())
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, found):
        for place, episode in found:
            env_index = self._env_index[place]
            number = int(self._ended[place]) * self.recorded.num_envs + env_index
            self._ended[place] += 1
            if number % self._stride:
                continue
            if self._writer is None:
                self._writer = RldsWriter(self._folder / f"{_PART}{self._begun_at:012d}", self._name)
            self._writer.write(episode, self._common | {"env_index": env_index})


def _relative(run_dir, folder):
    """Return the path of the run directory relative to the recording, so that they can be moved together."""
    return os.path.relpath(os.path.realpath(run_dir), os.path.realpath(folder))


def _example(spec: EnvSpec) -> Episode:
    """Return an episode of zeros with the shapes and dtypes of recorded episodes."""
    both = spec.observation_space, spec.action_space
    shapes = jax.eval_shape(lambda: tuple(spaces.named(spaces.zeros(space)) for space in both))
    observation, action = jax.tree.map(lambda x: np.zeros((2, *x.shape), x.dtype), shapes)
    number, flag = np.zeros(2, np.float32), np.zeros(2, np.bool_)
    return Episode(observation, action, number, number, flag, flag, flag, {"ending": CUT_OFF})
