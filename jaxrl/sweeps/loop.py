"""The loop over the points of many runs of one program: what sweeps and populations are trained by."""

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
    """Explain which settings do not go with `run_dir`, or without it; one line each."""
    if run.run_dir is None and (run.checkpoint_every is not None or run.overwrite):
        return ["checkpoint_every and overwrite have no meaning without run_dir=, which keeps the checkpoints"]
    if run.run_dir is not None and jax.process_count() > 1:
        return [
            f"run_dir= with {jax.process_count()} processes: a sweep keeps checkpoints in one process only; use "
            "jaxrl.sweeps.launcher.launch (--backend ray), whose runs resume on several machines"
        ]
    return []


def share(runs: list[Any]) -> list[Any]:
    """Those of this process; every process has the same number, so the last ones may have the last run again."""
    processes, index = jax.process_count(), jax.process_index()
    padded = runs + runs[-1:] * (-len(runs) % processes)
    each = len(padded) // processes
    return padded[index * each : (index + 1) * each]


def gathered(part: dict[str, Any], each: int) -> dict[str, Any]:
    """What all processes have of `each` run that is theirs, in the order of runs."""
    of_runs = {name: value for name, value in part.items() if name != "steps"}
    mine = jax.tree.map(lambda x: np.asarray(x)[:each], of_runs)  # the rest fills up a device
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
    """Train runs from point to point, or on from their newest checkpoint.

    Args:
      many: how they are computed.
      algos, roots: their algorithms and root keys, stacked.
      run: any one of them, which says what all share.
      points: of the curves, evenly over the iterations.
      display: shows how far they are.
      done_before: environment steps of all runs of the programs before.
      checkpointer: where they are kept.
      population: what happens to the runs between two points, if anything.

    Returns:
      Of all runs "steps", "metrics" by name, "failed" (runs, points) and "learner"; seconds and environment steps of
      each point; and the environment steps of all runs so far.

    Raises:
      KeyboardInterrupt, SystemExit: as a signal asked for, once the runs are saved.
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
                signals.hold()  # compiled, and there will be something to save
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
            since = time.monotonic()  # what saving took is not training
        if checkpointer is not None:
            checkpointer.wait()
    if signals.received is not None:  # since the last point, which is saved
        raise interrupted(signals.received)
    with np.errstate(invalid="ignore", divide="ignore"):  # means where no episode ended are NaN
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
    """The mean over the runs in which an episode ended; NaN where there is none."""
    returns, count = (np.asarray(values)[:runs] for values in (report.episodes.returns, report.episodes.count))
    ended = count > 0
    return float(np.mean(returns[ended] / count[ended])) if ended.any() else float("nan")
