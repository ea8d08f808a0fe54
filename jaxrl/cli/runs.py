"""The command lines of `jaxrl train`, `compile`, `sweep`, `tune` and `pbt`, checked before JAX is imported."""

import dataclasses
import importlib
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxrl.cli import imports, multihost, table
from jaxrl.cli.flags import INT, TEXT, Flag, Group, limit_problems, optional, parse
from jaxrl.core import limits
from jaxrl.core.errors import ConfigError

_COMPILES = (
    "Compiles what jaxrl train with the same flags would compile, and keeps it for that run. Nothing is written to "
    "--run-dir, --record or --wandb."
)
# Flags that change the programs of a run or how they run, without meaning for a target.
_NO_TARGET = ("dataset", "record", "init_from", "async_evaluation", "video_every", "wandb", "launch", "distributed")
_TARGET = Flag(
    "target",
    TEXT,
    None,
    "accelerators to compile for and report on, such as v5e:4x4 or h100:8, which need not be here; or the file of "
    "jaxrl doctor --describe-device",
)


# The groups of these commands' flags in the help; other flags are in "run".
_TITLES = {
    "evaluation and files": (
        "log_every",
        "evaluate_every",
        "evaluation_episodes",
        "explore_in_evaluation",
        "async_evaluation",
        "eval_env",
        "target_return",
        "checkpoint_every",
        "keep",
        "save_replay",
        "record",
        "record_every",
        "video_every",
        "wandb",
        "points",
        "out",
    ),
    "host environments": (
        "actors",
        "groups",
        "lockstep",
        "lag",
        "queue",
        "learner_batch",
        "max_lag",
        "parameter_period",
        "ready",
        "error_buffer",
        "step_timeout",
        "remote",
    ),
    "devices and machines": (
        "devices",
        "actor_devices",
        "actor_platform",
        "shards",
        "resources",
        "mapping",
        "backend",
        "cpus_per_run",
        "gpus_per_run",
        "max_concurrent",
        "restarts",
        "address",
        *multihost.FLAGS,
    ),
}
# Algorithms published for datasets, although those with a replay also run without one.
_OFFLINE = ("bc", "cql", "crr", "iql", "td3bc")
_RARE = ("host environments", "devices and machines")


# The module and the function that do the work of a command.
_WORK = {
    "train": ("training", "train"),
    "compile": ("ahead", "compile_"),
    "sweep": ("sweep", "sweep"),
    "tune": ("tune", "tune"),
    "pbt": ("pbt", "pbt"),
}


@dataclasses.dataclass(frozen=True)
class ParsedCommand:
    """A valid command line, as far as can be checked without JAX.

    Attributes:
      argv: words of the command line after the command.
      algorithm: name of the algorithm.
      preset: name of the preset, or None.
      groups: groups of the flags.
      values: values by group, without parts and schedules made.
    """

    argv: Sequence[str]
    algorithm: str
    preset: str | None
    groups: Sequence[Group]
    values: dict[str, dict[str, Any]]


