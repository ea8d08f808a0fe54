"""A dataset in place of environments: nothing acts, and all that is learnt from is there from the beginning."""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl import keys
from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.errors import ConfigError
from jaxrl.parallel import learner, streamed
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.report import Report, reported
from jaxrl.parallel.rollout import EpisodeSums, RunState
from jaxrl.parallel.streamed import DataProgram, StreamedProgram
from jaxrl.schedules import at
from jaxrl.sources import Replay, Uniform
from jaxrl.types import Algorithm, Counter, Environment, HostRecipe, env_spec

_EVERYTHING = 1.0  # the dataset's share of every batch


@dataclasses.dataclass(frozen=True)
class Offline:
    """Learning from a dataset alone, on the accelerator; a step is an update.

    Args:
      devices: as in `Anakin`: how many share every batch and the dataset's rows.
      shards: into how many parts the rows are cut, each of which gives the same part of every batch; the same number
        gives the same run on any number of devices. None: the largest of 8, 4, 2, 1 that divides the batch.
      stream: read batches from disk, in a shuffled order, instead of holding all rows in memory; None: if they do not
        fit.
    """

    devices: int | None = None
    shards: int | None = None
    stream: bool | None = None

    def rows_per_iteration(self, algo: Algorithm) -> int:
        """Updates of an iteration."""
        return learner.updates_of(algo)

    def bind(self, algo: Algorithm, env: Environment | HostRecipe, share: float = _EVERYTHING) -> "OfflineProgram":
        """Checks everything that can be checked before compiling, and fixes the program.

        Args:
          algo: what learns.
          env: what the data is about.
          share: of every batch that the dataset gives: all.

        Raises:
          ConfigError: with every problem found.
        """
        devices = meshes.default_device_count() if self.devices is None else self.devices
        spec = env_spec(env)
        # There are as many columns of rows as shards.
        columns = self.shards or max(8, devices)
        shards = meshes.checked_layout(algo, spec, columns, devices, self.shards, _EVERYTHING)
        return OfflineProgram(spec, devices, shards)


@dataclasses.dataclass(frozen=True)
class OfflineProgram(DataProgram):
    """The same calls as `AnakinProgram`, without environments."""

    def streamed(self, algo: Algorithm) -> StreamedProgram:
        """The same for a dataset that is streamed.

        Raises:
          ConfigError: the algorithm asks for more than a stream gives.
        """
        (name, source), *others = algo.experience.items()
        problems = []
        if others:
            problems.append(f"a stream serves one source, and {type(algo).__name__} has {sorted(algo.experience)}")
        if isinstance(source, Replay) and not isinstance(source.sampler, Uniform):
            problems.append(f"a stream has every item alike, and source {name!r} asks for {source.sampler}")
        if jax.process_count() > 1:
            problems.append("several processes cannot stream; hold the rows in memory, which they share")
        if problems:
            raise ConfigError(problems)
        return StreamedProgram(self.spec, self.devices, self.shards, block=streamed.block(algo, self.spec))

    def rows_per_iteration(self, algo: Algorithm) -> int:
        """Updates of an iteration."""
        return learner.updates_of(algo)

    def init(self, algo: Algorithm, key: jax.Array, dataset: Rings) -> RunState:
        """The state of a run that has not begun; pure."""
        initial = at(algo, jnp.float32(0.0)).init(keys.initial_key(key), self.spec)
        state = RunState(initial, (), (), (), {}, key, Counter.zero(), Counter.zero())
        return self._with_indices(algo, state, dataset)

    def _with_indices(self, algo, state, dataset):
        indices = learner.given_indices(algo, dataset, shards=self.shards, share=self.share)
        return state.replace(buffers=indices)

    def iterate(
        self, algo: Algorithm, state: RunState, total_ticks: jax.Array, dataset: Rings
    ) -> tuple[RunState, Report]:
        """One round of updates on this device. Pure; the report is this device's."""
        algo = at(algo, jnp.minimum(state.ticks.as_float() / total_ticks, 1.0))
        layout = {"spec": self.spec, "num_envs": self.num_envs, "replicas": self._replicas, "share": self.share}
        tick = state.ticks.low
        state, metrics, updated = learner.improve(algo, state, {}, True, tick=tick, dataset=dataset, **layout)
        finite = {name: jnp.isfinite(value) for name, value in metrics.items()}
        state = state.replace(ticks=state.ticks.add(self.rows_per_iteration(algo)))
        return state, reported(EpisodeSums.zero(), metrics, updated, finite)

    def advance(
        self, algo: Algorithm, state: RunState, length: jax.Array, total_ticks: jax.Array, dataset: Rings
    ) -> tuple[RunState, Report]:
        """`length` iterations (traced) on this device. Pure."""
        shapes = jax.eval_shape(lambda state: self.iterate(algo, state, total_ticks, dataset)[1], state)

        def body(number, carried):
            state, total = carried
            state, report = self.iterate(algo, state, total_ticks, dataset)
            return state, total.add(report, number)

        state, report = jax.lax.fori_loop(0, length, body, (state, Report.zeros_like(shapes)))
        return state, report.with_state(state, length - 1).over(self._replicas)

    # --- compiled forms ----------------------------------------------------------------------------------------

    def partition(self, algo: Algorithm) -> RunState:
        """How a run's state lies on the mesh: a prefix tree of partition specs."""
        everywhere = PartitionSpec()
        buffers = learner.partition(algo, "data", self.shards, self.share)
        return RunState(everywhere, (), (), (), buffers, everywhere, everywhere, everywhere)

    def shardings(self, algo: Algorithm) -> RunState:
        """The same as shardings."""
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.partition(algo), is_leaf=is_spec)

    def start(self, algo: Algorithm, env: None, seed: int, *, saved: bool = True, dataset: Rings) -> RunState:
        """`init`, compiled, with every leaf where it belongs."""
        init, _ = _beginnings(self, jax.tree.structure(algo))
        return init(algo, self.place(jax.random.key(seed)), dataset)

    def emptied(self, algo: Algorithm, env: None, state: RunState, dataset: Rings) -> RunState:
        """`state` with new indices."""
        _, empty = _beginnings(self, jax.tree.structure(algo))
        return empty(algo, state.replace(buffers={}), dataset)

    def chunk(
        self, algo: Algorithm, env: None, state: RunState, length: int, total_ticks: int, dataset: Rings
    ) -> tuple[RunState, Report]:
        """`length` iterations in one call, dispatched and not awaited. The buffers of `state` are donated."""
        length, total_ticks = self.place((np.int32(length), np.float32(total_ticks)))
        return _chunk(self, algo, state.replace(buffers={}), state.buffers, length, total_ticks, dataset)


@lru_cache(maxsize=32)
def _beginnings(program, structure):
    shardings = program.shardings(jax.tree.unflatten(structure, [0.0] * structure.num_leaves))
    return tuple(jax.jit(function, out_shardings=shardings) for function in (program.init, program._with_indices))


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _chunk(program, algo, state, buffers, length, total_ticks, dataset):
    state = state.replace(buffers=buffers)
    if program.devices == 1:
        return program.advance(algo, state, length, total_ticks, dataset)
    partition, everywhere = program.partition(algo), PartitionSpec()
    in_specs = (everywhere, partition, everywhere, everywhere, fixed.partition(dataset, "data"))
    advance = meshes.over_devices(program.advance, program.mesh, in_specs, (partition, everywhere))
    return advance(algo, state, length, total_ticks, dataset)
