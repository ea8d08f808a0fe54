"""Training: settings are checked, the program is bound, and the loop runs it."""

import contextlib
import contextvars
import dataclasses
import os
import warnings
import zlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from jaxrl import envs
from jaxrl.algos.base import Readable, as_algorithm, field_problems
from jaxrl.buffers import fixed
from jaxrl.core import files
from jaxrl.core.arguments import whole_arguments
from jaxrl.core.errors import ConfigError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed, number_problems, seed_problems, training_problems
from jaxrl.core.matching import space_problems
from jaxrl.core.program import RecordingProgram
from jaxrl.core.resources import Resources, applied
from jaxrl.core.sources import Replay
from jaxrl.core.types import Algorithm, EnvSpec, env_spec
from jaxrl.data import rings
from jaxrl.data.dataset import Dataset, load_dataset
from jaxrl.data.loading import Loader
from jaxrl.envs.registry import EnvironmentLike
from jaxrl.networks.summary import summary
from jaxrl.parallel import memory
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.experience import dataset_problems, has_separate_dataset, of_dataset
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.multihost.place import evaluator_problems, is_evaluator
from jaxrl.parallel.topology import Topology, choose
from jaxrl.run.callbacks import Callback, Callbacks, Decision, Moment, StopAtReturn, as_callbacks
from jaxrl.run.checkpoint import complete_steps
from jaxrl.run.compile_cache import keep_compiled_programs
from jaxrl.run.evaluation import EPISODES, default_episodes, episodes_problems
from jaxrl.run.follow import follow_launched
from jaxrl.run.init_from import InitFrom, load_initial, recorded_parent, said
from jaxrl.run.loggers import Logger
from jaxrl.run.loop import Loop, Pace
from jaxrl.run.progress import ProgressBar
from jaxrl.run.recorder import Record, Recorder
from jaxrl.run.result import Result, logging_settings, opened, run_config
from jaxrl.run.topologies import instance_problems, resource_problems
from jaxrl.run.videos import Videos

_pace: contextvars.ContextVar[Pace | None] = contextvars.ContextVar("pace", default=None)
_DATASET_FRACTION = 0.5  # of every batch, unless told otherwise


@contextlib.contextmanager
def at_pace(pace: Pace) -> Generator[None]:
    """Within it, `train` goes at this pace."""
    before = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(before)


