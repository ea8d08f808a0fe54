"""`jaxrl.tune`: Bayesian optimization of the settings of an algorithm, with pruning."""

import contextlib
import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxrl import envs
from jaxrl.algos.base import as_algorithm, replace
from jaxrl.core import arguments, files, interrupts, keys, limits, ownership
from jaxrl.core.errors import ConfigError, JaxrlError, MissingExtraError, NonFiniteError, RunDirectoryError
from jaxrl.core.sources import Dataset
from jaxrl.core.types import Algorithm, Environment
from jaxrl.parallel.anakin import Anakin
from jaxrl.plots.curves import EVALUATION, plot_trials
from jaxrl.run.directory import run_directory, sweep_directory
from jaxrl.run.directory.sweep_directory import Trial
from jaxrl.run.loop.progress import ProgressBar
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.distributions import COUNTS, MOST_TRIALS, checked_seeds
from jaxrl.sweeps.make_train import bind_run
from jaxrl.sweeps.ray_trials import Actors, side_by_side
from jaxrl.sweeps.results import save_policy
from jaxrl.sweeps.search_spaces import ends, search_space
from jaxrl.sweeps.sweep_loop import identity_of, settings_problems
from jaxrl.sweeps.tables import Tabulated, data_frame, short, write_tables
from jaxrl.sweeps.vectorized import VectorizedRuns, devices_and_mapping

if TYPE_CHECKING:
    import pandas

    from jaxrl.plots.chart import Chart

Search = Literal["tpe", "random"]
Pruner = Literal["median", "none"]
Backend = Literal["jax", "ray"]


