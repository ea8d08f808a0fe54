"""Result of a run, and the run directory that stores it."""

import base64
import contextlib
import dataclasses
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl.core import files, presentation
from jaxrl.core.arguments import checked
from jaxrl.core.errors import RunDirectoryError
from jaxrl.core.keys import held_out_seed
from jaxrl.core.pickled import dumped, loaded
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, Environment, HostRecipe
from jaxrl.core.versions import own_version
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.parallel.mesh import local
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.multihost.place import own_place
from jaxrl.plots.curves import plot_run
from jaxrl.run.directory.checkpoint import Checkpointer
from jaxrl.run.directory.run_directory import RunDirectory, read_config
from jaxrl.run.loggers import CSVLogger, JSONLLogger, Logger, Loggers, TensorBoardLogger
from jaxrl.run.loop.advice import late_return
from jaxrl.run.plotting import as_run, plot_runs
from jaxrl.run.policies.evaluation import Evaluation, evaluate, scores_of
from jaxrl.run.policies.policy import Policy

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart

_LONGEST_COMMAND = 2000  # characters


@dataclasses.dataclass
class Result:
    """The result of a training run.

    Attributes:
      state: the complete state of the run after the last chunk with finite values.
      metrics: a row every `log_every` steps, and at evaluations and checkpoints, with the entries "step", "train/...",
        "update/..." and, for an evaluation, "evaluation/...".
      evaluation: the last evaluation, without episodes if the run stopped before the first.
      stopped: "finished", "interrupted", "target_return", "non_finite", "unsaved" (checkpoints could not be written, or
        the run directory was deleted), or the stop reason of a callback.
      problem: a description of the values that were not finite, or the saving error, that stopped the run; else None.
      total_steps: environment steps so far, over all environments.
      steps_per_second: environment steps per second in the compiled loop, without compiling, evaluating and saving.
      wall_seconds: duration of this call of `train` in seconds, without earlier sessions of a resumed run.
      seconds: `wall_seconds` divided by part (`jaxrl.run.loop.timing.PARTS`), and the import time of a command.
      session_steps: environment steps of this session.
      earlier_seconds: duration of the earlier sessions in seconds, up to their last row of metrics.
      config: the contents of `config.json`, with `total_steps` rounded up to whole iterations.
      callbacks: the state of the callbacks, as in checkpoints.
    """

    algo: Algorithm
    env: Environment | HostRecipe
    state: RunState
    metrics: list[dict[str, float]]
    evaluation: Evaluation
    stopped: str
    problem: str | None
    total_steps: int
    steps_per_second: float
    wall_seconds: float
    spec: Any
    progress: float
    run_dir: Path | None = None
    seed: int | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    session_steps: int = 0
    earlier_seconds: float = 0.0
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        parts = [f"{self.total_steps:,} steps", self.stopped]
        parts += [repr(self.evaluation)] if self.evaluation else []
        parts += [] if (trained := late_return(self.metrics)) is None else [f"in training {trained:.4g}"]
        parts += [] if self.run_dir is None else [str(self.run_dir)]
        return f"Result({type(self.algo).__name__} on {self.env.name}: {', '.join(parts)})"

    def record(self) -> dict[str, Any]:
        """Return the contents of `result.json`."""
        return {
            "evaluation": self.evaluation.metrics() if self.evaluation else {},
            "explored": self.config.get("logging", {}).get("explore_in_evaluation", False),
            "training_return": late_return(self.metrics),
            "stopped": self.stopped,
            "problem": self.problem,
            "total_steps": self.total_steps,
            "steps_per_second": self.steps_per_second,
            "wall_seconds": self.wall_seconds,
            "seconds": dict(self.seconds),
            "session_steps": self.session_steps,
            "run_steps_per_second": self.session_steps / max(self.wall_seconds, 1e-9),
            "total_seconds": self.earlier_seconds + self.wall_seconds,
        }

    def _repr_html_(self) -> str:
        """Return a table and the learning curve as HTML, which notebooks display."""
        rows = [("environment steps", f"{self.total_steps:,}"), ("ended", self.stopped)]
        rows += [] if self.problem is None else [("problem", self.problem)]
        rows += [("last evaluation", repr(self.evaluation))] if self.evaluation else []
        rows += [("steps per second", f"{self.steps_per_second:,.0f}"), ("seconds", f"{self.wall_seconds:,.1f}")]
        rows += [] if self.run_dir is None else [("run directory", str(self.run_dir))]
        title = f"{type(self.algo).__name__} on {self.env.name}"
        found = presentation.as_html(title, [(name, value, "", False) for name, value in rows])
        if not any(name.endswith("return_mean") for row in self.metrics for name in row):
            return found
        picture = base64.b64encode(self.plot()._repr_png_()).decode()
        return f'{found}\n<img alt="learning curve" src="data:image/png;base64,{picture}">'

    def __reduce__(self) -> tuple[Any, ...]:
        instead = "use result.save(path), and jaxrl.load(path) in the other process"
        return _unpickled, (dumped(repr(self), vars(self), instead),)

    def __copy__(self) -> "Result":
        return dataclasses.replace(self)

    @property
    def policy(self) -> Policy:
        """The trained policy, with frozen statistics."""
        final, actor = policy_at(self.algo, local(self.state.learner), np.float32(self.progress))
        return Policy(final, actor, self.spec, self.env)

    @checked(episodes={"low": 1}, step_timeout={"above": 0})
    def evaluate(
        self,
        episodes: int = 128,
        *,
        seed: int | None = None,
        explore: bool = False,
        step_timeout: float = STEP_TIMEOUT,
        opponent: Policy | str | os.PathLike | None = None,
    ) -> Evaluation:
        """Evaluate the trained policy on complete episodes; the arguments are those of `jaxrl.evaluate`.

        Without a seed, the episodes differ from those of the run's own evaluations, because these may have been used to
        choose the policy or the settings.
        """
        policy = self.policy
        seed = held_out_seed(self.seed or 0) if seed is None else seed
        return evaluate(
            policy.algo,
            policy.actor,
            self.env,
            self.spec,
            seed=seed,
            episodes=episodes,
            explore=explore,
            step_timeout=step_timeout,
            opponent=opponent,
        )

    def plot(self, path: str | Path | None = None) -> "Chart":
        """Return the learning curve, which notebooks display, and write it to `path` if given."""
        return plot_run(as_run("run", self.config, self.metrics), path)

    def save(self, path: str | Path) -> Path:
        """Write a run directory for this run, with a checkpoint of its last state.

        `jaxrl.load` reads the directory, and `jaxrl.train` with the arguments of the run and `run_dir=path` continues
        the run. With several processes, all must call this method.

        Args:
          path: the directory; created if missing. The files of an earlier `save` of this run are replaced.

        Returns:
          The directory.

        Raises:
          CheckpointError: the state could not be saved.
          RunDirectoryError: `path` cannot be written to, or contains another run.
        """
        path = files.expand(path)
        with opened(path, self.config) as (directory, checkpointer):
            if directory is not None:
                loggers = Loggers(metrics_files(directory, -1))
                for row in self.metrics:
                    loggers.write(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
                loggers.close()
            score = scores_of(self.metrics).get(self.total_steps)
            checkpointer.save(self.total_steps, self.state, score=score, callbacks=self.callbacks)
            checkpointer.wait(last=True)
            if directory is not None:
                write_result(self, directory)
        return path


def metrics_files(directory: RunDirectory, step: int) -> list[Logger]:
    """Delete the metrics of a run directory after `step`, and return the loggers of its files."""
    truth = JSONLLogger(directory.metrics_jsonl, last=step)
    resumed_at = step if directory.resumed else None
    tensorboard = TensorBoardLogger(directory.path / "tensorboard", resumed_at=resumed_at, config=directory.config)
    return [truth, CSVLogger(directory.path / "metrics.csv", directory.metrics_jsonl), tensorboard]


def _unpickled(data: bytes) -> Result:
    return Result(**loaded(data))


@contextlib.contextmanager
def opened(
    path: str | Path, config: Mapping[str, Any], *, overwrite: bool = False, **settings: int
) -> Generator[tuple[RunDirectory | None, Checkpointer]]:
    """Open and lock a run directory in the first process, and yield it with its `Checkpointer(**settings)`."""
    path = files.expand(path)
    with contextlib.ExitStack() as stack:
        directory = None
        with distributed.collective_errors("opening the run directory"):
            if distributed.is_leader():
                place = own_place()
                start = None if place is None else place.start
                directory = RunDirectory(path, config, overwrite=overwrite, launch=start)
                stack.enter_context(directory)
        with distributed.collective_errors("reading the run directory"):
            if not distributed.is_leader() and read_config(path) != files.as_read_back(config):
                raise RunDirectoryError(f"{path.absolute()} differs between processes; use a directory that all share")
            checkpointer = Checkpointer(path / "checkpoints", config=config, **settings)
            stack.enter_context(checkpointer)
        yield directory, checkpointer


@jax.jit
def policy_at(algo, learner, progress):
    """Return the algorithm with its schedules resolved at `progress`, and its actor state."""
    algo = resolve_schedules(algo, progress)
    return algo, algo.actor(learner)


def origin() -> dict[str, str]:
    """Return the command and the machine of this process, and the versions of jaxrl, JAX and Python."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    name = Path(sys.argv[0]).name
    return {
        "command": shlex.join(["jaxrl" if name == "__main__.py" else name, *sys.argv[1:]])[:_LONGEST_COMMAND],
        "machine": f"{machine}, {jax.device_count()} x {jax.local_devices()[0].device_kind}",
        "versions": f"jaxrl {own_version()}, jax {jax.__version__}, Python {platform.python_version()}",
    }


def write_result(result: Result, directory: RunDirectory) -> None:
    """Write the result and its learning curve, or warn if they cannot be written."""
    try:
        files.write_json(directory.result, result.record() | {"start": directory.start, "origin": origin()})
        if result.metrics:
            plot_runs([directory.path], directory.path / "learning_curve.png")
    except (OSError, RunDirectoryError) as error:
        warnings.warn(f"the result could not be written to {directory.path}: {error}", RuntimeWarning, stacklevel=4)
