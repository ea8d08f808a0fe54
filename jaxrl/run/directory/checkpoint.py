"""Checkpoints of the complete training state, which are saved in the background and verified when read.

Orbax writes the arrays but does not notice a flipped bit, so a separate manifest next to them contains a checksum of
every leaf, the versions and the configuration. A step is written to a temporary folder, which is renamed when it is
complete, so a killed save leaves no incomplete step:

    checkpoints/000000008192/manifest.json     the contents with checksums, and a checksum of this file
    checkpoints/000000008192/state/            the arrays, in Orbax's format

Nothing is pickled.
"""

# Reasons not to use Orbax's CheckpointManager (0.12.8) to keep, delete and commit checkpoints:
# - `save` raises StepAlreadyExistsError for an existing step, and a kill after deleting the step would lose it. A run
#   that is interrupted during an evaluation saves the same step before the evaluation and again after it.
# - `BestN` uses scores that are passed to `save`, or that are in Orbax's files when the manager is created or reloaded.
#   Our scores may be known only later, after evaluations in a thread, and earlier runs have them in our manifests.
# - It counts a step with a damaged manifest among the newest steps, and deletes a sound step instead.
# - It recreates deleted folders, and its files and temporary names are unknown to `core/ownership.py`.
# It could replace `_prune`, `_recover` and `_move_into_place` (about 260 tokens), but workarounds need as many tokens.

import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl.core import files
from jaxrl.core.errors import CheckpointError
from jaxrl.core.types import PyTree
from jaxrl.core.versions import own_version
from jaxrl.parallel import memory
from jaxrl.run.directory import manifest as manifests
from jaxrl.run.directory.manifest import Damaged, Manifest
from jaxrl.run.directory.run_directory import check_no_pattern

_TEMPORARY = ".saving-"  # a save in progress, or one that was killed
_REPLACED = ".replaced-"  # the old contents of a step that is being replaced