def read(command: str, argv: Sequence[str]) -> ParsedCommand:
    """Read `ALGORITHM [FLAGS]`.

    Raises:
      ConfigError: lists every wrong value, of any part.
    """
    preset, name, rest = _preset(argv), argv[0], list(argv[1:])
    if preset is not None and name.startswith("-"):
        name, rest = preset.algorithm, list(argv)
    fields = table.algorithm_groups(name)
    if preset is not None:
        if preset.algorithm != name.lower():
            title = table.algorithm_groups(preset.algorithm)[0].title
            raise ConfigError(f"preset {preset.name} is for {title}, not for {name}")
        fields = table.algorithm_groups(name, preset)
    groups = [Group("run", [*_common_flags(preset), *_own_flags(command, preset), *multihost.flags()]), *fields]
    source = "" if preset is None else f" Settings: {table.preset_source(preset.name)}"
    what = f"{fields[0].help}{source} "
    what += "Numbers may be schedules over the run, such as linear:2.5e-4:0 or cosine:1e-3:1e-5:0.5."
    what = f"{_COMPILES} {what}" if command == "compile" else what
    values, problems = parse(
        f"jaxrl {command} {name}",
        f"{_example(command, name.lower(), preset, groups[0])}\n\n{what}",
        _help_groups(groups[0], fields, name.lower()),
        rest,
        known_elsewhere=partial(_flag_conflict, fields[0].title),
    )
    values["run"] = {flag.name: _value(values, fields, flag.name) for flag in groups[0].flags}
    run = values["run"]
    problems += limit_problems(fields[0], values[fields[0].title]) + multihost.problems(run, command)
    problems += limits.training_problems(**{name: run[name] for name in limits.LEAST if name in run})
    problems += _network_problems(fields, values)
    of_grid = grid_environments(run.get("grid", ()))
    if run["env"] is None and run.get("dataset") is None and not of_grid:
        problems.append("no environment: --env NAME, such as gymnax:CartPole-v1 (jaxrl envs lists them)")
    if run["total_steps"] is None and run.get("target") is None:
        problems.append("no number of steps: --total-steps N")
    for env in (run["env"], run.get("eval_env"), *of_grid):
        problems += [] if env is None else table.environment_problems(env)
    if run.get("target") is not None:
        unusable = [flag for flag in groups[0].flags if flag.name in _NO_TARGET and run[flag.name] != flag.default]
        problems += [f"--{flag.name.replace('_', '-')}: not with --target" for flag in unusable]
    if problems:
        raise ConfigError(problems)
    return ParsedCommand(argv, name, None if preset is None else preset.name, groups, values)


def grid_environments(words: Sequence[str]) -> list[str]:
    """Return the names of the environments in the words of `--grid`, from `env=NAME,NAME`."""
    return [name for word in words if word.startswith("env=") for name in word[len("env=") :].split(",")]


def _help_groups(run, fields, name):
    """Return the groups of flags in the order of the help.

    The order is required flags, the algorithm's `fields`, the run's flags, machines.
    """
    by_title: dict[str, list[Flag]] = {title: [] for title in ("required", "run", *_TITLES)}
    for flag in run.flags:
        title = next((title for title, names in _TITLES.items() if flag.name in names), "run")
        if flag.name == "dataset" and name in (*_OFFLINE, *table.load()["from_datasets"]):
            flag = dataclasses.replace(flag, hint="required")
        elif flag.name == "env" and name in _OFFLINE and _takes_dataset(run):
            flag = dataclasses.replace(flag, hint=None)
        by_title["required" if flag.hint == "required" else title].append(flag)
    groups = [Group(title, flags, rare=title in _RARE) for title, flags in by_title.items() if flags]
    own = [dataclasses.replace(fields[0], help=""), *fields[1:]]  # the algorithm's line begins the help
    first = sum(group.title == "required" for group in groups)
    return [*groups[:first], *own, *groups[first:]]


def _takes_dataset(run):
    return any(flag.name == "dataset" for flag in run.flags)


def _example(command, name, preset, run):
    """Return an example of a command line, within the terminal's width."""
    if preset is not None:
        words = [f"--preset {preset.name}"]
    elif name in _OFFLINE and _takes_dataset(run):
        words = [name, "--dataset rlds:data/pendulum", "--eval-env gymnax:Pendulum-v1", "--total-steps 20000"]
    else:
        data = ["--dataset rlds:data/pendulum"] if name in table.load()["from_datasets"] else []
        environment = "gymnax:Pendulum-v1" if data else _example_environment(name)
        words = [name, f"--env {environment}", *data, "--total-steps 500000"]
    words += [] if command == "tune" else [f"--run-dir runs/{name}"]
    width, lines = shutil.get_terminal_size().columns, [f"  jaxrl {command}"]
    for word in words:
        if len(f"{lines[-1]} {word}") > width - 2:
            lines[-1] += " \\"
            lines.append(" " * 5)
        lines[-1] += f" {word}"
    return "\n".join(["For example:", *lines])


