"""The sharding of a run's state across the learner devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.buffers.ring import HostMemory
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import count_problems, multiples
from jaxrl.core.recorded import Recorded
from jaxrl.core.report import Report, accumulate
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, EnvSpec, Episodes, PyTree, Replicas
from jaxrl.parallel import memory
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.experience import Experience, Pool
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.targets import Target

_DEFAULT_SHARDS = (8, 4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of a run among devices. Hashable, as it is a static argument of compiled functions.

    Args:
      spec: the spec of the environments.
      num_envs: number of environments that an update learns from, over all devices; 1 for a run without environments.
      devices: total number of devices of all processes.
      shards: number of logical groups of environments, over all devices.
      dataset_fraction: the fraction of every batch that comes from a dataset.
      streams: whether the host sends batches of the dataset to the devices, which then have no buffers.
      target: accelerators to compile for, without running on them; None: programs run on this machine's devices.
      pool: the groups whose rollouts the replays store independently, as in `Experience`.
    """

    spec: EnvSpec
    num_envs: int
    devices: int
    shards: int
    dataset_fraction: float = 0.0
    streams: bool = False
    target: Target | None = None
    pool: Pool | None = None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the learner devices."""
        return meshes.data_mesh(self.devices, target=self.target)

    @property
    def replicas(self) -> Replicas:
        """The reductions over the devices that share an update."""
        platform = meshes.local_devices(self.target)[0].platform
        if self.devices == 1:
            return SingleReplica(self.shards, platform)
        return MeshReplicas("data", self.shards // self.devices, platform)

    def experience(self, algo: Algorithm) -> Experience:
        """Return the experience that `algo` learns from."""
        fraction = self.dataset_fraction
        return Experience(algo, self.spec, self.num_envs, self.shards, fraction, self.replicas, self.pool)

    def place(self, tree: PyTree) -> PyTree:
        """Return the numbers in `tree` as arrays on every device, so that calls of `chunk` do not transfer them.

        With a target, return the shapes of these arrays.
        """
        if self.target is not None:
            return meshes.described(tree, NamedSharding(self.mesh, PartitionSpec()))
        return meshes.from_processes(tree, self.mesh, PartitionSpec())

    def accumulated(self, total: Report | None, report: Report, number: int) -> Report:
        """Add the report of iteration `number` of a chunk to the chunk's total, which is None before iteration 0."""
        which, begins = self.place((np.int32(number), np.bool_(total is None)))
        return accumulate(report if total is None else total, report, which, begins)

    def partition(self, algo: Algorithm) -> RunState:
        """Return a prefix tree of partition specs for a run's state."""
        return jax.tree.map(lambda x: x.spec if isinstance(x, HostMemory) else x, self._specs(algo), is_leaf=_is_spec)

    def shardings(self, algo: Algorithm) -> RunState:
        """Return a prefix tree of shardings for a run's state; unlike partition specs, shardings have a memory kind."""
        return self.on_mesh(self._specs(algo))

    def _specs(self, algo):
        data, everywhere = PartitionSpec("data"), PartitionSpec()
        specs: dict[str, PyTree] = {
            "learner": everywhere,
            "env_state": data,
            "timestep": data,
            "carry": data,
            "buffers": {} if self.streams else self.experience(algo).partition("data"),
            "key": everywhere,
            "steps_per_env": everywhere,
            "empty_at": everywhere,
        }
        return RunState(**specs)

    def on_mesh(self, specs: PyTree) -> PyTree:
        """Convert a tree of partition specs or `HostMemory` to shardings."""

        def sharding(x):
            if isinstance(x, HostMemory):
                return NamedSharding(self.mesh, x.spec, memory_kind="pinned_host")
            return NamedSharding(self.mesh, x)

        return jax.tree.map(sharding, specs, is_leaf=_is_spec)

    def resolve(self, algo: Algorithm, state: RunState, total_steps_per_env: jax.Array) -> Algorithm:
        """Return `algo` with its schedules resolved at the step count of `state`. Pure."""
        return resolve_schedules(algo, jnp.minimum(state.steps_per_env.as_float() / total_steps_per_env, 1.0))

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        """Return the settings of `Program.recorded_chunk` for recording about one in `every` episodes."""
        return Recorded.every(every, self.num_envs, ro.rollout_length(algo) * ro.row_bytes(self.spec))


def checked_layout(
    algo: Algorithm,
    spec: EnvSpec,
    num_envs: int,
    devices: int,
    shards: int | None,
    dataset_fraction: float = 0.0,
    processes: int | None = None,
    target: Target | None = None,
    pool: Pool | None = None,
) -> Layout:
    """Check that environments, batches, shards and devices can be divided evenly, and return the layout.

    Args:
      algo, spec: the algorithm, and the spec of its environments.
      num_envs: number of environments over all devices.
      devices: requested total number of devices of all processes.
      shards: requested number of shards; None: the largest of 8, 4, 2, 1 that works.
      dataset_fraction: the fraction of every batch that comes from a dataset.
      processes: number of processes whose devices are used; None: all.
      target: accelerators to compile for, without running on them.
      pool: the groups whose rollouts the replays store independently, as in `Experience`.

    Raises:
      ConfigError: the settings are invalid; the error lists all problems.
    """
    if problems := count_problems(num_envs=(num_envs, 1), devices=(devices, 1), shards=(shards, 1)):
        raise ConfigError(problems)
    problems = meshes.device_problems(devices, processes, target)
    if not problems and num_envs % (rows := devices * spec.num_agents):
        by = f"{devices} devices"
        if spec.num_agents > 1:
            by = f"the {spec.num_agents} agents of {spec.name} on each of {by}"
        problems.append(f"num_envs={num_envs} is not divisible by {by}; use {multiples(num_envs, rows)}")
    if shards is not None:
        if num_envs % shards:
            problems.append(f"shards={shards} must divide num_envs={num_envs}")
        elif shards % devices:
            problems.append(f"shards={shards} must be a multiple of devices={devices}")
    if problems:
        raise ConfigError(problems + algo.validate(spec, num_envs, shards or 1))
    length = ro.rollout_length(algo)
    if isinstance(length, int) and length > 0:  # otherwise, the algorithm reports it
        of_all = list(meshes.data_mesh(devices, processes, target).devices.flat)
        if problems := memory.rollout_problems(ro.row_bytes(spec), num_envs, length, of_all, target):
            raise ConfigError(problems)

    # With whole episodes, use as few shards as possible, because a batch waits for the shard with the longest episodes.
    most_first = not any(isinstance(source, Episodes) for source in algo.experience.values())
    candidates = [shards] if shards else sorted({*_DEFAULT_SHARDS, devices}, reverse=most_first)
    for candidate in candidates:
        if num_envs % candidate or candidate % devices:
            continue
        problems = algo.validate(spec, num_envs, candidate)
        try:
            problems += Experience(algo, spec, num_envs, candidate, dataset_fraction, pool=pool).problems()
        except (AttributeError, TypeError, ValueError):
            if not problems:  # a field has a wrong type, which the algorithm reports
                raise
        if not problems:
            return Layout(spec, num_envs, devices, candidate, dataset_fraction, target=target, pool=pool)
    raise ConfigError(problems)


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec | HostMemory)
