"""The table of the command line, made from the code: everything that is known before JAX is imported."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.algos import ALGORITHMS
from jaxrl.cli.fields import algorithm_groups, documented, first_line, kind_of, typed
from jaxrl.cli.flags import BOOL, FLOAT, INT, INTS, PATH, TEXT, DefaultText, Flag, optional
from jaxrl.core.resources import Resources
from jaxrl.core.sources import Dataset
from jaxrl.core.spaces import Box, Dict, Discrete, Tuple
from jaxrl.core.types import EnvSpec, Replay
from jaxrl.core.versions import installed_version
from jaxrl.data.metadata import DATA_FORMATS
from jaxrl.data.rlds import FILE_FORMATS
from jaxrl.envs import brax, gymnax
from jaxrl.envs import registry as environments
from jaxrl.envs.host import envpool
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.export.policies import FORMATS as EXPORT_FORMATS
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.sebulba.topology import Sebulba
from jaxrl.run import training
from jaxrl.run.presets import PRESETS
from jaxrl.run.recorder import Record
from jaxrl.sweeps.launcher import launch
from jaxrl.sweeps.pbt import pbt
from jaxrl.sweeps.sweep import sweep
from jaxrl.sweeps.tune import tune

# Spaces with which algorithms are validated, to list the kinds of actions that they support.
_OBSERVATION = Box(-1.0, 1.0, (4,))
_BOX = Box(-1.0, 1.0, (2,))
_ACTIONS = {"discrete": Discrete(2), "continuous": _BOX, "composite": Dict({"a": Tuple((Discrete(2),)), "b": _BOX})}
# The suites whose names are in the table, with their package and the names that their modules refuse; without the
# suites of `jaxrl.core.suites.INSTALLED_NAMES`.
SUITES: dict[str, tuple[str | None, Callable[[], Sequence[str]]]] = {
    "brax": ("brax", brax.refused),
    "envpool": ("envpool", envpool.refused),
    "gymnax": ("gymnax", lambda: gymnax.NEEDS_DOWNLOAD),
    "probe": (None, lambda: ()),
}


# --- contents of the table ---------------------------------------------------------------------------------------


def table() -> dict[str, Any]:
    """Return everything that the command line needs before JAX is imported, as JSON values."""
    parts: dict[str, Any] = {}
    algorithms = {
        name: [_group_json(group, parts) for group in algorithm_groups(cls())]
        for name, cls in ALGORITHMS.items()
        if cls.__module__.startswith("jaxrl.")
    }
    commands = {"train": _train_flags(), "sweep": _sweep_flags(), "tune": _tune_flags(), "pbt": _pbt_flags()}
    commands |= {"processes": _process_flags()}
    return {
        "algorithms": dict(sorted(algorithms.items())),
        "commands": {name: [_flag_json(flag, parts) for flag in typed(flags)] for name, flags in commands.items()},
        "constants": {
            "data_formats": DATA_FORMATS,
            "export_formats": EXPORT_FORMATS,
            "file_formats": FILE_FORMATS,
            "step_timeout": STEP_TIMEOUT,
        },
        "from_datasets": [name for name in sorted(algorithms) if _needs_dataset(ALGORITHMS[name]())],
        "environments": {
            suite: _suite_json(suite, package, refused)
            for suite, (package, refused) in SUITES.items()
            if package is None or installed_version(package) is not None
        },
        "lists": {
            "algorithms": [row for row in algorithm_rows() if row[0] in algorithms],
            "presets": preset_rows(),
        },
        "parts": dict(sorted(parts.items())),
        "presets": {name: _preset_json(preset) for name, preset in PRESETS.items()},
    }


def algorithm_rows() -> list[tuple[str, str, str, str]]:
    """Return name, source of experience, actions and one line for every algorithm.

    Supported actions are found by validating the algorithm with each kind.
    """
    rows = []
    for name, cls in sorted(ALGORITHMS.items()):
        algo = cls()
        actions = [kind for kind, space in _ACTIONS.items() if not _space_problems(algo, space)]
        summary = first_line(algo).rstrip(".")
        rows.append((name, _experience(algo), ", ".join(actions), summary))
    return rows


def _experience(algo):
    sources = algo.experience.values()
    if any(isinstance(source, Replay) for source in sources):
        return "off-policy"
    return "dataset" if all(isinstance(source, Dataset) for source in sources) else "on-policy"


def _needs_dataset(algo):
    return any(isinstance(source, Dataset) for source in algo.experience.values())


def preset_rows() -> list[tuple[str, str, str, str]]:
    """Return name, algorithm, environment and source of every preset."""
    return [
        (preset.name, type(preset.algorithm).__name__.lower(), preset.env, preset.source) for preset in PRESETS.values()
    ]


def _space_problems(algo, actions):
    return algo.validate(EnvSpec("probe", _OBSERVATION, actions), 64, 1)


def _suite_json(suite, package, refused):
    return {
        "refused": list(refused()),
        "package": package,
        "version": package and installed_version(package),
        "names": list(environments.names(suite)),
    }


def _preset_json(preset):
    """Return a preset, with the defaults that differ from its algorithm's own."""
    of_class = algorithm_groups(type(preset.algorithm)())
    defaults = {}
    for before, after in zip(of_class, algorithm_groups(preset.algorithm), strict=True):
        for old, new in zip(before.flags, after.flags, strict=True):
            if old != replace(new, default=old.default):
                raise ValueError(f"preset {preset.name} has other flags than its algorithm: {after.option(new)}")
            if old.default != new.default:
                defaults[after.option(new)] = _default_json(new.default)
    return {
        "algorithm": type(preset.algorithm).__name__.lower(),
        "env": preset.env,
        "num_envs": preset.topology["num_envs"],
        "total_steps": preset.total_steps,
        "defaults": defaults,
    }


