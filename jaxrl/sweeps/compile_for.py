"""Compilation of runs and sweeps for accelerators, which need not be attached to this machine."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core import keys
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment, Replay
from jaxrl.parallel import targets
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.mesh import described, device_problems
from jaxrl.parallel.targets import Target
from jaxrl.run.policies.evaluation import compile_evaluation
from jaxrl.run.result import policy_at
from jaxrl.run.settings import RunSettings
from jaxrl.run.target_report import TargetReport, compiled_for
from jaxrl.sweeps.distributions import COUNTS
from jaxrl.sweeps.vectorized import VectorizedRuns, chunk_many, evaluate_many, played


@checked(**COUNTS)
def compile_for(
    target: str,
    algo: Algorithm | str,
    env: Environment | str,
    *,
    num_envs: int | None = None,
    devices: int | None = None,
    runs: int | None = None,
    evaluation_episodes: int | None = None,
) -> TargetReport:
    """Compile a run for accelerators, which need not be attached, and return a report on its programs.

        print(jaxrl.compile_for("v5e:4x4", "ppo", "gymnax:CartPole-v1", num_envs=2048))

    Nothing is run or saved. TPUs need the extra `tpu-target`, NVIDIA GPUs the extra `cuda13`.

    Args:
      target: accelerators to compile for: for TPUs the kind and the shape of the slice, such as "v5e:4x4"; for GPUs the
        model and, if there are several, their number, such as "h100:8". A file written by `jaxrl doctor
        --describe-device` may replace the kind or the model, as in "card.json:8".
      algo, env, num_envs, evaluation_episodes: as for `jaxrl.train`; JAX environments only.
      devices: number of devices of the target to use; None: all.
      runs: number of runs of a sweep, distributed over the devices; None: one run over all devices.

    Returns:
      A report on the memory, work, kernels and collectives of each program.

    Raises:
      ConfigError: settings are invalid (the message lists all of them), the compiler for the target is not installed,
        or a program does not fit in memory.
    """
    topology = Anakin(num_envs, devices=devices)
    settings = RunSettings(
        algo=algo, env=env, total_steps=1, topology=topology, evaluation_episodes=evaluation_episodes
    )
    return report_for(targets.get(target), settings, runs)


def report_for(target: Target, settings: RunSettings, runs: int | None = None) -> TargetReport:
    """Compile the programs of a run with these settings for a target.

    Args:
      target: the accelerators.
      settings: the settings of the run before they are resolved, without a dataset or a recording.
      runs: as in `compile_for`.

    Raises:
      ConfigError: the settings are invalid, the run is not one compiled program, or a program does not fit in memory.
    """
    topology = (settings.topology or Anakin(settings.num_envs)).over(target)
    devices: Any = topology.devices
    if runs:  # each run uses one of the devices
        if problems := device_problems(devices, target=target):
            raise ConfigError(problems)
        topology = dataclasses.replace(topology, devices=1)
    settings = settings.replace(topology=topology, num_envs=None, total_steps=1).prepared().resolved()
    sources = settings.algo.experience.values()
    on_host = any(isinstance(source, Replay) and source.storage == "host" for source in sources)
    if target.devices[0].platform == "gpu" and on_host:
        raise ConfigError(
            f"storage='host': JAX cannot compile for the host memory of {target.name}; use storage='ring'"
        )
    bind = partial(settings.topology.bind, settings.algo, settings.env, processes=1, target=target)
    if runs:
        found = _sweep(target, settings, VectorizedRuns(bind(), min(devices, runs), "vmap", runs))
    else:
        found = _run(target, settings, bind())
    devices, steps, programs = found
    return TargetReport(target.name, target.devices[0].device_kind, devices, target.memory, steps, programs)


def _run(target, settings, program):
    """Compile a run; return the number of devices, the environment steps per iteration, and the programs."""
    layout = program.layout
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    algo, env = layout.place((settings.algo, settings.env))
    template = program.template(algo, env, settings.seed, saved=False)
    compiled = partial(compiled_for, target)
    programs = [
        compiled("start", lambda: program.compile_start(algo, env, settings.seed)),
        compiled("chunk", lambda: program.compile_chunk(algo, env, template)),
    ]
    acting = described(policy_at.eval_shape(algo, template.learner, layout.place(np.float32(0.0))), everywhere)
    how: dict[str, Any] = {"seed": settings.seed, "episodes": settings.evaluation_episodes}
    how |= {"explore": settings.explore_in_evaluation, "place": layout.place}
    programs += [compiled("evaluation", lambda: compile_evaluation(*acting, settings.eval_env, layout.spec, **how))]
    return layout.devices, program.steps_per_iteration(settings.algo), programs


def _sweep(target, settings, many):
    """Compile the runs of a sweep; return the same values as `_run`."""
    over_runs, everywhere = (NamedSharding(many.mesh, spec) for spec in (PartitionSpec("runs"), PartitionSpec()))
    stacked = many.stack([settings.algo] * many.runs)
    algos = described(stacked, over_runs)
    padded = -(-many.runs // many.devices) * many.devices
    root = keys.root_key(settings.seed)
    run_keys = jax.ShapeDtypeStruct((padded, *root.shape), root.dtype, sharding=over_runs)
    env = described(settings.env, everywhere)
    many.check_memory(stacked, settings.env, run_keys)
    start = VectorizedRuns.start.lower(many, algos, env, run_keys)
    states = described(start.out_info, over_runs)
    numbers = described((jnp.int32(1), jnp.float32(1.0)), everywhere)
    compiled = partial(compiled_for, target)
    playing = many, algos, states.learner, env, run_keys
    programs = [
        compiled("start", start.compile),
        compiled("chunk", lambda: chunk_many.lower(many, algos, env, states, *numbers).compile()),
        compiled("evaluation", lambda: evaluate_many.lower(*playing, **played(settings)).compile()),
    ]
    return many.devices, many.program.steps_per_iteration(settings.algo) * many.runs, programs
