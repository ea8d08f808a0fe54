"""The checkpoints of the runs of one program of a sweep, for resuming it."""

import contextlib
import signal
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core import files
from jaxrl.core.errors import CheckpointError
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.run.checkpoint import Checkpointer
from jaxrl.run.result import opened


@contextlib.contextmanager
def open_checkpointers(
    run_dir: str | Path | None, configs: Sequence[Mapping[str, Any]], *, overwrite: bool
) -> Generator[list[Checkpointer] | list[None]]:
    """Open the checkpoints of every program of a sweep, each in its own directory; None for each without `run_dir`.

    Raises:
      RunDirectoryError: a directory is in use, or holds another sweep (the message names the difference).
    """
    with contextlib.ExitStack() as stack:
        if run_dir is None:
            yield [None] * len(configs)
            return
        run_dir = files.expand(run_dir)
        paths = [run_dir / f"program-{number}" for number in range(len(configs))]
        # No limit on failed saves: until all runs have ended, their states are only in memory.
        settings = {"keep": 2, "max_failures": sys.maxsize}
        both = zip(paths, configs, strict=True)
        yield [stack.enter_context(opened(path, config, overwrite=overwrite, **settings))[1] for path, config in both]


def interrupted(number: int) -> BaseException:
    """Return the exception to raise once a sweep that a signal interrupted is saved."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class Progress:
    """The progress of the runs of one program: their states, and the report of every point so far.

    Args:
      states: the initial states of all runs.
      steps: the environment steps at each point.
      checkpointer: saves the progress; None: it is not saved.
      every: environment steps between two checkpoints.
      beside: further arrays to save, with room for every point; restored in place.
    """

    def __init__(
        self,
        states: RunState,
        steps: Sequence[int],
        checkpointer: Checkpointer | None,
        every: int,
        beside: Mapping[str, np.ndarray] = {},
    ):
        self.states, self.reports = states, list[Report]()
        self._beside = {"beside": dict(beside)} if beside else {}
        self._steps, self._checkpointer, self._every, self._saved = list(steps), checkpointer, every, 0

    def restore(self, report: Report, mesh: jax.sharding.Mesh) -> None:
        """Restore the newest checkpoint, if there is one.

        Args:
          report: the shapes of a point's report.
          mesh: the mesh that the states are sharded over.

        Raises:
          CheckpointError: no checkpoint matches this sweep.
        """
        if self._checkpointer is None or self._checkpointer.is_empty():
            return
        runs = NamedSharding(mesh, PartitionSpec("runs"))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=runs), self.states)
        self.states = shapes  # frees the initial states before others are restored
        saved, step, _ = self._checkpointer.restore({"states": shapes, "reports": self._room(report)} | self._beside)
        if step not in self._steps:
            raise CheckpointError(
                f"{self._checkpointer.directory} has step {step}, which is none of this sweep's points"
            )
        self.states, self._saved = saved["states"], step
        jax.tree.map(lambda x, y: x.__setitem__(..., y), self._beside, {name: saved[name] for name in self._beside})
        done = self._steps.index(step) + 1
        self.reports = [jax.tree.map(lambda x, point=point: x[point], saved["reports"]) for point in range(done)]

    def add(self, states: RunState, report: Report, signal_number: int | None) -> None:
        """Add a point; save if it is due, if it is the last one, or if a signal arrived.

        Args:
          states: states of all runs at the point.
          report: report since the previous point.
          signal_number: the signal that ends the sweep, if one arrived.

        Raises:
          KeyboardInterrupt, SystemExit: a signal arrived, and the sweep is saved.
        """
        self.states = states
        self.reports.append(report)
        step = self._steps[len(self.reports) - 1]
        if self._checkpointer is None:
            return
        if signal_number is not None or step - self._saved >= self._every or step == self._steps[-1]:
            room = self._room(report)
            for point, one in enumerate(self.reports):
                jax.tree.map(lambda x, y, point=point: x.__setitem__(point, y), room, one)
            self._checkpointer.save(step, {"states": states, "reports": room} | jax.tree.map(np.copy, self._beside))
            self._saved = step
        if signal_number is not None:
            if self._checkpointer.wait():
                where = self._checkpointer.directory.parent.parent
                text = f"saved at step {step} of each run in {where}; the same call goes on there"
                warnings.warn(text, RuntimeWarning, stacklevel=5)
            raise interrupted(signal_number)

    def _room(self, report):
        """Return zeros for the reports of all points, so that shapes do not depend on the number of points so far."""
        return jax.tree.map(lambda x: np.zeros((len(self._steps), *x.shape), x.dtype), report)
