"""The command `jaxrl sweep`, after its flags are read: many runs, in one program or as separate experiments."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.cli.environment import make_environment
from jaxrl.cli.fields import read_field
from jaxrl.cli.runs import ParsedCommand, grid_environments
from jaxrl.cli.training import prepare
from jaxrl.cli.values import assignments
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm
from jaxrl.parallel.multihost import distributed
from jaxrl.sweeps.launcher import Experiments, launch
from jaxrl.sweeps.search import LogUniform, Uniform
from jaxrl.sweeps.sweep import sweep as run_sweep

# Flags only for experiments (None: the default of `launch`), and flags only for sweeps in one program.
_RAY = ("cpus_per_run", "gpus_per_run", "restarts", "address", "resources")
_IN_ONE_PROGRAM = ("devices", "mapping", "checkpoint_every", "overwrite")
PICTURES = (".png", ".svg", ".pdf")  # suffixes of --out for curves


def sweep(parsed: ParsedCommand) -> int:
    """Run the sweep described by the flags; return the exit code."""
    request = prepare("sweep", parsed)
    arguments = {name: value for name, value in request.arguments.items() if name not in ("out", "seeds", "grid")}
    seeds, out = request.arguments["seeds"], request.arguments["out"]
    tasks = grid_environments(request.arguments["grid"])
    words = [word for word in request.arguments["grid"] if not word.startswith("env=")]
    space = read_space(request.algo, "--grid", words)
    if request.num_envs is not None:
        arguments["num_envs"] = request.num_envs
    run = _backend(arguments)
    if tasks and run is not launch:
        raise ConfigError("--grid env: other environments are other programs; add --backend ray")
    if tasks and out is not None:
        raise ConfigError("--out: not with --grid env, whose results are in a directory for each environment")
    seeds, root, failed = seeds[0] if len(seeds) == 1 else seeds, arguments["run_dir"], False
    made = {name: make_environment(name, parsed.values["run"]["env_params"]) for name in tasks}
    for name, env in made.items():  # their scores cannot be compared, so each has its own table and best run
        arguments["run_dir"] = root / re.sub(r"[^\w.-]", "_", name)
        print(f"{name}:")
        failed |= _report(run(request.algo, env, seeds=seeds, **arguments, **space), arguments["run_dir"], None)
    if not tasks:
        failed = _report(run(request.algo, request.env, seeds=seeds, **arguments, **space), root, out)
    return 1 if failed else 0


def _report(result, run_dir, out):
    """Print the table of a sweep and the location of its results; return whether a run raised."""
    if distributed.is_leader():
        print(result.table())
        how = "including start-up and evaluation" if isinstance(result, Experiments) else "while training"
        print(f"{result.wall_seconds:,.0f} s; {result.steps_per_second:,.0f} steps/s over all runs {how}")
        if out is not None:
            _save_sweep(result, out)
        if run_dir is not None:
            print(f"curves, table and best policy: {run_dir}")
        elif out is None:
            print("nothing is kept: --run-dir DIR keeps the curves, the table and the best policy")
    errors = result.errors if isinstance(result, Experiments) else {}
    for (place, index), error in errors.items():
        print(f"error: {result.run_dirs[place][index]}:\n{error}", file=sys.stderr)
    return bool(errors)


def _backend(arguments):
    """Return the function that runs the sweep; remove the arguments of the other one from `arguments`."""
    with_ray = arguments.pop("backend") == "ray"
    others = _IN_ONE_PROGRAM if with_ray else _RAY
    unusable = [f"--{name.replace('_', '-')}" for name in others if arguments.pop(name) not in (None, False)]
    problems = [f"{flag}: not with --backend {'ray' if with_ray else 'jax'}" for flag in unusable]
    if with_ray:
        for name in _RAY:
            if arguments[name] is None:
                del arguments[name]
        if arguments["run_dir"] is None:
            problems.append("--backend ray needs --run-dir, which holds the runs' directories")
        if distributed.is_several():
            problems.append("--distributed: not with --backend ray, which finds its machines by itself")
    if problems:
        raise ConfigError(problems)
    return launch if with_ray else run_sweep


def read_space(algo: Algorithm, flag: str, words: Sequence[str]) -> dict[str, Any]:
    """Return lists and distributions by field, from `learning_rate=1e-4,3e-4` or `learning_rate=log:1e-5:1e-2`.

    Args:
      algo: the algorithm with these fields.
      flag: the flag, for errors.
      words: the words of the flag.

    Raises:
      ConfigError: lists every word that cannot be read.
    """
    drawn = {"uniform": Uniform, "loguniform": LogUniform, "log": LogUniform}
    space, problems = {}, []
    for name, text in assignments(flag, words).items():
        name = name.replace("-", "_")
        kind, *numbers = text.split(":")
        try:
            if kind in drawn:
                if len(numbers) != 2:
                    raise ConfigError(f"{text!r}: write {kind}:LOW:HIGH")
                ends = [read_field(algo, name, number) for number in numbers]
                if not all(isinstance(end, int | float) for end in ends):
                    raise ConfigError(f"{text!r}: {kind}:LOW:HIGH takes two numbers")
                space[name] = drawn[kind](*map(float, ends))
            else:
                space[name] = [read_field(algo, name, part) for part in text.split(",")]
        except ConfigError as error:
            problems += [f"{flag} {name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return space


def _save_sweep(result, out):
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npz":
        curves = {f"metrics/{name}": curve for name, curve in result.metrics.items()}
        settings = [str(setting) for setting in result.configurations]
        np.savez(out, configurations=settings, seeds=result.seeds, steps=result.steps, returns=result.returns, **curves)
    elif out.suffix in PICTURES:
        result.plot(out)
    else:
        out.write_text(result.table() + "\n", encoding="utf-8")
    print(f"written to {out}")
