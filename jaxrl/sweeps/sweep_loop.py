"""The training loop of sweeps and populations: over the points of many runs of one program, with checkpoints."""

import contextlib
import dataclasses
import signal
import sys
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core import files, ownership
from jaxrl.core.errors import CheckpointError
from jaxrl.core.limits import count_problems, training_problems
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.multihost.place import check_no_evaluator
from jaxrl.run.compile_cache import keep_compiled_programs
from jaxrl.run.directory import sweep_directory
from jaxrl.run.directory.checkpoint import Checkpointer
from jaxrl.run.loop.progress import ProgressBar
from jaxrl.run.loop.signals import Signals
from jaxrl.run.result import opened
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.make_train import CompiledRun
from jaxrl.sweeps.vectorized import VectorizedRuns

if TYPE_CHECKING:
    from jaxrl.sweeps.population import Population


def settings_problems(kind: str, run: RunSettings, space: Mapping[str, Any]) -> list[str]:
    """Return the errors in the settings that sweeps, populations and searches share; keep what they compile.

    Raises:
      ConfigError: this program was launched with an evaluator, which could not follow `kind`.
    """
    check_no_evaluator(kind)
    keep_compiled_programs()
    problems = count_problems(evaluate_every=(run.evaluate_every, 1), checkpoint_every=(run.checkpoint_every, 1))
    problems += training_problems(total_steps=run.total_steps, evaluation_episodes=run.evaluation_episodes)
    if "dataset" in space:
        problems.append(f"dataset=: {kind} takes no dataset; call jaxrl.train(dataset=...) for each run")
    if run.run_dir is None:
        unusable = {"checkpoint_every": run.checkpoint_every is not None, "overwrite": run.overwrite}
        problems += [f"{name} needs run_dir=, which keeps {kind}" for name, is_set in unusable.items() if is_set]
    elif jax.process_count() > 1:
        problems.append(
            f"run_dir= with {jax.process_count()} processes: {kind} keeps checkpoints in one process only; use "
            "jaxrl.sweeps.launcher.launch (--backend ray), whose runs resume on several machines"
        )
    return problems


def gathered(part: dict[str, Any], each: int) -> dict[str, Any]:
    """Gather the first `each` runs of every process, in the order of runs."""
    if jax.process_count() == 1:
        return part
    mine = jax.tree.map(lambda x: np.asarray(x)[:each], part)  # the rest is padding
    return multihost_utils.process_allgather(mine, tiled=True)


