"""Sebulba's host loop: environments, the actor threads that collect in them, and the learner's rounds."""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys
from jaxrl.core.recorded import Fetch, Recorded
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, HostRecipe, PyTree, TimeStep
from jaxrl.envs.host.watchdog import close_all, first_call, warn_if_slow
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.layout import Layout
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.ray.actors import ActorPool, EnvironmentActor, ParameterStore, RemoteCollector
from jaxrl.parallel.recorded import from_rollouts
from jaxrl.parallel.sebulba import rate_limit
from jaxrl.parallel.sebulba.actors import ActorThreads
from jaxrl.parallel.sebulba.collector import Collector, Group, StepCollector
from jaxrl.parallel.sebulba.learning import HostLearning, HostRollouts
from jaxrl.parallel.sebulba.ready_collector import ReadyCollector
from jaxrl.parallel.sebulba.rounds import EveryRound, RateLimited, Rounds
from jaxrl.parallel.sebulba.selection import OldestFull, OneOfEveryGroup

if TYPE_CHECKING:
    from jaxrl.parallel.sebulba.topology import Sebulba


class SebulbaLoop:
    """A `HostLoop` for host environments: actor threads collect, the learner takes their rollouts.

    Args:
      topology: the settings.
      layout: the layout of the learner over its devices.
    """

    def __init__(self, topology: "Sebulba", layout: Layout):
        self.topology, self.layout = topology, layout
        self._processes, self._begins = jax.process_count(), HostRollouts(layout)
        self._learning = HostLearning(layout, self._processes, topology.learner_batch is not None)
        self._collectors: list[Collector] = []
        self._threads: ActorThreads | None = None
        self._rounds: Rounds | None = None  # exists as long as the threads do
        self._failures_reported = 0  # failures of environments in the reports so far

    def begin(self, algo: Algorithm, env: HostRecipe, seed: int) -> TimeStep:
        """Build the environments, begin their first episodes, and return their first time steps."""
        self._build(algo, env, seed)
        return self._first_timesteps()

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """Return the first time steps and carries of new episodes, as host environments cannot be saved."""
        begin = jax.jit(self._begins.begin, out_shardings=self.layout.on_mesh(PartitionSpec("data")))
        resolved = resolve_schedules(algo, jnp.float32(0.0))
        acting = begin(
            resolved, self._first_timesteps(), self.layout.place(keys.root_key(0))
        )  # the result is not random
        return {"timestep": acting.timestep, "carry": acting.carry}

    def _first_timesteps(self):
        begun = self._collectors[: self._groups_of_a_batch]
        first = jax.tree.map(lambda *x: np.concatenate(x), *(c.first_timestep() for c in begun))
        specs = PartitionSpec("data")
        if self._processes > 1:
            return meshes.from_processes(first, self.layout.mesh, specs)
        return jax.device_put(first, self.layout.on_mesh(specs))

    def _build(self, algo, env, seed):
        """Build new environments, and their collectors."""
        self.close()
        groups, remote = self.topology.threads * self.topology.groups, self.topology.remote
        size = self._group
        first_env = jax.process_index() * groups * size
        steps = HostSteps(self.layout.spec, self._num_envs, size, ro.rollout_length(algo))
        devices = [device for device in self._actor_devices() for _ in range(self.topology.groups)]
        store = ParameterStore(remote) if remote is not None and remote.policy else None
        try:
            with distributed.collective_errors("building environments"):
                for number, device in enumerate(devices):
                    env_offset = first_env + number * size
                    if store is not None and remote is not None:
                        self._collectors.append(RemoteCollector(env, remote, steps, store, seed, env_offset, device))
                    else:
                        group = Group(steps, keys.root_key(seed), env_offset, device)
                        self._collectors.append(self._collector(env, seed, env_offset, group))
        except BaseException:
            self.close()
            raise

    def _collector(self, env, seed, env_offset, group):
        ready, size, timeout = self.topology.ready, group.steps.group, self.topology.step_timeout
        remote, groups = self.topology.remote, self.topology.threads * self.topology.groups
        with warn_if_slow(env.name, "building the environments"):
            if remote is not None:
                host: Any = ActorPool(EnvironmentActor, env, remote, remote.actors // groups, size, seed, env_offset)
                host.wait()
            elif ready is not None:
                host = env.build_async(size, ready, seed, env_offset)
            else:
                host = env.build(size, seed, env_offset)
        kind = StepCollector if ready is None else ReadyCollector
        return first_call(lambda: kind(group, host), host, timeout)

    def _actor_devices(self):
        """Return the device of each actor thread: those after the learner's if there are enough, otherwise the same."""
        here, count = jax.local_devices(backend=self.topology.actor_platform), self.topology.actor_devices
        learning = sum(device in self.layout.mesh.local_devices for device in here)
        apart = here[learning : learning + count]
        devices = apart if len(apart) == count else here[:count]
        return [devices[number % len(devices)] for number in range(self.topology.threads)]

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Rings | None,
        recorded: Recorded | None,
    ) -> tuple[RunState, Report, Fetch | None]:
        """Collect and learn from as many rollouts as the chunk has iterations.

        Raises:
          EnvironmentFailedError: environments hang, or failed too often.
          Exception: any other error that an actor raised.
        """
        group, first = self._group, jax.process_index() * (self._num_envs // self._processes)
        columns = [
            np.asarray(recorded.within(first + number * group, group) if recorded else (), np.int32)
            for number in range(len(self._collectors))
        ]
        rows, versions = [], []

        def keep(batch, version):
            some = [(taken.collected.rollout, columns[taken.group]) for taken in batch if columns[taken.group].size]
            rows.append([_recorded_rows(rollout, mine, self.layout.spec) for rollout, mine in some])
            versions.append(version)

        threads, rounds = self._running(algo, state)
        since, before = time.monotonic(), threads.metrics()
        state, total, figures = rounds.chunk(algo, state, length, total_steps_per_env, dataset, keep)
        now = threads.metrics()
        figures |= {name: value - before[name] for name, value in now.items()}
        figures |= {name: now[name] for name in ("queue_depth", "batches_at_hand")}
        # Seconds are those of this chunk. Failures are not: actors also run between chunks, and all must be counted.
        failures = threads.failures
        figures["failures"], self._failures_reported = float(failures - self._failures_reported), failures
        figures |= {"inference_batch": float(self.topology.ready or group)}
        figures["seconds"] = time.monotonic() - since
        report = total.replace(actors={name: np.float32(value) for name, value in figures.items()})
        return state, report, lambda: (from_rollouts(rows), np.repeat(versions, ro.rollout_length(algo)))

    @property
    def _group(self):
        """Number of environments of a group."""
        return self._num_envs // self.topology.all_groups

    @property
    def _num_envs(self):
        """Number of environments that act; a batch may contain only some of them."""
        assert self.topology.num_envs is not None  # the topology is resolved
        return self.topology.num_envs

    @property
    def _groups_of_a_batch(self):
        """Number of this process's rollouts in a batch."""
        return self.layout.num_envs // (self._group * self._processes)

    def _running(self, algo, state):
        """Return the actor threads and the learner's rounds; start them at the first chunk."""
        if self._threads is None or self._rounds is None:
            if not self._collectors:
                raise RuntimeError("the environments were closed; call start() again")
            iterations = int(state.steps_per_env) // ro.rollout_length(algo)
            each, topology, size = self.topology.groups, self.topology, self._groups_of_a_batch
            pooled = topology.learner_batch is not None
            for collector in self._collectors:
                # If groups do not wait for each other, one group may have been in every batch that often.
                collector.begin_at(int(state.steps_per_env) * (size if pooled else 1))
            self._failures_reported = 0
            self._threads = ActorThreads(
                [self._collectors[i : i + each] for i in range(0, len(self._collectors), each)],
                self._actor_devices(),
                selection=self._selection(size) if pooled else OneOfEveryGroup(size),
                first=iterations,
                lag=topology.lag if topology.lockstep else None,
                period=topology.parameter_period,
                depth=topology.queue,
                step_timeout=topology.step_timeout,
            )
            self._rounds = self._rounds_with(self._threads, algo, state, iterations)
        return self._threads, self._rounds

    def _selection(self, size):
        topology = self.topology
        assert topology.max_lag is not None  # the topology is resolved
        return OldestFull(size, len(self._collectors), topology.queue, topology.max_lag)

    def _rounds_with(self, threads, algo, state, iterations) -> Rounds:
        if self.topology.error_buffer is None:
            return EveryRound(self._learning, threads, iterations)
        experience = self.layout.experience(algo)
        steps = ro.rollout_length(algo) * self.layout.num_envs
        limit = rate_limit.rate_limit(experience, self.topology.error_buffer, steps)
        counts = rate_limit.counts_of(experience, state.buffers)
        return RateLimited(self._learning, threads, limit, counts, iterations)

    def close(self) -> None:
        """End the threads and close the environments; may be called at any time, and twice."""
        threads, self._threads, self._rounds = self._threads, None, None
        collectors, self._collectors = self._collectors, []
        if threads is not None:
            threads.close()
        else:
            close_all(collector.host for collector in collectors)


@partial(jax.jit, static_argnums=2)
def _recorded_rows(rollout, columns, spec):
    """Return the bare rows of the environments `columns` of a group."""
    return jax.tree.map(lambda x: x[:, columns], ro.bare(rollout.rows, spec))
