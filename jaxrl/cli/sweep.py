"""The commands `jaxrl sweep`, `tune` and `pbt`."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from jaxrl.cli import environment, multihost, table, training
from jaxrl.cli.fields import read_field, written
from jaxrl.cli.flags import as_typed, option
from jaxrl.cli.runs import ParsedCommand, grid_environments
from jaxrl.cli.values import assignments
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm
from jaxrl.parallel.multihost import distributed
from jaxrl.sweeps.distributions import LogUniform, Uniform
from jaxrl.sweeps.launcher import Experiments, launch
from jaxrl.sweeps.pbt import pbt as run_pbt
from jaxrl.sweeps.sweep import sweep as run_sweep
from jaxrl.sweeps.tune import tune as run_tune

_PARAMETERS = {"jax": dict(signature(run_sweep).parameters), "ray": dict(signature(launch).parameters)}
# Flags that `train` also has, but whose values belong to the sweep or have another meaning.
_NOT_OF_THE_RUN = ("run_dir", "overwrite", "progress", "devices")


def sweep(parsed: ParsedCommand) -> int:
    """Run the sweep described by the flags; return the exit code."""
    algo, env, arguments, words = _prepared(parsed, "grid")
    root, failed = arguments.get("run_dir"), False
    tasks = grid_environments(words)
    space = read_space(algo, "--grid", [word for word in words if not word.startswith("env=")])
    run = _backend(arguments)
    if tasks and run is not launch:
        raise ConfigError("--grid env needs --backend ray, since each environment has its own program")
    # Scores of different environments are not comparable, so each has its own table and best run.
    made = {name: environment.make_environment(name, parsed.run["env_params"]) for name in tasks} or {"": env}
    for name, env in made.items():
        if name:
            arguments["run_dir"] = root / re.sub(r"[^\w.-]", "_", name)
            print(f"{name}:")
        failed |= _report(run(algo, env, **arguments, **space), arguments.get("run_dir"))
    return 1 if failed else 0


def tune(parsed: ParsedCommand) -> int:
    """Run the search described by the flags; return the exit code."""
    algo, env, arguments, words = _prepared(parsed, "space")
    result = run_tune(algo, env, **arguments, **_searched_space(algo, words))
    print(result.table())
    print(f"best: {train_command(parsed, result.best)}")
    return 0


def pbt(parsed: ParsedCommand) -> int:
    """Train the population described by the flags; return the exit code."""
    algo, env, arguments, words = _prepared(parsed, "space")
    space = _searched_space(algo, words)
    result = run_pbt(algo, env, **arguments, **space)
    if not distributed.is_leader():
        return 0
    print(result.table())
    episodes = f"{result.fresh_returns.size} fresh episodes"
    print(f"winner: member {result.lineage.winner}, return {result.fresh_score:.6g} in {episodes}")
    print(f"{result.wall_seconds:,.0f} s; {result.steps_per_second:,.0f} steps/s over all members while training")
    print(f"to train with the winner's schedules: {train_command(parsed, space | result.schedules)}")
    _print_location("lineage, curves, table and the winner's policy", arguments.get("run_dir"))
    return 0


def _prepared(parsed, flag):
    """Return the algorithm, the environment, the arguments, and the values of `flag`."""
    request = training.prepare(parsed)
    arguments = request.arguments
    if len(arguments.get("seeds", ())) == 1:  # the number of seeds
        [arguments["seeds"]] = arguments["seeds"]
    return request.algo, request.env, arguments, arguments.pop(flag)


def _report(result, run_dir):
    """Print the table of a sweep and the location of its results; return whether a run raised."""
    if distributed.is_leader():
        print(result.table())
        how = "including start-up and evaluation" if isinstance(result, Experiments) else "while training"
        print(f"{result.wall_seconds:,.0f} s; {result.steps_per_second:,.0f} steps/s over all runs {how}")
        _print_location("curves, table and best policy", run_dir)
    errors = result.errors if isinstance(result, Experiments) else {}
    for (place, index), error in errors.items():
        print(f"error: {result.run_dirs[place][index]}:\n{error}", file=sys.stderr)
    return bool(errors)


def _backend(arguments: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that runs the sweep, and remove the arguments of the other backend from `arguments`."""
    backend = arguments.pop("backend")
    others = [name for name in arguments if name not in _PARAMETERS[backend]]
    known = _PARAMETERS["ray"] | _PARAMETERS["jax"]
    unusable = [option(name) for name in others if arguments.pop(name) != known[name].default]
    problems = [f"{flag} cannot be used with --backend {backend}" for flag in unusable]
    if backend == "ray":
        if "run_dir" not in arguments:
            problems.append("--backend ray needs --run-dir, the parent of the runs' directories")
        if distributed.is_several():
            problems.append("--distributed cannot be used with --backend ray, which detects its machines itself")
    if problems:
        raise ConfigError(problems)
    return launch if backend == "ray" else run_sweep


# --- search spaces -------------------------------------------------------------------------------------------------


def read_space(algo: Algorithm, flag: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse the values or distribution of each field, as in `learning_rate=1e-4,3e-4` or `learning_rate=log:1e-5:1e-2`.

    Args:
      algo: the algorithm with these fields.
      flag: the flag, for error messages.
      words: the values of the flag.

    Raises:
      ConfigError: a value cannot be parsed; the message lists all such values.
    """
    drawn = {"uniform": Uniform, "loguniform": LogUniform, "log": LogUniform}
    space, problems = {}, []
    for name, text in assignments(flag, words).items():
        name = name.replace("-", "_")
        kind, *numbers = text.split(":")
        try:
            if kind in drawn:
                if len(numbers) != 2:
                    raise ConfigError(f"{text!r}: use {kind}:LOW:HIGH")
                ends = [read_field(algo, name, number) for number in numbers]
                if not all(isinstance(end, int | float) for end in ends):
                    raise ConfigError(f"{text!r}: LOW and HIGH of {kind}:LOW:HIGH must be numbers")
                space[name] = drawn[kind](*map(float, ends))
            else:
                space[name] = [read_field(algo, name, part) for part in text.split(",")]
        except ConfigError as error:
            problems += [f"{flag} {name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return space


def _searched_space(algo: Algorithm, words: Sequence[str]) -> dict[str, Any]:
    """Return the space of each field in the values of `--space`: a range, a list, or a single value."""
    space = read_space(algo, "--space", words)
    return {
        name: values[0] if isinstance(values, list) and len(values) == 1 else values for name, values in space.items()
    }


# --- output --------------------------------------------------------------------------------------------------------


def train_command(parsed: ParsedCommand, settings: Mapping[str, Any]) -> str:
    """Return a command `jaxrl train` with these settings and all other flags of the parsed command."""
    of_train = {flag.name for flag in table.command_flags("train")}
    own = {flag.name for flag in table.command_flags(parsed.command)} - of_train
    words = ["jaxrl", "train", parsed.algorithm]
    for name, texts in parsed.texts.items():
        if name not in {*own, *_NOT_OF_THE_RUN, *multihost.FLAGS, *settings}:
            for text in texts:
                words += as_typed(name, text)
    for name, value in settings.items():
        words += [option(name), repr(value) if isinstance(value, float) else written(value)]
    return shlex.join(words)


def _print_location(what, run_dir):
    print(f"nothing was saved; --run-dir DIR saves the {what}" if run_dir is None else f"{what}: {run_dir}")
