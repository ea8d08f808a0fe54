"""Sebulba's host loop: the environments, the actor threads that collect rollouts, and the learner's updates."""

import time
from functools import partial
from typing import Any

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
from jaxrl.core.types import Algorithm, HostRecipe, PyTree, TimeStep, Trajectory
from jaxrl.envs.host.watchdog import close_all, first_call, warn_if_slow
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.layout import Layout
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.remote.actors import ActorPool, EnvironmentActor, ParameterStore, Remote, RemoteCollector
from jaxrl.parallel.sebulba import rate_limit
from jaxrl.parallel.sebulba.actors import ActorThreads, Progress
from jaxrl.parallel.sebulba.collector import Collector, Published, StepCollector
from jaxrl.parallel.sebulba.learning import HostLearning, HostRollouts
from jaxrl.parallel.sebulba.rate_limit import Counts, RateLimit
from jaxrl.parallel.sebulba.selection import Selection


class SebulbaLoop:
    """A `HostLoop` for host environments: actor threads collect rollouts, and the learner takes batches of them.

    Without `error_buffer`, the learner learns from each batch immediately. So if a batch has one rollout of every
    group, the updates equal those of the compiled program. With `error_buffer`, the learner stores rounds (one rollout
    of every group) when the rate limit allows it, and makes updates between rounds.

    Args:
      layout: the layout of the learner over its devices.
      selection: the rule for the parameters and batches of rollouts, over the groups of this process.
      devices: the device that each actor thread acts on; the groups are divided over the threads.
      ready, error_buffer, step_timeout, remote: as in `Sebulba`.
    """

    def __init__(
        self,
        layout: Layout,
        selection: Selection,
        devices: list[jax.Device],
        *,
        ready: int | None,
        error_buffer: float | None,
        step_timeout: float,
        remote: Remote | None,
    ):
        self.layout, self.selection = layout, selection
        self._devices, self._ready, self._error_buffer = devices, ready, error_buffer
        self._step_timeout, self._remote, self._processes = step_timeout, remote, jax.process_count()
        self._group = layout.num_envs // (selection.size * self._processes)  # number of environments of a group
        self._groups_per_thread = selection.groups // len(devices)
        alone_in_step = selection.lag is not None or self._processes == 1
        self._learning = HostLearning(layout, pooled=selection.max_lag is not None or not alone_in_step)
        self._collectors: list[Collector] = []
        self._threads: ActorThreads | None = None
        self._failures_reported = 0  # failures of environments in the reports so far
        # The learner's progress, counted on the host because reading it from the state would wait for the learner.
        self._limit: RateLimit | None = None
        self._counts, self._updates_begun = Counts(0, 0), 0  # `_updates_begun`: updates before the threads started
        self._iterations, self._updates_since_stored = 0, 0
        self._version = 0  # version of the parameters that are published next

    # --- environments --------------------------------------------------------------------------------------------

    def begin(self, algo: Algorithm, env: HostRecipe, seed: int) -> TimeStep:
        """Build the environments, begin their first episodes, and return their first time steps.

        After an error, the caller calls `close` to close the environments that were built.
        """
        self.close()
        groups, remote = self.selection.groups, self._remote
        num_envs = self._group * groups * self._processes
        steps = HostSteps(self.layout.spec, num_envs, self._group, ro.rollout_length(algo))
        store = ParameterStore(remote) if remote is not None and remote.policy else None
        with distributed.collective_errors("building environments"):
            for number in range(groups):
                first_env, device = self._first_env(number), self._devices[number // self._groups_per_thread]
                if store is not None and remote is not None:
                    self._collectors.append(RemoteCollector(env, remote, steps, store, seed, first_env, device))
                else:
                    self._collectors.append(self._collector(env, steps, seed, first_env, device))
        return self._first_timesteps()

    def _collector(self, env, steps, seed, first_env, device):
        remote = self._remote
        with warn_if_slow(env.name, "building the environments"):
            if remote is not None:
                actors = remote.actors // self.selection.groups
                host: Any = ActorPool(EnvironmentActor, env, remote, actors, self._group, seed, first_env)
                host.wait()
            elif self._ready is None:
                host = env.build(self._group, seed, first_env)
            else:
                host = env.build_async(self._group, self._ready, seed, first_env)
        place = keys.root_key(seed), first_env, device
        collector = partial(StepCollector, steps, host, *place, ready=self._ready is not None)
        return first_call(collector, host, self._step_timeout)

    def _first_env(self, number):
        """Return the index of the first environment of group `number` of this process."""
        return (jax.process_index() * self.selection.groups + number) * self._group

    def _first_timesteps(self):
        begun = self._collectors[: self.selection.size]
        first = jax.tree.map(lambda *x: np.concatenate(x), *(c.first_timestep() for c in begun))
        return meshes.from_processes(first, self.layout.mesh, PartitionSpec("data"))

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """Return the first time steps and carries of new episodes, as host environments are not in checkpoints."""
        begin = jax.jit(HostRollouts(self.layout).begin, out_shardings=self.layout.on_mesh(PartitionSpec("data")))
        resolved = resolve_schedules(algo, jnp.float32(0.0))
        key = self.layout.place(keys.root_key(0))  # the result is not random
        acting = begin(resolved, self._first_timesteps(), key)
        return {"timestep": acting.timestep, "carry": acting.carry}

    def close(self) -> None:
        """End the threads and close the environments; may be called at any time, and more than once."""
        threads, self._threads = self._threads, None
        collectors, self._collectors = self._collectors, []
        if threads is not None:
            threads.close()
        else:
            close_all(collector.host for collector in collectors)

    # --- the learner ---------------------------------------------------------------------------------------------

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Rings | None,
        recorded: Recorded | None,
    ) -> tuple[RunState, Report, Fetch | None]:
        """Take `length` batches, one per iteration, and learn from them.

        Raises:
          EnvironmentFailedError: environments hung, or failed too often.
          Exception: any other error that an actor raised.
        """
        columns = [
            np.asarray(recorded.within(self._first_env(number), self._group) if recorded else (), np.int32)
            for number in range(self.selection.groups)
        ]
        threads = self._threads or self._start(algo, state)
        since, before, updates_before = time.monotonic(), threads.metrics(), self._counts.updates
        learned, updated, under_way, lags, rows, versions = None, None, None, [], [], []
        # Only this thread may dispatch programs of several processes, as all processes must use the same order.
        with jax.thread_guard(self._processes > 1):
            while len(versions) < length:
                buffers, state = state.buffers, state.replace(buffers={})
                resolved = self._publish(threads, algo, state, total_steps_per_env)
                limit, is_ready = self._limit, threads.is_round_ready(self._version - 1)
                if limit is not None and limit.is_update_next(self._counts, is_round_ready=is_ready):
                    state, report = self._update(resolved, state, buffers, dataset)
                    # Dispatch at most one update ahead: the choice between an update and a round is made at dispatch.
                    if under_way is not None:
                        under_way.block_until_ready()
                    under_way = report.made
                    updated = self.layout.accumulated(updated, report, len(versions))
                    continue
                batch = threads.rollouts(self._version - 1, _under_way(state))
                lags += [self._counts.updates - taken.progress.updates for taken in batch]
                rows.append(
                    [
                        _recorded_rows(taken.collected.rollout, columns[taken.group], self.layout.spec)
                        for taken in batch
                        if columns[taken.group].size
                    ]
                )
                state, report = self._learn(resolved, state, buffers, batch, dataset)
                threads.give_back(batch, state.steps_per_env.low.is_ready)
                learned = self.layout.accumulated(learned, report, len(versions))
                versions.append(batch[-1].progress.iterations)
        assert learned is not None  # length is at least 1
        report = learned if updated is None else learned.with_updates(updated, length - 1)
        figures: dict[str, Any] = {"policy_lag": np.mean(lags), "policy_lag_max": np.max(lags)}
        if self._limit is not None:
            learned_from = max(self._counts.inserted - self._limit.min_size, 1)
            figures["replay_ratio"] = self._counts.updates / learned_from
            figures["compiled"] = updated is not None and updates_before == self._updates_begun
        now = threads.metrics()
        figures |= {name: value - before[name] for name, value in now.items()}
        figures |= {name: now[name] for name in ("queue_depth", "batches_at_hand")}
        # Times are for this chunk. Failures are counted since the last report, as actors also run between chunks.
        failures = threads.failures
        figures["failures"], self._failures_reported = failures - self._failures_reported, failures
        figures |= {"inference_batch": self._ready or self._group, "seconds": time.monotonic() - since}
        report = report.replace(actors={name: np.float32(value) for name, value in figures.items()})
        return state, report, lambda: (_joined(rows), np.repeat(versions, ro.rollout_length(algo)))

    def _start(self, algo, state):
        """Start the actor threads, and set the learner's progress."""
        if not self._collectors:
            raise RuntimeError("the environments are closed; call start() again")
        steps_per_env, each = int(state.steps_per_env), self._groups_per_thread
        self._iterations = self._version = steps_per_env // ro.rollout_length(algo)
        self._counts, self._failures_reported = Counts(0, self._iterations), 0
        if self._error_buffer is not None:
            experience = self.layout.experience(algo)
            self._limit = rate_limit.rate_limit(experience, self._error_buffer)
            self._counts = rate_limit.counts_of(experience, state.buffers)
        self._updates_begun, self._updates_since_stored = self._counts.updates, 0
        for collector in self._collectors:
            # If groups do not wait for each other, all rollouts of every batch may have come from one group.
            collector.begin_at(steps_per_env * (1 if self.selection.max_lag is None else self.selection.size))
        grouped = [self._collectors[i : i + each] for i in range(0, len(self._collectors), each)]
        self._threads = ActorThreads(grouped, self._devices, self.selection, self._iterations, self._step_timeout)
        return self._threads

    def _publish(self, threads, algo, state, total_steps_per_env):
        """Publish the current parameters to the actors; return the algorithm with its schedules resolved."""
        resolved, actor = self._learning.prepare(algo, state, total_steps_per_env)
        progress = Progress(self._counts.updates, self._iterations)
        here = Published(*meshes.local((resolved, actor)), np.int32(self._version))
        threads.publish(self._version, here, progress)
        self._version += 1
        return resolved

    def _update(self, resolved, state, buffers, dataset):
        """Make an update without storing a round."""
        number = self.layout.place(np.int32(self._updates_since_stored))
        self._updates_since_stored += 1
        self._counts = self._counts.updated()
        return self._learning.update(resolved, state, buffers, dataset, number)

    def _learn(self, resolved, state, buffers, batch, dataset):
        """Learn from a batch or, with a rate limit, only store it."""
        collected = [taken.collected for taken in batch]
        if self.layout.pool is not None:
            rollouts = [taken.collected.rollout.replace(groups=np.int32(taken.group)) for taken in batch]
            collected = [one.replace(rollout=rollout) for one, rollout in zip(collected, rollouts, strict=True)]
        gathered = self._learning.gathered(collected)
        self._iterations, self._updates_since_stored = self._iterations + 1, 0
        if self._limit is None:
            self._counts = self._counts.updated()
            return self._learning.learn(resolved, state, buffers, gathered, dataset)
        self._counts = self._counts.stored(self._limit.steps)
        return self._learning.store(resolved, state, buffers, gathered)


@partial(jax.jit, static_argnums=2)
def _recorded_rows(rollout, columns, spec):
    """Return the bare rows of the environments `columns` of a group."""
    return jax.tree.map(lambda x: x[:, columns], ro.bare(rollout.rows, spec))


def _joined(rows: list[list[Trajectory]]) -> Trajectory:
    """Join recorded rows: along environments for the groups of a batch, then along time for the batches."""
    wide = [jax.tree.map(lambda *x: np.concatenate(x, axis=1), *groups) for groups in jax.device_get(rows)]
    return jax.tree.map(lambda *x: np.concatenate(x), *wide)


def _under_way(state):
    """Return a function that returns whether the update that computes `state` is still running."""
    steps_per_env = state.steps_per_env.low
    return lambda: not steps_per_env.is_ready()
