"""Training: `train` checks its settings, binds the program, and runs the loop."""

import contextlib
import dataclasses
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.buffers import fixed
from jaxrl.core.arguments import whole_arguments
from jaxrl.core.interrupts import interruptible
from jaxrl.core.resources import Resources, applied
from jaxrl.core.sources import Replay
from jaxrl.core.types import Algorithm
from jaxrl.data import rings
from jaxrl.data.batching import Loader
from jaxrl.data.dataset import Dataset
from jaxrl.envs.env_registry import EnvironmentLike
from jaxrl.parallel import determinism, memory
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.experience import of_dataset
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.multihost.place import is_evaluator
from jaxrl.parallel.topology import Topology
from jaxrl.run.callbacks import Callback, Decision, Moment
from jaxrl.run.compile_cache import keep_compiled_programs
from jaxrl.run.directory import run_log
from jaxrl.run.directory.checkpoint import complete_steps
from jaxrl.run.directory.follow import follow_launched
from jaxrl.run.directory.init_from import InitFrom, load_initial, parent_notes, recorded_parent
from jaxrl.run.loggers import Logger
from jaxrl.run.loop.journal import Journal
from jaxrl.run.loop.progress import ProgressBar
from jaxrl.run.loop.run_loop import Loop
from jaxrl.run.loop.schedule import NO_LIMITS, LoopLimits
from jaxrl.run.recording.recorder import Record, Recorder
from jaxrl.run.result import Result, opened
from jaxrl.run.settings import RunSettings, default_notes, network_lines


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
    deterministic: bool = False,
    progress: bool = True,
    verbose: bool = False,
) -> Result:
    """Train an algorithm on an environment, from a dataset, or on both.

    With a dataset but without an environment, an off-policy algorithm learns only from the data and is evaluated in
    `eval_env`, the environment that the data comes from. In such a run, a step is an update.

    The same call with the same `run_dir` resumes the run where it stopped, bit for bit for JAX environments. With
    several processes (`jaxrl.parallel.multihost.distributed`), each makes the same call, and all must be able to read
    `run_dir`. In the process of an evaluator (`jaxrl.launch`), the call follows the run instead and does not return.

    Args:
      algo: the algorithm, or its name to use the default settings.
      env: an environment or its name, as for `jaxrl.make`, or a Gymnasium environment, its class, or a function that
        creates one; None: learn only from the dataset.
      total_steps: environment steps over all environments, including resets; the last iteration may exceed it. Without
        an environment: number of updates.
      dataset: a dataset from `jaxrl.load_dataset`, or its name; its transitions are kept in memory.
      dataset_fraction: with a dataset and an environment, the dataset's fraction of every batch; None: 0.5, as in
        Ball et al. (2023, arXiv:2302.02948).
      init_from: start from another run: a run directory (its newest checkpoint) or one of its checkpoints, a policy, or
        a learner state (`jaxrl.run.directory.init_from`). The spaces must be the same; settings and environment may
        differ, and the run may continue offline training online. Steps and schedules start at 0.
      seed: seed of the run; the same seed gives the same run.
      topology: `Anakin` or `Sebulba`; None: chosen by the kind of environment.
      num_envs: number of environments, if no topology is given. None: 1 for algorithms that learn from a replay buffer
        of transitions (DQN, SAC), else 8.
      run_dir: directory for the configuration, metrics, checkpoints and the result; None: nothing is written.
      overwrite: delete the run in `run_dir`, and start again.
      log_every: environment steps between rows of training metrics, rounded to iterations; None: a fifteenth to a
        fiftieth of the run, or about a second in runs of fewer than a hundred iterations. Rows are also written at
        evaluations, checkpoints and calls of callbacks.
      evaluate_every: environment steps between evaluations; None: a tenth of the run; 0: only at the end.
      evaluation_episodes: episodes per evaluation; None: 128, or 10 for host environments.
      eval_env: another environment for evaluations, in the same forms as `env`. Its observations and actions must have
        the same shapes and types as those of `env`, while bounds, parameters and time limits may differ.
      explore_in_evaluation: sample actions instead of taking the best ones.
      async_evaluation: evaluate in a thread while training continues, on a device that is not used for learning if
        there is one. The result of an evaluation is available, and compared with `target_return`, at the next
        evaluation.
      target_return: stop when the mean return of an evaluation reaches this.
      callbacks: functions of a `Moment`, or objects with state (`jaxrl.run.callbacks`), called at evaluations and at
        the end. They may stop the run or change the environment's parameters.
      callback_every: environment steps between additional calls of the callbacks; None: no additional calls.
      checkpoint_every: environment steps between checkpoints; None: a tenth of the run; 0: only at the end.
      keep: number of the newest checkpoints to keep, in addition to the best one.
      save_replay: whether checkpoints include replay buffers. Without them, checkpoints are smaller, but a resumed run
        differs from an uninterrupted one: it collects `min_size` transitions again before it learns.
      record: directory to which training episodes are written as RLDS datasets, or a `Record` to select episodes.
      video_every: environment steps between videos of one episode, written to `run_dir` as by `jaxrl.render`.
      loggers: further loggers of metrics; with several processes, only those of the first are used.
      resources: processor cores of learner, actor threads, environments and evaluator, and memory of worker processes
        (Linux); the results do not depend on them. None: all parts use all cores.
      deterministic: on a GPU, use only programs whose results are equal, bit for bit, in every process. This is slower,
        because programs are not chosen by timing, and sums have a fixed order. CPUs and TPUs are always deterministic.
        XLA reads this when JAX starts: in Python, start the run before any other use of JAX, or set XLA_FLAGS.
      progress: show a progress bar and, in a terminal, a table of losses and speed at every tenth of the run.
      verbose: show the table at every row of metrics, and not only in a terminal.

    Returns:
      The result. Ctrl-C ends the run after the current chunk, saves, and returns the result so far; a second Ctrl-C,
      or one before the first chunk is compiled, raises KeyboardInterrupt.

    Raises:
      ConfigError: settings are invalid or incompatible; the message lists all problems, before anything is compiled.
      RunDirectoryError: the directory is in use, or contains a run of another configuration.
    """
    return run_training(RunSettings.of(locals()))


