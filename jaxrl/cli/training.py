"""The command `jaxrl train`, after its flags are read, and what it shares with `jaxrl sweep`."""

import dataclasses
from typing import Any

import jax

from jaxrl.algos.base import field_problems, make_algorithm
from jaxrl.cli import multihost
from jaxrl.cli.environment import make_environment
from jaxrl.cli.flags import build_parts, with_flags
from jaxrl.cli.runs import ParsedCommand
from jaxrl.cli.summary import report
from jaxrl.core import ownership
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment, HostRecipe
from jaxrl.parallel import determinism, threads
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.experience import dataset_settings, learns_from_dataset
from jaxrl.parallel.mesh import cores, use_cpu_devices
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.sebulba.topology import Sebulba
from jaxrl.parallel.topology import default_topology
from jaxrl.run import training
from jaxrl.run.compile_cache import keep_apart, keep_compiled_programs
from jaxrl.run.loggers import WandbLogger
from jaxrl.run.presets import preset
from jaxrl.run.recorder import Record
from jaxrl.run.settings import RunSettings
from jaxrl.run.timing import is_for_a_command

# Flags that are fields of either topology.
_LAYOUT = tuple({f.name: None for kind in (Sebulba, Anakin) for f in dataclasses.fields(kind) if f.name != "num_envs"})
# Suites whose steps take seconds to trace; with thousands of kernels each, one thread is as fast as two.
_SLOW_TO_TRACE = ("brax:",)