@interruptible
@whole_arguments
def train(
    algo: Algorithm | str,
    env: EnvironmentLike | None = None,
    *,
    total_steps: int,
    dataset: Dataset | str | None = None,
    dataset_fraction: float | None = None,
    init_from: InitFrom | None = None,
    seed: int = 0,
    topology: Topology | None = None,
    num_envs: int | None = None,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    log_every: int | None = None,
    evaluate_every: int | None = None,
    evaluation_episodes: int | None = None,
    eval_env: EnvironmentLike | None = None,
    explore_in_evaluation: bool = False,
    async_evaluation: bool = False,
    target_return: float | None = None,
    callbacks: Sequence[Callback | Callable[[Moment], Decision | bool | None]] = (),
    callback_every: int | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    save_replay: bool = True,
    record: Record | str | os.PathLike | None = None,
    video_every: int | None = None,
    loggers: Sequence[Logger] = (),
    resources: Resources | None = None,
    progress: bool = True,
) -> Result:
    """Trains an algorithm on an environment, from a dataset, or on both.

    With a dataset and no environment nothing acts: an off-policy algorithm learns from the data alone, and is evaluated
    in `eval_env`, the environment that the data is about. A step is then an update.

    The same call with the same `run_dir` resumes the run where it stopped, bit for bit for JAX environments. With
    several processes (`jaxrl.parallel.multihost.distributed`) each makes the same call, and all must be able to read
    `run_dir`. In the process of an evaluator it follows the run instead, and does not return (`jaxrl.launch`).

    Args:
      algo: the algorithm, or its name for the defaults.
      env: what `jaxrl.make` returns or takes: a name, or a Gymnasium environment, its class, or a function that makes
        one; None: learn from the dataset alone.
      total_steps: environment steps over all environments; the last iteration may exceed it. Without an environment:
        updates.
      dataset: what `jaxrl.load_dataset` returns, or its name; its transitions are held in memory.
      dataset_fraction: with a dataset and an environment, the dataset's fraction of every batch; None: 0.5, that of
        Ball et al. (2023, arXiv:2302.02948).
      init_from: begin with what another run has learned: a run directory (its newest checkpoint) or one of its
        checkpoints, a policy, or a learner state (`jaxrl.run.init_from`). The spaces must be the same, else settings
        and environment may differ; also offline first and then online. Steps and schedules begin anew.
      seed: seed of the run; the same seed gives the same run.
      topology: `Anakin` or `Sebulba`; None: by the kind of environment.
      num_envs: number of environments, if no topology is given. None: 1 for algorithms that learn from a replay of
        transitions (DQN, SAC), else 8.
      run_dir: where configuration, metrics, checkpoints and the result are written; None: nowhere.
      overwrite: delete the run that `run_dir` holds, and start again.
      log_every: environment steps between rows of training metrics, in whole iterations; None: about a fiftieth of the
        run, or about a second where it has fewer than a hundred iterations. Rows are also written where the run is
        evaluated, saved or calls back.
      evaluate_every: environment steps between evaluations; None: a tenth of the run; 0: only at the end.
      evaluation_episodes: complete episodes per evaluation; None: 128, or 10 where the environment is on the host.
      eval_env: another environment to evaluate in, as `env`; its observations and actions must have the shapes and
        types of `env`, while bounds, parameters and time limits may differ.
      explore_in_evaluation: sample actions as in training instead of taking the best.
      async_evaluation: evaluate in a thread while training continues, on a device that does not learn if there is one.
        The result of an evaluation is known, and compared with `target_return`, at the next one.
      target_return: stop when the mean return of an evaluation reaches it.
      callbacks: functions of a `Moment`, or objects that remember something (`jaxrl.run.callbacks`), called where the
        run is evaluated and at its end. They may stop it or change the environment's parameters.
      callback_every: environment steps between further calls of the callbacks; None: no further calls.
      checkpoint_every: environment steps between checkpoints; None: a tenth of the run; 0: only at the end.
      keep: how many checkpoints are kept, plus the best one.
      save_replay: whether checkpoints include replay buffers. Without, they are smaller, and a resumed run differs from
        an uninterrupted one: it collects `min_size` transitions again before it learns.
      record: where to write the episodes of training as RLDS datasets; a `Record` for some of them.
      video_every: environment steps between episodes that are written to `run_dir` as videos, as `jaxrl.render` does.
      loggers: further places for metrics; with several processes, those of the first.
      resources: processor cores of learner, actor threads, environments and evaluator, and memory of worker processes
        (Linux); nothing that is learned depends on it. None: all parts use all cores.
      progress: show a progress bar.

    Returns:
      The result. Ctrl-C ends the run after the current chunk, saves, and returns the result so far; a second Ctrl-C,
      or one before the first chunk is compiled, raises KeyboardInterrupt.

    Raises:
      ConfigError: settings that do not fit, all of them, before anything is compiled.
      RunDirectoryError: the directory is in use, or holds another configuration.
    """
    keep_compiled_programs()
    algo = as_algorithm(algo)
    problems = field_problems(algo) + training_problems(
        total_steps=total_steps,
        evaluation_episodes=evaluation_episodes,
        log_every=log_every,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        callback_every=callback_every,
        keep=keep,
        video_every=video_every,
        num_envs=num_envs,
    )
    run_dir = None if run_dir is None else files.expand(run_dir)
    with _merged_problems(problems):
        if isinstance(dataset, str):
            dataset = load_dataset(dataset)
        env, eval_env = (None if one is None else envs.as_environment(one) for one in (env, eval_env))
    offline = env is None
    problems += _fraction_problems(dataset_fraction, algo, dataset is not None, offline)
    fraction = _resolved_fraction(dataset_fraction, algo, dataset is not None, offline)
    about = eval_env if env is None else env
    if about is None or (offline and dataset is None):
        missing = "no env; pass one, or" if dataset is None else "a dataset and no env; pass"
        raise ConfigError(f"there is {missing} dataset= and eval_env=, the environment that the data comes from")
    if video_every is not None and run_dir is None:
        problems.append(f"video_every={video_every} needs run_dir=, where the videos are written")
    problems += evaluator_problems(run_dir)
    problems += seed_problems("seed", seed)
    if isinstance(evaluation_episodes, int) and evaluation_episodes > 0:
        problems += episodes_problems("evaluation_episodes", evaluation_episodes, None)
    problems += _kind_problems(target_return, callbacks, loggers)
    env = envs.prepared(about)
    topology, found = choose(topology, None if offline else env, num_envs)
    problems += found
    if offline and record is not None:
        problems.append("record= without an env: nothing acts, so there is nothing to record")
    played = env if eval_env is None or offline else envs.prepared(eval_env)
    problems += [f"eval_env: {line}" for line in space_problems(played, env, f"{env.name}, which is trained on, has")]
    if not is_evaluator():  # which has other cores
        problems += resource_problems(resources, topology, None if offline else env, async_evaluation)
    problems += dataset_problems(algo, env_spec(env), fraction, dataset=dataset is not None)
    if problems:
        raise ConfigError(problems)
    seed = checked_seed("seed", seed)
    if isinstance(record, str | os.PathLike):
        record = Record(record)
    given_topology, topology = topology, topology.resolve(algo)
    given_algo, algo = algo, algo.resolve(env_spec(env), topology.num_envs or 0)
    problems = instance_problems(None if offline else env, played, topology, video_every)
    if problems:
        raise ConfigError(problems)
    notes = []
    if evaluation_episodes is None:
        evaluation_episodes = default_episodes(played)
        if evaluation_episodes != EPISODES:
            notes.append(f"evaluation_episodes: {evaluation_episodes}")
    if is_evaluator():
        assert run_dir is not None  # else there was a problem
        evaluations = {"episodes": evaluation_episodes, "explore": explore_in_evaluation}
        follow_launched(run_dir, algo, played, step_timeout=topology.step_timeout, **evaluations)
    notes += resolved_defaults(given_algo, algo) + resolved_defaults(given_topology, topology, "topology.")
    settings = logging_settings(evaluate_every, evaluation_episodes, explore_in_evaluation, save_replay)
    others = {"checkpoint_every": checkpoint_every, "target_return": target_return, "run_dir": run_dir is not None}
    others |= {"dataset_fraction": fraction, "async_evaluation": async_evaluation}
    others |= {"video_every": video_every, "log_every": log_every}
    others |= {"record": None if record is None else record.every}
    distributed.check_same(run_config(algo, env, topology, total_steps, seed, settings) | others)
    program = topology.bind(algo, env, fraction)
    notes += network_lines(algo, program.layout.spec)
    if fraction < 1.0 and distributed.is_leader():
        _warn_if_no_updates(algo, total_steps)
    initial, parent = None, None
    if init_from is not None:
        with distributed.collective_errors("reading what the run begins with"):
            initial, parent = _begins_with(init_from, algo, env, program.layout.spec, None if overwrite else run_dir)
        distributed.check_same({"parent": parent})
        notes += said(parent)
    described, given = None, None
    if dataset is not None:
        if topology.stream is None:
            stream = not rings.fit(dataset, program.layout.spec, list(program.layout.mesh.devices.flat))
            topology = dataclasses.replace(topology, stream=stream)
            program = topology.bind(algo, env, fraction)
        learned = _streamed if topology.stream else _held
        described, given = learned(algo, dataset, program, seed)
    recorder = None
    if record is not None:
        with distributed.collective_errors("looking where to record"):
            record.check(program.layout.spec, run_dir, overwrite)
        assert isinstance(program, RecordingProgram)  # the others have no environment
        recorder = Recorder(record, program.recorded(algo, record.every), algo, env, seed, run_dir)
    videos = None if video_every is None else Videos(played, video_every, seed, explore_in_evaluation)
    if videos is not None:
        with distributed.collective_errors("looking at what videos would show"):
            videos.check(program.layout.spec)
    stops = [] if target_return is None else [StopAtReturn(target_return)]
    resolved = dataclasses.replace(topology, shards=program.layout.shards)
    config = run_config(algo, env, resolved, total_steps, seed, settings, described, parent)
    run = Loop(
        algo=algo,
        env=env,
        program=program,
        total_steps=total_steps,
        eval_env=played,
        evaluation_episodes=evaluation_episodes,
        explore=explore_in_evaluation,
        async_evaluation=async_evaluation,
        seed=seed,
        callbacks=Callbacks([*stops, *as_callbacks(callbacks)]),
        callback_every=callback_every,
        log_every=log_every,
        evaluate_every=total_steps // 10 if evaluate_every is None else evaluate_every,
        checkpoint_every=total_steps // 10 if checkpoint_every is None else checkpoint_every,
        save_replay=save_replay,
        dataset=given,
        recorder=recorder,
        step_timeout=topology.step_timeout,
        initial=initial,
        videos=videos,
        pace=_pace.get() or Pace(),
        config=config,
    )
    leader = distributed.is_leader()
    display = ProgressBar() if progress and leader else None
    if display is not None:
        for line in notes:
            display.note(line)
    loggers = loggers if leader else ()
    try:
        with applied(resources):
            if run_dir is None:
                return run.train(loggers, display, None, None)
            with opened(run_dir, config, overwrite=overwrite, keep=keep) as (directory, checkpointer):
                return run.train(loggers, display, directory, checkpointer)
    finally:
        if recorder is not None:
            recorder.close()
        program.close()
        if isinstance(given, Loader):
            given.close()