def _group_json(group, parts):
    flags = [_flag_json(flag, parts) for flag in group.flags]
    return {"title": group.title, "help": group.help, "prefix": group.prefix, "flags": flags}


def _flag_json(flag, parts):
    attributes = {"help": flag.help, "shown": flag.hint, "choices": flag.choices, "many": flag.many}
    attributes |= {"limits": flag.limits}
    others = {name: value for name, value in attributes.items() if value}
    return {"name": flag.name, "kind": _kind_text(flag.kind, parts), "default": _default_json(flag.default)} | others


def _default_json(default):
    if isinstance(default, DefaultText):
        return {"written": default.text}
    return str(default) if isinstance(default, Path) else default


def _kind_text(kind, parts):
    """Return a kind as text, `part:gru,lstm|None`, and add its parts to `parts`."""
    for part in kind.parts:
        described = {"made_by": part.made_by, "fields": {}}
        described["fields"] = {name: _kind_text(field, parts) for name, field in part.fields.items()}
        if not isinstance(part.made_by, str) or parts.setdefault(part.name, described) != described:
            raise ValueError(f"part {part.name} is not registered, or there are two of this name")
    name = f"part:{','.join(part.name for part in kind.parts)}" if kind.parts else kind.name
    return f"{name}|None" if kind.optional else name


# --- the flags of commands ---------------------------------------------------------------------------------------

# Arguments of `train` that are not flags in their Python form.
_NOT_FLAGS = (
    "topology",
    "num_envs",
    "loggers",
    "callbacks",
    "callback_every",
    "record",
    "eval_env",
    "dataset",
    "init_from",
)
# Help of flags that differ from the Python argument in values or names.
_INIT_FROM = (
    "begin with what another run has learned: its run directory (the newest checkpoint) or one of its checkpoints. The "
    "spaces must be the same, other settings and the environment may differ; also offline first and then online. Steps "
    "and schedules begin anew"
)
_STEPS_OF_A_RUN = "environment steps of every run, over all its environments; the last iteration may exceed it"
_TYPED = {
    "num_samples": "number of random draws from what --grid says; None: every combination of its values",
    "run_dir": (
        "keeps checkpoints here, from which the same command goes on after it was killed or interrupted, bit for bit; "
        "at the end also the curves, the table, a picture and the best policy; one process only. None: nothing is kept"
    ),
    "total_steps": _STEPS_OF_A_RUN,
}
_BACKEND = "jax: all runs in one program; ray: each run in its own process and run directory"


def _train_flags():
    # The other fields of both topologies; None: the field's own default.
    layout = {
        field.name: (kind_of(field.type), documented(topology)[field.name])
        for topology in (Sebulba, Anakin)
        for field in dataclasses.fields(topology)
        if field.name != "num_envs"
    }
    return [
        *argument_flags(training.train, _NOT_FLAGS),
        Flag("eval_env", TEXT, None, "another environment to evaluate in, suite:name"),
        Flag("dataset", TEXT, None, "dataset to learn from, rlds:PATH or minari:ID; it is held in memory"),
        Flag("init_from", optional(PATH), None, _INIT_FROM),
        Flag("record", optional(PATH), None, "write the agent's training episodes to this directory"),
        Flag("record_every", INT, 1, documented(Record)["every"]),
        Flag("wandb", TEXT, None, "also log to this project of Weights & Biases"),
        *(Flag(name, optional(kind), None, text) for name, (kind, text) in layout.items()),
    ]


