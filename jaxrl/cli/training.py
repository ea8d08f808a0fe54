"""The command `jaxrl train`, and code shared with `jaxrl sweep`, `tune`, `pbt` and `compile`."""

import dataclasses
from typing import Any

import jax

from jaxrl.algos.base import field_problems, make_algorithm
from jaxrl.cli import multihost
from jaxrl.cli.environment import make_environment
from jaxrl.cli.flags import build_parts, option, with_flags
from jaxrl.cli.run_summary import report
from jaxrl.cli.runs import ParsedCommand
from jaxrl.core import ownership
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment
from jaxrl.parallel import determinism, threads
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.experience import dataset_settings, learns_from_dataset
from jaxrl.parallel.mesh import cores, use_cpu_devices
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.sebulba.sebulba import Sebulba
from jaxrl.parallel.topology import default_topology
from jaxrl.run import training
from jaxrl.run.compile_cache import keep_apart, keep_compiled_programs
from jaxrl.run.loggers import WandbLogger
from jaxrl.run.loop.timing import is_for_a_command
from jaxrl.run.presets import preset
from jaxrl.run.recording.recorder import Record
from jaxrl.run.settings import RunSettings

# Flags that are fields of either topology.
_LAYOUT = {field.name for topology in (Sebulba, Anakin) for field in dataclasses.fields(topology)}
# Suites whose steps take seconds to trace, and run thousands of kernels, so that one thread is no faster than two.
_SLOW_TO_TRACE = ("brax:",)


def train(parsed: ParsedCommand) -> int:
    """Train as described by the flags; return the exit code. An evaluator process exits without returning."""
    settings = train_settings(parsed)
    project = parsed.run["wandb"]
    leader = distributed.is_leader()
    loggers = [_wandb(project, settings)] if project is not None and leader else []
    result = training.run_training(settings.replace(loggers=loggers))
    if leader:
        _report(result)
    return {"non_finite": 1, "unsaved": 1, "interrupted": 130}.get(result.stopped, 0)


# --- from flags to settings ----------------------------------------------------------------------------------------


def train_settings(parsed: ParsedCommand) -> RunSettings:
    """Return the settings of the run that the flags describe.

    Raises:
      ConfigError: values are invalid; the message lists all problems.
    """
    request = prepare(parsed)
    arguments: dict[str, Any] = {"total_steps": None} | request.arguments  # optional for a target
    topology = default_topology(request.env, arguments.pop("num_envs", None))
    layout = {name: value for name, value in arguments.items() if name in _LAYOUT}
    known = {field.name for field in dataclasses.fields(topology)}
    if strange := [name for name in layout if name not in known]:
        raise ConfigError(_only_on_the_host(strange, request.env))
    topology = dataclasses.replace(topology, **layout)
    if "record" in arguments:
        arguments["record"] = Record(arguments["record"], arguments["record_every"])
    env = _with_threads(request, parsed.run, topology)
    if "eval_env" in arguments:
        arguments["eval_env"] = make_environment(arguments["eval_env"])
    return RunSettings.of(arguments | {"algo": request.algo, "env": env, "topology": topology})


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """The arguments for `jaxrl.train`, `sweep`, `tune` or `pbt` from a command line."""

    algo: Algorithm
    env: Any  # an environment or its recipe; None with only a dataset
    arguments: dict[str, Any]  # values of the other flags, except None