@contextlib.contextmanager
def _merged_problems(problems):
    """What is wrong with a name is told with these."""
    try:
        yield
    except ConfigError as error:
        if not problems:
            raise
        raise ConfigError([*error.problems, *problems]) from error.__cause__


def _kind_problems(target_return, callbacks, loggers):
    """What is not of the kind that `train` takes there; one line each."""
    problems = []
    if target_return is not None:
        problems += number_problems("target_return", target_return)
    try:
        as_callbacks(callbacks)
    except ConfigError as error:
        problems += error.problems
    if not isinstance(loggers, Sequence) or not all(isinstance(one, Logger) for one in loggers):
        problems.append(f"loggers={loggers!r:.80} must be a list of loggers, which have `write` and `close`")
    return problems


def _fraction_problems(given, algo, dataset, offline):
    """What is wrong with a `dataset_fraction` that is given where there is nothing to mix."""
    if given is None:
        return []
    told = f"dataset_fraction={given} is for a dataset beside an environment"
    if not dataset:
        return [f"{told}, and there is no dataset; pass one, or leave the fraction out"]
    if offline:
        return [f"{told}, and there is no environment; pass one, or leave the fraction out"]
    if has_separate_dataset(algo):
        name = type(algo).__name__
        return [f"dataset_fraction={given}: how much of the dataset {name} learns from is fixed; leave it out"]
    return []