@interruptible
def run_training(settings: RunSettings, limits: LoopLimits = NO_LIMITS) -> Result:
    """Run training; see `train`.

    Args:
      settings: the settings as passed.
      limits: limits of chunks and evaluations.
    """
    if settings.deterministic:
        determinism.set_flags()  # before the cache, because the name of its folder depends on the flags
    keep_compiled_programs()
    with run_log.logged() as log:
        prepared = settings.prepared()
        settings = prepared.resolved()
        algo, env, run_dir = settings.algo, settings.env, settings.run_dir
        if is_evaluator():
            follow_launched(settings)
        _check_same(settings)
        program = settings.topology.bind(algo, env, settings.dataset_fraction)
        notes = default_notes(prepared, settings) + network_lines(algo, program.layout.spec)
        leader = distributed.is_leader()
        if leader and settings.dataset_fraction < 1.0:
            _warn_if_no_updates(algo, settings.total_steps)
            _warn_if_used_up(program.layout.experience(algo).online_sources)
        initial, parent = None, None
        if settings.init_from is not None:
            with distributed.collective_errors("reading init_from"):
                initial, parent = _initial(settings, program.layout.spec)
            distributed.check_same({"parent": parent})
            notes += parent_notes(parent)
        described, dataset = None, None
        if settings.dataset is not None:
            settings, program, described, dataset = _with_dataset(settings, program)
        recorder = _recorder(settings, program)
        if settings.video_every is not None:
            from jaxrl.run.recording import rendering  # imported late, because most runs have no videos

            with distributed.collective_errors("checking video_every"):
                rendering.check_drawable(settings.eval_env, program.layout.spec)
        settings = settings.replace(topology=dataclasses.replace(settings.topology, shards=program.layout.shards))
        config = settings.config(dataset=described, parent=parent)
        settings = settings if leader else settings.replace(loggers=())
        display = ProgressBar(visible=settings.progress and leader, verbose=settings.verbose)
        journal = Journal(settings.loggers, display, log)
        journal.log(f"{type(algo).__name__} on {env.name}, seed {settings.seed}, {settings.total_steps:,} steps")
        for line in notes:
            journal.log(line)
        if notes:
            display.note("\n".join(["Settings chosen for this environment:", *notes]))
        with contextlib.ExitStack() as stack:
            if isinstance(dataset, Loader):
                stack.callback(dataset.close)
            stack.callback(program.close)
            if recorder is not None:
                stack.callback(recorder.close)
            stack.enter_context(applied(settings.resources))
            directory = checkpointer = None
            if run_dir is not None:
                held = opened(run_dir, config, overwrite=settings.overwrite, keep=settings.keep)
                directory, checkpointer = stack.enter_context(held)
            if directory is not None:
                log.open(directory.path)
            return Loop(
                settings=settings,
                program=program,
                config=config,
                limits=limits,
                dataset=dataset,
                recorder=recorder,
                initial=initial,
                journal=journal,
                directory=directory,
                checkpointer=checkpointer,
            ).train()


