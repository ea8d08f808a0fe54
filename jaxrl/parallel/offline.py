"""Offline learning, without environments, from a dataset in memory or from batches that the host streams."""

import dataclasses
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys, registry, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.recorded import Recorded
from jaxrl.core.report import EpisodeSums, Report, make_report
from jaxrl.core.run_state import RunState
from jaxrl.core.shared_batch import shared_batch
from jaxrl.core.sources import Dataset, Replay, Uniform
from jaxrl.core.types import (
    Algorithm,
    Environment,
    HostRecipe,
    PyTree,
    SampleInfo,
    SequenceBatch,
    TransitionBatch,
    env_spec,
)
from jaxrl.parallel import memory
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.layout import Layout, checked_layout
from jaxrl.parallel.program import HostLoop, Program
from jaxrl.parallel.rollout import Acting
from jaxrl.parallel.topology import Topology

_EVERYTHING = 1.0  # the dataset's share of every batch
_BLOCK_BYTES, _MOST = 1 << 24, 64  # limits on batches that are sent to the device together: bytes and number


class Stream(Protocol):
    """A source of batches with a fixed order."""

    def take(self, first_batch: int, count: int) -> TransitionBatch | SequenceBatch:
        """Return `count` batches, starting with number `first_batch`, as numpy arrays `[count, batch, ...]`."""
        ...


@dataclasses.dataclass(frozen=True)
class Offline(Topology):
    """The topology that learns only from a dataset, on the accelerators; a step is one gradient update.

    Args:
      devices: number of devices, as in `Anakin`; every batch and the dataset are divided over them.
      shards: number of equal parts of the dataset; every batch has equally many items from each part. Runs with the
        same number are equal on any number of devices. None: the largest of 8, 4, 2, 1 that divides the batch.
      stream: read batches from disk in shuffled order instead of keeping the dataset in memory; None: only if the
        dataset does not fit.
    """

    devices: int | None = None
    shards: int | None = None
    stream: bool | None = None

    def problems(self, env: Environment | HostRecipe | None) -> list[str]:
        if env is None:
            return []
        return ["topology=Offline() learns only from a dataset; leave env out and pass eval_env"]

    def steps_per_iteration(self, algo: Algorithm) -> int:
        """Return 1, the number of updates per iteration, as there are no environment steps for a replay ratio."""
        return 1

    def bind(
        self, algo: Algorithm, env: Environment | HostRecipe, dataset_fraction: float = _EVERYTHING
    ) -> Program[None, Rings] | Program[None, Stream]:
        devices = meshes.device_count(self.devices)
        spec = env_spec(env)
        # Rows have one column per shard.
        columns = self.shards or max(8, devices)
        layout = checked_layout(algo, spec, columns, devices, self.shards, _EVERYTHING)
        layout = dataclasses.replace(layout, num_envs=1, streams=bool(self.stream))
        if not layout.streams:
            return Program(layout, NoRollouts(layout))
        (name, source), *others = algo.experience.items()
        problems = []
        if others:
            problems.append(
                f"streaming supports only one source, but {type(algo).__name__} has {sorted(algo.experience)}; use "
                "stream=False"
            )
        if isinstance(source, Replay) and not isinstance(source.sampler, Uniform):
            problems.append(f"a stream samples uniformly, but source {name!r} has {source.sampler}; use stream=False")
        if jax.process_count() > 1:
            problems.append("several processes cannot stream a dataset; use stream=False, which divides it over them")
        if problems:
            raise ConfigError(problems)
        block = _block_size(algo, layout.spec)
        return Program(layout, NoRollouts(layout, updates=block), StreamLoop(layout, block))


registry.add("topology", Offline)


@dataclasses.dataclass(frozen=True)
class NoRollouts:
    """A `RolloutCollector` without environments: an iteration consists of `updates` updates, which count as steps."""

    layout: Layout
    updates: int = 1

    def begin(self, algo: Algorithm, source: None, key: jax.Array) -> Acting:
        """Return an empty acting state, as there are no environments."""
        parts: dict[str, PyTree] = {"env_state": (), "timestep": (), "carry": ()}
        return Acting(**parts)

    def example(self, algo: Algorithm, source: None, state: RunState) -> None:
        """Return None, as there are no environments."""

    def steps_per_env(self, algo: Algorithm) -> int:
        return self.updates

    def collect(
        self, algo: Algorithm, source: None, state: RunState, first_env: jax.Array | int
    ) -> tuple[RunState, None, EpisodeSums]:
        state = state.replace(steps_per_env=state.steps_per_env.add(self.updates))
        return state, None, EpisodeSums.zero()


