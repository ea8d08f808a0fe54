"""Parsing and validation of the flags of `jaxrl train`, `compile`, `sweep`, `tune` and `pbt`, before importing JAX."""

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl.cli import multihost, table
from jaxrl.cli.flags import option, parse
from jaxrl.cli.imports import announce_jax, found
from jaxrl.core import limits
from jaxrl.core.errors import ConfigError

_COMPILES = (
    "Compile and cache the programs that jaxrl train would run with the same flags, so that training starts without "
    "compiling. Nothing is written to --run-dir, --record or --wandb."
)
# Flags that change the programs of a run or how they run, but do not apply to a target.
_NO_TARGET = ("dataset", "record", "init_from", "async_evaluation", "video_every", "wandb", "launch", "distributed")


@dataclasses.dataclass(frozen=True)
class ParsedCommand:
    """A command line that passed all checks possible without JAX.

    Attributes:
      command: name of the command.
      algorithm: name of the algorithm.
      values: the given values, by flag; parts and schedules are not yet built.
      texts: the texts of the given values, by flag.
      run: values of all flags that do not belong to the algorithm, including defaults; also not yet built.
    """

    command: str
    algorithm: str
    values: Mapping[str, Any]
    texts: Mapping[str, Sequence[str]]
    run: Mapping[str, Any]


def read(command: str, argv: Sequence[str]) -> ParsedCommand:
    """Parse and validate `ALGORITHM [FLAGS]`; return the parsed command.

    Raises:
      ConfigError: arguments are invalid; the message lists all problems.
    """
    preset, name, rest = _preset(argv), argv[0], list(argv[1:])
    if preset is not None and name.startswith("-"):
        name, rest = preset["algorithm"], list(argv)
    own, helps = table.algorithm_flags(name)
    title = next(iter(helps))
    if preset is not None and preset["algorithm"] != name.lower():
        other = next(iter(table.algorithm_flags(preset["algorithm"])[1]))
        raise ConfigError(f"preset {preset['defaults']['preset']} is for {other}, not for {name}")
    what = [_COMPILES] * (command == "compile") + [helps.pop(title)]
    what += [] if preset is None else [f"Settings: {preset['source']}"]
    what += [
        "Numbers can be schedules over the run, such as linear:2.5e-4:0 or cosine:1e-3:1e-5:0.5; --PART.FIELD sets a "
        "field of a part."
    ]
    others = table.command_flags(command)
    changes: dict[str, dict[str, Any]] = {}
    if any(flag.name == "dataset" for flag in others):  # required by algorithms that learn from one
        offline = name.lower() in table.load()["offline"]
        changes["dataset"] = {"required": offline or name.lower() in table.load()["from_datasets"]}
        changes["env"] = {"required": not offline}
    if preset is not None:
        changes |= {flag: {"default": text, "required": False} for flag, text in preset["defaults"].items()}
    flags = [dataclasses.replace(flag, **changes.get(flag.name, {})) for flag in (*own, *others)]
    values, texts, problems = parse(
        f"jaxrl {command} {name}",
        f"{_example(command, name.lower(), preset, flags)}\n\n{' '.join(what)}",
        flags,
        rest,
        helps=helps,
        known_elsewhere=partial(_flag_conflict, title),
    )
    problems += _limit_problems(title, flags, values) + _network_problems(values)
    run = {flag.name: values.get(flag.name, flag.value) for flag in flags[len(own) :]}
    problems += multihost.problems(run, command)
    problems += limits.training_problems(**{name: run[name] for name in limits.LEAST if name in run})
    of_grid = grid_environments(run.get("grid", ()))
    if run["env"] is None and run.get("dataset") is None and not of_grid:
        problems.append("no environment: give --env NAME, such as gymnax:CartPole-v1 (jaxrl envs lists them)")
    if run["total_steps"] is None and run.get("target") is None:
        problems.append("no number of steps: give --total-steps N")
    for env in (run["env"], run.get("eval_env"), *of_grid):
        problems += [] if env is None else table.environment_problems(env)
    if run.get("target") is not None:
        problems += [f"{option(name)} cannot be used with --target" for name in _NO_TARGET if name in values]
    if problems:
        raise ConfigError(problems)
    return ParsedCommand(command, name, values, texts, run)