def prepare(parsed: ParsedCommand) -> TrainRequest:
    """Return the algorithm, the environment and the arguments of `train`, `sweep`, `tune` and `pbt`.

    Raises:
      ConfigError: values are invalid; the message lists all problems.
    """
    run = parsed.run
    algo = make_algorithm(parsed.algorithm) if run["preset"] is None else preset(run["preset"]).algorithm
    made, problems = build_parts(parsed.values, algo)
    algo = with_flags(algo, made)
    problems += field_problems(algo)
    if not problems and run.get("dataset") is None and learns_from_dataset(algo):
        problems.append(_no_dataset(parsed, algo))
    if run.get("record_every", 1) != 1 and run["record"] is None:
        problems.append("--record-every needs --record")
    if run["env"] is None and run.get("dataset") is not None and run["num_envs"] is not None:
        problems.append(f"--num-envs {run['num_envs']} needs --env")
    if problems and multihost.is_one_of_several(run):
        raise ConfigError(problems)  # before waiting for the other processes
    if run.get("deterministic"):
        determinism.set_flags()  # before anything initializes JAX's devices
    processes = multihost.join(run)
    elsewhere, runs = run.get("target") is not None, parsed.command in ("sweep", "tune", "pbt")
    if elsewhere or run.get("backend") == "ray":
        jax.config.update("jax_platforms", "cpu")  # skips accelerators, or leaves them to the experiments
    split = run["devices"] or (cores() if runs else 1)
    if not runs:
        split = 1 if elsewhere else split // processes  # the count is for all processes, or for the target
    if split > 1:
        use_cpu_devices(split)  # before the environment or anything else initializes JAX's devices
    keep_compiled_programs()  # making an environment also compiles: 345 programs for brax's ant
    env = None
    try:
        env = None if run["env"] is None else make_environment(run["env"], run["env_params"])
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    common = ("preset", "import_", "env", "env_params", *multihost.FLAGS)
    arguments = {name: value for name, value in {**run, **made}.items() if name in run and name not in common}
    return TrainRequest(algo, env, {name: value for name, value in arguments.items() if value is not None})


def _no_dataset(parsed, algo):
    """Explain that the algorithm learns from a dataset but none was given."""
    settings = dataset_settings(algo)
    flags = [option(field.name) for field in dataclasses.fields(algo) if field.name in settings]
    what = f"{type(algo).__name__} with {' and '.join(flags)}" if flags else type(algo).__name__
    if "dataset" in parsed.run:
        return f"{what} learns from a dataset: give --dataset PATH, such as rlds:data/pendulum"
    return f"{what} learns from a dataset, which jaxrl {parsed.command} does not accept; use jaxrl train --dataset"


def _with_threads(request, run, topology):
    """Return the environment; if the run is faster with one thread, restart JAX and recreate the environment first."""
    of_others = not is_for_a_command() or run["import_"] is not None  # user code may hold arrays
    compiled = isinstance(request.env, Environment) and run["dataset"] is None
    if of_others or not compiled or request.env.name.startswith(_SLOW_TO_TRACE):
        return request.env
    # An asynchronous evaluation needs a second thread.
    if run["async_evaluation"] or not threads.one_suffices(request.algo, request.env, topology):
        return request.env
    threads.restart_backend()
    keep_apart(threads=1)
    return make_environment(run["env"], run["env_params"])


def _only_on_the_host(names, env):
    """Explain that these flags need a host environment."""
    flags, them = ", ".join(map(option, names)), "them" if len(names) > 1 else "it"
    why = "learning from a dataset needs none (Offline)" if env is None else f"{env.name} runs in JAX (Anakin)"
    return (
        f"{flags}: only for host environments (Sebulba), but {why}; remove {them}, or use a host environment, such as "
        "--env gymnasium:CartPole-v1 (jaxrl envs lists them)"
    )


# --- the report --------------------------------------------------------------------------------------------------


def _report(result: training.Result) -> None:
    """Print the summary of a run."""
    record, notes = result.record(), []
    if record["session_steps"] == 0 and result.stopped == "finished":
        notes.append("the run had already finished; increase --total-steps to continue, or use --overwrite to restart")
    if result.stopped == "interrupted":
        unsaved = result.run_dir is None
        saved = "nothing was saved without --run-dir" if unsaved else "run the same command again to resume"
        notes.append(f"interrupted; {saved}")
    print("\n".join(report(record, type(result.algo).__name__, result.env.name, result.run_dir, *notes)))


def _wandb(project, settings):
    config, run_dir = {"algorithm": encode(settings.algo), "environment": settings.env.name}, settings.run_dir
    if run_dir is not None:
        ownership.check_folder(run_dir, "a run")
    name, resume = run_dir and run_dir.name, not settings.overwrite
    return WandbLogger(project, config=config, directory=run_dir, name=name, resume=resume)