def _block_size(algo, spec):
    """Return the number of batches that are sent to the device together."""
    (source,) = algo.experience.values()
    assert isinstance(source, Replay | Dataset)  # the sources that can sample from a dataset
    one = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    rows = source.batch_size * (2 if source.sequence is None else source.sequence.rows)
    return int(min(max(_BLOCK_BYTES // (rows * memory.size_of(one)), 1), _MOST))


@dataclasses.dataclass(frozen=True)
class StreamLoop(HostLoop[None, Stream]):
    """A `HostLoop` that learns only from a `Stream`; an iteration consists of a block of updates.

    The number of the next batch equals the number of updates so far. The caller opens and closes the dataset. Hashable,
    as it is a static argument of compiled functions.

    Args:
      layout: the layout of batches over devices.
      block: number of updates per iteration.
    """

    layout: Layout
    block: int

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Stream | None,
        recorded: Recorded | None,
    ) -> tuple[RunState, Report, None]:
        """Run `length` blocks of updates; while a block runs, the batches of the next block are read."""
        assert dataset is not None  # runs with this loop have a dataset
        total, first = None, int(state.steps_per_env)
        for number in range(length):
            batches = dataset.take(first + number * self.block, self.block)
            batches = jax.device_put(batches, self.layout.on_mesh(_batch_specs(batches)))
            state, report = _block(self, algo, state, batches, total_steps_per_env)
            total = self.layout.accumulated(total, report, number)
        assert total is not None  # length is at least 1
        return state, total, None

    def advance(
        self, algo: Algorithm, state: RunState, batches: TransitionBatch | SequenceBatch, total_steps_per_env: jax.Array
    ) -> tuple[RunState, Report]:
        """Run one block of updates on this device. Pure."""
        (name,) = algo.experience
        replicas = self.layout.replicas

        def update(state, batch):
            resolved = self.layout.resolve(algo, state, total_steps_per_env)
            if isinstance(batch, SequenceBatch):
                size = batch.mask.shape[1]
                one = resolved.initial_carry(self.layout.spec, jnp.int32(0), self.layout.num_envs)
                batch = batch.replace(carry=jax.tree.map(lambda x: jnp.broadcast_to(x[None], (size, *x.shape)), one))
            else:
                size = batch.weight.shape[0]
            batch = batch.replace(sample_info=_equal_items(size))
            key = jax.random.fold_in(keys.update_key(state.key, state.steps_per_env.low), 0)
            with shared_batch(replicas):
                learner, info = resolved.update(
                    state.learner, {name: batch}, spec=self.layout.spec, key=key, replicas=replicas
                )
            return state.replace(learner=learner, steps_per_env=state.steps_per_env.add(1)), jax.tree.map(
                jnp.float32, info.metrics
            )

        state, metrics = jax.lax.scan(update, state, batches)
        metrics = jax.tree.map(jnp.mean, metrics)
        report = make_report(EpisodeSums.zero(), metrics, jnp.float32(self.block), {})
        return state, report.with_state(state, jnp.int32(0)).all_reduce(replicas)


def _equal_items(size):
    """Return a placeholder `SampleInfo` for items that were not sampled through an index."""
    ones, zeros = jnp.ones(size, jnp.float32), jnp.zeros(size, jnp.int32)
    return SampleInfo(
        position=jnp.arange(size, dtype=jnp.int32),
        step=zeros.astype(jnp.uint32),
        probability=ones / size,
        importance=ones,
        priority=ones,
        age_steps=zeros,
        age_updates=zeros,
        times_sampled=zeros,
    )


def _batch_specs(batches):
    """Return a prefix tree of partition specs for blocks of batches."""
    items = PartitionSpec(None, "data")
    if isinstance(batches, TransitionBatch):
        return items
    over_time = PartitionSpec(None, None, "data")
    return batches.replace(rows=over_time, timesteps=over_time, mask=over_time, carry=items, sample_info=items)


@partial(jax.jit, static_argnums=0)
def _block(loop, algo, state, batches, total_steps_per_env):
    if loop.layout.devices == 1:
        return loop.advance(algo, state, batches, total_steps_per_env)
    everywhere = PartitionSpec()
    specs = (everywhere, everywhere, _batch_specs(batches), everywhere)
    advance = meshes.over_devices(loop.advance, loop.layout.mesh, specs, (everywhere, everywhere))
    return advance(algo, state, batches, total_steps_per_env)
