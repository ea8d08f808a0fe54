"""Topologies: the devices and processes of a run, as seen by the training loop."""

import dataclasses
from typing import Any

from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment, HostRecipe
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.parallel.program import Program
from jaxrl.parallel.rollout import rollout_length
from jaxrl.parallel.targets import Target

_WITHOUT_ENV = "without an env, the topology must be Offline(), and num_envs has no meaning; remove both, or pass env"


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices and processes of a run. The default methods are for runs in one compiled program.

    A topology is a registered frozen dataclass (`registry.add("topology", ...)`) that implements `problems` and `bind`,
    and overrides other methods if their defaults do not apply.
    """

    @property
    def num_envs(self) -> int | None:
        """Number of environments over all devices; None before `resolve`."""
        return 0

    @property
    def batch_envs(self) -> int | None:
        """Number of environments whose rollouts an update learns from, by default all; None before `resolve`."""
        return self.num_envs

    @property
    def step_timeout(self) -> float:
        """Time limit in seconds for one step or reset of a host environment."""
        return STEP_TIMEOUT

    @property
    def in_process(self) -> bool:
        """True if the environments are in this process."""
        return True

    @property
    def stream(self) -> bool | None:
        """True if a dataset is read from disk batch by batch; None: only if it does not fit in memory."""
        return False

    def problems(self, env: Environment | HostRecipe | None) -> list[str]:
        """Return one line per reason why a run in `env` (None: without environments) cannot use this topology."""
        raise NotImplementedError

    def absent_resources(self, env: Environment | HostRecipe | None) -> dict[str, str]:
        """Return the parts of `Resources` that a run in `env` does not have, each with the reason."""
        return dict.fromkeys(("actors", "environments", "worker_memory"), "a single compiled program has no such part")

    def worker_processes(self, env: Environment | HostRecipe | None) -> int:
        """Return the number of worker processes on this machine that step `env`."""
        return 0

    def over(self, target: Target) -> "Topology":
        """Return the topology with the number of devices of a target, unless a number is set.

        Raises:
          ConfigError: runs of this topology are not one compiled program.
        """
        raise ConfigError(
            f"target={target.name!r} needs a run in one compiled program, but the topology is {self}; use an "
            "environment in JAX with Anakin"
        )

    def resolve(self, algo: Algorithm, agents: int = 1) -> "Topology":
        """Return the topology after setting all fields that depend on the algorithm or the number of agents."""
        return self

    def steps_per_iteration(self, algo: Algorithm) -> int:
        """Return the total steps of all environments per iteration; without environments, the number of updates."""
        return rollout_length(algo) * (self.resolve(algo).batch_envs or 0)

    def bind(self, algo: Algorithm, env: Environment | HostRecipe, dataset_fraction: float = 0.0) -> Program[Any, Any]:
        """Check everything that can be checked before compiling, and return the program.

        Args:
          algo, env: the algorithm and the environment; for offline learning, the dataset's environment.
          dataset_fraction: the fraction of every batch that comes from a dataset.

        Raises:
          ConfigError: the settings are invalid; the error lists all problems.
        """
        raise NotImplementedError


def default_topology(env: Environment | HostRecipe | None, num_envs: int | None = None) -> Topology:
    """Return the first registered topology that can run `env` or, if `env` is None, learn from a dataset."""
    kinds = registry.registered("topology").values()  # includes parts of topologies, such as `Remote`
    choices = (kind() for kind in kinds if issubclass(kind, Topology))
    topology = next(choice for choice in choices if not choice.problems(env))
    return topology if num_envs is None else dataclasses.replace(topology, num_envs=num_envs)


def choose(
    topology: Topology | None, env: Environment | HostRecipe | None, num_envs: int | None
) -> tuple[Topology, list[str]]:
    """Return the topology of a run, and an error line for each setting that is incompatible with it.

    Args:
      topology: the topology that the caller set; None: the default for `env`.
      env: the environment; None: the run learns only from a dataset.
      num_envs: the number of environments that the caller set for the default topology.
    """
    if topology is None:
        found = needs_environment(env) if num_envs is not None else []
        return default_topology(env, None if found else num_envs), found
    if not isinstance(topology, Topology):
        found = [f"topology={topology!r:.80} is not a topology; pass one, such as jaxrl.Anakin(num_envs=8)"]
        return default_topology(env), found
    found = topology.problems(env)
    if num_envs is not None:
        found.append(
            f"num_envs={num_envs} is not allowed with topology={topology}; set it in the topology, or leave it out"
        )
    return topology, found


def needs_environment(env: Environment | HostRecipe | None) -> list[str]:
    """Return an error line if `env` is None, for topologies that need an environment; otherwise []."""
    return [_WITHOUT_ENV] if env is None else []
