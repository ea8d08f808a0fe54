"""The program that a topology returns: the training loop uses it to start a run and to continue it chunk by chunk.

Programs differ in two parts: how they collect rollouts (`RolloutCollector`), and whether the host drives their
iterations (`HostLoop`).
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys
from jaxrl.core.recorded import Fetch, Recorded
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, Counter, Metrics, PyTree
from jaxrl.parallel import iteration, memory
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.iteration import RolloutCollector
from jaxrl.parallel.layout import Layout


class HostLoop[Env, Data](Protocol):
    """A driver on the host that runs the iterations of a program and supplies their data.

    The default methods are for drivers without environments.
    """

    def begin(self, algo: Algorithm, env: Env, seed: int) -> PyTree:
        """Create what the run needs on the host (environments, threads); return `source` for `RolloutCollector.begin`.

        After an error, the caller calls `close`.
        """
        return None

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Data | None,
        recorded: Recorded | None,
    ) -> tuple[RunState, Report, Fetch | None]:
        """Run `length` iterations; also return a function that fetches their recorded rows."""
        ...

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """Return the new values of the state's fields that a resumed run cannot restore from a checkpoint."""
        return {}

    def close(self) -> None:
        """Close everything that `begin` created; may be called at any time, and more than once."""
        return None


