"""Generation of the command line's table, which contains everything that is needed before JAX is imported."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from jaxrl.algos import ALGORITHMS
from jaxrl.cli import multihost
from jaxrl.cli.fields import algorithm_flags, kind_of, typed, written
from jaxrl.cli.flags import Flag, argument_flags, first_line
from jaxrl.cli.imports import Importing
from jaxrl.core.sources import Dataset
from jaxrl.core.spaces import Box, Dict, Discrete, Tuple
from jaxrl.core.types import EnvSpec, Replay
from jaxrl.core.versions import installed_version
from jaxrl.data.rlds import FILE_FORMATS
from jaxrl.envs import brax, gymnax
from jaxrl.envs import env_registry as environments
from jaxrl.envs.host import envpool, watchdog
from jaxrl.export.policies import FORMATS as EXPORT_FORMATS
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.sebulba.sebulba import Sebulba
from jaxrl.run.presets import PRESETS
from jaxrl.run.recording.recorder import Record
from jaxrl.run.settings import RunSettings
from jaxrl.run.training import train
from jaxrl.sweeps.launcher import launch
from jaxrl.sweeps.pbt import pbt
from jaxrl.sweeps.sweep import sweep
from jaxrl.sweeps.tune import tune

# Spaces for validating algorithms, to find the kinds of actions that they support.
_OBSERVATION = Box(-1.0, 1.0, (4,))
_BOX = Box(-1.0, 1.0, (2,))
_ACTIONS = {"discrete": Discrete(2), "continuous": _BOX, "composite": Dict({"a": Tuple((Discrete(2),)), "b": _BOX})}
# Suites whose environment names are in the table, each with its package and the names that its module rejects. The
# suites of `jaxrl.core.suites.INSTALLED_NAMES` are not included.
SUITES: dict[str, tuple[str | None, Callable[[], Sequence[str]]]] = {
    "brax": ("brax", brax.refused),
    "envpool": ("envpool", envpool.refused),
    "gymnax": ("gymnax", lambda: gymnax.NEEDS_DOWNLOAD),
    "probe": (None, lambda: ()),
}


# --- contents of the table ---------------------------------------------------------------------------------------


def table() -> dict[str, Any]:
    """Return everything that the command line needs before JAX is imported, as JSON values."""
    made = {name: cls() for name, cls in sorted(ALGORITHMS.items()) if cls.__module__.startswith("jaxrl.")}
    return {
        "algorithms": {name: _algorithm_json(algo) for name, algo in made.items()},
        "commands": {name: list(map(_as_json, flags)) for name, flags in _commands().items()},
        # Allowed values of flags with these names, the default first.
        "values": {
            "file_format": FILE_FORMATS,
            "step_timeout": [watchdog.STEP_TIMEOUT],
            "to": EXPORT_FORMATS,
        },
        "from_datasets": [name for name, algo in made.items() if Dataset in map(type, algo.experience.values())],
        "offline": [name for name, algo in made.items() if getattr(algo, "offline", _experience(algo) == "dataset")],
        "environments": {
            suite: {
                "refused": list(refused()),
                "package": package,
                "version": package and installed_version(package),
                "names": list(environments.names(suite)),
            }
            for suite, (package, refused) in SUITES.items()
            if package is None or installed_version(package) is not None
        },
        "rows": [row for row in algorithm_rows() if row[0] in made],
        "presets": {name: _preset_json(preset) for name, preset in PRESETS.items()},
    }


def algorithm_rows() -> list[tuple[str, str, str, str]]:
    """Return the name, source of experience, actions and a one-line description of every algorithm.

    The supported actions are found by validating the algorithm with each kind of action space.
    """
    rows = []
    for name, cls in sorted(ALGORITHMS.items()):
        algo = cls()
        specs = {kind: EnvSpec("probe", _OBSERVATION, space) for kind, space in _ACTIONS.items()}
        actions = [kind for kind, spec in specs.items() if not algo.validate(spec, 64, 1)]
        rows.append((name, _experience(algo), ", ".join(actions), first_line(algo).rstrip(".")))
    return rows


def _experience(algo):
    sources = set(map(type, algo.experience.values()))
    return "off-policy" if Replay in sources else "dataset" if sources == {Dataset} else "on-policy"


def _algorithm_json(algo):
    flags, helps = algorithm_flags(algo)
    return list(map(_as_json, flags)), helps


def _as_json(flag):
    """Return a flag as nested dictionaries, without empty attributes."""
    return dataclasses.asdict(flag, dict_factory=lambda pairs: {k: v for k, v in pairs if v or k == "default"})


def _preset_json(preset):
    """Return a preset, with the defaults that differ from those of its algorithm."""
    usual = _defaults(type(preset.algorithm)())
    defaults = {name: text for name, text in _defaults(preset.algorithm).items() if text != usual[name]}
    defaults |= {"preset": preset.name, "env": preset.env, "total_steps": written(preset.total_steps)}
    defaults["num_envs"] = written(preset.topology["num_envs"])
    return {"algorithm": type(preset.algorithm).__name__.lower(), "source": preset.source, "defaults": defaults}


def _defaults(algo):
    return {flag.name: flag.default for flag in algorithm_flags(algo)[0]}


# --- the flags of commands ---------------------------------------------------------------------------------------

_NOT_FLAGS = ("algo", "env", "topology", "num_envs", "loggers", "callbacks", "callback_every")
_SETTINGS = [field.name for field in dataclasses.fields(RunSettings)]
_TOPOLOGY = argument_flags(Sebulba, ["num_envs"], kind_of) | argument_flags(Anakin, ["num_envs"], kind_of)
_JOINING = argument_flags(distributed.initialize, ("heartbeat_seconds", "start_seconds", "end_seconds"))
_MACHINES = ("deterministic", "devices", "actor_devices", "actor_platform", "shards", "resources", "mapping", "backend")
_MACHINES += ("cpus_per_run", "gpus_per_run", "max_concurrent", "restarts", "address", *multihost.FLAGS)
# Settings of evaluation and output are declared consecutively.
_EVALUATION = _SETTINGS[_SETTINGS.index("log_every") : _SETTINGS.index("loggers")]
_EVALUATION += ["points"]
_RECORDING = ("record", "record_every", "video_every", "wandb", "log_every", "checkpoint_every", "keep", "save_replay")
_RECORDING += ("async_evaluation", "eval_env")
# Help sections by flag; the other flags are in "run".
_TITLES = dict.fromkeys(_EVALUATION, "evaluation and files")
_TITLES |= dict.fromkeys(_RECORDING, "recording, logging and checkpoints")
_TITLES |= dict.fromkeys(_TOPOLOGY, "host environments") | dict.fromkeys(_MACHINES, "devices and machines")


_declared = dataclasses.dataclass(kw_only=True)


@_declared
class _Common:
    """Flags of every command that takes an algorithm.

    Args:
      env: environment, as suite:name.
      env_params: parameters of the environment, as key=value; also auto_reset=pooled.
      preset: preset with published settings; jaxrl algos lists the presets.
      num_envs: number of environments; None: 1 with a replay buffer of transitions, otherwise 8.
      launch: here: run in this process; processes:N[:restarts=R]: N processes on this machine, restarted up to R times
        if one fails; ray:N[:restarts=R][:cpus=C][:gpus=G]: N processes on a Ray cluster; both also accept :evaluators=1
        for one more process that evaluates every checkpoint in --run-dir; cluster: the same as --distributed.
      distributed: join a run of several processes, all started with this command; TPU pods, Slurm, Open MPI and
        Kubernetes are detected, otherwise set the next three flags.
    """

    env: str
    env_params: tuple[str, ...] = ()
    preset: str | None = None
    num_envs: int | None = None
    launch: str = "here"
    distributed: bool = False


@_declared
class _Train:
    """Flags of `jaxrl train` that differ from the arguments of `jaxrl.train`.

    Args:
      eval_env: separate environment for evaluation, as suite:name.
      dataset: dataset to learn from, rlds:PATH or minari:ID; it is loaded into memory.
      init_from: initialize from another run's directory or checkpoint, with the same spaces; steps and schedules start
        from zero.
      record: directory to which training episodes are recorded.
      wandb: Weights & Biases project to log to.
    """

    eval_env: str | None = None
    dataset: str | None = None
    init_from: Path | None = None
    record: Path | None = None
    wandb: str | None = None


@_declared
class _Compile(_Train):
    """Flags of `jaxrl compile`.

    Args:
      target: accelerators to compile for and report on, such as v5e:4x4 or h100:8, which need not be attached; or a
        file written by jaxrl doctor --describe-device.
    """

    target: str | None = None


@_declared
class _Sweep:
    """Flags of `jaxrl sweep` that differ from arguments of `jaxrl.sweep`.

    Args:
      grid: values to try for fields of the algorithm, such as learning_rate=1e-4,3e-4; with --num-samples also
        uniform:LOW:HIGH and loguniform:LOW:HIGH; with --backend ray also environments instead of --env, such as
        env=NAME,NAME.
      seeds: number of seeds, starting from 0; or the seeds, separated by commas.
      backend: jax: all runs in one program; ray: each run in its own process and run directory.
    """

    grid: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (8,)
    backend: Literal["jax", "ray"] = "jax"


@_declared
class _Tune:
    """Flags of `jaxrl tune` that differ from arguments of `jaxrl.tune`.

    Args:
      space: search space of one field of the algorithm, such as learning_rate=log:1e-5:1e-2, clip=uniform:0.1:0.4 or
        rollout_length=64,128; replaces or extends the default space (docs/sweeps.md). A single value fixes the field.
      seeds: number of seeds per trial, starting from 0; or the seeds, separated by commas.
    """

    space: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (2,)


@_declared
class _PBT:
    """Flags of `jaxrl pbt` that differ from arguments of `jaxrl.pbt`.

    Args:
      space: space of one hyperparameter, such as learning_rate=log:1e-5:1e-2, clip=uniform:0.1:0.4 or gamma=0.98,0.99;
        replaces or extends the default space (docs/sweeps.md). A single value fixes the hyperparameter.
    """

    space: tuple[str, ...] = ()


def _commands() -> dict[str, list[Flag]]:
    """Return the flags of every command that takes an algorithm, by command."""
    training = _open(_TOPOLOGY)
    training["record_every"] = replace(argument_flags(Record)["every"], name="record_every")
    experiments = argument_flags(launch, {*_NOT_FLAGS, *signature(sweep).parameters}, kind_of)
    return {
        "train": _flags(train, _Train, training),
        "compile": _flags(train, _Compile, training),
        "sweep": _flags(sweep, _Sweep, _open(experiments, "; with --backend ray")),
        "tune": _flags(tune, _Tune, {}),
        "pbt": _flags(pbt, _PBT, {}),
    }


def _open(flags: dict[str, Flag], more: str = "") -> dict[str, Flag]:
    """Return flags without defaults; the function or class that receives the values sets the defaults."""
    return {
        name: replace(flag, kind=replace(flag.kind, optional=True), default="None", help=flag.help + more)
        for name, flag in flags.items()
    }


def _flags(function: Callable, own: type, others: dict[str, Flag]) -> list[Flag]:
    """Return all flags of a command: common flags, those in `own`, those of the function that it calls, and others."""
    flags = argument_flags(_Common) | argument_flags(Importing) | _JOINING | argument_flags(own)
    flags |= argument_flags(function, {*_NOT_FLAGS, *flags}, kind_of) | others
    return [replace(flag, title=_TITLES.get(flag.name, "run")) for flag in typed(list(flags.values()))]
