"""How a run lies over the devices that learn."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.buffers.ring import HostMemory
from jaxrl.core.recorded import Recorded
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, EnvSpec, PyTree, Replicas
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.experience import Experience
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.targets import Target


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run lies over devices. Static: a key of the compilation cache.

    Args:
      spec: of the environments.
      num_envs: whose rollouts an update learns from, over all devices; 1 where nothing acts.
      devices: of all processes together.
      shards: logical groups of environments, over all devices.
      dataset_fraction: the part of every batch that comes from a dataset.
      streams: whether the dataset's batches come from the host, so that there are no buffers.
      target: accelerators that programs are only compiled for; None: they run on the devices that there are.
    """

    spec: EnvSpec
    num_envs: int
    devices: int
    shards: int
    dataset_fraction: float = 0.0
    streams: bool = False
    target: Target | None = None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices that learn."""
        return meshes.data_mesh(self.devices, target=self.target)

    @property
    def replicas(self) -> Replicas:
        """What an update is averaged over."""
        platform = meshes.local_devices(self.target)[0].platform
        if self.devices == 1:
            return SingleReplica(self.shards, platform)
        return MeshReplicas("data", self.shards // self.devices, platform)

    def experience(self, algo: Algorithm) -> Experience:
        """What `algo` learns from."""
        return Experience(algo, self.spec, self.num_envs, self.shards, self.dataset_fraction, self.replicas)

    def place(self, tree: PyTree) -> PyTree:
        """Numbers as arrays on every device, where `chunk` finds them without a transfer at every call.

        For a target their shapes.
        """
        if self.target is not None:
            return meshes.described(tree, NamedSharding(self.mesh, PartitionSpec()))
        return meshes.everywhere(tree, self.mesh)

    def partition(self, algo: Algorithm) -> RunState:
        """How a run's state lies on the mesh: a prefix tree of partition specs."""
        return jax.tree.map(lambda x: x.spec if isinstance(x, HostMemory) else x, self._lies(algo), is_leaf=_is_spec)

    def shardings(self, algo: Algorithm) -> RunState:
        """How a run's state lies on the mesh: a prefix tree of shardings, which also tell of the host's memory."""
        return self.on_mesh(self._lies(algo))

    def _lies(self, algo):
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
        """A tree of partition specs, or `HostMemory`, as shardings."""

        def sharding(x):
            if isinstance(x, HostMemory):
                return NamedSharding(self.mesh, x.spec, memory_kind="pinned_host")
            return NamedSharding(self.mesh, x)

        return jax.tree.map(sharding, specs, is_leaf=_is_spec)

    def resolve(self, algo: Algorithm, state: RunState, total_steps_per_env: jax.Array) -> Algorithm:
        """`algo` with its schedules resolved at where `state` stands; pure."""
        return resolve_schedules(algo, jnp.minimum(state.steps_per_env.as_float() / total_steps_per_env, 1.0))

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        """What `Program.recorded_chunk` records for about one in `every` episodes."""
        return Recorded.every(every, self.num_envs, ro.rollout_length(algo) * ro.row_bytes(self.spec))


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec | HostMemory)