@dataclasses.dataclass(frozen=True, repr=False)
class TuneResult(Tabulated):
    """The trials of a search.

    Attributes:
      trials: the trials, in the order in which they began, each with `settings`, `returns` (the mean over seeds at each
        evaluation), `ended` ("finished", "pruned" or "failed"), `problem`, and `score`, the last mean return of a
        finished trial.
      title: the algorithm and the environment.
    """

    trials: list[Trial]
    title: str

    def __repr__(self) -> str:
        finished = sum(trial.ended == "finished" for trial in self.trials)
        found = ", ".join(f"{k}={short(v)}" for k, v in self.best.items()) if finished else "none"
        return f"TuneResult({self.title}: {len(self.trials)} trials, {finished} finished; best: {found[:200]})"

    @property
    def best_trial(self) -> Trial:
        """The trial with the highest final mean return; if several are equal, the first of them.

        Raises:
          NonFiniteError: no trial finished.
        """
        finished = [trial for trial in self.trials if trial.ended == "finished"]
        if not finished:
            raise NonFiniteError(f"no trial of {len(self.trials)} finished; TuneResult.trials lists their problems")
        return max(finished, key=lambda trial: trial.score)

    @property
    def best(self) -> dict[str, Any]:
        """The settings of the best trial."""
        return self.best_trial.settings

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame with one row per trial: settings, last return, number of evaluations, and outcome.

        Raises:
          MissingExtraError: pandas is not installed.
        """
        return data_frame(sorted(self._rows(), key=lambda row: row["trial"]))

    def _settings_and_scores(self) -> tuple[list[dict[str, Any]], list[float]]:
        trials = [trial for trial in self.trials if trial.ended != "pruned"]
        return [trial.settings for trial in trials], [trial.score for trial in trials]

    def plot(self, path: str | Path | None = None) -> "Chart":
        """Plot the score of every trial and the best score so far.

        Args:
          path: image file to write, or None; its suffix sets the format.
        """
        return plot_trials([trial.score for trial in self.trials], path, title=self.title)

    def save(self, path: str | Path) -> None:
        """Write the trials to a directory: `trials.csv`, `trials.md` and `trials.png`.

        Raises:
          ConfigError: a file with one of these names exists that was not written by jaxrl.
          RunDirectoryError: the directory cannot be written to.
        """
        path = files.expand(path)
        for name in ("trials.csv", "trials.md"):
            ownership.check_output(path / name, "table")
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_tables(path / "trials", self._rows())
            self.plot(path / "trials.png")
        except OSError as error:
            raise RunDirectoryError(f"the trials cannot be written to {path}: {error}") from error

    def _rows(self) -> list[dict[str, Any]]:
        """Return one row per trial, sorted from best to worst, with unfinished trials at the end."""
        ranked = sorted(enumerate(self.trials), key=lambda found: -np.nan_to_num(found[1].score, nan=-np.inf))
        return [
            {"trial": place, **trial.settings, "return": trial.returns[-1] if trial.returns else math.nan}
            | {"evaluations": len(trial.returns), "ended": trial.ended, "problem": trial.problem}
            for place, trial in ranked
        ]


@interrupts.interruptible
@arguments.whole_arguments
def tune(
    algo: Algorithm | str,
    env: Environment | str,
    *,
    total_steps: int,
    trials: int = 30,
    seeds: int | Sequence[int] = 2,
    search: Search = "tpe",
    pruner: Pruner = "median",
    search_seed: int = 0,
    num_envs: int | None = None,
    topology: Anakin | None = None,
    devices: int | None = None,
    mapping: str | None = None,
    backend: Backend = "jax",
    cpus_per_run: float = 1.0,
    gpus_per_run: float = 0.0,
    max_concurrent: int | None = None,
    address: str | None = None,
    evaluate_every: int | None = None,
    evaluation_episodes: int = 128,
    explore_in_evaluation: bool = False,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **space: Any,
) -> TuneResult:
    """Search for the settings of an algorithm with the highest final return, averaged over seeds.

    All seeds of a trial are trained by one compiled program, which all trials share if only traced fields are searched.
    A trial may be pruned after each evaluation, which ends its training. Each run equals the run of `jaxrl.train`
    with the same seed and settings.

    With `backend="ray"` several trials run at once, each in a separate process, on any machine of a Ray cluster. The
    settings of a new trial depend on the trials that have ended, so they depend on which trials end first; with
    `max_concurrent=1` the search is the same as without Ray. If the process of a trial is lost, the trial counts as
    failed and the search continues.

    The default ranges of fields are in `jaxrl.sweeps.search_spaces.RANGES`. Fields of `algo` that differ from their
    defaults are not searched. This function needs Optuna: `pip install 'jaxrl[tune]'`.

    Args:
      algo, env, num_envs, topology: settings of every run, as for `make_train`.
      total_steps: environment steps per run, over all its environments; the last iteration may exceed it.
      trials: number of trials, including those in `run_dir`.
      seeds: number of seeds per trial, starting from 0; or a list of seeds. The score is the mean over seeds.
      search: the search method: "tpe", Bayesian optimization (tree-structured Parzen estimator), or "random".
      pruner: rule for ending trials early: "median", if a trial is below the median of earlier trials at the same
        evaluation; or "none".
      search_seed: seed of the search.
      devices: number of devices of this process that the seeds are spread over; None: all. On a CPU, JAX is set up with
        one device per core, unless it has started already. With `backend="ray"`: number of devices of each trial's
        process; None: one for each of its GPUs or CPUs.
      mapping: how the runs on one device are executed: together ("vmap") or one after another ("in_turn"); None: the
        faster way on this platform.
      backend: "jax": one trial after another, in this process; "ray": several at once, in processes of a Ray cluster.
      cpus_per_run: CPUs that Ray reserves for each trial.
      gpus_per_run: GPUs that Ray reserves for each trial; 0: the trial runs on the CPU.
      max_concurrent: maximum number of trials that run at once with Ray; None: as many as fit on the cluster.
      address: address of the Ray cluster; None: RAY_ADDRESS if set, otherwise a cluster of only this machine.
      evaluate_every: environment steps of a run between evaluations; None: a tenth of the run.
      evaluation_episodes: complete episodes of each evaluation.
      explore_in_evaluation: sample actions as in training in each evaluation.
      run_dir: directory for the study, from which the same call resumes after it was killed, also with more trials, and
        with or without Ray; trials that were running are started again. At the end, it also contains the trials as
        tables and a plot and, without Ray, the best policy. None: nothing is saved.
      overwrite: delete an earlier search in `run_dir` and start again.
      progress: show a progress bar of the trials.
      **space: search spaces of fields, replacing or extending the default space: `LogUniform`, `Uniform`, a list of
        values, or a single value, which fixes the field.

    Returns:
      The settings and returns of all trials.

    Raises:
      ConfigError: settings are invalid (the message lists all of them), or the Ray cluster has no room for a trial.
      MissingExtraError: Optuna is not installed, or Ray for `backend="ray"`.
      PeerError: no process could be started on the Ray cluster.
      RunDirectoryError: `run_dir` is in use, contains anything other than this search, or contains a foreign file
        with a name that jaxrl uses.
    """
    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError("jaxrl.tune", "tune")
    if backend == "ray" and importlib.util.find_spec("ray") is None:  # before an earlier search is overwritten
        raise MissingExtraError("backend='ray'", "ray")
    from jaxrl.sweeps.study import Study

    run = RunSettings.of(locals())
    limits_of = (
        COUNTS
        | {"trials": {"low": 1, "high": MOST_TRIALS}}
        | dict.fromkeys(("cpus_per_run", "gpus_per_run"), {"low": 0})
    )
    wrong = arguments.problems_of(tune, locals(), **limits_of)
    problems = wrong + settings_problems("a search", run, space)
    if run.topology is not None and run.num_envs is not None:
        problems.append(f"num_envs={run.num_envs} is not allowed with topology={run.topology}; set it in the topology")
    how = Actors(cpus_per_run, gpus_per_run, max_concurrent, address)
    if backend == "ray":
        problems += [] if wrong else how.problems(devices)
    else:
        unused = [f for f in dataclasses.fields(how) if getattr(how, f.name) != f.default]
        problems += [f"{f.name}={getattr(how, f.name)!r} needs backend='ray'" for f in unused]
    if jax.process_count() > 1:
        problems.append(
            f"a search is started in one process, but there are {jax.process_count()}; start one process, and "
            "use backend='ray' to run trials in other processes"
        )
    if problems:
        raise ConfigError(problems)
    if backend == "ray":  # the processes of the trials have their own devices
        devices, mapping = devices or how.devices, mapping or ("vmap" if gpus_per_run else "in_turn")
        devices_and_mapping(1, mapping)
    else:
        devices, mapping = devices_and_mapping(devices, mapping)
    seeds, search_seed = checked_seeds(seeds), limits.checked_seed("search_seed", search_seed)
    algo, made = as_algorithm(run.algo), envs.as_environment(run.env)
    if any(isinstance(source, Dataset) for source in algo.experience.values()):
        raise ConfigError(
            f"{type(algo).__name__} with these settings learns from a dataset, which a search does not accept; call "
            "jaxrl.train(dataset=...) for each configuration"
        )
    fixed, ranges = search_space(algo, space)
    every = max(run.total_steps // 10, 1) if run.evaluate_every is None else run.evaluate_every
    layout = run.topology or Anakin(run.num_envs, devices=1)
    run = run.replace(algo=algo, env=made, evaluate_every=every)
    for name, values in ranges.items():
        for value in ends(values):
            bind_run(run.replace(algo=replace(algo, **fixed | {name: value})))

    identity = identity_of(run.replace(topology=layout), mapping) | {"seeds": seeds, "search_seed": search_seed}
    identity |= {"search": search, "pruner": pruner}
    identity["space"] = {name: repr(values) for name, values in (fixed | ranges).items()}
    title = f"{type(algo).__name__} on {made.name}"
    with contextlib.ExitStack() as stack:
        path = None
        if run.run_dir is not None:
            config = {"tune": identity | run.logging}
            sweep_directory.check_best(files.expand(run.run_dir))
            directory = run_directory.RunDirectory(run.run_dir, config, overwrite=run.overwrite)
            path = stack.enter_context(directory).study
            if not directory.resumed:
                ownership.remove(path.parent / sweep_directory.BEST, "the best policy of a sweep or a search")
        study = Study(path, ranges, fixed, search, pruner, search_seed)
        keep = partial(_keep_best, study, path.parent) if path is not None and backend == "jax" else None
        if path is not None:
            stack.callback(_leave, study, title, path.parent)
        training = _Training(run, seeds, devices, mapping, keep)
        display = stack.enter_context(ProgressBar(unit="trials", visible=run.progress))
        display.note(f"searched: {', '.join(ranges)}")
        display.start(trials, len(study.trials()))

        def report(number, trial):
            display.note(_line(number, trial))
            display.update(len(study.trials()))

        while len(study.trials()) < trials:
            if backend == "ray":
                side_by_side(study, training, trials, how, devices, report)
            else:
                report(study.next_number, study.run(training))
        return TuneResult(study.trials(), title)


def _keep_best(study, path, seeds, run, states, returns) -> None:
    """Save the policy of the best seed of a trial if this trial is the best so far; warn if this fails."""
    scores = np.nanmean(returns, axis=-1)
    if any(trial.score >= float(scores.mean()) for trial in study.trials()):  # NaN if it did not finish
        return
    best = int(np.argmax(scores))
    config, score = run.config(seeds[best]) | {"logging": {}, "sweep": {"of": "tune"}}, float(scores[best])
    learner = jax.tree.map(lambda x: x[best], states.learner)
    try:
        save_policy(path, config, learner, [{"step": run.iterations * run.rows, EVALUATION: score}], score)
    except (JaxrlError, OSError) as error:
        warnings.warn(f"the best policy could not be saved: {error}", RuntimeWarning, stacklevel=2)


def _leave(study, title, path) -> None:
    """Save the trials so far; warn if this fails, for example on a full disk."""
    if not study.trials():
        return
    try:
        TuneResult(study.trials(), title).save(path)
    except JaxrlError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


@dataclasses.dataclass(frozen=True)
class _Training:
    """A callable that trains a trial with given settings, in this process or in a Ray actor."""

    run: RunSettings
    seeds: list[int]
    devices: int
    mapping: str
    keep: Callable | None = None  # called with the seeds, run, final states and returns of every finished trial

    def __call__(self, settings: dict[str, Any]) -> Iterator[tuple[float, bool]]:
        """Train the runs of all seeds; yield the mean return of each evaluation, and whether it is the last one.

        Raises:
          NonFiniteError: a value was not finite, or no episode ended, for one of the seeds.
        """
        run, seeds = bind_run(self.run.replace(algo=replace(self.run.algo, **settings))), self.seeds
        many = VectorizedRuns(run.program, min(self.devices, len(seeds)), self.mapping, len(seeds))
        algos, roots = many.stack([run.algo] * len(seeds)), many.stack([keys.root_key(seed) for seed in seeds])
        many.check_memory(algos, run.env, roots)
        each, done = max(1, round((run.settings.evaluate_every or 0) / run.rows)), 0
        states = many.start(algos, run.env, roots)
        while done < run.iterations:
            length = min(each, run.iterations - done)
            states, report = many.chunk(algos, run.env, states, length, run.total_steps_per_env)
            done += length
            returns = many.evaluate(algos, states.learner, roots, run.settings)
            failed = (np.asarray(report.failed_at)[: many.runs] >= 0) | np.isinf(returns).any(-1)
            wrong = failed | np.isnan(returns).all(-1)
            if wrong.any():
                what = "a value was not finite" if failed.any() else "no episode of the evaluation ended"
                those = ", ".join(str(seed) for seed, bad in zip(seeds, wrong, strict=True) if bad)
                raise NonFiniteError(f"{what} before step {done * run.rows}, seed {those}")
            if self.keep is not None and done == run.iterations:
                self.keep(seeds, run, states, returns)
            yield float(np.nanmean(returns, axis=-1).mean()), done == run.iterations


def _line(place: int, trial: Trial) -> str:
    """Return a description of a trial that ended, for the progress display."""
    settings = ", ".join(f"{name}={short(value)}" for name, value in trial.settings.items())
    last = trial.returns[-1] if trial.returns else math.nan
    return f"trial {place}: {trial.problem or f'{last:.4g}'} ({trial.ended}; {settings})"
