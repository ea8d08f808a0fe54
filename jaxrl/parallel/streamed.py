"""A dataset that does not fit in memory: batches come from the host, some updates' worth at a time."""

import dataclasses
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl import keys, spaces
from jaxrl.buffers import memory
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.report import Report, reported, summed
from jaxrl.parallel.rollout import EpisodeSums, RunState
from jaxrl.schedules import at
from jaxrl.types import Algorithm, Counter, Drawn, EnvSpec, PyTree, Replicas, SequenceBatch, TransitionBatch

_BLOCK_BYTES, _MOST = 1 << 24, 64  # of the batches that go to the device together; how many


class Stream(Protocol):
    """Batches in an order that is the same whenever it is asked for."""

    def take(self, first_batch: int, count: int) -> TransitionBatch | SequenceBatch:
        """Batches `first_batch` and those that follow, in numpy: leaves `[count, batch, ...]`."""
        ...


def block(algo: Algorithm, spec: EnvSpec) -> int:
    """How many batches go to the device together."""
    (source,) = algo.experience.values()
    one = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    rows = source.batch_size * (2 if source.sequence is None else source.sequence.rows)
    return int(min(max(_BLOCK_BYTES // (rows * memory.size_of(one)), 1), _MOST))


@dataclasses.dataclass(frozen=True)
class DataProgram:
    """What programs without environments have in common. Static: a key of the compilation cache."""

    spec: EnvSpec
    devices: int
    shards: int
    num_envs: int = 1  # a tick is an update
    share: float = 1.0  # of every batch that the dataset gives

    @property
    def _replicas(self) -> Replicas:
        if self.devices == 1:
            return SingleReplica(self.shards)
        return MeshReplicas("data", self.shards // self.devices)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return meshes.data_mesh(self.devices)

    def place(self, tree: PyTree) -> PyTree:
        """Numbers as arrays on every device, where `chunk` finds them without a transfer at every call."""
        return meshes.everywhere(tree, self.mesh)

    def not_in_checkpoints(self, fresh: RunState) -> dict[str, Any]:
        """The parts of a state that a resumed run takes from a fresh one: none. The dataset is read again."""
        return {}

    def close(self) -> None:
        """Nothing is held; whoever opened the dataset closes it."""


@dataclasses.dataclass(frozen=True)
class StreamedProgram(DataProgram):
    """The same calls as `OfflineProgram`, of a dataset that is a `Stream`; an iteration is a block of updates.

    Its state is the number of the next batch, which is the number of updates so far.
    """

    block: int = 1  # updates

    def rows_per_iteration(self, algo: Algorithm) -> int:
        """Updates of an iteration."""
        return self.block

    def init(self, algo: Algorithm, key: jax.Array) -> RunState:
        """The state of a run that has not begun; pure."""
        initial = at(algo, jnp.float32(0.0)).init(keys.initial_key(key), self.spec)
        return RunState(initial, (), (), (), {}, key, Counter.zero(), Counter.zero())

    def start(self, algo: Algorithm, env: Any, seed: int, *, saved: bool = True, dataset: Stream) -> RunState:
        """`init`, compiled."""
        return _beginning(self, jax.tree.structure(algo))(algo, self.place(jax.random.key(seed)))

    def emptied(self, algo: Algorithm, env: Any, state: RunState, dataset: Stream) -> RunState:
        """`state`: it holds nothing of the data."""
        return state

    def chunk(
        self, algo: Algorithm, env: Any, state: RunState, length: int, total_ticks: int, dataset: Stream
    ) -> tuple[RunState, Report]:
        """`length` iterations; while one runs, the batches of the next are made."""
        total, total_ticks, first = None, self.place(np.float32(total_ticks)), int(state.ticks)
        for number in range(length):
            batches = self._placed(dataset.take(first + number * self.block, self.block))
            state, report = _block(self, algo, state, batches, total_ticks)
            total = summed(total, report, np.int32(number))
        return state, total

    def _placed(self, batches):
        specs = _batch_specs(batches)
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.device_put(
            batches, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)
        )

    def advance(
        self, algo: Algorithm, state: RunState, batches: TransitionBatch | SequenceBatch, total_ticks: jax.Array
    ) -> tuple[RunState, Report]:
        """One block on this device. Pure."""
        (name,) = algo.experience
        replicas = self._replicas

        def update(state, batch):
            resolved = at(algo, jnp.minimum(state.ticks.as_float() / total_ticks, 1.0))
            if isinstance(batch, SequenceBatch):
                size = batch.mask.shape[1]
                one = resolved.initial_carry(self.spec, jnp.int32(0), self.num_envs)
                batch = batch.replace(carry=jax.tree.map(lambda x: jnp.broadcast_to(x[None], (size, *x.shape)), one))
            else:
                size = batch.weight.shape[0]
            batch = batch.replace(drawn=_all_alike(size))
            key = jax.random.fold_in(keys.update_key(state.key, state.ticks.low), 0)
            learner, info = resolved.update(state.learner, {name: batch}, spec=self.spec, key=key, replicas=replicas)
            return state.replace(learner=learner, ticks=state.ticks.add(1)), jax.tree.map(jnp.float32, info.metrics)

        state, metrics = jax.lax.scan(update, state, batches)
        metrics = jax.tree.map(jnp.mean, metrics)
        finite = {name: jnp.isfinite(value) for name, value in metrics.items()}
        report = reported(EpisodeSums.zero(), metrics, jnp.float32(1.0), finite)
        return state, report.with_state(state, jnp.int32(0)).over(replicas)


def _all_alike(size):
    """What is told of items that no index gave."""
    ones, zeros = jnp.ones(size, jnp.float32), jnp.zeros(size, jnp.int32)
    return Drawn(
        place=jnp.arange(size, dtype=jnp.int32),
        tick=zeros.astype(jnp.uint32),
        probability=ones / size,
        importance=ones,
        priority=ones,
        age_steps=zeros,
        age_updates=zeros,
        times_sampled=zeros,
    )


def _batch_specs(batches):
    """How blocks of batches lie on the mesh: a prefix tree of partition specs."""
    items = PartitionSpec(None, "data")
    if isinstance(batches, TransitionBatch):
        return items
    over_time = PartitionSpec(None, None, "data")
    return batches.replace(rows=over_time, timesteps=over_time, mask=over_time, carry=items, drawn=items)


@lru_cache(maxsize=32)
def _beginning(program, structure):
    return jax.jit(program.init, out_shardings=NamedSharding(program.mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=0)
def _block(program, algo, state, batches, total_ticks):
    if program.devices == 1:
        return program.advance(algo, state, batches, total_ticks)
    everywhere = PartitionSpec()
    specs = (everywhere, everywhere, _batch_specs(batches), everywhere)
    advance = meshes.over_devices(program.advance, program.mesh, specs, (everywhere, everywhere))
    return advance(algo, state, batches, total_ticks)
