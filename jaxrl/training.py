"""Training: settings are checked, the program is bound, and the loop runs it."""

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path

from jaxrl import envs
from jaxrl.algos.base import make_algorithm
from jaxrl.buffers import fixed, memory
from jaxrl.data import rows
from jaxrl.data.dataset import Dataset, load_dataset
from jaxrl.data.loading import Loader
from jaxrl.data.recorder import Record, Recorder
from jaxrl.errors import ConfigError
from jaxrl.loggers import Logger
from jaxrl.loop import Loop
from jaxrl.parallel import distributed, experience
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.offline import Offline
from jaxrl.parallel.sebulba import Sebulba
from jaxrl.progress import ProgressBar
from jaxrl.result import Result, logging_settings, opened, run_config
from jaxrl.types import Algorithm, Environment, HostRecipe, env_spec
from jaxrl.watchdog import STEP_TIMEOUT

Topology = Anakin | Sebulba | Offline


def train(
    algo: Algorithm | str,
    env: Environment | HostRecipe | str | None = None,
    *,
    total_steps: int,
    dataset: Dataset | str | None = None,
    demonstration_ratio: float = 0.5,
    seed: int = 0,
    topology: Topology | None = None,
    num_envs: int | None = None,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    evaluate_every: int | None = None,
    evaluation_episodes: int = 128,
    eval_env: Environment | HostRecipe | str | None = None,
    explore_in_evaluation: bool = False,
    evaluate_beside: bool = False,
    target_return: float | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    save_replay: bool = True,
    record: Record | str | Path | None = None,
    loggers: Sequence[Logger] = (),
    progress: bool = True,
) -> Result:
    """Trains an algorithm on an environment, from a dataset, or on both.

    With a dataset and no environment nothing acts: an off-policy algorithm learns from the data as it is, and
    `eval_env` says what it is about and is where it is evaluated. A step is then an update.

    The same call with the same `run_dir` goes on where the run stopped, bit for bit for JAX environments. With several
    processes (`jaxrl.parallel.distributed`) all make the same call, and `run_dir` is where all of them can read.

    Args:
      algo: the algorithm, or its name for the defaults.
      env: what `jaxrl.make` gives, or its name; None: learn from the dataset alone.
      total_steps: rows over all environments; the last iteration may go over it. Without an environment: updates.
      dataset: what `jaxrl.load_dataset` gives, or its name; its rows are held in memory.
      demonstration_ratio: with an environment, the dataset's share of every batch; 0.5 is that of Ball et al. (2023,
        arXiv:2302.02948).
      seed: the same seed is the same run.
      topology: `Anakin` or `Sebulba`; None: by the kind of environment.
      num_envs: environments, if no topology is given.
      run_dir: where configuration, metrics, checkpoints and the result go; None: nowhere.
      overwrite: begin anew where `run_dir` holds another run.
      evaluate_every: rows between evaluations; None: a tenth of the run; 0: only at the end.
      evaluation_episodes: complete episodes an evaluation.
      eval_env: another environment to evaluate in, or its name.
      explore_in_evaluation: sample actions as in training instead of taking the best.
      evaluate_beside: play evaluations in a thread of its own while the run goes on, on a device that does not learn if
        there is one. What an evaluation finds is known, and `target_return` compared with it, at the next one.
      target_return: stop when an evaluation reaches it.
      checkpoint_every: rows between checkpoints; None: a tenth of the run; 0: only at the end.
      keep: how many checkpoints stay, besides the best.
      save_replay: whether checkpoints hold the replays. Without, they are smaller by all of it, and a run that goes on
        from one is another run: it acts until `min_size` rows are there again before it learns on.
      record: where to write the episodes that the agent lives through while it trains, as RLDS datasets; a `Record` for
        some of them.
      loggers: further places for metrics; with several processes, those of the first.
      progress: show a progress bar.

    Returns:
      The result. Ctrl-C ends the run after the running chunk, saves and returns what there is; a second one leaves at
      once.

    Raises:
      ConfigError: settings that do not fit, all of them, before anything is compiled.
      RunDirectoryError: the directory is in use, or holds another configuration.
    """
    if isinstance(algo, str):
        algo = make_algorithm(algo)
    if isinstance(dataset, str):
        dataset = load_dataset(dataset)
    env, eval_env = (envs.make(given) if isinstance(given, str) else given for given in (env, eval_env))
    offline, share = env is None, 0.0 if dataset is None else 1.0 if env is None else demonstration_ratio
    if offline and (dataset is None or eval_env is None):
        missing = "no env; give one, or" if dataset is None else "a dataset and no env; give"
        raise ConfigError(f"there is {missing} dataset= and eval_env=, the environment that the data is about")
    env = eval_env if offline else env
    problems = [
        f"{name}={value} must be at least {least}"
        for name, value, least in (
            ("total_steps", total_steps, 1),
            ("evaluation_episodes", evaluation_episodes, 1),
            ("evaluate_every", evaluate_every, 0),
            ("checkpoint_every", checkpoint_every, 0),
            ("keep", keep, 1),
        )
        if value is not None and value < least
    ]
    if topology is not None and num_envs is not None:
        problems.append(f"num_envs={num_envs} beside topology={topology}; set num_envs in the topology")
    if offline and (num_envs is not None or not isinstance(topology, Offline | None)):
        problems.append("without an env nothing acts: num_envs has no meaning, and the topology is Offline()")
    if not offline and isinstance(topology, Offline):
        problems.append("topology=Offline() learns from a dataset alone; leave env out, and give eval_env")
    env = envs.prepared(env)
    problems += experience.dataset_problems(algo, env_spec(env), share, dataset=dataset is not None)
    if offline and record is not None:
        problems.append("record= without an env: nothing acts, so there is nothing to record")
    if problems:
        raise ConfigError(problems)
    if isinstance(record, str | Path):
        record = Record(record)
    topology = topology or (Offline() if offline else default_topology(env, num_envs))
    settings = logging_settings(evaluate_every, evaluation_episodes, explore_in_evaluation, save_replay)
    others = {"checkpoint_every": checkpoint_every, "target_return": target_return, "run_dir": run_dir is not None}
    others |= {"demonstration_ratio": share, "evaluate_beside": evaluate_beside}
    others |= {"record": None if record is None else record.every}
    distributed.check_same(run_config(algo, env, topology, total_steps, seed, settings) | others)
    program = topology.bind(algo, env, share)
    described, given = None, None
    if offline:
        stream = topology.stream
        if stream is None:
            stream = not rows.fit(dataset, program.spec, list(program.mesh.devices.flat))
        topology = dataclasses.replace(topology, stream=stream)
        if stream:
            program = program.streamed(algo)
            described, given = _streamed(algo, dataset, program, seed)
    if dataset is not None and given is None:
        described, given = _held(algo, dataset, program)
    recorder = None
    if record is not None:
        with distributed.jointly("looking where to record"):
            record.check(program.spec, run_dir, overwrite)
        recorder = Recorder(record, program.recorded(algo, record.every), algo, env, seed, run_dir)
    run = Loop(
        algo=algo,
        env=env,
        program=program,
        total_steps=total_steps,
        eval_env=env if eval_env is None or offline else envs.prepared(eval_env),
        evaluation_episodes=evaluation_episodes,
        explore=explore_in_evaluation,
        evaluate_beside=evaluate_beside,
        seed=seed,
        target_return=target_return,
        evaluate_every=total_steps // 10 if evaluate_every is None else evaluate_every,
        checkpoint_every=total_steps // 10 if checkpoint_every is None else checkpoint_every,
        save_replay=save_replay,
        dataset=given,
        recorder=recorder,
        step_timeout=topology.step_timeout if isinstance(topology, Sebulba) else STEP_TIMEOUT,
    )
    leader = distributed.is_leader()
    display = ProgressBar() if progress and leader else None
    loggers = loggers if leader else ()
    try:
        if run_dir is None:
            return run.train(loggers, display, None, None)
        resolved = dataclasses.replace(topology, shards=program.shards)
        config = run_config(algo, env, resolved, total_steps, seed, settings, described)
        with opened(run_dir, config, overwrite=overwrite, keep=keep) as (directory, checkpointer):
            return run.train(loggers, display, directory, checkpointer)
    finally:
        if recorder is not None:
            recorder.close()
        program.close()
        if isinstance(given, Loader):
            given.close()


def _streamed(algo, dataset, program, seed):
    """What is remembered of a dataset, and its batches from disk."""
    (source,) = experience.given(algo, program.shards, program.share).values()
    described = {"path": str(dataset.path), "checksum": zlib.crc32(dataset.lengths.tobytes()), "share": program.share}
    return described, rows.stream(dataset, source, program.spec, seed=seed)


def _held(algo, dataset, program):
    """What is remembered of a dataset, and its rows where the program runs."""
    sources = experience.given(algo, program.shards, program.share)
    made, checksum = rows.rings(dataset, sources, program.spec, columns=program.shards)
    made = {experience.of_dataset(name): ring for name, ring in made.items()}
    memory.check_rings(made, list(program.mesh.devices.flat))
    described = {"path": str(dataset.path), "checksum": checksum, "share": program.share}
    return described, meshes.sharded(made, program.mesh, fixed.partition(made, "data"))


def default_topology(env: Environment | HostRecipe, num_envs: int | None = None) -> Topology:
    """`Anakin` for JAX environments, `Sebulba` for those on the host."""
    topology = Anakin() if isinstance(env, Environment) else Sebulba()
    return topology if num_envs is None else dataclasses.replace(topology, num_envs=num_envs)
