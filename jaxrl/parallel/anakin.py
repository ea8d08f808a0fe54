"""Anakin (Hessel et al., 2021, arXiv:2104.06272): environments, replay and learner in one compiled program."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys, registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.report import EpisodeSums
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm, Environment, HostRecipe, Rollout, env_spec
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.layout import Layout, checked_layout
from jaxrl.parallel.program import Program
from jaxrl.parallel.rollout import Acting
from jaxrl.parallel.targets import Target
from jaxrl.parallel.topology import Topology, needs_environment


@dataclasses.dataclass(frozen=True)
class Anakin(Topology):
    """The topology that compiles a whole run for the accelerators, with environments sharded over the devices.

    Args:
      num_envs: number of environments over all devices. None: 1 for algorithms that learn from a replay of
        transitions (DQN, SAC), otherwise 8, rounded up to a multiple of the devices and shards.
      devices: number of devices; None: all accelerators, or one CPU. With several processes: the total number, divided
        evenly among the processes; None: all devices.
      shards: number of logical groups of environments, within which minibatches are sampled. Runs with the same number
        are equal on any number of devices. None: the largest of 8, 4, 2, 1 that the algorithm allows.
    """

    num_envs: int | None = None
    devices: int | None = None
    shards: int | None = None

    def problems(self, env: Environment | HostRecipe | None) -> list[str]:
        if env is None or isinstance(env, Environment):
            return needs_environment(env)
        return [f"Anakin needs an environment in JAX, but {env.name} runs on the host; use Sebulba"]

    def over(self, target: Target) -> "Anakin":
        return dataclasses.replace(self, devices=len(target.devices)) if self.devices is None else self

    def resolve(self, algo: Algorithm, agents: int = 1) -> "Anakin":
        """Return the topology with `num_envs` set; the default is a multiple of the number of agents."""
        return dataclasses.replace(self, num_envs=self._num_envs(algo, agents))

    def _num_envs(self, algo: Algorithm, agents: int = 1) -> int:
        if self.num_envs is not None:
            return self.num_envs
        devices = meshes.device_count(self.devices)
        return ro.default_num_envs(algo, math.lcm(max(devices, 1), max(self.shards or 1, 1)), agents)

    def bind(
        self,
        algo: Algorithm,
        env: Environment | HostRecipe,
        dataset_fraction: float = 0.0,
        processes: int | None = None,
        target: Target | None = None,
    ) -> Program[Environment, Rings]:
        """Check everything that can be checked before compiling, and return the program.

        Args:
          algo, env: the algorithm and a JAX environment.
          dataset_fraction: the fraction of every batch that comes from a dataset.
          processes: the number of processes of the run; None: all.
          target: accelerators to compile for, without running on them.

        Raises:
          ConfigError: the settings are invalid; the error lists all problems.
        """
        if problems := self.problems(env):
            raise ConfigError(problems)
        spec = env_spec(env)
        num_envs = self._num_envs(algo, spec.num_agents)
        devices = meshes.device_count(self.devices)
        layout = checked_layout(algo, spec, num_envs, devices, self.shards, dataset_fraction, processes, target)
        return Program(layout, CompiledRollouts(layout))


registry.add("topology", Anakin)


@dataclasses.dataclass(frozen=True)
class CompiledRollouts:
    """A `RolloutCollector` that steps the environments within the compiled program."""

    layout: Layout

    def begin(self, algo: Algorithm, source: Environment, key: jax.Array) -> Acting:
        spec, num_envs = self.layout.spec, self.layout.num_envs
        env_index = jnp.arange(num_envs, dtype=jnp.int32)
        return ro.begin(algo, source, keys.environment_keys(key, env_index), env_index, spec=spec, num_envs=num_envs)

    def example(self, algo: Algorithm, source: Environment, state: RunState) -> Rollout:
        return self.collect(algo, source, state, 0)[1]

    def steps_per_env(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo)

    def collect(
        self, algo: Algorithm, source: Environment, state: RunState, first_env: jax.Array | int
    ) -> tuple[RunState, Rollout, EpisodeSums]:
        spec, length = self.layout.spec, ro.rollout_length(algo)
        actor = algo.actor(state.learner)
        env_index = first_env + jnp.arange(state.timestep.first.shape[0], dtype=jnp.int32)
        roots = keys.environment_keys(state.key, env_index)
        env_keys = keys.tick_keys(roots, state.steps_per_env.low, length)
        act_keys = keys.tick_keys(keys.policy_keys(state.key, env_index), state.steps_per_env.low, length)
        acting = Acting(state.env_state, state.timestep, state.carry)
        acting, rollout = ro.unroll(algo, actor, source, acting, (env_keys, act_keys), spec=spec, explore=True)
        state = state.replace(
            env_state=acting.env_state,
            timestep=acting.timestep,
            carry=acting.carry,
            steps_per_env=state.steps_per_env.add(length),
        )
        return state, rollout, ro.episode_sums(rollout)
