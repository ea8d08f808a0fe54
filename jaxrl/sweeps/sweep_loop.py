"""Training loop of sweeps and populations, which trains many runs of one program from point to point and saves them."""

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
from jaxrl.core.config import encode
from jaxrl.core.errors import CheckpointError
from jaxrl.envs.configs import to_config
from jaxrl.parallel.multihost import distributed, place
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
    """Return error messages about settings that sweeps, populations and searches share; enable the compilation cache.

    Raises:
      ConfigError: this program was launched with an evaluator, which does not support `kind`.
    """
    place.check_no_evaluator(kind)
    keep_compiled_programs()
    problems = []
    if "dataset" in space:
        problems.append(f"dataset=: {kind} does not accept a dataset; call jaxrl.train(dataset=...) for each run")
    if run.run_dir is None:
        unusable = {"checkpoint_every": run.checkpoint_every is not None, "overwrite": run.overwrite}
        problems += [f"{name} needs run_dir=, where {kind} is saved" for name, is_set in unusable.items() if is_set]
    elif jax.process_count() > 1:
        problems.append(
            f"run_dir= with {jax.process_count()} processes: {kind} saves checkpoints only in a single process; use "
            "jaxrl.sweeps.launcher.launch (--backend ray), whose runs resume on several machines"
        )
    return problems


def identity_of(run: RunSettings, mapping: str) -> dict[str, Any]:
    """Return the settings of all runs that must be equal when a sweep, a population or a search is resumed."""
    env = run.env if isinstance(run.env, str) else to_config(run.env)
    identity = {"algorithm": encode(run.algo), "environment": env, "topology": encode(run.topology)}
    return identity | {"total_steps": run.total_steps, "mapping": mapping}


def gathered(part: dict[str, Any], each: int) -> dict[str, Any]:
    """Return the first `each` runs of every process, concatenated in the order of the processes."""
    if jax.process_count() == 1:
        return part
    mine = jax.tree.map(lambda x: np.asarray(x)[:each], part)  # the other runs are padding
    return multihost_utils.process_allgather(mine, tiled=True)


