"""What a run leaves behind: its result, and the directory that holds it."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.checkpoint import Checkpointer
from jaxrl.config import encode
from jaxrl.errors import RunDirectoryError
from jaxrl.evaluation import Evaluation, evaluate
from jaxrl.parallel import distributed
from jaxrl.parallel.mesh import local
from jaxrl.parallel.rollout import RunState
from jaxrl.plotting import Chart, Run, plot_run
from jaxrl.policy import Policy
from jaxrl.run_directory import MAY_CHANGE, RunDirectory, read_config, write_json
from jaxrl.schedules import at
from jaxrl.types import Algorithm, Environment, HostRecipe
from jaxrl.watchdog import STEP_TIMEOUT

# With the same shards the same run, up to rounding, goes on on any number of devices.
_MAY_CHANGE = (*MAY_CHANGE, "topology.devices")


@dataclasses.dataclass
class Result:
    """What a training run leaves behind.

    Attributes:
      state: the whole state of the run after the last good chunk.
      metrics: one row a chunk: "step", "train/...", "update/...", and "evaluation/..." where there was one.
      evaluation: the last evaluation, or None if the run was stopped before any.
      stopped: "finished", "target_return", "interrupted", or "non_finite".
      problem: what was not finite and where, if that stopped the run.
      total_steps: rows done, over all environments.
    """

    algo: Algorithm
    env: Environment | HostRecipe
    state: RunState
    metrics: list[dict[str, float]]
    evaluation: Evaluation | None
    stopped: str
    problem: str | None
    total_steps: int
    steps_per_second: float
    wall_seconds: float
    spec: Any
    progress: float
    run_dir: Path | None = None
    seed: int | None = None

    @property
    def policy(self) -> Policy:
        """The policy as learnt, its statistics frozen."""
        final, actor = frozen(self.algo, local(self.state.learner), np.float32(self.progress))
        return Policy(final, actor, self.spec)

    def evaluate(
        self, episodes: int = 128, *, seed: int = 0, explore: bool = False, step_timeout: float = STEP_TIMEOUT
    ) -> Evaluation:
        """Plays complete episodes with the policy as learnt; the arguments are those of `jaxrl.evaluate`."""
        policy, settings = self.policy, {"seed": seed, "episodes": episodes, "explore": explore}
        return evaluate(policy.algo, policy.actor, self.env, self.spec, step_timeout=step_timeout, **settings)

    def plot(self, path: str | Path | None = None) -> Chart:
        """The learning curve, which notebooks show; also a picture at `path`, if given."""
        config = {"algorithm": {"type": type(self.algo).__name__}, "environment": {"name": self.env.name}}
        return plot_run(Run("run", config, self.metrics), path)

    def save(self, path: str | Path) -> Path:
        """Writes a run directory that `jaxrl.load` reads: configuration, metrics and the whole state.

        With several processes, all call it.
        """
        config = run_config(self.algo, self.env, None, self.total_steps, None, {})
        with opened(path, config) as (_, checkpointer):
            checkpointer.save(self.total_steps, self.state)
        return Path(path)


@contextlib.contextmanager
def opened(
    path: str | Path, config: Mapping[str, Any], *, overwrite: bool = False, keep: int = 3
) -> Generator[tuple[RunDirectory | None, Checkpointer]]:
    """A run's directory, which the first process alone holds, and its checkpoints."""
    with contextlib.ExitStack() as stack:
        directory = None
        with distributed.jointly("opening the run directory"):
            if distributed.is_leader():
                directory = RunDirectory(path, config, overwrite=overwrite, may_change=_MAY_CHANGE)
                stack.enter_context(directory)
        with distributed.jointly("reading the run directory"):
            if not distributed.is_leader() and read_config(path) != json.loads(json.dumps(config)):
                raise RunDirectoryError(f"{Path(path).absolute()} is not the same directory on every process")
            checkpointer = Checkpointer(Path(path) / "checkpoints", config=config, keep=keep)
            stack.enter_context(checkpointer)
        yield directory, checkpointer


def run_config(
    algo, env, topology, total_steps, seed, settings: Mapping[str, Any], dataset: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `config.json` says of a run, and what must be the same where it goes on."""
    return {
        "algorithm": encode(algo),
        "environment": {"name": env.name, "value": encode(env)},
        "topology": encode(topology),
        "total_steps": total_steps,
        "seed": seed,
        "logging": dict(settings),
    } | ({} if dataset is None else {"dataset": dict(dataset)})


def logging_settings(
    evaluate_every: int | None, evaluation_episodes: int, explore_in_evaluation: bool, save_replay: bool = True
) -> dict[str, Any]:
    """What `config.json` says under "logging"; where it differs, the same run goes on and is looked at otherwise."""
    settings: dict[str, Any] = {"evaluate_every": evaluate_every, "evaluation_episodes": evaluation_episodes}
    unusual = {"explore_in_evaluation": True} if explore_in_evaluation else {}
    return settings | unusual | ({} if save_replay else {"save_replay": False})


@jax.jit
def frozen(algo, learner, progress):
    """The algorithm as it is at `progress`, and what acting with it needs."""
    algo = at(algo, progress)
    return algo, algo.actor(learner)


def write_result(result: Result, directory: RunDirectory) -> None:
    """Writes the result and its learning curve; a disk that is full by then costs no more than that."""
    evaluation = {} if result.evaluation is None else result.evaluation.metrics()
    record = {
        "evaluation": evaluation,
        "stopped": result.stopped,
        "problem": result.problem,
        "total_steps": result.total_steps,
        "steps_per_second": result.steps_per_second,
        "wall_seconds": result.wall_seconds,
    }
    try:
        write_json(directory.result, record)
        if result.metrics:
            plot_run(directory.path, directory.learning_curve)
    except OSError as error:
        warnings.warn(f"the result could not be written to {directory.path}: {error}", RuntimeWarning, stacklevel=4)
