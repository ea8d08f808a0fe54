"""`jaxrl train`, and what it shares with `jaxrl sweep`: from flags to an algorithm, an environment and a topology."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl import envs
from jaxrl.algos import ALGORITHMS
from jaxrl.algos.base import field_problems, make_algorithm
from jaxrl.cli import multihost
from jaxrl.cli.flags import Flag, Group, algorithm_groups, argument_flags, documented, parse, with_flags
from jaxrl.cli.values import assignments, literal
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, HostRecipe
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.mesh import cores, use_cpu_devices
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.offline import Offline
from jaxrl.parallel.sebulba.topology import Sebulba
from jaxrl.run import training
from jaxrl.run.evaluation import Evaluation
from jaxrl.run.loggers import WandbLogger
from jaxrl.run.presets import Preset
from jaxrl.run.presets import preset as preset_of
from jaxrl.run.recorder import Record

# Arguments of `train` that are no flags as they are.
_NOT_FLAGS = ("topology", "num_envs", "loggers", "callbacks", "callback_every", "record", "eval_env", "dataset")


def train(argv: Sequence[str]) -> int:
    """`jaxrl train ALGORITHM [FLAGS]`; the exit code."""
    if asks_for_help(argv):
        return print_help("train")

    def flags(preset):
        steps = None if preset is None else preset.total_steps
        help_, named = documented(training.train), ("eval_env", "dataset")
        return [
            *argument_flags(training.train, _NOT_FLAGS, total_steps=steps),
            *(Flag(name, str, None, help_[name]) for name in named),
            Flag("record", Path | None, None, "write the agent's training episodes to this directory"),
            Flag("record_every", int, 1, f"record {documented(Record)['every']}"),
            Flag("wandb", str, None, "also log to this project of Weights & Biases"),
            *_layout_flags(),
        ]

    asked = read_run("train", argv, flags)
    arguments = dict(asked.arguments)
    if arguments["eval_env"] is not None:
        arguments["eval_env"] = make_environment(arguments["eval_env"])
    every = arguments.pop("record_every")
    if arguments["record"] is not None:
        arguments["record"] = Record(arguments["record"], every)
    elif every != 1:
        raise ConfigError("--record-every needs --record")
    layout = {name: arguments.pop(name) for name in _LAYOUT}
    asked_layout = {name: value for name, value in layout.items() if value is not None}
    topology = _topology(asked.env, asked.num_envs, asked_layout)
    project = arguments.pop("wandb")
    leader = distributed.is_leader()
    loggers = [_wandb(project, arguments["run_dir"], asked)] if project is not None and leader else []
    result = training.train(asked.algo, asked.env, topology=topology, loggers=loggers, **arguments)
    if leader:
        _report(result)
    return {"non_finite": 1, "interrupted": 130}.get(result.stopped, 0)


# --- what was asked for ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Asked:
    algo: Any
    env: Environment | HostRecipe | None  # None: a dataset alone
    num_envs: int | None
    arguments: dict[str, Any]  # the command's own flags


def read_run(command: str, argv: Sequence[str], flags: Callable[[Preset | None], list[Flag]]) -> _Asked:
    """Reads `ALGORITHM [FLAGS]`; `flags` are the command's own, with a preset's defaults if there is one.

    Raises:
      ConfigError: every value that is wrong, whichever part it belongs to.
    """
    preset, name, rest = _preset(argv), argv[0], list(argv[1:])
    if preset is not None and name.startswith("-"):
        name, rest = type(preset.algorithm).__name__.lower(), list(argv)
    algo = make_algorithm(name)
    if preset is not None:
        if type(preset.algorithm) is not type(algo):
            raise ConfigError(f"preset {preset.name} is for {type(preset.algorithm).__name__}, not for {name}")
        algo = preset.algorithm
    fields = algorithm_groups(algo)
    values, problems = parse(
        f"jaxrl {command} {name}",
        f"{fields[0].help} Numbers may be schedules over the run, such as linear:2.5e-4:0 or cosine:1e-3:1e-5:0.5.",
        [Group("run", [*_common_flags(preset), *flags(preset), *multihost.flags()]), *fields],
        rest,
    )
    run, algo = values["run"], with_flags(algo, values)
    problems += field_problems(algo) + multihost.problems(run)
    if run["env"] is None and run.get("dataset") is None:
        problems.append("no environment: --env NAME, such as gymnax:CartPole-v1 (jaxrl envs lists them)")
    if run["total_steps"] is None:
        problems.append("no number of steps: --total-steps N")
    if problems and run["distributed"]:
        raise ConfigError(problems)  # before the other processes are waited for
    processes = multihost.join(run)
    split = cores() if command == "sweep" and run["devices"] is None else run["devices"]
    if command == "train" and split is not None:
        split //= processes  # it counts those of all of them
    if split is not None and split > 1:
        use_cpu_devices(split)  # before anything else, the environment first of all, asks JAX for its devices
    if run.get("backend") == "ray":
        jax.config.update("jax_platforms", "cpu")  # the accelerators are for the experiments, if this machine has any
    env = None
    try:
        env = None if run["env"] is None else make_environment(run["env"], run["env_params"])
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    common = ("preset", "env", "env_params", "num_envs", *multihost.FLAGS)
    return _Asked(algo, env, run["num_envs"], {name: v for name, v in run.items() if name not in common})


def _common_flags(preset):
    name, env, num_envs = (
        (None, None, None) if preset is None else (preset.name, preset.env, preset.topology["num_envs"])
    )
    required = "required" if preset is None else None
    return [
        Flag("env", str, env, "the environment, suite:name", required),
        Flag("env_params", str, (), "parameters of the environment, as key=value; also auto_reset=pooled", many=True),
        Flag("preset", str, name, "published settings to start from; jaxrl algos lists them"),
        Flag("num_envs", int | None, num_envs, "number of environments; None: 8"),
    ]


# What else a topology is, of either kind; None: as it is by itself.
_LAYOUT = {
    field.name: (field.type, documented(topology)[field.name])
    for topology in (Sebulba, Anakin)
    for field in dataclasses.fields(topology)
    if field.name != "num_envs"
}


def _layout_flags():
    return [Flag(name, _optional(kind), None, help_) for name, (kind, help_) in _LAYOUT.items()]


def _optional(kind):
    return kind if kind == int | None else kind | None


def _preset(argv):
    """The preset that is asked for. It is looked up first, because it gives the defaults that the help shows."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--preset":
            return preset_of(value if equals else following)
    return None


