"""The learner of host environments: the compiled pieces around what actors collected."""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl import keys
from jaxrl.buffers import fixed
from jaxrl.parallel import learner
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.collector import Collected, Steps
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.rollout import EpisodeSums, RunState
from jaxrl.schedules import at
from jaxrl.types import Counter, EnvSpec, Replicas, RolloutBatch


@dataclasses.dataclass(frozen=True)
class HostLearning:
    """The learner's compiled pieces of one run, static: a key of the compilation cache."""

    spec: EnvSpec
    num_envs: int
    shards: int
    devices: int
    processes: int = 1
    share: float = 0.0  # of every batch that a dataset gives

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return meshes.data_mesh(self.devices)

    def mesh_devices(self) -> list[jax.Device]:
        return list(self.mesh.devices.flat)

    @property
    def _replicas(self) -> Replicas:
        if self.devices == 1:
            return SingleReplica(self.shards)
        return MeshReplicas("data", self.shards // self.devices)

    def _partition(self, algo) -> RunState:
        data, everywhere = PartitionSpec("data"), PartitionSpec()
        return RunState(
            learner=everywhere,
            env_state=everywhere,
            timestep=data,
            carry=data,
            buffers=learner.partition(algo, "data", self.shards, self.share),
            key=everywhere,
            ticks=everywhere,
            empty_at=everywhere,
        )

    def _placed(self, specs):
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    # --- beginnings ----------------------------------------------------------------------------------------------

    def init(self, algo, timestep, key, dataset=None) -> RunState:
        """The state of a run that has not begun; pure."""
        resolved = at(algo, jnp.float32(0.0))
        env_index = jnp.arange(self.num_envs, dtype=jnp.int32)
        state = RunState(
            learner=resolved.init(keys.initial_key(key), self.spec),
            env_state=(),
            timestep=ro.first_timestep(timestep, self.spec),
            carry=jax.vmap(lambda index: resolved.initial_carry(self.spec, index, self.num_envs))(env_index),
            buffers={},
            key=key,
            ticks=Counter.zero(),
            empty_at=Counter.zero(),
        )
        return self._emptied(algo, state, dataset)

    def started(self, algo, timestep, key, dataset) -> RunState:
        """`init`, compiled, with every leaf where it belongs."""
        return _beginnings(self, jax.tree.structure(algo))[0](algo, timestep, key, dataset)

    def with_empty_buffers(self, algo, state, dataset) -> RunState:
        """`state` with new buffers, compiled."""
        return _beginnings(self, jax.tree.structure(algo))[1](algo, state, dataset)

    def shardings(self, algo) -> RunState:
        """How a run's state lies on the mesh."""
        return self._placed(self._partition(algo))

    def _emptied(self, algo, state, dataset):
        rows = jax.eval_shape(lambda: self._example(at(algo, jnp.float32(0.0)), state))
        layout = {"num_envs": self.num_envs, "shards": self.shards, "share": self.share}
        buffers = learner.empty_buffers(algo, rows, state.carry, dataset=dataset, **layout)
        if not buffers:
            return state
        return state.replace(buffers=buffers, empty_at=jax.tree.map(jnp.copy, state.ticks))

    def _example(self, algo, state):
        steps = Steps(self.spec, self.num_envs, self.num_envs, 1)
        roots = steps.roots(state.key, jnp.arange(self.num_envs, dtype=jnp.int32))
        action = ro.no_action(self.spec, self.num_envs)
        actor, following = algo.actor(state.learner), state.timestep.replace(previous_action=None)
        storage = steps.storage(algo, actor, following, state.carry, action, roots)
        return steps.finish(storage, following, action, state.carry, state.carry, (), jnp.int32(0)).batch.rows

    # --- an iteration --------------------------------------------------------------------------------------------

    @partial(jax.jit, static_argnums=0)
    def prepare(self, algo, state, total_ticks):
        """The algorithm with its schedules resolved, and what acting needs."""
        algo = at(algo, jnp.minimum(state.ticks.as_float() / total_ticks, 1.0))
        return algo, algo.actor(state.learner)

    def gathered(self, rollouts: list[Collected]) -> list[Collected]:
        """All groups' rollouts on the learner's device, or as one batch on its devices."""
        first = self.mesh.local_devices[0]
        rollouts = [rollout if _lies_on(rollout, first) else jax.device_put(rollout, first) for rollout in rollouts]
        if self.devices == 1:
            return rollouts  # `learn` joins them where it reads them, which saves a pass over the frames
        whole = rollouts[0] if len(rollouts) == 1 else self._joined(rollouts)
        specs = Collected(_batch_specs(), PartitionSpec("data"), PartitionSpec())
        if self.processes == 1:
            return [jax.device_put(whole, self._placed(specs))]
        # Each process counted the episodes of its own environments: they are summed where they are used.
        apart = jax.tree.map(lambda x: jnp.zeros(self.devices // self.processes).at[0].set(x), whole.episodes)
        specs = specs.replace(episodes=PartitionSpec("data"))
        return [meshes.from_processes(whole.replace(episodes=apart), self.mesh, specs)]

    @partial(jax.jit, static_argnums=0)
    def _joined(self, rollouts):
        batches = [rollout.batch for rollout in rollouts]
        along_time = lambda *x: jnp.concatenate(x, axis=1)  # noqa: E731
        at_once = lambda *x: jnp.concatenate(x, axis=0)  # noqa: E731
        whole = RolloutBatch(
            rows=jax.tree.map(along_time, *(b.rows for b in batches)),
            timesteps=jax.tree.map(along_time, *(b.timesteps for b in batches)),
            final=jax.tree.map(at_once, *(b.final for b in batches)),
            carry=jax.tree.map(at_once, *(b.carry for b in batches)),
            final_carry=jax.tree.map(at_once, *(b.final_carry for b in batches)),
            # Every group acted with the same version.
            statistics=batches[0].statistics,
            version=batches[0].version,
        )
        episodes = rollouts[0].episodes
        for rollout in rollouts[1:]:
            episodes = episodes + rollout.episodes
        return Collected(whole, jax.tree.map(at_once, *(rollout.final for rollout in rollouts)), episodes)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def learn(self, algo, state, buffers, rollouts, dataset):
        """Stores what `gathered` gave and updates, on all devices. `algo` has its schedules resolved."""
        collected = rollouts[0] if len(rollouts) == 1 else self._joined(rollouts)
        state = state.replace(buffers=buffers)
        if self.devices == 1:
            state, report = self._learn(algo, state, collected.whole, collected.final, dataset)
        else:
            partition, everywhere = self._partition(algo), PartitionSpec()
            rings = None if dataset is None else fixed.partition(dataset, "data")
            specs = (everywhere, partition, _batch_specs(), PartitionSpec("data"), rings)
            state, report = meshes.over_devices(self._learn, self.mesh, specs, (partition, everywhere))(
                algo, state, collected.whole, collected.final, dataset
            )
        episodes = collected.episodes
        if self.processes > 1:
            episodes = jax.tree.map(jnp.sum, episodes)
        return state, report.replace(episodes=episodes)

    def _learn(self, algo, state, batch, final, dataset):
        tick, length = state.ticks.low, batch.rows.reward.shape[0]
        state = state.replace(timestep=final, carry=batch.final_carry, ticks=state.ticks.add(length))
        state, report = learner.learn(
            algo,
            state,
            batch,
            EpisodeSums.zero(),
            tick=tick,
            spec=self.spec,
            num_envs=self.num_envs,
            replicas=self._replicas,
            share=self.share,
            dataset=dataset,
        )
        return state, report.with_state(state, jnp.int32(0)).over(self._replicas)


@lru_cache(maxsize=32)
def _beginnings(learning, structure):
    """The two beginnings compiled for algorithms of a tree structure, which holds all that is static."""
    shardings = learning.shardings(jax.tree.unflatten(structure, [0.0] * structure.num_leaves))
    return tuple(jax.jit(function, out_shardings=shardings) for function in (learning.init, learning._emptied))


def _lies_on(tree, device) -> bool:
    """Whether the arrays of `tree`, which one program made, are on `device` already."""
    return jax.tree.leaves(tree)[0].devices() == {device}


def _batch_specs() -> RolloutBatch:
    """How a batch lies on the mesh: a prefix tree of partition specs."""
    rows, moment, everywhere = PartitionSpec(None, "data"), PartitionSpec("data"), PartitionSpec()
    return RolloutBatch(
        rows=rows,
        timesteps=rows,
        final=moment,
        carry=moment,
        final_carry=moment,
        statistics=everywhere,
        version=everywhere,
    )
