"""Sweeps of separate runs, each in its own process and directory, on a Ray cluster."""

import dataclasses
import hashlib
import os
import re
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.algos.base import replace
from jaxrl.core import arguments, files, host_types, interrupts, ownership
from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.core.resources import Resources
from jaxrl.core.types import Algorithm, num_agents
from jaxrl.envs.env_registry import EnvironmentLike
from jaxrl.parallel.multihost.place import check_no_evaluator
from jaxrl.parallel.ray.cluster import connect, room
from jaxrl.parallel.topology import Topology
from jaxrl.run.directory import run_status, sweep_directory
from jaxrl.run.directory.run_directory import check_below, check_no_pattern, difference, read_config, with_new_fields
from jaxrl.run.loggers import read_metrics
from jaxrl.run.loop.progress import ProgressBar
from jaxrl.run.settings import RunSettings
from jaxrl.run.training import run_training
from jaxrl.sweeps.distributions import COUNTS, checked_seeds, configurations
from jaxrl.sweeps.records import Record
from jaxrl.sweeps.results import Results, leave

_LONGEST_NAME = 100  # characters of a directory's name; file systems allow 255
_ENDED = ("finished", "target_return")


@dataclasses.dataclass(kw_only=True, repr=False)
class Experiments(Results):
    """The results of a sweep whose runs have separate directories, from which `jaxrl.load` loads the policies.

    Attributes:
      run_dirs: the run directories of each configuration, in the order of its seeds.
      errors: traceback of each failed run, keyed by the indices of its configuration and its seed.
    """

    run_dirs: list[list[Path]]
    errors: dict[tuple[int, int], str]

    def records(self) -> list[Record]:
        """Return the runs with their metrics and scores, as saved in their directories."""
        found = []
        for number, paths in enumerate(self.run_dirs):
            for place, path in enumerate(paths):
                rows, result = read_metrics(path / "metrics.jsonl"), run_status.read_result(path)
                score = (
                    np.nan if self.failed[number, place] else result.get("evaluation", {}).get("return_mean", np.nan)
                )
                rows.append({"step": result.get("total_steps", 0)})
                found.append(self.record(number, place, rows, score))
        return found

    def _draw(self, path: Path) -> dict[str, Any]:
        return super()._draw(path) | {"runs": [[os.path.relpath(run, path) for run in runs] for runs in self.run_dirs]}

    def _save_best(self, path: Path, number: int, place: int) -> str:
        run, root = self.run_dirs[number][place], path.absolute()
        if run.is_relative_to(root):
            return str(run.relative_to(root))
        best = path / sweep_directory.BEST
        ownership.remove(best, "the best policy of a sweep or a search")
        best.mkdir(exist_ok=True)
        for name in ("config.json", "metrics.jsonl", "result.json"):
            shutil.copy(run / name, best)
        shutil.copytree(run / "checkpoints", best / "checkpoints", dirs_exist_ok=True)
        return best.name


