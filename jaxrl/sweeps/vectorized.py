"""Many runs of one compiled program, sharded over the devices of a process and run in turn or under `vmap`."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from jaxrl.buffers.fixed import Rings
from jaxrl.core.errors import ConfigError
from jaxrl.core.keys import kind
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Environment, num_agents
from jaxrl.parallel import memory
from jaxrl.parallel.mesh import (
    cores,
    device_problems,
    from_processes,
    local_devices,
    over_devices,
    use_cpu_devices,
)
from jaxrl.parallel.program import Program
from jaxrl.run.directory.manifest import is_key
from jaxrl.run.policies.evaluation import MAX_STEPS, layout, play
from jaxrl.run.settings import RunSettings


def devices_and_mapping(devices: int | None, mapping: str | None) -> tuple[int, str]:
    """Return the number of devices of this process to use, and the way to execute the runs on one device.

    Args:
      devices: number of devices; None: all, which on a CPU is one per core if JAX has not started yet.
      mapping: "vmap", "in_turn" (one run after another), or None for the faster way on this platform.

    Raises:
      ConfigError: there are fewer devices than requested, or the mapping is unknown.
    """
    if devices is None:
        use_cpu_devices(cores())
    if mapping not in (None, "vmap", "in_turn"):
        raise ConfigError(f"mapping={mapping!r} is not one of 'vmap', 'in_turn'")
    devices = jax.local_device_count() if devices is None else devices
    if problems := device_problems(devices, processes=1):
        raise ConfigError(problems)
    return devices, mapping or ("in_turn" if jax.default_backend() == "cpu" else "vmap")


def share[T](runs: list[T]) -> list[T]:
    """Return the runs of this process. Every process has the same number of runs, so the last may be repeated."""
    processes, index = jax.process_count(), jax.process_index()
    padded = runs + runs[-1:] * (-len(runs) % processes)
    each = len(padded) // processes
    return padded[index * each : (index + 1) * each]


@dataclasses.dataclass(frozen=True)
class VectorizedRuns:
    """The runs of one program on a mesh of devices, hashable for `jit`; runs beyond the first `runs` are padding."""

    program: Program[Environment, Rings]
    devices: int
    mapping: str
    runs: int

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the devices, over whose axis "runs" the runs are sharded."""
        return _mesh(local_devices(self.program.layout.target)[: self.devices])

    def stack(self, trees: list[Any]) -> Any:
        """Stack trees along a leading axis of runs, which is padded to a multiple of the number of devices."""
        padded = trees + [trees[-1]] * (-len(trees) % self.devices)
        if isinstance(trees[0], jax.Array):
            return jnp.stack(padded)
        return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y, jnp.float32) for y in x]), *padded)

    def first(self, algos: Any) -> Any:
        """Return the entry of the first run in a stacked tree."""
        return jax.tree.map(lambda x: x[0], algos)

    @partial(jax.jit, static_argnums=0)
    def start(self, algos, env, keys):
        """Return the initial states of all runs, stacked."""

        def one_device(algos, keys, env):
            return self.mapped(lambda algo, key: self.program.init(algo, env, key))(algos, keys)

        return self.sharded(one_device, unmapped=1)(algos, keys, env)

    def chunk(self, algos, env, states, length, total_steps_per_env) -> tuple[RunState, Report]:
        """Advance all runs by `length` iterations; return their states and their reports, stacked."""
        return chunk_many(self, algos, env, states, jnp.int32(length), jnp.float32(total_steps_per_env))

    def check_memory(self, algos: Any, env: Environment, keys: Any) -> None:
        """Check that the devices can store the states of all runs and have enough memory.

        Args:
          algos, env, keys: stacked algorithms, the environment, and the stacked keys of the runs, or their shapes.

        Raises:
          ConfigError: the devices cannot store the states, or do not have enough memory.
        """
        sources = self.program.layout.experience(self.first(algos)).online_sources.values()
        if any(source.storage == "host" for source in sources):
            raise ConfigError(
                "storage='host': replay buffers in host memory do not support several runs in one program; "
                "use storage='ring', or jaxrl.train for each run"
            )
        one = jax.eval_shape(lambda algos, keys: self.program.init(self.first(algos), env, keys[0]), algos, keys)
        devices, runs = list(self.mesh.devices.flat), jax.tree.leaves(algos)[0].shape[0]
        target = self.program.layout.target
        memory.check_run(self.first(algos), one, devices, runs=runs, saved=False, target=target)

    def evaluate(self, algos: Any, learners: Any, keys: jax.Array, settings: RunSettings) -> np.ndarray:
        """Evaluate all runs; return the episode returns, shape (runs, episodes), NaN for unfinished episodes."""
        how = played(settings)
        scores = evaluate_many(self, algos, learners, settings.env, keys, **how)
        returns, _, done = jax.device_get(scores)
        counts = np.arange(how["quota"])[None, :, None] < done[:, None, :]
        return np.where(counts, returns, np.nan).reshape(returns.shape[0], -1)[: self.runs]

    def copied(self, trees: Any, copies: Sequence[tuple[int, int]]) -> Any:
        """Overwrite runs with copies of other runs, within this process or between processes.

        Args:
          trees: trees of the runs of this process, stacked as by `stack`; donated.
          copies: pairs `(to, source)` of indices among the runs of all processes, where each process has `runs` runs.
            Every process passes the same pairs, and no run is both a target and a source.

        Returns:
          The trees, bit for bit unchanged except for the overwritten runs.
        """
        if not copies:
            return trees
        rows = -(-self.runs // self.devices) * self.devices  # runs per process, including padding
        places = np.asarray(copies) // self.runs * rows + np.asarray(copies) % self.runs
        mesh, runs, processes = self.mesh, PartitionSpec("runs"), jax.process_count()
        if processes > 1:
            devices = [jax.local_devices(process_index=number)[: self.devices] for number in range(processes)]
            mesh = _mesh(sum(devices, []))
            trees = from_processes(trees, mesh, runs)
        room = np.zeros((rows * processes, 2), np.int32)  # a fixed shape: one program for any number of copies
        room[: len(places)] = places
        trees = _copy_many(mesh, trees, room, np.int32(len(places)))
        return trees if processes == 1 else multihost_utils.global_array_to_host_local_array(trees, mesh, runs)

    def mapped(self, function):
        """Return a function that maps `function` over the runs of one device."""
        if self.mapping == "vmap":
            return jax.vmap(function)
        return lambda *trees: jax.lax.map(lambda tree: function(*tree), trees)

    def sharded(self, function, unmapped: int):
        """Shard a function of the runs on one device over all devices, and replicate its last `unmapped` arguments."""
        runs = PartitionSpec("runs")

        def call(*arguments):
            cut = len(arguments) - unmapped
            specs = (runs,) * cut + (PartitionSpec(),) * unmapped
            return over_devices(function, self.mesh, specs, runs)(*arguments)

        return call


def _mesh(devices):
    return jax.sharding.Mesh(np.array(devices), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))


