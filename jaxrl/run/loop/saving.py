"""Saving and restoring of a run: its checkpoints and the parts of its recording."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from jaxrl.core.errors import CheckpointError
from jaxrl.core.run_state import RunState
from jaxrl.parallel.multihost import distributed
from jaxrl.run.callbacks import Callbacks
from jaxrl.run.directory.checkpoint import Checkpointer, read_manifest
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.loop.journal import Journal
from jaxrl.run.loop.stopping import Stop, abort_without_saving
from jaxrl.run.recording.recorder import Recorder


@dataclasses.dataclass(eq=False, repr=False)
class Saver:
    """A writer of a run's checkpoints and recording.

    Args:
      directory: run directory; None if there is none, and in all processes except the first.
      checkpointer: writer of the checkpoints; None: nothing is saved.
      recorder: recorder of the training episodes, if they are recorded.
      callbacks: callbacks, whose state is saved in every checkpoint.
      journal: journal of the run.
      save_replay: whether checkpoints include replay buffers.
    """

    directory: RunDirectory | None
    checkpointer: Checkpointer | None
    recorder: Recorder | None
    callbacks: Callbacks
    journal: Journal
    save_replay: bool

    @property
    def saves_replay(self) -> bool:
        return self.checkpointer is not None and self.save_replay

    def announce_stop(self) -> None:
        """Report, at the first Ctrl-C, that the run ends."""
        saved = "" if self.directory is None else " and is saved"
        self.journal.note(f"the run ends after the current chunk{saved}; press Ctrl-C again to end it at once")

    def has_run(self) -> bool:
        """Return whether there is a checkpoint to resume from, as seen by the first process."""
        checkpointer = self.checkpointer
        return checkpointer is not None and distributed.from_leader("is there a run", not checkpointer.is_empty())

    def restore(self, template: RunState) -> tuple[RunState, int, Mapping[str, Any], bool]:
        """Restore the newest checkpoint; return its state, step, callback states, and whether buffers were not saved.

        Args:
          template: the shapes of the state.

        Raises:
          CheckpointError: the checkpoint cannot be read, or the processes see different files.
        """
        assert self.checkpointer is not None  # `has_run` is true
        # `save_replay` may have changed since the checkpoint was saved.
        saved = any(leaf.name.startswith("buffers") for leaf in read_manifest(self.checkpointer.directory).leaves)
        with distributed.collective_errors("restoring"):
            state, step, record = self.checkpointer.restore(template if saved else template.replace(buffers={}))
        steps = distributed.exchange("restored", step)
        if len(set(steps)) > 1:
            raise CheckpointError(f"the processes found different checkpoints ({steps}); use one run directory for all")
        configs = record.config, self.checkpointer.config
        before, now = (config.get("logging", {}).get("deterministic", False) for config in configs)
        if before != now and distributed.is_leader():
            text = f"deterministic={now} from step {step} on, but {before} before: on a GPU, rounding will differ"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        return state, step, record.callbacks, bool(template.buffers) and not saved

    def save(self, step: int, state: RunState, score: float | None) -> None:
        """Save the state after `step` environment steps.

        Raises:
          Stop, CheckpointError: the previous saves failed.
        """
        assert self.checkpointer is not None  # otherwise no save is due
        state = state if self.save_replay else state.replace(buffers={})
        try:
            self.checkpointer.save(step, state, score=score, callbacks=self.callbacks.keep())
        except CheckpointError as error:
            abort_without_saving(error)

    def close_part(self, step: int, *, ending: bool) -> None:
        """Close a part of the recording before a checkpoint, so that a resumed run records later episodes only."""
        if self.recorder is not None:
            with distributed.collective_errors("closing a part of the recording"):
                self.recorder.close_part(step, ending=ending)

    def save_at_rest(self, step: int, state: RunState) -> None:
        """Save during an evaluation, which a resumed run then repeats; errors are only displayed and logged."""
        if self.checkpointer is None:
            return
        try:
            self.close_part(step, ending=True)
            self.save(step, state, None)
            self.checkpointer.wait(last=True)
        except Exception as error:  # an error in this thread would be lost, and the previous checkpoint still exists
            self.journal.note(f"error: {error}")

    def check_directory(self) -> None:
        """Check that the run directory still exists.

        Raises:
          Stop, CheckpointError: the directory was deleted or moved; the result contains the state so far.
        """
        if self.directory is None:
            return
        try:
            self.directory.check()
        except CheckpointError as error:
            self.directory = None
            self.journal.drop_files()
            abort_without_saving(error)

    def save_last(self, step: int, state: RunState, score: float | None, stop: Stop) -> Stop:
        """Wait for the last save, and retry it once if it failed; return `stop`, or an "unsaved" stop if both fail."""
        assert self.checkpointer is not None  # called only if there are checkpoints
        try:
            self.checkpointer.wait(last=True)
        except CheckpointError as error:
            if distributed.is_several():
                raise
            if self.directory is None or stop.reason == "unsaved":
                return stop
            try:
                self.check_directory()
                self.save(step, state, score)
                self.checkpointer.wait(last=True)
            except Stop as ended:
                return ended
            except CheckpointError:
                return Stop("unsaved", str(error))
        return stop

    def describe_unsaved(self, problem: str | None, step: int) -> str:
        """Return the warning for a run that could not be saved."""
        reported = self.directory is not None and self.checkpointer is not None and self.checkpointer.has_warned
        problem = "the last saves also failed" if reported else problem  # each failure is reported once
        message = f"{problem}; the result has the state at step {step}: save it elsewhere with `result.save(path)`"
        return message if self.directory is None else f"{message}, or run again to resume from the last checkpoint"