class Checkpointer:
    """A writer of the checkpoints of one run, which keeps the newest ones and the best one.

    Only the process that owns a run may use it. To read the checkpoints of a run that another process owns, use
    `restore` and `read_manifest`, which change nothing on disk.

    Args:
      directory: folder of the checkpoints; created if missing. Remains of a killed save are removed.
      config: the resolved configuration as JSON values, which every manifest contains.
      keep: number of the newest steps to keep, at least 1; the step with the best score is kept as well.
      max_failures: number of consecutive failed saves after which an error is raised; the first failure only warns.

    Raises:
      CheckpointError: the directory cannot be created or written to.
    """

    def __init__(
        self, directory: str | os.PathLike, *, config: Mapping[str, Any], keep: int = 3, max_failures: int = 3
    ):
        self.directory = files.expand(directory).absolute()
        self.awaiting: int | None = None  # a step that is kept until `score` is called
        self._failures_in_a_row = 0
        self._failure: str | None = None  # error of the last save
        self.has_warned = False  # since the last successful save
        self.config = files.as_read_back(config)  # as it is read back; raises an error for values that are not JSON
        self._keep = keep
        self._max_failures = max_failures
        self._damaged: set[int] = set()
        self._pending: tuple[int, concurrent.futures.Future] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._folder: int | None = None
        if jax.process_index() == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                _recover(self.directory)
                probe = self.directory / f"{_TEMPORARY}probe"
                probe.write_bytes(bytes(4096))
                probe.unlink()
            except OSError as error:
                raise CheckpointError(f"cannot save checkpoints in {self.directory}: {error}") from error
            # Kept open, because the inode number of a deleted folder may be reused.
            self._folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._scores = {step: scored.score for step, scored in _complete(self.directory).items()}

    def save(
        self, step: int, state: PyTree, *, score: float | None = None, callbacks: Mapping[str, Any] | None = None
    ) -> None:
        """Save `state` as `step` in the background, and replace an older save of the same step.

        The call waits for the previous save and returns once the leaves are copied to host memory, so the caller may
        donate them afterwards. With several processes, all must call it, and it returns when the state is saved.

        Args:
          step: the number of the checkpoint, which names its folder.
          state: a pytree of arrays (including typed keys) and Python numbers.
          score: score of the checkpoint, if known; higher is better, and the best checkpoint is kept.
          callbacks: the state of the callbacks as JSON values, stored in the manifest.

        Raises:
          CheckpointError: a leaf is not an array, or `max_failures` consecutive saves failed.
        """
        self.wait()
        leaves = manifests.named_leaves(state)
        arrays = {name: manifests.take(name, leaf) for name, leaf in leaves.items()}
        if score is not None and not math.isfinite(score):
            score = None
        record = Manifest(
            step=step,
            score=score,
            config=self.config,
            leaves=[manifests.leaf_entry(n, x) for n, x in leaves.items()],
            callbacks=dict(callbacks or {}),
        )
        if jax.process_count() == 1:
            self._pending = step, self._executor.submit(self._write, record, arrays)
        else:  # Orbax synchronizes processes by collectives, which a second thread must not start
            future: concurrent.futures.Future = concurrent.futures.Future()
            try:
                future.set_result(self._write(record, arrays))
            except Exception as error:
                future.set_exception(error)
            self._pending = step, future
            self.wait()

    def score(self, step: int, score: float) -> None:
        """Set the score of a saved checkpoint, after waiting for the pending save.

        If the checkpoint no longer exists or `score` is not finite, nothing changes. With several processes, only the
        first one writes. The next save deletes an old checkpoint that is no longer the best.

        Raises:
          CheckpointError: as for `wait`.
        """
        self.wait()
        self.awaiting = None
        if step not in self._scores or not math.isfinite(score):
            return
        self._scores[step] = score
        path = self.directory / _folder(step) / manifests.FILE
        if jax.process_index() == 0 and not path.parent.is_symlink():  # a link may lead to another run
            try:
                manifests.write(path, dataclasses.replace(manifests.read(path), score=score))
            except (OSError, Damaged) as error:
                message = f"the score of checkpoint {step} could not be written in {self.directory}: {_one_line(error)}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def wait(self, *, last: bool = False) -> bool:
        """Wait for the pending save; return whether the last save succeeded (True if there was none).

        Args:
          last: whether to raise an error if the last save failed, because no other save will follow.

        Raises:
          CheckpointError: `max_failures` consecutive saves failed, or `last` is true and the last save failed.
        """
        if self._pending is None:
            if last and self._failure is not None:
                raise CheckpointError(self._failure)
            return self._failure is None
        step, future = self._pending
        error = future.exception()
        self._pending = None
        if error is None:
            self._failures_in_a_row, self._failure, self.has_warned = 0, None, False
            return True
        self._failures_in_a_row += 1
        message = f"checkpoint {step} could not be saved in {self.directory}: {_one_line(error)}"
        self._failure = message
        if last:
            raise CheckpointError(message) from error
        if self._failures_in_a_row >= self._max_failures:
            raise CheckpointError(
                f"{message}; {self._failures_in_a_row} saves in a row failed, so continuing would risk losing the run"
            ) from error
        if not self.has_warned:
            warnings.warn(f"{message}; training continues, and the next save tries again", RuntimeWarning, stacklevel=2)
        self.has_warned = True
        return False

    def steps(self) -> list[int]:
        """Return the complete steps on disk, in ascending order."""
        return complete_steps(self.directory)

    def is_empty(self) -> bool:
        """Return whether the directory has no checkpoints, not even damaged ones."""
        return not _numbered(self.directory)

    @property
    def best(self) -> int | None:
        """The step with the highest score, or None if no step has one."""
        return _best(self._scores)

    def restore(self, template: PyTree) -> tuple[PyTree, int, Manifest]:
        """Restore the newest sound step. Newer steps, which are damaged, no longer count towards `keep`."""
        self.wait()
        state, step, record = restore(self.directory, template)
        self._damaged = {newer for newer in _numbered(self.directory) if newer > step}
        return state, step, record

    def close(self) -> None:
        """Wait for the pending save and stop the background thread. May be called twice."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            folder, self._folder = self._folder, None
            if folder is not None:
                os.close(folder)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: Manifest, arrays: dict[str, Any]) -> None:
        building = self.directory / f"{_TEMPORARY}{_folder(record.step)}"
        leader = jax.process_index() == 0
        try:
            if leader:
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()  # without parents: a deleted run directory must not reappear
            _barrier("checkpoint folder")
            for entry in record.leaves:
                entry.crc32 = manifests.checksum(arrays[entry.name])
            stored = {name: x for name, x in arrays.items() if math.prod(x.shape)}  # Orbax rejects empty arrays
            if stored:
                import orbax.checkpoint as ocp  # imported late, because runs without a directory do not need it

                with _absl_quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
                    orbax.save(building / "state", args=ocp.args.PyTreeSave(stored))
            if leader:
                assert self._folder is not None  # set until `close`
                # Orbax recreates deleted folders, so an existing folder may not be the original one.
                if not os.path.samestat(os.stat(self.directory), os.fstat(self._folder)):
                    raise FileNotFoundError(errno.ENOENT, "the folder was deleted or moved", str(self.directory))
                manifests.write(building / manifests.FILE, record)
                _move_into_place(building, self.directory / _folder(record.step))
                self._damaged.discard(record.step)
                self._scores[record.step] = record.score
                self._prune(record.step)
            _barrier("checkpoint committed")
        except BaseException:
            _remove_until_it_stays_away(building)
            raise

    def _prune(self, saved: int) -> None:
        here = _numbered(self.directory)
        sound = sorted(set(here) - self._damaged)
        stay = {saved, *sound[-self._keep :]}
        stay |= {step for step in (self.best, self.awaiting) if step is not None}
        for step in set(here) - stay:
            shutil.rmtree(here[step], ignore_errors=True)
            self._scores.pop(step, None)
            self._damaged.discard(step)


def restore(
    directory: str | os.PathLike, template: PyTree, step: int | None = None, *, partial: bool = False
) -> tuple[PyTree, int, Manifest]:
    """Read a checkpoint and verify every leaf, without changing anything on disk.

    If the newest step is damaged, the step before it is read instead, with a warning.

    Args:
      directory: the run's `checkpoints` folder.
      template: a pytree of arrays or `jax.ShapeDtypeStruct` with the structure, shapes, dtypes and shardings of the
        result. Leaves without a sharding and uncommitted arrays are restored as uncommitted arrays on the default
        device; numpy arrays and Python numbers keep their types. The number of devices may have changed since the save.
      step: the step to read, which must be sound; None: the newest sound step.
      partial: whether the template may leave out saved leaves.

    Returns:
      The state, its step, and its manifest.

    Raises:
      CheckpointError: no checkpoint exists, all are damaged (the message lists the reasons), or the leaves of the
        template and the checkpoint differ in name, shape or dtype (the message lists them).
    """
    directory = files.expand(directory).absolute()
    check_no_pattern(directory)  # otherwise, the checkpoints in such a path would seem damaged
    here = _numbered(directory)
    if step is not None and step not in here:
        raise CheckpointError(f"no checkpoint {step} in {directory}; its checkpoints are {sorted(here)}")
    if not here:
        raise CheckpointError(f"no checkpoint in {directory}")
    tried = []
    for candidate in [step] if step is not None else sorted(here, reverse=True):
        try:
            state, record = _read_step(here[candidate], template, partial)
        except Damaged as error:
            tried.append(f"{here[candidate]}: {error}")
            continue
        for reason in tried:
            warnings.warn(f"damaged checkpoint {reason}; using step {candidate} instead", RuntimeWarning, stacklevel=2)
        return state, candidate, record
    raise CheckpointError("no checkpoint can be restored; tried:\n  " + "\n  ".join(tried))


def read_manifest(directory: str | os.PathLike, step: int | None = None) -> Manifest:
    """Return the manifest of `step`, or the newest sound manifest if it is None.

    Raises:
      CheckpointError: no such manifest exists.
    """
    directory = files.expand(directory).absolute()
    if step is not None:
        try:
            return manifests.read(directory / _folder(step) / manifests.FILE)
        except Damaged as error:
            raise CheckpointError(f"checkpoint {step} in {directory}: {error}") from error
    complete = _complete(directory)
    if not complete:
        raise CheckpointError(f"no complete checkpoint in {directory}")
    return complete[max(complete)]


def complete_steps(directory: str | os.PathLike) -> list[int]:
    """Return the complete checkpoint steps in ascending order; the run may be in progress."""
    return sorted(_complete(files.expand(directory).absolute()))


def best_step(directory: str | os.PathLike) -> int:
    """Return the step with the highest score; if several steps have this score, the latest of them.

    Raises:
      CheckpointError: no complete checkpoint has a score.
    """
    directory = files.expand(directory).absolute()
    best = _best({step: record.score for step, record in _complete(directory).items()})
    if best is None:
        raise CheckpointError(f"no checkpoint in {directory} has a score, so there is no best one; use the newest")
    return best


def _best(scores: Mapping[int, float | None]) -> int | None:
    scored = [(score, step) for step, score in scores.items() if score is not None]
    return max(scored)[1] if scored else None


def _read_step(path: Path, template: PyTree, partial: bool) -> tuple[PyTree, Manifest]:
    record = manifests.read(path / manifests.FILE)
    if record.step != int(path.name):
        raise Damaged(f"the manifest belongs to step {record.step}")
    template_leaves = manifests.named_leaves(template)
    saved = {entry.name: (entry.shape, entry.dtype) for entry in record.leaves}
    if problems := manifests.differences(template_leaves, saved, partial=partial):
        raise CheckpointError(
            f"checkpoint {path} does not fit this configuration:\n  " + "\n  ".join(problems) + "\n"
            f"the checkpoint was written by jaxrl {record.jaxrl_version}, and this is jaxrl {own_version()}; if the "
            "settings are the same, resume with the version that wrote it; otherwise, start another run from it, in "
            f"another run_dir: init_from={str(path)!r} (--init-from)"
        )
    stored = {name: manifests.stored_as(leaf) for name, leaf in template_leaves.items()}
    _check_memory(path, stored)
    arrays = _read_arrays(path / "state", {name: x for name, x in stored.items() if x.size})
    checksums = {entry.name: entry.crc32 for entry in record.leaves}
    leaves = []
    for name, leaf in template_leaves.items():
        value = arrays[name] if name in arrays else np.zeros(stored[name].shape, stored[name].dtype)
        if checksums[name] is not None and manifests.checksum(value) != checksums[name]:
            raise Damaged(f"leaf {name} does not match its checksum")
        leaves.append(manifests.put(value, leaf))
    return jax.tree.unflatten(jax.tree.structure(template), leaves), record


def _read_arrays(folder: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Read the arrays of a step; return them keyed by name."""
    if not expected:
        return {}
    import orbax.checkpoint as ocp

    options = dict.fromkeys(expected, ocp.RestoreArgs(restore_type=np.ndarray))
    request = ocp.args.PyTreeRestore(item=dict.fromkeys(expected, 0), restore_args=options, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            files.check_regular(folder)
            _check_arrays(expected, orbax.metadata(folder).item_metadata)  # before memory is allocated for them
            arrays = orbax.restore(folder, args=request)
    except (MemoryError, Damaged):
        raise
    except Exception as error:  # tensorstore, json and the file system raise various errors
        raise Damaged(f"the arrays cannot be read: {_one_line(error)}") from error
    _check_arrays(expected, arrays)
    return arrays


def _check_arrays(expected: Mapping[str, jax.ShapeDtypeStruct], found: Mapping[str, Any]) -> None:
    """Check that no array is missing or has another shape or dtype.

    Raises:
      Damaged: an array does not match; the message names the first one.
    """
    for name, like in expected.items():
        array = found.get(name)
        if array is None:
            raise Damaged(f"leaf {name} is missing from the arrays")
        if (tuple(array.shape), str(array.dtype)) != (like.shape, str(like.dtype)):
            raise Damaged(f"leaf {name} is stored as {array.dtype}{list(array.shape)}, not as in the manifest")


def _check_memory(path: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Check that arrays fit in memory before any of them is allocated.

    Raises:
      CheckpointError: the arrays do not fit.
    """
    needed, free = sum(x.size * x.dtype.itemsize for x in arrays.values()), memory.free_on_host()
    if free is not None and needed > free:
        raise CheckpointError(
            f"checkpoint {path} needs {memory.readable(needed)} of memory, but only {memory.readable(free)} are free"
        )


def _folder(step: int) -> str:
    return f"{step:012d}"


def _numbered(directory: Path) -> dict[int, Path]:
    """Return the folders of all saved steps, including damaged ones, keyed by step."""
    if not directory.is_dir():
        return {}
    return {int(path.name): path for path in directory.iterdir() if path.name.isdecimal() and path.is_dir()}


def _complete(directory: Path) -> dict[int, Manifest]:
    found = {}
    for step, path in _numbered(directory).items():
        try:
            found[step] = manifests.read(path / manifests.FILE)
        except Damaged:
            continue
    return found


def _move_into_place(building: Path, final: Path) -> None:
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    building.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_until_it_stays_away(building: Path) -> None:
    """Remove a folder until nothing recreates it, because TensorStore's threads write even after an error in Orbax."""
    quiet = 0
    for _ in range(100):
        quiet = 0 if building.exists() else quiet + 1
        if quiet > 6:
            return
        shutil.rmtree(building, ignore_errors=True)
        time.sleep(0.05)


def _recover(directory: Path) -> None:
    """Remove the remains of killed saves, and restore old contents that were moved away but not yet replaced."""
    for path in directory.glob(_TEMPORARY + "[0-9]*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in directory.glob(_REPLACED + "[0-9]*"):
        original = directory / path.name.removeprefix(_REPLACED)
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def _absl_quiet() -> Generator[None]:
    """Silence absl's error log, because Orbax also logs the errors that it raises, with their tracebacks."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
