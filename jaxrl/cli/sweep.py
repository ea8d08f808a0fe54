"""`jaxrl sweep`: many runs, in one program or as experiments side by side."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.cli.flags import Flag, argument_flags, documented
from jaxrl.cli.runs import asks_for_help, print_help, read_run
from jaxrl.cli.values import assignments, read_field
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.multihost import distributed
from jaxrl.sweeps.launcher import Experiments, launch
from jaxrl.sweeps.search import LogUniform, Uniform
from jaxrl.sweeps.sweep import sweep as run_sweep

_BACKEND = "jax: all runs in one program; ray: each run in its own process and run directory"
# What only experiments have; None: as `launch` has it.
_RAY = {
    "run_dir": Path | None,
    "cpus_per_run": float | None,
    "gpus_per_run": float | None,
    "restarts": int | None,
    "address": str | None,
}


def sweep(argv: Sequence[str]) -> int:
    """`jaxrl sweep ALGORITHM [FLAGS]`; the exit code."""
    if asks_for_help(argv):
        return print_help("sweep")

    def flags(preset):
        steps = None if preset is None else preset.total_steps
        left_out, help_ = ("seeds", "topology", "num_envs", "devices"), documented(launch)
        return [
            Flag(
                "grid",
                str,
                (),
                "values to try for fields of the algorithm, as learning_rate=1e-4,3e-4; with --samples also "
                "uniform:LOW:HIGH and loguniform:LOW:HIGH",
                many=True,
            ),
            Flag("seeds", tuple[int, ...], (8,), "number of seeds, from 0 on; or the seeds, separated by commas"),
            *argument_flags(run_sweep, left_out, total_steps=steps),
            Flag("devices", int | None, None, documented(run_sweep)["devices"]),
            Flag("backend", str, "jax", _BACKEND, choices=("jax", "ray")),
            *(Flag(name, kind, None, f"{help_[name]}; with --backend ray") for name, kind in _RAY.items()),
            Flag("out", Path | None, None, "a file for the table, or for all results if it ends in .npz"),
        ]

    asked = read_run("sweep", argv, flags)
    arguments = {name: value for name, value in asked.arguments.items() if name not in ("out", "seeds", "grid")}
    seeds, out = asked.arguments["seeds"], asked.arguments["out"]
    space = _search_space(asked.algo, asked.arguments["grid"])
    if asked.num_envs is not None:
        arguments["num_envs"] = asked.num_envs
    run = _backend(arguments)
    result = run(asked.algo, asked.env, seeds=seeds[0] if len(seeds) == 1 else seeds, **arguments, **space)
    if distributed.is_leader():
        print(result.table())
        print(f"{result.wall_seconds:,.0f} s, {result.steps_per_second:,.0f} steps/s over all runs")
        if out is not None:
            _save_sweep(result, out)
    errors = result.errors if isinstance(result, Experiments) else {}
    for (place, index), error in errors.items():
        print(f"error: {result.run_dirs[place][index]}:\n{error}", file=sys.stderr)
    return 1 if errors else 0


def _backend(arguments):
    """What runs the sweep; of its `arguments`, those of the other one are taken away."""
    with_ray = arguments.pop("backend") == "ray"
    others = ("devices", "mapping") if with_ray else tuple(_RAY)
    given = [f"--{name.replace('_', '-')}" for name in others if arguments.pop(name) is not None]
    problems = [f"{flag}: not with --backend {'ray' if with_ray else 'jax'}" for flag in given]
    if with_ray:
        for name in _RAY:
            if arguments[name] is None:
                del arguments[name]
        if "run_dir" not in arguments:
            problems.append("--backend ray needs --run-dir, which holds the runs' directories")
        if distributed.is_several():
            problems.append("--distributed: not with --backend ray, which finds its machines by itself")
    if problems:
        raise ConfigError(problems)
    return launch if with_ray else run_sweep


def _search_space(algo, words):
    """`learning_rate=1e-4,3e-4` as the lists and distributions that `sweep` takes."""
    drawn = {"uniform": Uniform, "loguniform": LogUniform}
    space, problems = {}, []
    for name, text in assignments("--grid", words).items():
        name = name.replace("-", "_")
        kind, *numbers = text.split(":")
        try:
            if kind in drawn:
                if len(numbers) != 2:
                    raise ConfigError(f"{text!r}: write {kind}:LOW:HIGH")
                space[name] = drawn[kind](*(float(read_field(algo, name, number)) for number in numbers))
            else:
                space[name] = [read_field(algo, name, part) for part in text.split(",")]
        except ConfigError as error:
            problems += [f"--grid {name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return space


def _save_sweep(result, out):
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npz":
        curves = {f"metrics/{name}": curve for name, curve in result.metrics.items()}
        settings = [str(setting) for setting in result.configurations]
        np.savez(out, configurations=settings, seeds=result.seeds, steps=result.steps, returns=result.returns, **curves)
    else:
        out.write_text(result.table() + "\n")
    print(f"written to {out}")