@interrupts.interruptible
@arguments.checked(**COUNTS, cpus_per_run={"low": 0}, gpus_per_run={"low": 0}, restarts={"low": 0})
def launch(
    algo: Algorithm | str,
    env: EnvironmentLike,
    *,
    total_steps: int,
    run_dir: str | Path,
    seeds: int | Sequence[int] = 8,
    num_samples: int | None = None,
    search_seed: int = 0,
    num_envs: int | None = None,
    topology: Topology | None = None,
    cpus_per_run: float = 1.0,
    gpus_per_run: float = 0.0,
    restarts: int = 3,
    address: str | None = None,
    resources: Resources | None = None,
    evaluation_episodes: int | None = None,
    explore_in_evaluation: bool = False,
    progress: bool = True,
    **space: Any,
) -> Experiments:
    """Train every configuration with every seed in a separate process; Ray runs as many processes as resources allow.

    Each process calls `jaxrl.train`. Runs that have ended are not repeated, and interrupted runs resume from their
    checkpoints.

    Args:
      algo, env, num_envs, topology: settings of every run; host environments are supported. Defaults of the topology
        depend on `algo`, not on changes in `space`.
      total_steps: environment steps per run, over all its environments; the last iteration may exceed it.
      run_dir: parent of the run directories, on storage shared by all machines. The final curves, table and plot are
        also written to it, as by `Experiments.save`.
      seeds: number of seeds, starting from 0; or a list of seeds.
      num_samples: number of random samples of the settings; None: every combination of their values.
      search_seed: seed of the random samples.
      cpus_per_run: CPUs that Ray reserves for each run.
      gpus_per_run: GPUs that Ray reserves for each run; 0: the run uses the CPU.
      restarts: number of times that a run resumes after its process or machine was lost.
      address: address of the Ray cluster; None: RAY_ADDRESS if set, otherwise a cluster of only this machine.
      resources: CPU cores and memory of the parts of each run (Linux). Ray counts CPUs but does not assign cores; with
        reserved cores, such as resources:own_cores=2, runs do not share cores.
      evaluation_episodes, explore_in_evaluation: settings of every run's evaluations, as for `jaxrl.train`.
      progress: show a progress bar of the runs.
      **space: fields of the algorithm, or of an object in one of them ("exploration_bonus.gamma"): a list of values, or
        `Uniform` / `LogUniform` with `num_samples`.

    Returns:
      The results; a run that raised an error is marked as failed and does not affect the others.

    Raises:
      ConfigError: settings are invalid (checked before any run is launched), or a run needs more resources than the
        cluster has.
      RunDirectoryError: a directory contains something else, is a link, or contains a foreign file with a name that
        jaxrl uses.
    """
    check_no_evaluator("a sweep of experiments")
    run = RunSettings.of(locals()).prepared()
    if host_types.only_instance(run.env) is not None:
        raise ConfigError(
            f"{run.env.name} is a single environment, but every run needs a separate one; pass its class or a function"
        )
    seeds = checked_seeds(seeds)
    settings = configurations(num_samples, space, search_seed)
    topology = run.topology.resolve(run.algo, num_agents(run.env))
    run = run.replace(topology=topology, num_envs=None, progress=False)
    runs = [run.replace(algo=replace(run.algo, **setting)).resolved() for setting in settings]
    configs = []  # as `train` writes them
    for one in runs:
        shards = one.topology.bind(one.algo, one.env).layout.shards
        configs.append(one.replace(topology=dataclasses.replace(one.topology, shards=shards)).config() | {"seed": None})
    root = files.expand(run.run_dir).absolute()
    check_no_pattern(root)
    ownership.check_folder(root, "a sweep")
    if any(map(ownership.folder_kind, (root / "program-0", root / sweep_directory.BEST))):
        raise RunDirectoryError(f"{root} contains the results of jaxrl.sweep; use another run_dir (--run-dir)")
    run_dirs = [[root / _name(setting) / f"seed={seed}" for seed in seeds] for setting in settings]
    for paths in run_dirs:
        for path in paths:
            check_below(root, path)
            ownership.check_folder(path, "a run")
    began = time.monotonic()
    again: dict[str, Any] = {"eval_env": None, "dataset_fraction": None}  # `train` sets these itself
    unfinished = {
        (place, index): runs[place].replace(seed=seed, run_dir=run_dirs[place][index], **again)
        for place in range(len(runs))
        for index, seed in enumerate(seeds)
        if not _ended(run_dirs[place][index], configs[place] | {"seed": seed})
    }
    errors = _run(unfinished, cpus_per_run, gpus_per_run, restarts, address, len(settings) * len(seeds), progress)
    wall = time.monotonic() - began
    steps = sum(run_status.read_result(one.run_dir).get("total_steps", 0) for one in unfinished.values())
    rate = steps / max(wall, 1e-9)
    failed = [
        [(place, index) in errors or run_status.read_result(path).get("stopped") not in _ENDED for index, path in paths]
        for place, paths in enumerate(map(enumerate, run_dirs))
    ]
    result = Experiments(
        configurations=settings,
        seeds=seeds,
        failed=np.asarray(failed),
        steps_per_second=rate,
        wall_seconds=wall,
        configs=configs,
        run_dirs=run_dirs,
        errors=errors,
    )
    return leave(result, root, trained=bool(unfinished))


# --- the runs ----------------------------------------------------------------------------------------------------


def _run(unfinished, cpus, gpus, restarts, address, count, progress) -> dict[tuple[int, int], str]:
    """Train the unfinished runs; return the error of each run that failed, keyed by the indices of the run."""
    errors: dict[tuple[int, int], str] = {}
    with ProgressBar(unit="runs", visible=progress) as display:
        display.start(count, count - len(unfinished))
        if not unfinished:
            return errors
        ray = connect(address)
        room(ray, cpus, gpus)
        # One process per run, so that no state is left in the process or on the accelerator for the next run.
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": restarts, "max_calls": 1}
        task = ray.remote(**options)(_experiment)
        pending = {task.remote(settings, gpus > 0): run for run, settings in unfinished.items()}
        try:
            while pending:
                [reference], _ = ray.wait(list(pending), num_returns=1)
                run = pending.pop(reference)
                try:
                    error = ray.get(reference)
                except ray.exceptions.RayError as lost:
                    error = f"the process was lost more than restarts={restarts} times: {lost}"
                if error is not None:
                    errors[run] = error
                    display.note(f"{unfinished[run].run_dir} failed: {error.strip().splitlines()[-1]}")
                display.update(count - len(pending))
        except BaseException:
            for reference in pending:
                ray.cancel(reference, force=True)
            raise
    return errors


def _experiment(settings: RunSettings, gpu: bool) -> str | None:
    """Train one run in this process; return its error as text, or None."""
    if not gpu:
        jax.config.update("jax_platforms", "cpu")
    try:
        result = run_training(settings)
    except Exception:
        return traceback.format_exc()
    return None if result.stopped in _ENDED else result.problem or f"stopped: {result.stopped}"


def _name(setting: Mapping[str, Any]) -> str:
    """Return the name of a configuration's directory, made from its settings."""
    text = ",".join(f"{name}={value}" for name, value in setting.items()) or "defaults"
    name = re.sub(r"[^\w=.,+-]", "_", text)
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _ended(run_dir, config) -> bool:
    """Return whether the run with this configuration has ended and was evaluated as configured.

    Otherwise, the caller runs `train`, which raises an error that names the differences if the directory contains
    another run, and only evaluates again if only the evaluation differs.
    """
    record = run_status.read_result(run_dir)
    if record.get("stopped") not in _ENDED:
        return False
    if record["stopped"] == "finished" and record.get("total_steps", 0) < config["total_steps"]:
        return False
    try:
        before = read_config(run_dir)
    except RunDirectoryError:
        return False
    may_change = ("total_steps", "topology.devices", "native")
    return not difference(with_new_fields(before), files.as_read_back(config), may_change)