def grid_environments(words: Sequence[str]) -> list[str]:
    """Return the names of the environments in the values of `--grid`, from `env=NAME,NAME`."""
    return [name for word in words if word.startswith("env=") for name in word[len("env=") :].split(",")]


def _example(command, name, preset, flags):
    """Return an example command line, wrapped to the terminal's width."""
    required = {flag.name for flag in flags if flag.required}
    if preset is not None:
        words = [f"--preset {preset['defaults']['preset']}"]
    else:
        environment = "gymnax:Pendulum-v1" if "dataset" in required else _example_environment(name)
        acts = "env" in required
        words = [name, f"--{'env' if acts else 'eval-env'} {environment}"]
        words += ["--dataset rlds:data/pendulum"] if "dataset" in required else []
        words += [f"--total-steps {500_000 if acts else 20_000}"]
    words += [] if command == "tune" else [f"--run-dir runs/{name}"]
    together = [word.replace(" ", "\xa0") for word in words]  # keeps a flag and its value on one line
    lines = textwrap.wrap(
        " ".join(["jaxrl", command, *together]),
        shutil.get_terminal_size().columns - 2,
        initial_indent=" " * 2,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
    )
    return "For example:\n" + " \\\n".join(lines).replace("\xa0", " ")


def _example_environment(name):
    actions = next((row[2] for row in table.load()["rows"] if row[0] == name), None)
    if actions is None:
        return "SUITE:NAME"  # a user-defined algorithm, which the table does not contain
    return "gymnax:CartPole-v1" if "discrete" in actions else "gymnax:Pendulum-v1"


def _flag_conflict(title, flag, text):
    """Return a message if other algorithms accept this value for the flag but this one does not, otherwise None."""
    name = text.partition(":")[0].lower()
    others = table.algorithms_accepting(flag.name, name)
    if not others or any(part.name == name for part in flag.kind.parts):
        return None
    usage = " or ".join(part.usage() for part in flag.kind.parts)
    return f"{title} does not support {name}, which is for {', '.join(others)}; use {usage}"


def _limit_problems(title, flags, values):
    """Return problems with numbers outside their limits, worded as in the algorithm's own validation."""
    return [
        f"{title}.{flag.name}={value!r} {what}"
        for flag in flags
        if flag.title == title
        and type(value := values.get(flag.name)) in (int, float)
        and (what := limits.problem(value, flag.limits))
    ]


def _network_problems(values):
    """Return problems with flags for a network that is replaced by a user-defined network."""
    return [
        f"{option(name)} cannot be used with {option(network)}, which replaces that network"
        for name in values
        if "." in name and (network := name.partition(".")[0]) in values
    ]


def _preset(argv):
    """Return the requested preset, or None. It is read before other flags, since the help shows its defaults."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--preset":
            return table.preset(value if equals else following)
    return None


def begin(command: str, place: str, argv: Sequence[str]) -> int:
    """Run `jaxrl COMMAND ALGORITHM [FLAGS]` and return the exit code. JAX is only imported if all flags are valid.

    Args:
      command: the command as typed.
      place: module and name of the command's function.
      argv: the arguments after the command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        return _print_help(command)
    parsed = read(command, argv)
    if (code := multihost.start(command, argv, parsed.run)) is not None:
        return code
    announce_jax()
    from jaxrl.parallel.multihost.distributed import report_errors

    with report_errors():
        return found(place)(parsed)


def _print_help(command):
    """Print the algorithms that a command supports; return the exit code."""
    lines = [f"  jaxrl {command} {name} --help" for name in table.algorithms(command)]
    usage = [f"usage: jaxrl {command} ALGORITHM [FLAGS]", f"       jaxrl {command} --preset NAME [FLAGS]"]
    listed = "jaxrl algos describes the algorithms and lists the presets."
    print("\n".join([*usage, "", "flags of each algorithm:", *lines, "", listed]))
    return 0
