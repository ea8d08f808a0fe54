"""Compilation of a run, or a sweep of runs, for accelerators that this machine need not have."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core import keys
from jaxrl.core.arguments import whole_arguments
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import count_problems
from jaxrl.core.types import Algorithm, Environment, Replay
from jaxrl.parallel import targets
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.mesh import described, device_problems
from jaxrl.parallel.targets import Target
from jaxrl.run.policies.evaluation import compile_evaluation
from jaxrl.run.result import policy_at
from jaxrl.run.settings import RunSettings
from jaxrl.run.target_report import TargetReport, compiled_for
from jaxrl.sweeps.vectorized import VectorizedRuns, chunk_many, evaluate_many, played


@whole_arguments
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
    """Compile a run for accelerators that this machine need not have, and report on the programs.

        print(jaxrl.compile_for("v5e:4x4", "ppo", "gymnax:CartPole-v1", num_envs=2048))

    Nothing is run and nothing is kept. TPUs need the extra `tpu-target`, NVIDIA's GPUs the extra `cuda13`.

    Args:
      target: of TPUs their kind and the shape of the slice, such as "v5e:4x4"; of GPUs the card and, unless it is one,
        their number, such as "h100:8". In place of the kind or the card the file of `jaxrl doctor --describe-device`,
        such as "card.json:8".
      algo, env, num_envs, evaluation_episodes: as for `jaxrl.train`; JAX environments only.
      devices: how many of the target's devices are used; None: all.
      runs: of a sweep, spread over the devices, each on one; None: one run over all devices.

    Returns:
      The programs with their memory, work, kernels and collectives.

    Raises:
      ConfigError: all invalid settings; the compiler for the target is not installed; a program does not fit.
    """
    if problems := count_problems(runs=(runs, 1), devices=(devices, 1)):
        raise ConfigError(problems)
    topology = Anakin(num_envs, devices=devices)
    settings = RunSettings(
        algo=algo, env=env, total_steps=1, topology=topology, evaluation_episodes=evaluation_episodes
    )
    return report_for(targets.get(target), settings, runs)


def report_for(target: Target, settings: RunSettings, runs: int | None = None) -> TargetReport:
    """Compile the programs of a run with these settings on the target.

    Args:
      target: the accelerators.
      settings: the settings of the run, as they were passed, without a dataset or a recording.
      runs: as in `compile_for`.

    Raises:
      ConfigError: invalid settings; the run is not one compiled program; a program does not fit.
    """
    topology = (settings.topology or Anakin(settings.num_envs)).over(target)
    devices: Any = topology.devices
    if runs:  # each on one of the devices
        if problems := device_problems(devices, target=target):
            raise ConfigError(problems)
        topology = dataclasses.replace(topology, devices=1)
    settings = settings.replace(topology=topology, num_envs=None, total_steps=1).prepared().resolved()
    sources = settings.algo.experience.values()
    on_host = any(isinstance(source, Replay) and source.replay_memory == "host" for source in sources)
    if target.devices[0].platform == "gpu" and on_host:
        raise ConfigError(
            f"replay_memory='host': JAX does not compile for the memory of {target.name}'s host; use 'device'"
        )
    bind = partial(settings.topology.bind, settings.algo, settings.env, processes=1, target=target)
    if runs:
        return _sweep(target, settings, VectorizedRuns(bind(), min(devices, runs), "vmap", runs))
    return _run(target, settings, bind())


def _run(target, settings, program):
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
    return _report(target, layout.devices, program.steps_per_iteration(settings.algo), programs)


def _sweep(target, settings, many):
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
    steps = many.program.steps_per_iteration(settings.algo) * many.runs
    return _report(target, many.devices, steps, programs)


def _report(target, devices, steps, programs):
    return TargetReport(target.name, target.devices[0].device_kind, devices, target.memory, steps, programs)
