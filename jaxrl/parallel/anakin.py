"""Anakin (Hessel et al., 2021, arXiv:2104.06272): environments, replay and learner in one compiled program."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl import keys
from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.parallel import learner
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.recorded import Fetch, Recorded, from_mesh
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.report import Report
from jaxrl.parallel.rollout import EpisodeSums, RunState
from jaxrl.schedules import at
from jaxrl.types import (
    Algorithm,
    Counter,
    Environment,
    EnvSpec,
    Episodes,
    Metrics,
    PyTree,
    Replicas,
    RolloutBatch,
    Trajectory,
    env_spec,
)


@dataclasses.dataclass(frozen=True)
class Anakin:
    """Everything on the accelerator: `num_envs` environments, sharded over `devices`.

    Args:
      num_envs: environments over all devices together.
      devices: how many devices; None: all accelerators, or one CPU. With several processes: of all of them together,
        the same number of each; None: all they have.
      shards: logical groups of environments that minibatches are drawn within; the same for any number of devices
        gives the same run. None: the largest of 8, 4, 2, 1 that the algorithm can work with.
    """

    num_envs: int = 8
    devices: int | None = None
    shards: int | None = None

    def rows_per_iteration(self, algo: Algorithm) -> int:
        """Rows that an iteration collects, over all environments."""
        return ro.rollout_length(algo) * self.num_envs

    def bind(
        self, algo: Algorithm, env: Environment, share: float = 0.0, processes: int | None = None
    ) -> "AnakinProgram":
        """Checks everything that can be checked before compiling, and fixes the program.

        Args:
          algo, env: what runs.
          share: of every batch that a dataset gives.
          processes: that the run is of; None: all there are.

        Raises:
          ConfigError: with every problem found.
        """
        spec = env_spec(env)
        devices = meshes.default_device_count() if self.devices is None else self.devices
        shards = meshes.checked_layout(algo, spec, self.num_envs, devices, self.shards, share, processes)
        return AnakinProgram(spec, self.num_envs, devices, shards, share)


@dataclasses.dataclass(frozen=True)
class AnakinProgram:
    """The pure functions of one run, and their compiled forms. Static: a key of the compilation cache."""

    spec: EnvSpec
    num_envs: int
    devices: int
    shards: int
    share: float = 0.0  # of every batch that a dataset gives

    @property
    def _replicas(self) -> Replicas:
        if self.devices == 1:
            return SingleReplica(self.shards)
        return MeshReplicas("data", self.shards // self.devices)

    def rows_per_iteration(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo) * self.num_envs

    def init(self, algo: Algorithm, env: Environment, key: jax.Array, dataset: Rings | None = None) -> RunState:
        """The state of a run that has not begun; pure."""
        env_index = jnp.arange(self.num_envs, dtype=jnp.int32)
        initial = at(algo, jnp.float32(0.0)).init(keys.initial_key(key), self.spec)
        roots = keys.environment_keys(key, env_index)
        env_state, timestep = jax.vmap(env.reset)(keys.reset_keys(roots))
        timestep = ro.first_timestep(timestep, self.spec)
        carry = jax.vmap(lambda index: algo.initial_carry(self.spec, index, self.num_envs))(env_index)
        state = RunState(initial, env_state, timestep, carry, {}, key, Counter.zero(), Counter.zero())
        return self.with_empty_buffers(algo, env, state, dataset)

    def with_empty_buffers(
        self, algo: Algorithm, env: Environment, state: RunState, dataset: Rings | None = None
    ) -> RunState:
        """`state` with new buffers in place of what it has; pure."""
        rows = jax.eval_shape(lambda: self._collect(at(algo, jnp.float32(0.0)), env, state, 0)[1].rows)
        layout = {"num_envs": self.num_envs, "shards": self.shards, "share": self.share}
        buffers = learner.empty_buffers(algo, rows, state.carry, dataset=dataset, **layout)
        if not buffers:
            return state
        # A copy: no array may be in the state twice.
        return state.replace(buffers=buffers, empty_at=jax.tree.map(jnp.copy, state.ticks))

    def _collect(
        self, algo: Algorithm, env: Environment, state: RunState, first_env: Any
    ) -> tuple[RunState, RolloutBatch, EpisodeSums]:
        """Acts for one rollout with the learner as it is."""
        length = ro.rollout_length(algo)
        actor = algo.actor(state.learner)
        env_index = first_env + jnp.arange(state.timestep.first.shape[0], dtype=jnp.int32)
        roots = keys.environment_keys(state.key, env_index)
        env_keys = keys.tick_keys(roots, state.ticks.low, length)
        act_keys = keys.tick_keys(keys.policy_keys(state.key, env_index), state.ticks.low, length)
        whole_episodes = any(isinstance(source, Episodes) for source in algo.experience.values())
        env_state, timestep, carry = state.env_state, state.timestep, state.carry
        if whole_episodes:
            env_state, timestep = jax.vmap(env.reset)(jax.vmap(lambda key: jax.random.fold_in(key, 1))(env_keys[0]))
            timestep = ro.first_timestep(timestep, self.spec)
        initial = carry

        def step(moment, tick_keys):
            env_state, timestep, carry = moment
            env_key, act_key = tick_keys
            output = algo.act(actor, timestep, carry, act_key, spec=self.spec, explore=True)
            env_state, following = jax.vmap(env.step)(env_state, output.action, env_key)
            following = ro.with_previous_action(following, output.action)
            return (env_state, following, output.carry), (timestep, output.action, output.extras)

        moment, (timesteps, action, extras) = jax.lax.scan(step, (env_state, timestep, carry), (env_keys, act_keys))
        env_state, final, carry = moment
        batch = ro.assemble(
            timesteps,
            final,
            action,
            extras,
            carry=initial,
            final_carry=carry,
            statistics=actor.statistics,
            whole_episodes=whole_episodes,
        )
        episodes = ro.episode_sums(batch.rows, timesteps, final)
        state = state.replace(env_state=env_state, timestep=final, carry=carry, ticks=state.ticks.add(length))
        return state, batch, episodes

    def iterate(
        self, algo: Algorithm, env: Environment, state: RunState, total_ticks: jax.Array, dataset: Rings | None = None
    ) -> tuple[RunState, Report]:
        """One iteration of one run on this device: collect, store, update. Pure; the report is this device's."""
        state, report, _ = self._iterate(algo, env, state, total_ticks, dataset)
        return state, report

    def _iterate(self, algo, env, state, total_ticks, dataset):
        """`iterate`, and the rows that were collected."""
        replicas = self._replicas
        algo = at(algo, jnp.minimum(state.ticks.as_float() / total_ticks, 1.0))
        tick = state.ticks.low
        first_env = replicas.first_shard * (self.num_envs // self.shards)
        state, collected, episodes = self._collect(algo, env, state, first_env)
        state, report = learner.learn(
            algo,
            state,
            collected,
            episodes,
            tick=tick,
            spec=self.spec,
            num_envs=self.num_envs,
            replicas=replicas,
            share=self.share,
            dataset=dataset,
        )
        return state, report, collected.rows

    def advance(
        self,
        algo: Algorithm,
        env: Environment,
        state: RunState,
        length: jax.Array,
        total_ticks: jax.Array,
        dataset: Rings | None = None,
        *,
        iterate: Callable | None = None,
    ) -> tuple[RunState, Report]:
        """`length` iterations (traced) on this device. Pure; `iterate` may be a mapped form of `self.iterate`."""
        iterate = iterate or partial(self.iterate, dataset=dataset)
        shapes = jax.eval_shape(lambda state: iterate(algo, env, state, total_ticks)[1], state)

        def body(number, carried):
            state, total = carried
            state, report = iterate(algo, env, state, total_ticks)
            return state, total.add(report, number)

        state, report = jax.lax.fori_loop(0, length, body, (state, Report.zeros_like(shapes)))
        return state, report.with_state(state, length - 1).over(self._replicas)

    def advance_recorded(
        self,
        algo: Algorithm,
        env: Environment,
        state: RunState,
        length: jax.Array,
        total_ticks: jax.Array,
        dataset: Rings | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Trajectory]:
        """`advance`, and the rows of this device's environments that are recorded, `[E, iterations * T, ...]`.

        Those of the iterations after `length` are not written, and mean nothing.
        """
        _, report, rows = jax.eval_shape(self._iterate, algo, env, state, total_ticks, dataset)
        columns = jnp.asarray(recorded.columns(self.devices)[0])[self._replicas.first_shard // self._replicas.shards]
        time = rows.reward.shape[0]

        def room(x):
            # To fill it with zeros would take a hundredth of a chunk's time.
            return jnp.empty((columns.shape[0], recorded.iterations * time, *x.shape[2:]), x.dtype)

        def body(number, carried):
            state, total, kept = carried
            state, report, rows = self._iterate(algo, env, state, total_ticks, dataset)

            def write(kept, x):
                x = x if len(recorded.env_index) == self.num_envs else x[:, columns]
                return jax.lax.dynamic_update_slice_in_dim(kept, jnp.swapaxes(x, 0, 1), number * time, 1)

            return state, total.add(report, number), jax.tree.map(write, kept, ro.bare(rows))

        beginning = state, Report.zeros_like(report), jax.tree.map(room, ro.bare(rows))
        state, report, kept = jax.lax.fori_loop(0, length, body, beginning)
        return state, report.with_state(state, length - 1).over(self._replicas), kept

    def run(
        self, algo: Algorithm, env: Environment, key: jax.Array, iterations: int, total_ticks: jax.Array
    ) -> tuple[RunState, Metrics]:
        """A whole run on one device, from its key; pure. Metrics have one entry an iteration."""

        def step(state, _):
            state, report = self.iterate(algo, env, state, total_ticks)
            return state, report.metrics()

        return jax.lax.scan(step, self.init(algo, env, key), None, iterations)

    # --- compiled forms ----------------------------------------------------------------------------------------

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return meshes.data_mesh(self.devices)

    def partition(self, algo: Algorithm) -> RunState:
        """How a run's state lies on the mesh: a prefix tree of partition specs."""
        data, everywhere = PartitionSpec("data"), PartitionSpec()
        return RunState(
            learner=everywhere,
            env_state=data,
            timestep=data,
            carry=data,
            buffers=learner.partition(algo, "data", self.shards, self.share),
            key=everywhere,
            ticks=everywhere,
            empty_at=everywhere,
        )

    def shardings(self, algo: Algorithm) -> RunState:
        """The same as shardings, for placing a state that was read from disk."""
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.partition(algo), is_leaf=is_spec)

    def place(self, tree: PyTree) -> PyTree:
        """Numbers as arrays on every device, where `chunk` finds them without a transfer at every call."""
        return meshes.everywhere(tree, self.mesh)

    def start(
        self, algo: Algorithm, env: Environment, seed: int, *, saved: bool = True, dataset: Rings | None = None
    ) -> RunState:
        """`init`, compiled, with every leaf where it belongs; `saved`: whether checkpoints will hold the replays.

        Raises:
          ConfigError: the replay would not fit in memory.
        """
        init, _ = _beginnings(self, jax.tree.structure(algo))
        key = self.place(jax.random.key(seed))
        shapes = init.eval_shape(algo, env, key, dataset)
        learner.check_memory(algo, shapes, list(self.mesh.devices.flat), saved=saved)
        return init(algo, env, key, dataset)

    def not_in_checkpoints(self, fresh: RunState) -> dict[str, Any]:
        """The parts of a state that a resumed run takes from a fresh one: none, a run is all in its state."""
        return {}

    def emptied(self, algo: Algorithm, env: Environment, state: RunState, dataset: Rings | None = None) -> RunState:
        """`with_empty_buffers`, compiled."""
        _, empty = _beginnings(self, jax.tree.structure(algo))
        return empty(algo, env, state.replace(buffers={}), dataset)

    def close(self) -> None:
        """Nothing is held."""

    def chunk(
        self,
        algo: Algorithm,
        env: Environment,
        state: RunState,
        length: int,
        total_ticks: int,
        dataset: Rings | None = None,
    ) -> tuple[RunState, Report]:
        """`length` iterations in one call, dispatched and not awaited. The buffers of `state` are donated."""
        length, total_ticks = self.place((np.int32(length), np.float32(total_ticks)))
        return _chunk(self, algo, env, state.replace(buffers={}), state.buffers, length, total_ticks, dataset)

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        """What `recorded_chunk` is told, to record about one in `every` episodes."""
        return Recorded.every(every, self.num_envs, ro.rollout_length(algo) * ro.row_bytes(self.spec))

    def recorded_chunk(
        self,
        algo: Algorithm,
        env: Environment,
        state: RunState,
        length: int,
        total_ticks: int,
        dataset: Rings | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Fetch]:
        """`chunk`, of `recorded.iterations` iterations at most, and what fetches its rows."""
        ticks, time = state.ticks, ro.rollout_length(algo)
        moved, total = self.place((np.int32(length), np.float32(total_ticks)))
        buffers, state = state.buffers, state.replace(buffers={})
        state, report, kept = _recorded_chunk(self, recorded, algo, env, state, buffers, moved, total, dataset)

        def fetch():
            first = int(meshes.local(ticks)) // time
            versions = np.repeat(np.arange(first, first + length), time)
            return from_mesh(kept, recorded, self.devices, length * time), versions

        return state, report, fetch


@lru_cache(maxsize=32)
def _beginnings(program, structure):
    """`init` and `with_empty_buffers` compiled for algorithms of a tree structure, which holds all that is static."""
    shardings = program.shardings(jax.tree.unflatten(structure, [0.0] * structure.num_leaves))
    functions = (program.init, program.with_empty_buffers)
    return tuple(jax.jit(function, out_shardings=shardings) for function in functions)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _chunk(program, algo, env, state, buffers, length, total_ticks, dataset):
    # Only the buffers are donated: they are large, and the rest of the state before a chunk is what is kept when
    # the chunk turns out to have met NaN.
    return _spread(
        program.advance, (), program, algo, env, state.replace(buffers=buffers), length, total_ticks, dataset
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _recorded_chunk(program, recorded, algo, env, state, buffers, length, total_ticks, dataset):
    advance, rows = partial(program.advance_recorded, recorded=recorded), (PartitionSpec("data"),)
    return _spread(advance, rows, program, algo, env, state.replace(buffers=buffers), length, total_ticks, dataset)


def _spread(advance, more, program, algo, env, state, length, total_ticks, dataset):
    """`advance` over the devices; `more` says how what it gives besides state and report lies on them."""
    if program.devices == 1:
        return advance(algo, env, state, length, total_ticks, dataset)
    partition, everywhere = program.partition(algo), PartitionSpec()
    rings = None if dataset is None else fixed.partition(dataset, "data")
    in_specs = (everywhere, everywhere, partition, everywhere, everywhere, rings)
    advance = meshes.over_devices(advance, program.mesh, in_specs, (partition, everywhere, *more))
    return advance(algo, env, state, length, total_ticks, dataset)