@dataclasses.dataclass(frozen=True)
class Program[Env, Data]:
    """A run of one algorithm in one topology, checked and ready to start.

    `Env` is the type of the environment, or None. `Data` is the type of the dataset: rows on the devices, a stream of
    batches, or None. Each method takes the bound algorithm again, because its numbers may have changed since `bind`.
    Hashable, as it is a static argument of compiled functions.

    Args:
      layout: the layout of the run over its devices.
      collects: the collector.
      host: the driver of the iterations; None: each chunk is one compiled call.
    """

    layout: Layout
    collects: RolloutCollector
    host: HostLoop[Env, Data] | None = dataclasses.field(default=None, compare=False)

    @property
    def is_compiled(self) -> bool:
        """True if a chunk is one compiled call, which can be compiled before a state exists."""
        return self.host is None

    def steps_per_iteration(self, algo: Algorithm) -> int:
        """Return the total steps of all environments per iteration; without environments, the number of updates."""
        return self.collects.steps_per_env(algo) * self.layout.num_envs

    # --- pure ----------------------------------------------------------------------------------------------------

    def init(self, algo: Algorithm, env: Env, key: jax.Array, dataset: Rings | None = None) -> RunState:
        """Return the initial state of a run. Pure."""
        return _init(self.collects, algo, env, key, dataset)

    def iterate(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        total_steps_per_env: jax.Array,
        dataset: Rings | None = None,
    ) -> tuple[RunState, Report]:
        """Run one iteration on this device: collect, store, update. Pure; the report covers only this device."""
        algo = self.layout.resolve(algo, state, total_steps_per_env)
        state, report, _ = iteration.iterate(self.collects, algo, env, state, dataset)
        return state, report

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
        """Run `length` (traced) iterations on this device. Pure; `iterate` may be a mapped form of `self.iterate`."""
        iterate = iterate or partial(self.iterate, dataset=dataset)
        step = lambda state: (*iterate(algo, env, state, total_steps_per_env), ())  # noqa: E731
        return self._repeat(step, state, length, None)[:2]

    def _repeat(self, step, state, length, recorded):
        """Run `step` `length` times; return the state, the report and this device's rows `[E, iterations * T, ...]`.

        Recorded rows of iterations after `length` are not written, so they are undefined.
        """
        replicas = self.layout.replicas
        _, report, rows = jax.eval_shape(step, state)
        if recorded is not None:
            columns = jnp.asarray(recorded.columns(self.layout.devices)[0])[replicas.first_shard // replicas.shards]

        def room(x):
            # Zeros would take 1 % of a chunk's time.
            return jnp.empty((columns.shape[0], recorded.iterations * x.shape[0], *x.shape[2:]), x.dtype)

        def body(number, carried):
            state, total, written = carried
            state, report, rows = step(state)

            def write(written, x):
                time = x.shape[0]
                x = x if len(recorded.env_index) == self.layout.num_envs else x[:, columns]
                return jax.lax.dynamic_update_slice_in_dim(written, jnp.swapaxes(x, 0, 1), number * time, 1)

            return state, total.add(report, number), jax.tree.map(write, written, rows)

        beginning = state, Report.zeros_like(report), jax.tree.map(room, rows)
        state, report, rows = jax.lax.fori_loop(0, length, body, beginning)
        return state, report.with_state(state, length - 1).all_reduce(replicas), rows

    def run(
        self, algo: Algorithm, env: Env, key: jax.Array, iterations: int, total_steps_per_env: jax.Array
    ) -> tuple[RunState, Metrics]:
        """Train from the first to the last iteration on one device. Pure; metrics have one entry per iteration."""

        def step(state, _):
            state, report = self.iterate(algo, env, state, total_steps_per_env)
            return state, report.metrics()

        return jax.lax.scan(step, self.init(algo, env, key), None, iterations)

    # --- compiled, or driven from the host -----------------------------------------------------------------------

    def start(
        self, algo: Algorithm, env: Env, seed: int, *, saved: bool = True, dataset: Data | None = None
    ) -> RunState:
        """Return the initial state of a run on its devices.

        Args:
          algo, env: the algorithm and the environment; host environments are built, and begin their first episodes.
          seed: the seed of all random numbers.
          saved: whether checkpoints will contain the replays.
          dataset: the dataset to learn from, if any.

        Raises:
          ConfigError: the replays would not fit in memory.
        """
        return self._begin(algo, env, seed, saved, dataset)[0]()

    def template(
        self, algo: Algorithm, env: Env, seed: int, *, saved: bool = True, dataset: Data | None = None
    ) -> RunState:
        """Return the shapes and shardings of the result of `start`, for resuming a run, without allocating arrays.

        Host environments are built, and begin their first episodes.
        """
        return self._begin(algo, env, seed, saved, dataset)[1]

    def _begin(self, algo, env, seed, saved, dataset):
        """Return a function that creates the initial state, and the shapes and shardings of that state."""
        try:
            source = env if self.host is None else self.host.begin(algo, env, seed)
            compiled, _ = _beginnings(self.collects, jax.tree.structure(algo))
            arguments = algo, source, self.layout.place(keys.root_key(seed)), None if self.layout.streams else dataset
            shapes = compiled.eval_shape(*arguments)
            devices = list(self.layout.mesh.devices.flat)
            memory.check_run(algo, shapes, devices, saved=saved, target=self.layout.target)
        except BaseException:
            self.close()
            raise

        def on(sharding, part):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

        template = jax.tree.map(on, self.layout.shardings(algo), shapes)
        return partial(compiled, *arguments), template

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """Return the new values of the state's fields that a resumed run cannot restore from a checkpoint."""
        return {} if self.host is None else self.host.unsaved_state(algo)

    def reset_buffers(self, algo: Algorithm, env: Env, state: RunState, dataset: Data | None = None) -> RunState:
        """Return `state` with empty buffers."""
        _, compiled = _beginnings(self.collects, jax.tree.structure(algo))
        source = env if self.host is None else state.timestep
        return compiled(algo, source, state.replace(buffers={}), None if self.layout.streams else dataset)

    def chunk(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Data | None = None,
    ) -> tuple[RunState, Report]:
        """Dispatch `length` iterations without waiting for them. The buffers of `state` are donated.

        Raises:
          EnvironmentFailedError: host environments hung, or failed too often.
          Exception: any other error that an actor raised.
        """
        return self.recorded_chunk(algo, env, state, length, total_steps_per_env, dataset, recorded=None)[:2]

    def recorded_chunk(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Data | None = None,
        *,
        recorded: Recorded | None,
    ) -> tuple[RunState, Report, Fetch | None]:
        """Run `chunk` for at most `recorded.iterations` iterations; also return a function that fetches the rows."""
        numbers = self.layout.place((np.int32(length), np.float32(total_steps_per_env)))
        if self.host is not None:
            return self.host.chunk(algo, state, length, numbers[1], dataset, recorded)
        steps_per_env, time, buffers = state.steps_per_env, self.collects.steps_per_env(algo), state.buffers
        state, report, rows = _chunk(self, recorded, algo, env, state.replace(buffers={}), buffers, *numbers, dataset)
        if recorded is None:
            return state, report, None

        def fetch():
            first = int(meshes.local(steps_per_env)) // time
            versions = np.repeat(np.arange(first, first + length), time)
            return _recorded_rows(rows, recorded, self.layout, length * time), versions

        return state, report, fetch

    def compile_start(self, algo: Algorithm, env: Env, seed: int) -> jax.stages.Compiled:
        """Compile the program of `start` without running it; only valid if `is_compiled` is true."""
        compiled, _ = _beginnings(self.collects, jax.tree.structure(algo))
        return compiled.lower(algo, env, self.layout.place(keys.root_key(seed)), None).compile()

    def compile_chunk(
        self, algo: Algorithm, env: Env, state: RunState, dataset: Rings | None = None
    ) -> jax.stages.Compiled:
        """Compile the program of `chunk` without running it; only valid if `is_compiled` is true.

        Instead of arrays, `state` may contain their shapes and shardings.

        Returns:
          The compiled program, with its memory analysis and its text.
        """
        numbers, buffers = self.layout.place((np.int32(1), np.float32(1))), state.buffers
        return _chunk.lower(self, None, algo, env, state.replace(buffers={}), buffers, *numbers, dataset).compile()

    def close(self) -> None:
        """End the program's threads and close its environments; may be called at any time, and more than once."""
        if self.host is not None:
            self.host.close()


def _init(collects, algo, source, key, dataset):
    resolved = resolve_schedules(algo, jnp.float32(0.0))
    acting = collects.begin(resolved, source, key)
    state = RunState(
        learner=resolved.init(keys.initial_key(key), collects.layout.spec),
        env_state=acting.env_state,
        timestep=acting.timestep,
        carry=acting.carry,
        buffers={},
        key=key,
        steps_per_env=Counter.zero(),
        empty_at=Counter.zero(),
    )
    return _with_empty_buffers(collects, algo, source, state, dataset)


def _with_empty_buffers(collects, algo, source, state, dataset):
    if collects.layout.streams:
        return state
    resolved = resolve_schedules(algo, jnp.float32(0.0))
    rollout = jax.eval_shape(lambda: collects.example(resolved, source, state))
    buffers = collects.layout.experience(algo).empty(rollout, dataset)
    if not buffers:
        return state
    # A copy, as no array may occur in the state twice.
    return state.replace(buffers=buffers, empty_at=jax.tree.map(jnp.copy, state.steps_per_env))


@lru_cache(maxsize=32)  # most chunks of a run have the same length
@lru_cache(maxsize=32)
def _beginnings(collects, structure):
    """Compile `_init` and `_with_empty_buffers` for algorithms with this `structure`, which includes static fields."""
    layout, algo = collects.layout, jax.tree.unflatten(structure, [0.0] * structure.num_leaves)
    shardings = layout.shardings(algo)
    functions = _init, _with_empty_buffers
    return tuple(jax.jit(partial(function, collects), out_shardings=shardings) for function in functions)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _chunk(program, recorded, algo, env, state, buffers, length, total_steps_per_env, dataset):
    layout = program.layout

    def advance(algo, env, state, length, total_steps_per_env, dataset):
        def step(state):
            resolved = layout.resolve(algo, state, total_steps_per_env)
            state, report, rollout = iteration.iterate(program.collects, resolved, env, state, dataset)
            unrecorded = rollout is None or recorded is None
            return state, report, () if unrecorded else ro.bare(rollout.rows, layout.spec)

        return program._repeat(step, state, length, recorded)

    # Only the buffers are donated, as they are large; other parts of the state are kept in case the chunk produces NaN.
    arguments = algo, env, state.replace(buffers=buffers), length, total_steps_per_env, dataset
    if layout.devices == 1:
        return advance(*arguments)
    partition, everywhere = layout.partition(algo), PartitionSpec()
    rings = None if dataset is None else fixed.partition(dataset, "data")
    in_specs = (everywhere, everywhere, partition, everywhere, everywhere, rings)
    out_specs = (partition, everywhere, PartitionSpec("data"))
    return meshes.over_devices(advance, layout.mesh, in_specs, out_specs)(*arguments)


def _recorded_rows(rows, recorded, layout, length):
    """Convert padded rows `[E, time, ...]` to the first `length` rows of this process, `[length, E, ...]`."""
    real = recorded.columns(layout.devices)[1]
    real = np.split(real, jax.process_count())[jax.process_index()].ravel()
    pick = slice(None) if real.all() else real
    here = multihost_utils.global_array_to_host_local_array(rows, layout.mesh, PartitionSpec("data"))
    return jax.tree.map(lambda x: np.swapaxes(np.asarray(x)[pick, :length], 0, 1), here)