@dataclasses.dataclass
class Session:
    """The training of one call: the checkpoints of its programs, its progress bar and its speed.

    Attributes:
      run_dir: the directory of the sweep, if it has one.
      checkpointers: the checkpoints of each program; None without a directory.
      display: the progress bar, if it is shown.
      began: monotonic seconds.
      done: environment steps of all runs so far.
      timed: seconds and environment steps of each point, except those that compiled.
    """

    run_dir: Path | None
    checkpointers: list[Checkpointer] | list[None]
    display: ProgressBar | None
    began: float = dataclasses.field(default_factory=time.monotonic)
    done: int = 0
    timed: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return the speed and the time of the call, by their names in results."""
        rate = sum(rows for _, rows in self.timed) / max(sum(seconds for seconds, _ in self.timed), 1e-9)
        rate = sum(distributed.exchange("steps a second", rate))
        return {"steps_per_second": rate, "wall_seconds": time.monotonic() - self.began}


@contextlib.contextmanager
def opened_session(
    run: RunSettings,
    kind: str,
    identity: Mapping[str, Any],
    programs: Sequence[Mapping[str, Any]],
    total: int,
    configs: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
) -> Generator[Session]:
    """Check and open the directory of a sweep or a population, and show the progress of its programs.

    Args:
      run: the settings of the call.
      kind: "a sweep" or "a population".
      identity: what must be the same on all processes, and when the call is resumed.
      programs: for each program, what else must be the same when it is resumed.
      total: environment steps of all runs of this process.
      configs, seeds: the configurations and their seeds, by which finished results are recognized.

    Raises:
      ConfigError: settings differ between processes.
      RunDirectoryError: the directory is in use, or holds something else (the message names the difference).
    """
    distributed.check_same({**identity, **run.logging})
    run_dir = None if run.run_dir is None else files.expand(run.run_dir)
    with contextlib.ExitStack() as stack:
        checkpointers = [None] * len(programs)
        if run_dir is not None:
            other = run.overwrite or (run_dir / "program-0").exists()  # the check of checkpoints names the differences
            sweep_directory.check(run_dir, kind, configs, seeds, overwrite=other)
            # No limit on failed saves: until all runs have ended, their states are only in memory.
            how = {"keep": 2, "max_failures": sys.maxsize}
            checkpointers = [
                stack.enter_context(
                    opened(
                        run_dir / f"program-{number}",
                        {"sweep": {**identity, **program}, "logging": run.logging},
                        overwrite=run.overwrite,
                        **how,
                    )
                )[1]
                for number, program in enumerate(programs)
            ]
            if run.overwrite:
                ownership.remove(run_dir, kind)
        display = stack.enter_context(ProgressBar()) if run.progress and distributed.is_leader() else None
        if display is not None:
            display.start(total, timed=True, phase="compiling")
        yield Session(run_dir, checkpointers, display)


def train_many(
    session: Session,
    number: int,
    many: VectorizedRuns,
    algos: Any,
    run: CompiledRun,
    roots: jax.Array,
    points: int,
    population: "Population | None" = None,
) -> dict[str, Any]:
    """Train the runs of one program from point to point, from the beginning or from their newest checkpoint.

    Args:
      session: the training of this call.
      number: the number of the program.
      many: the compiled program of the runs.
      algos, roots: their algorithms and root keys, stacked.
      run: any one of the runs, for the settings that all share.
      points: number of points of the curves, evenly over the iterations.
      population: changes the runs between two points, if given.

    Returns:
      "metrics" by name and "failed" (runs, points), and "learner" of all runs.

    Raises:
      KeyboardInterrupt, SystemExit: on a signal, once the runs are saved.
    """
    many.check_memory(algos, run.env, roots)
    checkpointer, display, env = session.checkpointers[number], session.display, run.env
    borders = [0, *run.steps(points)]
    every = run.settings.checkpoint_every
    every = max(run.settings.total_steps // 10, 1) if every is None else every
    beside = {} if population is None else population.record
    progress = Progress(many.start(algos, env, roots), borders[1:], checkpointer, every, beside)
    if checkpointer is not None:
        shapes = jax.eval_shape(
            lambda states: many.chunk(algos, env, states, 1, run.total_steps_per_env)[1], progress.states
        )
        progress.restore(shapes, many.mesh)
    session.done += borders[progress.points] * many.runs
    timed = []
    with Signals() as signals:
        since = time.monotonic()
        for point in range(progress.points, points):
            if population is not None:
                algos = population.algos(point)
            length = borders[point + 1] - borders[point]
            states, report = many.chunk(algos, env, progress.states, length // run.rows, run.total_steps_per_env)
            if checkpointer is not None:
                signals.hold()  # the chunk is compiled, so there will be a state to save
            report = jax.device_get(report)
            timed.append((time.monotonic() - since, length * many.runs))
            session.done += length * many.runs
            if display is not None:
                metrics = {"train/return_mean": _mean_return(report, many.runs)}
                if len(timed) > 1:  # the first part compiles
                    metrics["steps_per_second"] = timed[-1][1] / max(timed[-1][0], 1e-9)
                display.update(session.done, metrics)
            if population is not None:
                states = population.step(point, algos, states, report)
            progress.add(states, report, signals.received)
            since = time.monotonic()  # the time to save does not count as training
        if checkpointer is not None:
            checkpointer.wait()
    if signals.received is not None:  # after the last point, which is saved
        raise _interrupted(signals.received)
    session.timed += timed[1:] or timed  # the first part compiles
    with np.errstate(invalid="ignore", divide="ignore"):  # means without an ended episode are NaN
        curves = progress.reports.metrics() | {"failed": progress.reports.failed_at >= 0}
    curves = {name: np.moveaxis(np.asarray(curve), 0, -1)[: many.runs] for name, curve in curves.items()}
    return {"failed": curves.pop("failed"), "metrics": curves, "learner": progress.states.learner}


def _mean_return(report, runs):
    """Return the mean over the runs in which an episode ended; NaN if there is none."""
    returns, count = (np.asarray(values)[:runs] for values in (report.episodes.returns, report.episodes.count))
    ended = count > 0
    return float(np.mean(returns[ended] / count[ended])) if ended.any() else float("nan")


def _interrupted(number):
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

    Attributes:
      states: the newest states.
      points: number of points so far.
    """

    def __init__(
        self,
        states: RunState,
        steps: Sequence[int],
        checkpointer: Checkpointer | None,
        every: int,
        beside: Mapping[str, np.ndarray] = {},
    ):
        self.states, self.points = states, 0
        self._record: dict[str, Any] = {"beside": dict(beside)} if beside else {}
        self._steps, self._checkpointer, self._every, self._saved = list(steps), checkpointer, every, 0

    @property
    def reports(self) -> Report:
        """The reports of the points so far, leaves (points, runs, ...)."""
        return jax.tree.map(lambda x: x[: self.points], self._record["reports"])

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
        self._make_room(report)
        runs = NamedSharding(mesh, PartitionSpec("runs"))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=runs), self.states)
        self.states = shapes  # frees the initial states before others are restored
        saved, step, _ = self._checkpointer.restore({"states": shapes} | self._record)
        if step not in self._steps:
            raise CheckpointError(
                f"{self._checkpointer.directory} has step {step}, which is none of this sweep's points"
            )
        self.states, self._saved, self.points = saved["states"], step, self._steps.index(step) + 1
        jax.tree.map(np.copyto, self._record, {name: saved[name] for name in self._record})

    def add(self, states: RunState, report: Report, signal_number: int | None) -> None:
        """Add a point; save if it is due, if it is the last one, or if a signal arrived.

        Args:
          states: states of all runs at the point.
          report: report since the previous point.
          signal_number: the signal that ends the sweep, if one arrived.

        Raises:
          KeyboardInterrupt, SystemExit: a signal arrived, and the sweep is saved.
        """
        self._make_room(report)
        jax.tree.map(lambda room, x: room.__setitem__(self.points, x), self._record["reports"], report)
        self.states, step = states, self._steps[self.points]
        self.points += 1
        if self._checkpointer is None:
            return
        if signal_number is not None or step - self._saved >= self._every or step == self._steps[-1]:
            self._checkpointer.save(step, {"states": states} | self._record)
            self._saved = step
        if signal_number is not None:
            if self._checkpointer.wait():
                where = self._checkpointer.directory.parent.parent
                text = f"saved at step {step} of each run in {where}; the same call goes on there"
                warnings.warn(text, RuntimeWarning, stacklevel=5)
            raise _interrupted(signal_number)

    def _make_room(self, report):
        """Make room for the reports of all points, so that shapes do not depend on the number of points so far."""
        if "reports" not in self._record:
            room = jax.tree.map(lambda x: np.zeros((len(self._steps), *x.shape), x.dtype), report)
            self._record["reports"] = room