def _check_same(settings):
    """Check that all processes have the same settings.

    Raises:
      ConfigError: the settings differ.
    """
    names = ("checkpoint_every", "target_return", "dataset_fraction", "async_evaluation", "video_every", "log_every")
    others = {name: getattr(settings, name) for name in names}
    others |= {"run_dir": settings.run_dir is not None}
    others |= {"record": None if settings.record is None else settings.record.every}
    distributed.check_same(settings.config() | others)


def _warn_if_no_updates(algo, total_steps):
    waits = max((source.min_size for source in algo.experience.values() if isinstance(source, Replay)), default=0)
    if total_steps < waits:
        warnings.warn(
            f"total_steps={total_steps} is too small for any update: {type(algo).__name__} first collects "
            f"min_size={waits} transitions; raise total_steps, or lower min_size",
            RuntimeWarning,
            stacklevel=4,
        )


def _warn_if_used_up(sources):
    for name, source in sources.items():
        period = 1 if source.sequence is None else source.sequence.period  # steps per stored item
        draws, most = source.replay_ratio * source.batch_size * period, source.max_times_sampled
        if 0 < most < draws:
            warnings.warn(
                f"replay_ratio={source.replay_ratio:g} and batches of {source.batch_size} sample each item of {name!r} "
                f"{draws:g} times, but max_times_sampled={most}, so {1 - most / draws:.0%} of the samples are missing; "
                "lower replay_ratio (sampling.samples_per_insert), or raise max_times_sampled",
                RuntimeWarning,
                stacklevel=4,
            )


def _initial(settings, spec):
    """Return the initial arrays of a run (None if the run is resumed) and the entry "parent" of config.json."""
    run_dir = None if settings.overwrite else settings.run_dir
    recorded = recorded_parent(run_dir, settings.init_from)
    if recorded is not None and run_dir is not None and complete_steps(run_dir / "checkpoints"):
        return None, recorded
    step = None if recorded is None else recorded.get("step")
    initial = load_initial(settings.init_from, settings.algo, settings.env, spec, step=step)
    return initial, initial.parent


def _with_dataset(settings, program):
    """Return settings, program, the entry "dataset" of config.json, and the data.

    The data are transitions on the program's devices or, for an offline dataset that does not fit there, batches from
    disk. In the second case, the returned settings and program differ from those passed.
    """
    dataset, layout = settings.dataset, program.layout
    devices = list(layout.mesh.devices.flat)
    if settings.topology.stream is None:
        stream = not rings.fit(dataset, layout.spec, devices)
        settings = settings.replace(topology=dataclasses.replace(settings.topology, stream=stream))
        program = settings.topology.bind(settings.algo, settings.env, settings.dataset_fraction)
        layout = program.layout
    sources = layout.experience(settings.algo).dataset_sources
    if settings.topology.stream:
        (source,) = sources.values()
        checksum = zlib.crc32(dataset.lengths.tobytes())
        data = rings.stream(dataset, source, layout.spec, seed=settings.seed)
    else:
        made, checksum = rings.rings(dataset, sources, layout.spec, columns=layout.shards)
        made = {of_dataset(name): ring for name, ring in made.items()}
        memory.check_rings(made, devices)
        data = meshes.sharded(made, layout.mesh, fixed.partition(made, "data"))
    described = {"path": str(dataset.path), "checksum": checksum, "dataset_fraction": layout.dataset_fraction}
    return settings, program, described, data


def _recorder(settings, program):
    record = settings.record
    if record is None:
        return None
    with distributed.collective_errors("checking record"):
        record.check(program.layout.spec, settings.run_dir, settings.overwrite)
    recorded = program.layout.recorded(settings.algo, record.every)
    return Recorder(record, recorded, settings.algo, settings.env, settings.seed, settings.run_dir)