def _sweep_flags():
    left_out, help_ = ("seeds", "topology", "num_envs", "devices"), documented(launch)
    values = (
        "values to try for fields of the algorithm, as learning_rate=1e-4,3e-4; with --num-samples also "
        "uniform:LOW:HIGH and loguniform:LOW:HIGH; with --backend ray also environments in place of --env, as "
        "env=NAME,NAME"
    )
    kinds = {"cpus_per_run": FLOAT, "gpus_per_run": FLOAT, "restarts": INT}
    kinds |= {"address": TEXT, "resources": kind_of(Resources)}
    return [
        Flag("grid", TEXT, (), values, many=True),
        Flag("seeds", INTS, (8,), "number of seeds, from 0 on; or the seeds, separated by commas"),
        *(replace(flag, help=_TYPED.get(flag.name, flag.help)) for flag in argument_flags(sweep, left_out)),
        Flag("devices", optional(INT), None, documented(sweep)["devices"]),
        Flag("backend", TEXT, "jax", _BACKEND, choices=("jax", "ray")),
        *(Flag(name, optional(kind), None, f"{help_[name]}; with --backend ray") for name, kind in kinds.items()),
        Flag(
            "out",
            optional(PATH),
            None,
            "a file for the table; curves if it ends in .png, .svg or .pdf, all results if in .npz",
        ),
    ]


def _tune_flags():
    space = (
        "what to search for a field of the algorithm, in place of the table's (docs/sweeps.md) or beside it, as "
        "learning_rate=log:1e-5:1e-2, clip=uniform:0.1:0.4 or rollout_length=64,128; a single value is fixed"
    )
    return [
        Flag("space", TEXT, (), space, many=True),
        Flag("seeds", INTS, (2,), "number of seeds of every trial, from 0 on; or the seeds, separated by commas"),
        *(
            replace(flag, help=_STEPS_OF_A_RUN) if flag.name == "total_steps" else flag
            for flag in argument_flags(tune, ("seeds", "topology", "num_envs", "devices"))
        ),
        Flag("devices", optional(INT), None, documented(tune)["devices"]),
        Flag(
            "out", optional(PATH), None, "a file for the table; the best so far drawn if it ends in .png, .svg or .pdf"
        ),
    ]


def _pbt_flags():
    space = (
        "what a hyperparameter may be, in place of the table's (docs/sweeps.md) or beside it, as "
        "learning_rate=log:1e-5:1e-2, clip=uniform:0.1:0.4 or gamma=0.98,0.99; a single value is fixed"
    )
    return [
        Flag("space", TEXT, (), space, many=True),
        *argument_flags(pbt, ("topology", "num_envs", "devices")),
        Flag("devices", optional(INT), None, documented(pbt)["devices"]),
        Flag("out", optional(PATH), None, "a file for the table; the lineage drawn if it ends in .png, .svg or .pdf"),
    ]


def _process_flags():
    help_ = documented(distributed.initialize)
    what = (
        "this process is one of several of one run, all started with this command; TPU pods, Slurm, Open MPI and "
        "Kubernetes are detected, elsewhere set the next three flags"
    )
    how = (
        "here: this process; processes:N[:restarts=R]: N processes of this machine, started again up to R times where "
        "one fails; ray:N[:restarts=R][:cpus=C][:gpus=G]: N of a Ray cluster; either with :evaluators=1: and one that "
        "evaluates every checkpoint in --run-dir; cluster: as --distributed"
    )
    return [
        Flag("launch", TEXT, "here", how),
        Flag("distributed", BOOL, False, what),
        Flag("coordinator", optional(TEXT), None, help_["coordinator"]),
        Flag("num_processes", optional(INT), None, help_["num_processes"]),
        Flag("process_id", optional(INT), None, help_["process_id"]),
    ]


def argument_flags(function: Callable, leave_out: Sequence[str] = ()) -> list[Flag]:
    """Return the flags of a function's keyword-only arguments, with the help texts of its docstring.

    Arguments without a default are shown as "required".

    Args:
      function: a function whose docstring has a section "Args:".
      leave_out: arguments that are not flags.
    """
    hints, help_ = typing.get_type_hints(function), documented(function)
    flags = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in leave_out or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        needed = parameter.default is inspect.Parameter.empty
        default = None if needed else parameter.default
        choices = typing.get_args(hints[name]) if typing.get_origin(hints[name]) is typing.Literal else ()
        hint = "required" if needed else None
        flags.append(Flag(name, kind_of(hints[name]), default, help_.get(name, ""), hint, choices))
    return flags