def make_environment(name: str, words: Sequence[str] = ()) -> Environment | HostRecipe:
    """The environment `name` with parameters given as `key=value` words.

    Raises:
      ConfigError: unknown name or parameters, or a word that is no `key=value`.
    """
    return envs.make(name, **{key: literal(value) for key, value in assignments("--env-params", words).items()})


def _topology(env, num_envs, layout):
    if env is None and num_envs is not None:
        raise ConfigError(f"--num-envs {num_envs}: without --env nothing acts")
    topology = Offline() if env is None else training.default_topology(env, num_envs)
    known = {field.name for field in dataclasses.fields(topology)}
    if strange := sorted(set(layout) - known):
        flags = ", ".join(f"--{name}" for name in strange)
        what = "a dataset alone" if env is None else env.name
        raise ConfigError(f"{flags}: not for {what}, whose topology is {type(topology).__name__}")
    return dataclasses.replace(topology, **layout)


def asks_for_help(argv):
    """Whether these words ask for help and name no algorithm."""
    return not argv or argv[0] in ("-h", "--help")


def print_help(command):
    """Prints which algorithms a command has flags for; the exit code."""
    lines = [f"  jaxrl {command} {name} --help" for name in sorted(ALGORITHMS)]
    print("\n".join([f"usage: jaxrl {command} ALGORITHM [FLAGS]", "", "the flags of each algorithm:", *lines]))
    return 0


# --- what came of it ---------------------------------------------------------------------------------------------


def score(evaluation: Evaluation) -> str:
    """An evaluation in a line."""
    shown = f"return {evaluation.return_mean:.2f} ± {evaluation.return_std:.2f} over {evaluation.episodes} episodes"
    return shown + (f"; {evaluation.unfinished} more did not end" if evaluation.unfinished else "")


def _report(result: training.Result) -> None:
    """Prints how a run ended."""
    line = f"{type(result.algo).__name__} on {result.env.name}: {result.total_steps:,} steps"
    if result.steps_per_second > 0:
        line += f", {result.steps_per_second:,.0f} steps/s, {result.wall_seconds:,.0f} s"
    print(line)
    if result.evaluation is not None:
        print(f"evaluation: {score(result.evaluation)}")
    if result.run_dir is not None:
        print(f"run directory: {_short(result.run_dir)}")
    if result.stopped == "target_return":
        print("stopped early: the target return was reached")
    if result.stopped == "non_finite":
        print(f"error: {result.problem}", file=sys.stderr)
    if result.stopped == "interrupted":
        saved = "nothing was saved: no --run-dir given"
        if result.run_dir is not None:
            saved = "the same command resumes from here"
        print(f"interrupted; {saved}")


def _short(path: Path) -> Path:
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def _wandb(project, run_dir, asked):
    config = {"algorithm": encode(asked.algo), "environment": asked.env.name}
    return WandbLogger(project, config=config, directory=run_dir, name=None if run_dir is None else Path(run_dir).name)
