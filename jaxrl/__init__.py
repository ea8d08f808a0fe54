"""jaxrl: reinforcement learning in JAX, with environments, replay and learner in one compiled program.

A public name is imported when it is first used (PEP 562), so `import jaxrl` takes no longer than `import jax`.
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl import envs, networks, schedules, spaces
    from jaxrl.algos import (
        A2C,
        ALGORITHMS,
        BC,
        CQL,
        CRR,
        D4PG,
        DDPG,
        DQN,
        GAIL,
        IMPALA,
        IQL,
        MPO,
        PPO,
        PQN,
        R2D2,
        REPPO,
        SAC,
        TD3,
        TD3BC,
        VMPO,
        AlphaZero,
        CrossQ,
        Dreamer,
        MuZero,
        make_algorithm,
    )
    from jaxrl.core.errors import JaxrlError
    from jaxrl.core.registry import register
    from jaxrl.core.resources import Resources
    from jaxrl.data import Dataset, load_dataset
    from jaxrl.envs import check_env, environments, make
    from jaxrl.envs.host.dm_env import from_dm_env
    from jaxrl.export.hub import pull, push
    from jaxrl.export.policies import export_policy
    from jaxrl.parallel.anakin import Anakin
    from jaxrl.parallel.multihost.launch import Processes, RayProcesses, launch
    from jaxrl.parallel.offline import Offline
    from jaxrl.parallel.remote.actors import Remote
    from jaxrl.parallel.sebulba.sebulba import Sebulba
    from jaxrl.run.callbacks import Decision, FunctionCallback
    from jaxrl.run.directory.loading import load
    from jaxrl.run.policies.evaluation import Evaluation, evaluate
    from jaxrl.run.policies.policy import Policy
    from jaxrl.run.presets import Preset, preset
    from jaxrl.run.recording.dataset_export import export_minari, export_rlds
    from jaxrl.run.recording.recorder import Record
    from jaxrl.run.recording.rendering import render
    from jaxrl.run.recording.replay_export import export_replay
    from jaxrl.run.result import Result
    from jaxrl.run.training import train
    from jaxrl.sweeps.compile_for import compile_for
    from jaxrl.sweeps.distributions import LogUniform, Uniform
    from jaxrl.sweeps.html_report import report
    from jaxrl.sweeps.make_train import make_train
    from jaxrl.sweeps.pbt import PBTResult, pbt
    from jaxrl.sweeps.records import to_pandas
    from jaxrl.sweeps.sweep import SweepResult, sweep
    from jaxrl.sweeps.tune import TuneResult, tune

__version__ = "0.1.0"
__all__ = [
    "A2C",
    "ALGORITHMS",
    "AlphaZero",
    "Anakin",
    "BC",
    "CQL",
    "CRR",
    "CrossQ",
    "D4PG",
    "DDPG",
    "DQN",
    "Dataset",
    "Decision",
    "Dreamer",
    "Evaluation",
    "FunctionCallback",
    "GAIL",
    "IMPALA",
    "IQL",
    "JaxrlError",
    "LogUniform",
    "MPO",
    "MuZero",
    "Offline",
    "PBTResult",
    "PPO",
    "PQN",
    "Policy",
    "Preset",
    "Processes",
    "R2D2",
    "REPPO",
    "RayProcesses",
    "Record",
    "Remote",
    "Resources",
    "Result",
    "SAC",
    "Sebulba",
    "SweepResult",
    "TD3",
    "TD3BC",
    "TuneResult",
    "Uniform",
    "VMPO",
    "check_env",
    "compile_for",
    "environments",
    "envs",
    "evaluate",
    "export_minari",
    "export_policy",
    "export_replay",
    "export_rlds",
    "from_dm_env",
    "launch",
    "load",
    "load_dataset",
    "make",
    "make_algorithm",
    "make_train",
    "networks",
    "pbt",
    "preset",
    "pull",
    "push",
    "register",
    "render",
    "report",
    "schedules",
    "spaces",
    "sweep",
    "to_pandas",
    "train",
    "tune",
]


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, from the imports for type checkers above."""
    import ast
    import pkgutil

    source = pkgutil.get_data(__name__, "__init__.py") or b""
    [checked] = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in imports for name in node.names}


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxrl.core import interrupts

    home, load = _homes()[name], interrupts.interruptible(importlib.import_module)
    value = load(f"{home}.{name}") if home == __name__ else getattr(load(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