def _resolved_fraction(given, algo, dataset, offline):
    """Of every batch of the replay."""
    if not dataset:
        return 0.0
    if offline:
        return 1.0
    if has_separate_dataset(algo):
        return 0.0  # the dataset's part has a source of its own
    return _DATASET_FRACTION if given is None else given


def _warn_if_no_updates(algo, total_steps):
    waits = max((source.min_size for source in algo.experience.values() if isinstance(source, Replay)), default=0)
    if total_steps < waits:
        warnings.warn(
            f"nothing is learned in total_steps={total_steps}: {type(algo).__name__}.min_size={waits} transitions come "
            "before the first update; raise total_steps, or lower min_size",
            RuntimeWarning,
            stacklevel=4,
        )


def _begins_with(source, algo, env, spec, run_dir):
    """What the run begins with, and what config.json says of it; a run that goes on does not read its parent again."""
    recorded = recorded_parent(run_dir, source)
    if recorded is not None and run_dir is not None and complete_steps(run_dir / "checkpoints"):
        return None, recorded
    initial = load_initial(source, algo, env, spec, step=None if recorded is None else recorded.get("step"))
    return initial, initial.parent


def _streamed(algo, dataset, program, seed):
    """What config.json says of a dataset, and its batches from disk."""
    (source,) = program.layout.experience(algo).dataset_sources.values()
    described = {
        "path": str(dataset.path),
        "checksum": zlib.crc32(dataset.lengths.tobytes()),
        "dataset_fraction": program.layout.dataset_fraction,
    }
    return described, rings.stream(dataset, source, program.layout.spec, seed=seed)


def _held(algo, dataset, program, seed):
    """What config.json says of a dataset, and its transitions on the program's devices."""
    sources = program.layout.experience(algo).dataset_sources
    made, checksum = rings.rings(dataset, sources, program.layout.spec, columns=program.layout.shards)
    made = {of_dataset(name): ring for name, ring in made.items()}
    memory.check_rings(made, list(program.layout.mesh.devices.flat))
    described = {"path": str(dataset.path), "checksum": checksum, "dataset_fraction": program.layout.dataset_fraction}
    return described, meshes.sharded(made, program.layout.mesh, fixed.partition(made, "data"))


def resolved_defaults(unresolved: Any, resolved: Any, prefix: str = "") -> list[str]:
    """Return a line for every field that was None and depends on the environment: "epochs: 4"; networks aside."""
    lines = []
    for field in dataclasses.fields(resolved):
        before, after = getattr(unresolved, field.name), getattr(resolved, field.name)
        if before is None and after is not None:
            lines.append(f"{prefix}{field.name}: {after!r}")
        elif isinstance(after, Readable):
            continue  # `network_lines` says what it is
        elif dataclasses.is_dataclass(after) and type(before) is type(after):
            lines += resolved_defaults(before, after, f"{prefix}{field.name}.")
    return lines


def network_lines(algo: Algorithm, spec: EnvSpec) -> list[str]:
    """Return a line for every network of a resolved algorithm: its layers, and how many parameters it has."""
    networks = {field.name: getattr(algo, field.name) for field in dataclasses.fields(algo)}
    return [f"{name}: {summary(one, spec)}" for name, one in networks.items() if isinstance(one, Readable)]
