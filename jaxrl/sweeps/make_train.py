"""Training runs as pure functions, which compile to single programs."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm, Environment, Metrics
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.program import Program
from jaxrl.parallel.rollout import rollout_length
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.distributions import COUNTS


@checked(**COUNTS)
def make_train(
    algo: Algorithm | str,
    env: Environment | str,
    *,
    total_steps: int,
    num_envs: int | None = None,
    topology: Anakin | None = None,
) -> Callable[[jax.Array], tuple[RunState, Metrics]]:
    """Return a training run as a pure function, for `jit` and `vmap`.

        train = jax.jit(jax.vmap(jaxrl.make_train(jaxrl.PPO(), "gymnax:CartPole-v1", total_steps=500_000)))
        state, metrics = train(jax.random.split(jax.random.key(0), 16))

    `algo` may contain tracers, so a function of the learning rate can construct and train a run. Every run uses one
    device; use `jaxrl.sweep` for several devices. Under `vmap`, each run equals the single run with the same key up to
    rounding, not bit for bit (batched matrix products of PPO and SAC round differently). A run with a replay buffer in
    host memory can be compiled, but `vmap` does not support it.

    Args:
      algo, env, total_steps: as for `jaxrl.train`; JAX environments only.
      num_envs: number of environments if `topology` is None; None: the default of `jaxrl.train`.
      topology: an `Anakin` topology with one device.

    Returns:
      A function `key -> (state, metrics)`; each metric has one entry per iteration, NaN if no episode ended in it.

    Raises:
      ConfigError: settings are invalid; the message lists all of them.
    """
    return partial(_run, bind_run(RunSettings.of(locals())))


def _run(run, key):
    # The compiler would fold constants, which rounds differently. The barrier prevents this, so that the run equals the
    # same run of `train` and `sweep` bit for bit.
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
    """A training run as one compiled program.

    Attributes:
      settings: the resolved settings, for one device.
      algo, env: the algorithm and the environment of the settings.
      program: the program of the run.
      rows: environment steps per iteration, over all environments.
      iterations: number of iterations in the run.
    """

    settings: RunSettings
    algo: Algorithm
    env: Environment
    program: Program[Environment, Rings]
    rows: int
    iterations: int

    @property
    def total_steps_per_env(self) -> int:
        """The number of steps of each environment in the whole run."""
        return self.iterations * rollout_length(self.algo)

    def steps(self, points: int) -> list[int]:
        """Return the environment steps at `points` points, spaced evenly over the iterations."""
        return [self.rows * (self.iterations * point // points) for point in range(1, points + 1)]

    def config(self, seed: int | None) -> dict[str, Any]:
        """Return the contents of `config.json` for the run with this seed, or for all seeds if it is None."""
        topology = dataclasses.replace(self.settings.topology, shards=self.program.layout.shards)
        return self.settings.replace(topology=topology).config() | {"seed": seed}


def bind_run(settings: RunSettings) -> CompiledRun:
    """Resolve the settings and return the run as one compiled program.

    Raises:
      ConfigError: settings are invalid; the message lists all of them.
    """
    settings = settings.prepared()
    env, topology = settings.env, settings.topology
    if not isinstance(env, Environment):
        raise ConfigError(f"{env.name} is stepped on the host and cannot be part of a compiled run; use jaxrl.train")
    if topology.devices not in (None, 1):
        raise ConfigError(f"devices={topology.devices}: a compiled run uses one device; use devices=1")
    settings = settings.replace(topology=dataclasses.replace(topology, devices=1)).resolved()
    algo = settings.algo
    program = settings.topology.bind(algo, env, processes=1)
    rows = program.steps_per_iteration(algo)
    if (iterations := -(-settings.total_steps // rows)) >= 2**31:
        raise ConfigError(
            f"total_steps={settings.total_steps} needs {iterations:,} iterations, but a compiled run must have fewer "
            "than 2^31; use jaxrl.train"
        )
    return CompiledRun(settings, algo, env, program, rows, iterations)