def played(settings: RunSettings) -> dict[str, Any]:
    """Return the keyword arguments of `evaluate_many` for these settings."""
    num_envs, quota = layout(settings.evaluation_episodes, agents=num_agents(settings.env))
    return {"num_envs": num_envs, "quota": quota, "explore": settings.explore_in_evaluation}


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def chunk_many(many, algos, env, states, length, total_steps_per_env):
    """Advance all runs by `length` iterations; return their states and their reports, stacked."""
    program = many.program

    def one_device(algos, states, env, length, total_steps_per_env):
        if many.mapping == "in_turn":
            return _in_turn(
                lambda algo, state: program.advance(algo, env, state, length, total_steps_per_env), algos, states
            )
        # Under vmap the counters are not mapped, so that branches on them are not converted to selects.
        steps_per_env, empty_at = jax.tree.map(lambda x: x[0], (states.steps_per_env, states.empty_at))
        names = [field.name for field in dataclasses.fields(RunState)]
        mapped_axes: dict[str, Any] = dict.fromkeys(names, 0) | {"steps_per_env": None, "empty_at": None}
        axes = RunState(**mapped_axes)
        mapped = jax.vmap(program.iterate, in_axes=(0, None, axes, None), out_axes=(axes, 0))
        states, report = program.advance(
            algos,
            env,
            states.replace(steps_per_env=steps_per_env, empty_at=empty_at),
            length,
            total_steps_per_env,
            iterate=mapped,
        )
        count = jax.tree.leaves(algos)[0].shape[0]
        steps_per_env, empty_at = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (count,)), (states.steps_per_env, states.empty_at)
        )
        return states.replace(steps_per_env=steps_per_env, empty_at=empty_at), report

    return many.sharded(one_device, unmapped=3)(algos, states, env, length, total_steps_per_env)


def _in_turn(advance, algos, states):
    """Call `advance(algo, state) -> (state, report)` for one run after another, overwriting each state in place.

    `jax.lax.map` would keep the old and the new states of all runs, and therefore every replay buffer twice.
    """

    def of(trees, run):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, run, keepdims=False), trees)

    def put(trees, tree, run):
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, run, 0), trees, tree)

    runs = states.key.shape[0]
    shapes = jax.eval_shape(lambda: advance(of(algos, 0), of(states, 0)))[1]
    reports = jax.tree.map(lambda x: jnp.zeros((runs, *x.shape), x.dtype), shapes)

    def body(run, carried):
        states, reports = carried
        state, report = advance(of(algos, run), of(states, run))
        return put(states, state, run), put(reports, report, run)

    return jax.lax.fori_loop(0, runs, body, (states, reports))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copy_many(mesh, trees, copies, count):
    """Copy one run after another, so that each device needs memory for only one more run."""

    def one_device(trees, copies, count):
        def copy(number, x):
            rows, (to, source) = x.shape[0], copies[number]
            found = jax.lax.all_gather(x[source % rows], "runs")[source // rows]
            here = to // rows == jax.lax.axis_index("runs")
            return x.at[to % rows].set(jnp.where(here, found, x[to % rows]))

        def body(number, trees):
            return jax.tree.map(partial(copy, number), trees)

        return jax.lax.fori_loop(0, count, body, trees)

    runs, everywhere = PartitionSpec("runs"), PartitionSpec()
    data = over_devices(one_device, mesh, (runs, everywhere, everywhere), runs)(_key_data(trees), copies, count)
    return jax.tree.map(lambda x, y: jax.random.wrap_key_data(y, impl=kind(x)) if is_key(x) else y, trees, data)


def _key_data(trees):
    """Replace random keys with their integer data, which devices can exchange."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, trees)


@partial(jax.jit, static_argnums=0, static_argnames=("num_envs", "quota", "explore"))
def evaluate_many(many, algos, learners, env, keys, *, num_envs, quota, explore):
    """Play `quota` episodes in each of `num_envs` environments of every run; return the results of `play`."""
    spec = many.program.layout.spec

    def one(algo, learner, key, env):
        final = resolve_schedules(algo, jnp.float32(1.0))
        most = jnp.int32(MAX_STEPS)
        return play(
            final, final.actor(learner), env, key, most, spec=spec, num_envs=num_envs, quota=quota, explore=explore
        )

    def one_device(algos, learners, keys, env):
        return many.mapped(lambda algo, learner, key: one(algo, learner, key, env))(algos, learners, keys)

    return many.sharded(one_device, unmapped=1)(algos, learners, keys, env)