@dataclasses.dataclass
class Session:
    """The state of a call that trains a sweep or a population: checkpoints, progress bar and speed.

    Attributes:
      run_dir: the directory of the sweep, or None.
      checkpointers: the checkpointer of each program; None without a directory.
      display: the progress bar.
      began: start of the call, in monotonic seconds.
      done: environment steps of all runs so far.
      timed: seconds and environment steps of the training before each point, unless it included compilation.
    """

    run_dir: Path | None
    checkpointers: list[Checkpointer] | list[None]
    display: ProgressBar
    began: float = dataclasses.field(default_factory=time.monotonic)
    done: int = 0
    timed: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return the speed and the duration of the call, keyed by their names in `SweepResult`."""
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
    """Check and open the directory of a sweep or a population, and start its progress bar.

    Args:
      run: the settings of the call.
      kind: "a sweep" or "a population".
      identity: settings that must be equal on all processes, and when the call is resumed.
      programs: additional settings of each program that must be equal when the call is resumed.
      total: environment steps of all runs of this process.
      configs, seeds: the configurations and seeds that identify finished results.

    Raises:
      ConfigError: settings differ between processes.
      RunDirectoryError: the directory is in use, or contains something else (the message names the difference).
    """
    distributed.check_same({**identity, **run.logging})
    run_dir = None if run.run_dir is None else files.expand(run.run_dir)
    with contextlib.ExitStack() as stack:
        checkpointers = [None] * len(programs)
        if run_dir is not None:
            other = run.overwrite or (run_dir / "program-0").exists()  # opening the checkpoints reports differences
            sweep_directory.check(run_dir, kind, configs, seeds, overwrite=other)
            # No limit on failed saves: until all runs have ended, their states are kept in memory anyway.
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
        display = stack.enter_context(ProgressBar(visible=run.progress and distributed.is_leader()))
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
    """Train the runs of one program from point to point, starting from their newest checkpoint if there is one.

    Args:
      session: the state of this call.
      number: index of the program.
      many: the compiled program of the runs.
      algos, roots: algorithms and root keys of the runs, stacked.
      run: any of the runs, for the settings that all runs share.
      points: number of points of the curves, spaced evenly over the iterations.
      population: the population, which changes the runs between points; None for a sweep.

    Returns:
      A dictionary: "metrics", arrays (runs, points) by name; "failed", bool (runs, points); and "learner", the final
      learner states of all runs.

    Raises:
      KeyboardInterrupt, SystemExit: on a signal, after the runs were saved.
    """
    many.check_memory(algos, run.env, roots)
    checkpointer, env = session.checkpointers[number], run.env
    borders = [0, *run.steps(points)]
    every = run.settings.checkpoint_every
    every = max(run.settings.total_steps // 10, 1) if every is None else every
    states = many.start(algos, env, roots)
    shapes = jax.eval_shape(lambda states: many.chunk(algos, env, states, 1, run.total_steps_per_env)[1], states)
    # Allocated for all points, so that shapes do not depend on the number of completed points.
    record: dict[str, Any] = {"reports": jax.tree.map(lambda x: np.zeros((points, *x.shape), x.dtype), shapes)}
    record |= {} if population is None else {"beside": population.record}
    first = 0
    if checkpointer is not None and not checkpointer.is_empty():
        runs = NamedSharding(many.mesh, PartitionSpec("runs"))
        states = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=runs), states)  # frees memory
        states, first = _restored(checkpointer, states, record, borders)
    saved = borders[first]
    session.done += saved * many.runs
    timed = []
    with Signals() as signals:
        since = time.monotonic()
        for point in range(first, points):
            if population is not None:
                algos = population.algos(point)
            step = borders[point + 1]
            length = step - borders[point]
            states, report = many.chunk(algos, env, states, length // run.rows, run.total_steps_per_env)
            if checkpointer is not None:
                signals.hold()  # the chunk is compiled, so there will be a state to save
            report = jax.device_get(report)
            timed.append((time.monotonic() - since, length * many.runs))
            session.done += length * many.runs
            metrics = {"train/return_mean": _mean_return(report, many.runs)}
            if len(timed) > 1:  # the first point includes compilation
                metrics["steps_per_second"] = timed[-1][1] / max(timed[-1][0], 1e-9)
            session.display.update(session.done, metrics)
            if population is not None:
                states = population.step(point, algos, states, report)
            jax.tree.map(lambda room, x, point=point: room.__setitem__(point, x), record["reports"], report)
            if checkpointer is not None:
                received = signals.received
                if received is not None or step - saved >= every or step == borders[-1]:
                    checkpointer.save(step, {"states": states} | record)
                    saved = step
                if received is not None:
                    if checkpointer.wait():
                        where = checkpointer.directory.parent.parent
                        text = f"saved at step {step} of each run in {where}; the same call resumes from there"
                        warnings.warn(text, RuntimeWarning, stacklevel=4)
                    raise _interrupted(received)
            since = time.monotonic()  # saving does not count as training
        if checkpointer is not None:
            checkpointer.wait()
    if signals.received is not None:  # after the last point, which was saved
        raise _interrupted(signals.received)
    session.timed += timed[1:] or timed  # the first point includes compilation
    reports = record["reports"]
    with np.errstate(invalid="ignore", divide="ignore"):  # means are NaN if no episode ended
        curves = reports.metrics() | {"failed": reports.failed_at >= 0}
    curves = {name: np.moveaxis(np.asarray(curve), 0, -1)[: many.runs] for name, curve in curves.items()}
    return {"failed": curves.pop("failed"), "metrics": curves, "learner": states.learner}


def _restored(checkpointer, states, record, borders):
    """Restore the states from the newest checkpoint, and the record in place; return the states and the next point.

    Raises:
      CheckpointError: no checkpoint matches this sweep.
    """
    saved, step, _ = checkpointer.restore({"states": states} | record)
    if step not in borders[1:]:
        raise CheckpointError(f"{checkpointer.directory} contains step {step}, which is not a point of this sweep")
    jax.tree.map(np.copyto, record, {name: saved[name] for name in record})
    return saved["states"], borders.index(step)


def _mean_return(report, runs):
    """Return the mean return of the runs in which an episode ended; NaN if there are none."""
    returns, count = (np.asarray(values)[:runs] for values in (report.episodes.returns, report.episodes.count))
    ended = count > 0
    return float(np.mean(returns[ended] / count[ended])) if ended.any() else float("nan")


def _interrupted(number):
    """Return the exception to raise, after the sweep is saved, for the signal that interrupted it."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
