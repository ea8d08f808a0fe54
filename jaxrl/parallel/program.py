"""What all programs do: lay a run out over devices, begin it, run its iterations, and record them.

Programs differ in how they collect, which is a strategy (`RunInitializer`, `RolloutCollector`), and in nothing else.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.replay import ReplayState
from jaxrl.core import keys
from jaxrl.core.recorded import Fetch, Recorded
from jaxrl.core.report import EpisodeSums, Report
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, Counter, EnvSpec, Metrics, PyTree, Replicas, Rollout, Trajectory
from jaxrl.parallel import learner
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.experience import Experience
from jaxrl.parallel.recorded import from_mesh
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.rollout import Acting


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run lies over devices. Static: a key of the compilation cache.

    Args:
      spec: of the environments.
      num_envs: over all devices; 1 where nothing acts.
      devices: of all processes together.
      shards: logical groups of environments, over all devices.
      dataset_fraction: the part of every batch that comes from a dataset.
    """

    spec: EnvSpec
    num_envs: int
    devices: int
    shards: int
    dataset_fraction: float = 0.0

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return meshes.data_mesh(self.devices)

    @property
    def replicas(self) -> Replicas:
        """What an update is averaged over."""
        if self.devices == 1:
            return SingleReplica(self.shards)
        return MeshReplicas("data", self.shards // self.devices)

    def experience(self, algo: Algorithm) -> Experience:
        """What `algo` learns from."""
        return Experience(algo, self.spec, self.num_envs, self.shards, self.dataset_fraction, self.replicas)

    def samples_per_update(self, algo: Algorithm) -> int:
        return self.experience(algo).samples_per_update

    def place[T: PyTree](self, tree: T) -> T:
        return meshes.everywhere(tree, self.mesh)

    def partition(self, algo: Algorithm) -> RunState:
        """How a run's state lies on the mesh: a prefix tree of partition specs."""
        data, everywhere = PartitionSpec("data"), PartitionSpec()
        specs: dict[str, PyTree] = {
            "learner": everywhere,
            "env_state": data,
            "timestep": data,
            "carry": data,
            "buffers": self.experience(algo).partition("data"),
            "key": everywhere,
            "steps_per_env": everywhere,
            "empty_at": everywhere,
        }
        return RunState(**specs)

    def on_mesh(self, specs: PyTree) -> PyTree:
        """A tree of partition specs as shardings."""
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    def resolve(self, algo: Algorithm, state: RunState, total_steps_per_env: jax.Array) -> Algorithm:
        """`algo` with its schedules resolved at where `state` stands; pure."""
        return resolve_schedules(algo, jnp.minimum(state.steps_per_env.as_float() / total_steps_per_env, 1.0))

    def store_and_update(
        self,
        algo: Algorithm,
        state: RunState,
        rollout: Rollout | None,
        episodes: EpisodeSums,
        *,
        tick: jax.Array,
        dataset: Rings | None,
    ) -> tuple[RunState, Report]:
        """As `learner.store_and_update`, on one of the devices; pure."""
        return learner.store_and_update(self.experience(algo), state, rollout, episodes, tick=tick, dataset=dataset)

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        return Recorded.every(every, self.num_envs, ro.rollout_length(algo) * ro.row_bytes(self.spec))


# --- beginnings --------------------------------------------------------------------------------------------------


class RunInitializer[Source](Protocol):
    """How a run begins: its first time step, from a source, and its buffers. Static: a key of the compilation cache."""

    def __hash__(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def begin(self, algo: Algorithm, source: Source, key: jax.Array) -> Acting:
        """Where all environments stand at first; pure."""
        ...

    def empty_buffers(
        self, algo: Algorithm, source: Source, state: RunState, dataset: Rings | None
    ) -> dict[str, ReplayState]:
        """Buffers in which nothing is yet; pure."""
        ...

    def partition(self, algo: Algorithm) -> RunState:
        """How the state lies on the mesh: a prefix tree of partition specs."""
        ...


def init[Source](
    begins: RunInitializer[Source], algo: Algorithm, source: Source, key: jax.Array, dataset: Rings | None = None
) -> RunState:
    """The state of a run that has not begun; pure."""
    resolved = resolve_schedules(algo, jnp.float32(0.0))
    acting = begins.begin(resolved, source, key)
    state = RunState(
        learner=resolved.init(keys.initial_key(key), begins.layout.spec),
        env_state=acting.env_state,
        timestep=acting.timestep,
        carry=acting.carry,
        buffers={},
        key=key,
        steps_per_env=Counter.zero(),
        empty_at=Counter.zero(),
    )
    return _with_empty_buffers(begins, algo, source, state, dataset)


def _with_empty_buffers(begins, algo, source, state, dataset):
    buffers = begins.empty_buffers(algo, source, state, dataset)
    if not buffers:
        return state
    # A copy: no array may be in the state twice.
    return state.replace(buffers=buffers, empty_at=jax.tree.map(jnp.copy, state.steps_per_env))


def start[Source](
    begins: RunInitializer[Source], algo: Algorithm, source: Source, seed: int, *, saved: bool, dataset: Rings | None
) -> RunState:
    """As `Program.start`: `init`, compiled."""
    template(begins, algo, source, seed, saved=saved, dataset=dataset)
    compiled, _ = _beginnings(begins, jax.tree.structure(algo))
    return compiled(algo, source, begins.layout.place(keys.root_key(seed)), dataset)


def template[Source](
    begins: RunInitializer[Source], algo: Algorithm, source: Source, seed: int, *, saved: bool, dataset: Rings | None
) -> RunState:
    """As `Program.template`.

    Raises:
      ConfigError: the replays would not fit in memory.
    """
    layout, (compiled, _) = begins.layout, _beginnings(begins, jax.tree.structure(algo))
    shapes = compiled.eval_shape(algo, source, layout.place(keys.root_key(seed)), dataset)
    learner.check_memory(algo, shapes, list(layout.mesh.devices.flat), saved=saved)

    def on(sharding, part):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    return jax.tree.map(on, layout.on_mesh(begins.partition(algo)), shapes)


def reset_buffers[Source](
    begins: RunInitializer[Source], algo: Algorithm, source: Source, state: RunState, dataset: Rings | None
) -> RunState:
    """As `Program.reset_buffers`."""
    _, compiled = _beginnings(begins, jax.tree.structure(algo))
    return compiled(algo, source, state.replace(buffers={}), dataset)


@lru_cache(maxsize=32)
def _beginnings(begins, structure):
    """The two beginnings compiled for algorithms of a tree structure, which holds all that is static."""
    partition = begins.partition(jax.tree.unflatten(structure, [0.0] * structure.num_leaves))
    shardings = begins.layout.on_mesh(partition)
    functions = init, _with_empty_buffers
    return tuple(jax.jit(partial(function, begins), out_shardings=shardings) for function in functions)


# --- everything in one compiled program ----------------------------------------------------------------------------


class RolloutCollector[Env](RunInitializer[Env], Protocol):
    """How an iteration collects within a compiled program."""

    def steps_per_env(self, algo: Algorithm) -> int:
        """Steps of each environment in an iteration."""
        ...

    def collect(
        self, algo: Algorithm, env: Env, state: RunState, first_env: jax.Array | int
    ) -> tuple[RunState, Rollout | None, EpisodeSums]:
        """Moves this device's environments on by an iteration, with the learner as it is; pure.

        Args:
          algo: with its schedules resolved.
          env: what it acts in.
          state: this device's part.
          first_env: the index of this device's first environment.

        Returns:
          The state after these steps, what was collected, and what ended in it.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CompiledProgram[Env]:
    """A `Program` that runs whole chunks in one compiled call. Static: a key of the compilation cache."""

    layout: Layout
    collects: RolloutCollector[Env]

    def steps_per_iteration(self, algo: Algorithm) -> int:
        return self.collects.steps_per_env(algo) * self.layout.num_envs

    # --- pure ----------------------------------------------------------------------------------------------------

    def init(self, algo: Algorithm, env: Env, key: jax.Array, dataset: Rings | None = None) -> RunState:
        """The state of a run that has not begun; pure."""
        return init(self.collects, algo, env, key, dataset)

    def iterate(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        total_steps_per_env: jax.Array,
        dataset: Rings | None = None,
    ) -> tuple[RunState, Report]:
        """One iteration of one run on this device: collect, store, update. Pure; the report is this device's."""
        state, report, _ = self._iterate(algo, env, state, total_steps_per_env, dataset)
        return state, report

    def _iterate(self, algo, env, state, total_steps_per_env, dataset):
        """`iterate`, and what was collected."""
        layout, tick = self.layout, state.steps_per_env.low
        algo = layout.resolve(algo, state, total_steps_per_env)
        first_env = layout.replicas.first_shard * (layout.num_envs // layout.shards)
        state, rollout, episodes = self.collects.collect(algo, env, state, first_env)
        state, report = layout.store_and_update(algo, state, rollout, episodes, tick=tick, dataset=dataset)
        return state, report, rollout

    def advance(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: jax.Array,
        total_steps_per_env: jax.Array,
        dataset: Rings | None = None,
        *,
        iterate: Callable[..., tuple[RunState, Report]] | None = None,
    ) -> tuple[RunState, Report]:
        """`length` iterations (traced) on this device. Pure; `iterate` may be a mapped form of `self.iterate`."""
        iterate = iterate or partial(self.iterate, dataset=dataset)
        shapes = jax.eval_shape(lambda state: iterate(algo, env, state, total_steps_per_env)[1], state)

        def body(number, carried):
            state, total = carried
            state, report = iterate(algo, env, state, total_steps_per_env)
            return state, total.add(report, number)

        state, report = jax.lax.fori_loop(0, length, body, (state, Report.zeros_like(shapes)))
        return state, report.with_state(state, length - 1).over(self.layout.replicas)

    def advance_recorded(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: jax.Array,
        total_steps_per_env: jax.Array,
        dataset: Rings | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Trajectory]:
        """`advance`, and the rows of this device's environments that are recorded, `[E, iterations * T, ...]`.

        Those of the iterations after `length` are not written, and mean nothing.
        """
        replicas = self.layout.replicas

        def iterate(state):
            state, report, rollout = self._iterate(algo, env, state, total_steps_per_env, dataset)
            return state, report, ro.bare(rollout.rows, self.layout.spec)

        _, report, rows = jax.eval_shape(iterate, state)
        columns = jnp.asarray(recorded.columns(self.layout.devices)[0])[replicas.first_shard // replicas.shards]
        time = rows.reward.shape[0]

        def room(x):
            # To fill it with zeros would take a hundredth of a chunk's time.
            return jnp.empty((columns.shape[0], recorded.iterations * time, *x.shape[2:]), x.dtype)

        def body(number, carried):
            state, total, kept = carried
            state, report, rows = iterate(state)

            def write(kept, x):
                x = x if len(recorded.env_index) == self.layout.num_envs else x[:, columns]
                return jax.lax.dynamic_update_slice_in_dim(kept, jnp.swapaxes(x, 0, 1), number * time, 1)

            return state, total.add(report, number), jax.tree.map(write, kept, rows)

        beginning = state, Report.zeros_like(report), jax.tree.map(room, rows)
        state, report, kept = jax.lax.fori_loop(0, length, body, beginning)
        return state, report.with_state(state, length - 1).over(replicas), kept

    def run(
        self, algo: Algorithm, env: Env, key: jax.Array, iterations: int, total_steps_per_env: jax.Array
    ) -> tuple[RunState, Metrics]:
        """A whole run on one device, from its key; pure. Metrics have one entry an iteration."""

        def step(state, _):
            state, report = self.iterate(algo, env, state, total_steps_per_env)
            return state, report.metrics()

        return jax.lax.scan(step, self.init(algo, env, key), None, iterations)

    # --- compiled ------------------------------------------------------------------------------------------------

    def start(
        self, algo: Algorithm, env: Env, seed: int, *, saved: bool = True, dataset: Rings | None = None
    ) -> RunState:
        return start(self.collects, algo, env, seed, saved=saved, dataset=dataset)

    def template(
        self, algo: Algorithm, env: Env, seed: int, *, saved: bool = True, dataset: Rings | None = None
    ) -> RunState:
        return template(self.collects, algo, env, seed, saved=saved, dataset=dataset)

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """All of a run is in its state."""
        return {}

    def reset_buffers(self, algo: Algorithm, env: Env, state: RunState, dataset: Rings | None = None) -> RunState:
        return reset_buffers(self.collects, algo, env, state, dataset)

    def chunk(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Rings | None = None,
    ) -> tuple[RunState, Report]:
        numbers = self.layout.place((np.int32(length), np.float32(total_steps_per_env)))
        return _chunk(self, algo, env, state.replace(buffers={}), state.buffers, *numbers, dataset)

    def compile_chunk(
        self, algo: Algorithm, env: Env, state: RunState, dataset: Rings | None = None
    ) -> jax.stages.Compiled:
        numbers = self.layout.place((np.int32(1), np.float32(1)))
        return _chunk.lower(self, algo, env, state.replace(buffers={}), state.buffers, *numbers, dataset).compile()

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        return self.layout.recorded(algo, every)

    def recorded_chunk(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Rings | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Fetch]:
        steps_per_env, time = state.steps_per_env, ro.rollout_length(algo)
        numbers = self.layout.place((np.int32(length), np.float32(total_steps_per_env)))
        buffers, state = state.buffers, state.replace(buffers={})
        state, report, kept = _recorded_chunk(self, recorded, algo, env, state, buffers, *numbers, dataset)

        def fetch():
            first = int(meshes.local(steps_per_env)) // time
            versions = np.repeat(np.arange(first, first + length), time)
            return from_mesh(kept, recorded, self.layout.devices, length * time), versions

        return state, report, fetch

    def close(self) -> None:
        """There is nothing to close."""


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _chunk(program, algo, env, state, buffers, length, total_steps_per_env, dataset):
    # Only the buffers are donated: they are large, and the rest of the state before a chunk is what is kept when
    # the chunk turns out to have met NaN.
    arguments = algo, env, state.replace(buffers=buffers), length, total_steps_per_env, dataset
    return _over_devices(program.layout, program.advance, arguments)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _recorded_chunk(program, recorded, algo, env, state, buffers, length, total_steps_per_env, dataset):
    arguments = algo, env, state.replace(buffers=buffers), length, total_steps_per_env, dataset
    advance, rows = partial(program.advance_recorded, recorded=recorded), PartitionSpec("data")
    return _over_devices(program.layout, advance, arguments, rows)


def _over_devices(layout, advance, arguments, *more):
    """`advance` on every device; `more` says how what it gives besides state and report lies on them."""
    if layout.devices == 1:
        return advance(*arguments)
    algo, dataset = arguments[0], arguments[-1]
    partition, everywhere = layout.partition(algo), PartitionSpec()
    rings = None if dataset is None else fixed.partition(dataset, "data")
    in_specs = (everywhere, everywhere, partition, everywhere, everywhere, rings)
    return meshes.over_devices(advance, layout.mesh, in_specs, (partition, everywhere, *more))(*arguments)
