"""A training run as a pure function."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import envs
from jaxrl.algos.base import as_algorithm
from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys
from jaxrl.core.arguments import whole_arguments
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import training_problems
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm, Environment, Metrics, env_spec, num_agents
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.experience import dataset_problems
from jaxrl.parallel.program import Program
from jaxrl.parallel.rollout import rollout_length
from jaxrl.run.settings import RunSettings


@whole_arguments
def make_train(
    algo: Algorithm | str,
    env: Environment | str,
    *,
    total_steps: int,
    num_envs: int | None = None,
    topology: Anakin | None = None,
) -> Callable[[jax.Array], tuple[RunState, Metrics]]:
    """Return a training run as a pure function, to `jit` and `vmap`.

        train = jax.jit(jax.vmap(jaxrl.make_train(jaxrl.PPO(), "gymnax:CartPole-v1", total_steps=500_000)))
        state, metrics = train(jax.random.split(jax.random.key(0), 16))

    `algo` may hold tracers, so a function of a learning rate can build its own run. Every run is on one device; use
    `jaxrl.sweep` to run on several. Under `vmap` a run equals the single run of its key up to rounding, not bit for bit
    (seen with PPO and SAC: batched products round differently). A run with a replay in the host's memory can be
    compiled, but not mapped.

    Args:
      algo, env, total_steps: as for `jaxrl.train`; JAX environments only.
      num_envs: number of environments, if no topology is given; None: as in `jaxrl.train`.
      topology: `Anakin` on one device.

    Returns:
      key -> (state, metrics); each metric has one entry per iteration, NaN where no episode ended.

    Raises:
      ConfigError: all invalid settings.
    """
    return partial(_run, bind_run(RunSettings.of(locals())))


def _run(run, key):
    # The compiler folds constants into others, which rounds differently. With the barrier the run is equal bit for bit
    # to that of `train` and `sweep`.
    algo, env, total_steps_per_env = jax.lax.optimization_barrier(
        (
            jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), run.algo),
            jax.tree.map(jnp.asarray, run.env),
            jnp.float32(run.total_steps_per_env),
        )
    )
    return run.program.run(algo, env, keys.unrolled(key), run.iterations, total_steps_per_env)


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledRun:
    """A run that is one compiled program: its settings, its program and its length.

    Attributes:
      settings: resolved, for one device.
      algo, env: the same as in the settings.
      program: the program of the run.
      rows: environment steps of an iteration, over all environments.
      iterations: number of iterations of the run.
    """

    settings: RunSettings
    algo: Algorithm
    env: Environment
    program: Program[Environment, Rings]
    rows: int
    iterations: int

    @property
    def total_steps_per_env(self) -> int:
        return self.iterations * rollout_length(self.algo)

    def steps(self, points: int) -> list[int]:
        """Return the environment steps at `points` points, evenly over the iterations."""
        return [self.rows * (self.iterations * point // points) for point in range(1, points + 1)]

    def config(self, seed: int | None) -> dict[str, Any]:
        """Return the contents of `config.json` for the run with this seed; None: for any seed."""
        topology = dataclasses.replace(self.settings.topology, shards=self.program.layout.shards)
        return self.settings.replace(topology=topology).config() | {"seed": seed}


def bind_run(settings: RunSettings) -> CompiledRun:
    """Return the run as one compiled program.

    Raises:
      ConfigError: all invalid settings.
    """
    algo, env = as_algorithm(settings.algo), envs.prepared(settings.env)
    topology = settings.topology or Anakin(settings.num_envs, devices=1)
    if not isinstance(env, Environment):
        raise ConfigError(f"{env.name} is stepped on the host and cannot be part of a compiled run; use jaxrl.train")
    if topology.devices not in (None, 1):
        raise ConfigError(f"devices={topology.devices}: here every run is on one device; use devices=1")
    if problems := training_problems(total_steps=settings.total_steps, num_envs=topology.num_envs):
        raise ConfigError(problems)
    topology = dataclasses.replace(topology, devices=1).resolve(algo, num_agents(env))
    algo = algo.resolve(env_spec(env), topology.num_envs or 0)
    if problems := dataset_problems(algo, env_spec(env), 0.0, dataset=False):
        raise ConfigError(problems)
    program = topology.bind(algo, env, processes=1)
    rows, settings = program.steps_per_iteration(algo), settings.replace(algo=algo, env=env, topology=topology)
    if (iterations := -(-settings.total_steps // rows)) >= 2**31:
        raise ConfigError(
            f"total_steps={settings.total_steps}: a compiled run has fewer than 2^31 iterations; use jaxrl.train"
        )
    return CompiledRun(settings, algo, env, program, rows, iterations)
