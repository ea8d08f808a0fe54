"""A training run as a pure function."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl import envs
from jaxrl.algos.base import as_algorithm
from jaxrl.core import keys
from jaxrl.core.arguments import whole_arguments
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import training_problems
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm, Environment, Metrics, env_spec
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.experience import dataset_problems
from jaxrl.parallel.program import CompiledProgram
from jaxrl.parallel.rollout import rollout_length


@whole_arguments
def make_train(
    algo: Algorithm | str,
    env: Environment | str,
    *,
    total_steps: int,
    num_envs: int | None = None,
    topology: Anakin | None = None,
) -> Callable[[jax.Array], tuple[RunState, Metrics]]:
    """A training run as a pure function, to `jit` and `vmap`.

        train = jax.jit(jax.vmap(jaxrl.make_train(jaxrl.PPO(), "gymnax:CartPole-v1", total_steps=500_000)))
        state, metrics = train(jax.random.split(jax.random.key(0), 16))

    `algo` may hold tracers, so a function of a learning rate can build its own run. Every run is on one device; use
    `jaxrl.sweep` to run on several.

    Args:
      algo, env, total_steps: as for `jaxrl.train`; JAX environments only.
      num_envs: number of environments, if no topology is given; None: as in `jaxrl.train`.
      topology: `Anakin` on one device.

    Returns:
      key -> (state, metrics); each metric has one entry per iteration, NaN where no episode ended.

    Raises:
      ConfigError: all invalid settings.
    """
    algo, env, program, iterations = bound(algo, env, total_steps, topology or Anakin(num_envs, devices=1))
    return partial(_run, program, algo, env, iterations)


def _run(program, algo, env, iterations, key):
    # Numbers that the compiler knows it folds into others, which rounds differently: hidden, this is the same run,
    # bit for bit, as that of `train` and `sweep`.
    algo, env, total_steps_per_env = jax.lax.optimization_barrier(
        (
            jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), algo),
            jax.tree.map(jnp.asarray, env),
            jnp.float32(iterations * rollout_length(algo)),
        )
    )
    return program.run(algo, env, keys.unrolled(key), iterations, total_steps_per_env)


def bound(
    algo: Algorithm | str, env: Environment | str, total_steps: int, topology: Anakin
) -> tuple[Algorithm, Environment, CompiledProgram[Environment], int]:
    """The algorithm, the environment as it is stepped, the program of one run, and how many iterations that has.

    Raises:
      ConfigError: settings that do not fit, all of them.
    """
    algo = as_algorithm(algo)
    made = envs.prepared(env)
    if not isinstance(made, Environment):
        raise ConfigError(f"{made.name} is stepped on the host and cannot be part of a compiled run; use jaxrl.train")
    if topology.devices not in (None, 1):
        raise ConfigError(f"devices={topology.devices}: here every run is on one device; use devices=1")
    if problems := training_problems(total_steps=total_steps, num_envs=topology.num_envs):
        raise ConfigError(problems)
    topology = dataclasses.replace(topology, devices=1).resolve(algo)
    algo = algo.resolve(env_spec(made), topology.num_envs or 0)
    if problems := dataset_problems(algo, env_spec(made), 0.0, dataset=False):
        raise ConfigError(problems)
    program = topology.bind(algo, made, processes=1)
    return algo, made, program, -(-total_steps // program.steps_per_iteration(algo))