def _example_environment(name):
    actions = next((row[2] for row in table.load()["lists"]["algorithms"] if row[0] == name), None)
    if actions is None:
        return "SUITE:NAME"  # a user's own algorithm, whose actions are not known here
    return "gymnax:CartPole-v1" if "discrete" in actions else "gymnax:Pendulum-v1"


def _value(values, fields, name):
    """Return the value of a flag of the run, from the group in which it was shown."""
    own = {group.title for group in fields}
    return next(found[name] for title, found in values.items() if title not in own and name in found)


def _flag_conflict(title, group, flag, text):
    """Return a message on a part that this flag does not accept but flags of other algorithms do, or None."""
    name = text.partition(":")[0].lower()
    if flag.kind.name != "part" or any(part.name == name for part in flag.kind.parts):
        return None
    if not (algorithms_accepting := table.algorithms_accepting(group.option(flag), name)):
        return None
    usage = " or ".join(part.usage() for part in flag.kind.parts)
    return f"{title} does not take {name}, which is for {', '.join(algorithms_accepting)}; write {usage}"


def _network_problems(fields, values):
    """Return the problems with flags of a network that is replaced by the user's own."""
    own, *nested = fields
    return [
        f"{group.option(flag)}: not with --{group.title}, which takes the place of that network"
        for group in nested
        if values[own.title].get(group.title) is not None
        for flag in group.flags
        if values[group.title][flag.name] != flag.default
    ]


def _common_flags(preset):
    name, env, num_envs = (None, None, None) if preset is None else (preset.name, preset.env, preset.num_envs)
    required = "required" if preset is None else None
    return [
        Flag("env", TEXT, env, "the environment, suite:name", required),
        Flag("env_params", TEXT, (), "parameters of the environment, as key=value; also auto_reset=pooled", many=True),
        Flag("preset", TEXT, name, "published settings to start from; jaxrl algos lists them"),
        imports.FLAG,
        Flag(
            "num_envs", optional(INT), num_envs, "number of environments; None: 1 with a replay of transitions, else 8"
        ),
    ]


def _own_flags(command, preset):
    # `compile` has every flag of `train`: recording changes the program, and nothing is written to output paths.
    flags = table.command_flags("train" if command == "compile" else command)
    if command == "compile":
        flags = [*flags, _TARGET]
    if preset is None:
        return flags
    known = {"total_steps": {"default": preset.total_steps, "hint": None}}
    return [dataclasses.replace(flag, **known.get(flag.name, {})) for flag in flags]


def _preset(argv):
    """Return the requested preset, or None. It is looked up first, because the help shows its defaults."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--preset":
            return table.preset(value if equals else following)
    return None


def begin(command: str, argv: Sequence[str]) -> int:
    """Run `jaxrl COMMAND ALGORITHM [FLAGS]`, which imports JAX only if all flags are valid; return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        return _print_help(command)
    parsed = read(command, argv)
    if (code := multihost.start(command, argv, parsed.values["run"])) is not None:
        return code
    from jaxrl.parallel.multihost.distributed import report_errors

    module, function = _WORK[command]
    with report_errors():
        return getattr(importlib.import_module(f"jaxrl.cli.{module}"), function)(parsed)


def _print_help(command):
    """Print the algorithms that a command has flags for; return the exit code."""
    lines = [f"  jaxrl {command} {name} --help" for name in table.algorithms(command)]
    usage = [f"usage: jaxrl {command} ALGORITHM [FLAGS]", f"       jaxrl {command} --preset NAME [FLAGS]"]
    listed = "jaxrl algos says what each algorithm is, and lists the presets."
    print("\n".join([*usage, "", "the flags of each algorithm:", *lines, "", listed]))
    return 0