def train(parsed: ParsedCommand) -> int:
    """Train as the flags say; return the exit code. The process of an evaluator ends here."""
    settings = train_settings(parsed)
    project = parsed.values["run"]["wandb"]
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
      ConfigError: lists every wrong value, of any part.
    """
    request = prepare("train", parsed)
    arguments = dict(request.arguments)
    layout = {name: value for name in _LAYOUT if (value := arguments[name]) is not None}
    topology = _topology(request.env, request.num_envs, layout)
    if arguments["record"] is not None:
        arguments["record"] = Record(arguments["record"], arguments["record_every"])
    env = _with_threads(request, parsed.values["run"], topology)
    if arguments["eval_env"] is not None:
        arguments["eval_env"] = make_environment(arguments["eval_env"])
    return RunSettings.of(arguments | {"algo": request.algo, "env": env, "topology": topology})


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """The request of a command line, ready for `jaxrl.train`, `sweep`, `tune` and `pbt`."""

    algo: Algorithm
    env: Environment | HostRecipe | None  # None: only a dataset
    num_envs: int | None
    arguments: dict[str, Any]  # the command's own flags


def prepare(command: str, parsed: ParsedCommand) -> TrainRequest:
    """Return the algorithm, the environment and the arguments of `train`, `sweep`, `tune` and `pbt`.

    Raises:
      ConfigError: lists every wrong value, of any part.
    """
    if (out := parsed.values["run"].get("out")) is not None:
        ownership.check_output(out, "output of a sweep")
    values, problems = build_parts(parsed.groups, parsed.values)
    algo = make_algorithm(parsed.algorithm) if parsed.preset is None else preset(parsed.preset).algorithm
    run, algo = values["run"], with_flags(algo, values)
    problems += field_problems(algo)
    if not problems and run.get("dataset") is None and learns_from_dataset(algo):
        problems.append(_no_dataset(command, parsed, algo))
    if run.get("record_every", 1) != 1 and run["record"] is None:
        problems.append("--record-every needs --record")
    if run["env"] is None and run.get("dataset") is not None and run["num_envs"] is not None:
        problems.append(f"--num-envs {run['num_envs']} needs --env")
    if problems and multihost.is_one_of_several(run):
        raise ConfigError(problems)  # before waiting for the other processes
    if run.get("deterministic"):
        determinism.set_flags()  # before anything initializes JAX's devices
    processes = multihost.join(run)
    if run.get("target") is not None:
        jax.config.update("jax_platforms", "cpu")  # the target is elsewhere, so JAX need not look for it
    split = cores() if command in ("sweep", "tune", "pbt") and run["devices"] is None else run["devices"]
    if command == "train" and split is not None:
        split = 1 if run.get("target") else split // processes  # the count is for all processes, or for the target
    if split is not None and split > 1:
        use_cpu_devices(split)  # before the environment or anything else initializes JAX's devices
    if run.get("backend") == "ray":
        jax.config.update("jax_platforms", "cpu")  # the accelerators are for the experiments, if this machine has any
    keep_compiled_programs()  # making an environment also compiles: 345 programs for brax's ant
    env = None
    try:
        env = None if run["env"] is None else make_environment(run["env"], run["env_params"])
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    common = ("preset", "import_", "env", "env_params", "num_envs", *multihost.FLAGS)
    return TrainRequest(algo, env, run["num_envs"], {name: v for name, v in run.items() if name not in common})


def _no_dataset(command, parsed, algo):
    """Return a message on an algorithm that learns from a dataset but has none."""
    settings = dataset_settings(algo)
    flags = [group.option(flag) for group in parsed.groups for flag in group.flags if flag.name in settings]
    what = f"{type(algo).__name__} with {' and '.join(flags)}" if flags else type(algo).__name__
    if command == "train":
        return f"{what} learns from a dataset: --dataset PATH, such as rlds:data/pendulum"
    return f"{what} learns from a dataset, which jaxrl {command} does not take; use jaxrl train with --dataset"


def _topology(env, num_envs, layout):
    topology = default_topology(env, num_envs)
    known = {field.name for field in dataclasses.fields(topology)}
    if strange := [name for name in layout if name not in known]:
        raise ConfigError(_only_on_the_host(strange, env))
    return dataclasses.replace(topology, **layout)


def _with_threads(request, run, topology):
    """Return the environment, made again after restarting JAX with one thread if the run is faster with it."""
    if not is_for_a_command() or run["import_"] is not None:  # the process, or an imported module, may hold arrays
        return request.env
    if run["async_evaluation"]:  # a second thread is needed for evaluations during training
        return request.env
    compiled = isinstance(request.env, Environment) and run["dataset"] is None
    if not compiled or request.env.name.startswith(_SLOW_TO_TRACE):
        return request.env
    if not threads.one_suffices(request.algo, request.env, topology):
        return request.env
    threads.restart_backend()
    keep_apart(threads=1)
    return make_environment(run["env"], run["env_params"])


def _only_on_the_host(names, env):
    """Explain that these flags need a host environment."""
    flags, them = ", ".join(f"--{name.replace('_', '-')}" for name in names), "them" if len(names) > 1 else "it"
    why = "with a dataset alone nothing acts (Offline)" if env is None else f"{env.name} is in JAX (Anakin)"
    return (
        f"{flags}: only for environments on the host (Sebulba), and {why}; leave {them} out, or take an environment on "
        "the host, such as --env gymnasium:CartPole-v1 (jaxrl envs lists them)"
    )


# --- the report --------------------------------------------------------------------------------------------------


def _report(result: training.Result) -> None:
    """Print how a run ended."""
    record, notes = result.record(), []
    if record["session_steps"] == 0 and result.stopped == "finished":
        notes.append("it had ended before; more --total-steps continue it, --overwrite starts again")
    if result.stopped == "interrupted":
        unsaved = result.run_dir is None
        saved = "nothing was saved: no --run-dir given" if unsaved else "the same command resumes from here"
        notes.append(f"interrupted; {saved}")
    print("\n".join(report(record, type(result.algo).__name__, result.env.name, result.run_dir, *notes)))


def _wandb(project, settings):
    config, run_dir = {"algorithm": encode(settings.algo), "environment": settings.env.name}, settings.run_dir
    name = None if run_dir is None else run_dir.name
    if run_dir is not None:
        ownership.check_folder(run_dir, "a run")
    return WandbLogger(project, config=config, directory=run_dir, name=name, resume=not settings.overwrite)
