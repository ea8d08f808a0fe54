"""The training loop of sweeps and populations: over the points of many runs of one program."""

import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl.run.progress import ProgressBar
from jaxrl.run.settings import RunSettings
from jaxrl.run.signals import Signals
from jaxrl.sweeps.make_train import CompiledRun
from jaxrl.sweeps.sweep_checkpoints import Progress, interrupted
from jaxrl.sweeps.vectorized import VectorizedRuns

if TYPE_CHECKING:
    from jaxrl.run.checkpoint import Checkpointer
    from jaxrl.sweeps.population import Population


def directory_problems(run: RunSettings) -> list[str]:
    """Explain which settings are incompatible with `run_dir`, or need it; one line each."""
    if run.run_dir is None and (run.checkpoint_every is not None or run.overwrite):
        return ["checkpoint_every and overwrite have no meaning without run_dir=, which keeps the checkpoints"]
    if run.run_dir is not None and jax.process_count() > 1:
        return [
            f"run_dir= with {jax.process_count()} processes: a sweep keeps checkpoints in one process only; use "
            "jaxrl.sweeps.launcher.launch (--backend ray), whose runs resume on several machines"
        ]
    return []


def share(runs: list[Any]) -> list[Any]:
    """Return the runs of this process, the same number on each, so the last processes may repeat the last run."""
    processes, index = jax.process_count(), jax.process_index()
    padded = runs + runs[-1:] * (-len(runs) % processes)
    each = len(padded) // processes
    return padded[index * each : (index + 1) * each]


def gathered(part: dict[str, Any], each: int) -> dict[str, Any]:
    """Gather the first `each` runs of every process, in the order of runs."""
    of_runs = {name: value for name, value in part.items() if name != "steps"}
    mine = jax.tree.map(lambda x: np.asarray(x)[:each], of_runs)  # the rest is padding
    return multihost_utils.process_allgather(mine, tiled=True) | {"steps": part["steps"]}


def train_many(
    many: VectorizedRuns,
    algos: Any,
    run: CompiledRun,
    roots: jax.Array,
    points: int,
    display: ProgressBar | None,
    done_before: int,
    checkpointer: "Checkpointer | None",
    population: "Population | None" = None,
) -> tuple[dict[str, Any], list[tuple[float, int]], int]:
    """Train runs from point to point, from the beginning or from their newest checkpoint.

    Args:
      many: the compiled program of the runs.
      algos, roots: their algorithms and root keys, stacked.
      run: any one of the runs, for the settings that all share.
      points: number of points of the curves, evenly over the iterations.
      display: shows their progress.
      done_before: environment steps of all runs of earlier programs.
      checkpointer: keeps their checkpoints, if given.
      population: changes the runs between two points, if given.

    Returns:
      "steps", "metrics" by name, "failed" (runs, points) and "learner" of all runs; seconds and environment steps of
      each point; and the environment steps of all runs so far.

    Raises:
      KeyboardInterrupt, SystemExit: on a signal, once the runs are saved.
    """
    many.check_memory(algos, run.env, roots)
    borders = [run.iterations * (index + 1) // points for index in range(points)]
    rows, env = run.rows, run.env
    steps = [border * rows for border in borders]
    every = run.settings.checkpoint_every
    every = max(run.settings.total_steps // 10, 1) if every is None else every
    beside = {} if population is None else population.record
    progress = Progress(many.start(algos, env, roots), steps, checkpointer, every, beside)
    if checkpointer is not None:
        shapes = jax.eval_shape(
            lambda states: many.chunk(algos, env, states, 1, run.total_steps_per_env)[1], progress.states
        )
        progress.restore(shapes, many.mesh)
    at_iteration = borders[len(progress.reports) - 1] if progress.reports else 0
    timed, done = [], done_before + at_iteration * rows * many.runs
    with Signals() as signals:
        since = time.monotonic()
        for point in range(len(progress.reports), points):
            if population is not None:
                algos = population.algos(point)
            length = borders[point] - at_iteration
            states, report = many.chunk(algos, env, progress.states, length, run.total_steps_per_env)
            if checkpointer is not None:
                signals.hold()  # the chunk is compiled, so there will be a state to save
            report = jax.device_get(report)
            now = time.monotonic()
            timed.append((now - since, length * rows * many.runs))
            at_iteration = borders[point]
            done += length * rows * many.runs
            if display is not None:
                metrics = {"train/return_mean": _mean_return(report, many.runs)}
                if len(timed) > 1:  # the first part compiles
                    metrics["steps_per_second"] = timed[-1][1] / max(timed[-1][0], 1e-9)
                display.update(done, metrics)
            if population is not None:
                states = population.step(point, algos, states, report)
            progress.add(states, report, signals.received)
            since = time.monotonic()  # the time to save does not count as training
        if checkpointer is not None:
            checkpointer.wait()
    if signals.received is not None:  # after the last point, which is saved
        raise interrupted(signals.received)
    with np.errstate(invalid="ignore", divide="ignore"):  # means without an ended episode are NaN
        curves = [report.metrics() for report in progress.reports]
    failed = np.stack([report.failed_at for report in progress.reports], axis=-1) >= 0
    return (
        {
            "steps": np.asarray(steps),
            "metrics": {
                name: np.stack([np.asarray(curve[name])[: many.runs] for curve in curves], -1) for name in curves[0]
            },
            "failed": failed[: many.runs],
            "learner": progress.states.learner,
        },
        timed[1:] or timed,  # the first part compiles
        done,
    )


def _mean_return(report, runs):
    """Return the mean over the runs in which an episode ended; NaN if there is none."""
    returns, count = (np.asarray(values)[:runs] for values in (report.episodes.returns, report.episodes.count))
    ended = count > 0
    return float(np.mean(returns[ended] / count[ended])) if ended.any() else float("nan")
