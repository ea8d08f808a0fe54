"""Sebulba (Hessel et al., 2021, arXiv:2104.06272): environments on the host feed a learner on the accelerator.

Actor threads step groups of environments and act on actor devices; the learner, in the caller's thread, learns from
one rollout of every group at a time. Rollouts wait in a bounded queue, so neither side runs away from the other.

With several processes each has its share of the environments and of the learner's devices. Acting never leaves a
process; what was collected becomes one batch, of which each process holds its own rows, and the learners all-reduce.
"""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.buffers.fixed import Rings
from jaxrl.errors import ConfigError
from jaxrl.parallel import distributed, learner, ready_collector
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.actors import ActorThreads
from jaxrl.parallel.collector import Collector, Published, Steps
from jaxrl.parallel.host_learning import HostLearning
from jaxrl.parallel.ready_collector import ReadyCollector
from jaxrl.parallel.recorded import Fetch, Recorded, from_rollouts
from jaxrl.parallel.remote import Remote
from jaxrl.parallel.remote_environments import RemoteRecipe
from jaxrl.parallel.remote_policy import RemoteCollector, Shelf
from jaxrl.parallel.report import Report, summed
from jaxrl.parallel.rollout import RunState
from jaxrl.types import (
    Algorithm,
    EnvSpec,
    Episodes,
    HostRecipe,
    PyTree,
    env_spec,
)
from jaxrl.watchdog import STEP_TIMEOUT, first_call


@dataclasses.dataclass(frozen=True)
class Sebulba:
    """Host environments in actor threads, and a learner.

    Args:
      num_envs: environments over all groups, of all processes.
      actors: threads that act, in each process.
      groups: of each thread: with 2, one group's environments step while the other acts.
      devices: that learn; the environments' rows are divided over them. With several processes: of all of them
        together. None: one of each process.
      actor_devices: of each process, that act, after the learner's if there are so many, else the same ones; threads
        take them in turn.
      shards: logical groups of environments, as in `Anakin`.
      lockstep: deterministic, the same on every run: every rollout is acted with parameters that are exactly `lag`
        updates old. Else with the newest there are, which several processes cannot: theirs would differ.
      lag: with lockstep, 0 or 1. With 0 actors wait for the learner, and the run is `Anakin`'s where the environments
        are the same; with 1 they act while it learns.
      queue: rollouts of each group that may wait for the learner.
      ready: environments that act at once, the first of their group that are ready; must divide the group. None: all of
        it, in step.
      step_timeout: seconds that environments have for one step or reset; after that the run ends and says which. What
        replaces its workers or actors by itself has the time for that besides.
      remote: Ray actors that hold the environments, on other machines say; None: this process holds them. With a copy
        of the policy each is a group of its own, which a thread serves.
    """

    num_envs: int = 8
    actors: int = 1
    groups: int = 1
    devices: int | None = None
    actor_devices: int = 1
    shards: int | None = None
    lockstep: bool = False
    lag: int = 0
    queue: int = 1
    ready: int | None = None
    step_timeout: float = STEP_TIMEOUT
    remote: Remote | None = None

    def rows_per_iteration(self, algo: Algorithm) -> int:
        """Rows that an iteration collects, over all environments."""
        return ro.rollout_length(algo) * self.num_envs

    @property
    def threads(self) -> int:
        """How many there are in each process: one for every Ray actor that has the policy."""
        return self.remote.actors if self.remote is not None and self.remote.policy else self.actors

    def bind(self, algo: Algorithm, env: HostRecipe, share: float = 0.0) -> "SebulbaProgram":
        """Checks everything that can be checked before an environment is built.

        Args:
          algo, env: what runs.
          share: of every batch that a dataset gives.

        Raises:
          ConfigError: with every problem found.
        """
        problems = [
            f"{name}={value} must be at least 1"
            for name in ("actors", "groups", "actor_devices", "queue")
            if (value := getattr(self, name)) < 1
        ]
        if self.groups > 2:
            problems.append(f"groups={self.groups}: one that steps and one that acts; use 1 or 2, and more actors")
        if self.lag not in (0, 1) or (self.lag and not self.lockstep):
            problems.append(f"lag={self.lag} must be 0, or 1 with lockstep=True")
        if self.step_timeout <= 0:
            problems.append(f"step_timeout={self.step_timeout} must be more than 0 seconds")
        processes = jax.process_count()
        if processes > 1 and not self.lockstep:
            problems.append(f"{processes} processes need lockstep=True (and lag=1, to act while the learner learns)")
        groups = max(self.threads * self.groups, 1) * processes
        if self.num_envs % groups:
            below, above = self.num_envs // groups * groups, -(-self.num_envs // groups) * groups
            problems.append(
                f"num_envs={self.num_envs} does not divide over {groups} groups "
                f"(actors * groups{' * processes' if processes > 1 else ''}); use "
                + (f"{below} or {above}" if below else f"{above}")
            )
        elif self.remote is not None:
            problems += self.remote.problems(groups // processes, self.num_envs // groups)
        if self.ready is not None and self.num_envs % groups == 0:
            alone = {"groups": self.groups == 1, "lockstep": not self.lockstep, "remote": self.remote is None}
            problems += ready_collector.problems(self.ready, self.num_envs // groups, env, alone)
        if self.remote is not None and self.remote.policy and self.actors * self.groups > 1:
            problems.append(f"actors={self.actors}, groups={self.groups}: 1 where remote actors have the policy")
        if any(isinstance(source, Episodes) for source in algo.experience.values()):
            problems.append(
                "batches of whole episodes need environments that can be reset at will; use whole_episodes=False here"
            )
        if problems:
            raise ConfigError(problems)
        spec = env_spec(env)
        devices = processes if self.devices is None else self.devices
        shards = meshes.checked_layout(algo, spec, self.num_envs, devices, self.shards, share)
        return SebulbaProgram(self, spec, devices, shards, share)


class SebulbaProgram:
    """One run over host environments: the same calls as `AnakinProgram`, with the loop on the host."""

    def __init__(self, topology: Sebulba, spec: EnvSpec, devices: int, shards: int, share: float = 0.0):
        self.topology, self.spec, self.devices, self.shards = topology, spec, devices, shards
        self.share = share
        self.num_envs, self._processes = topology.num_envs, jax.process_count()
        self._learning = HostLearning(spec, self.num_envs, shards, devices, self._processes, share)
        self._collectors: list[Collector] = []
        self._threads: ActorThreads | None = None
        self._updates = 0  # iterations of the run so far; counted here, so that the learner need not be waited for

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The learner's devices."""
        return self._learning.mesh

    def rows_per_iteration(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo) * self.num_envs

    def place(self, tree: PyTree) -> PyTree:
        """Numbers as arrays on the learner's devices."""
        return meshes.everywhere(tree, self._learning.mesh)

    def start(
        self, algo: Algorithm, env: HostRecipe, seed: int, *, saved: bool = True, dataset: Rings | None = None
    ) -> RunState:
        """Builds the environments and begins their first episodes; `saved`: whether checkpoints will hold the replays.

        Raises:
          ConfigError: the replay would not fit in memory.
        """
        self.close()
        groups, remote = self.topology.threads * self.topology.groups, self.topology.remote
        size, key = self.num_envs // (groups * self._processes), jax.random.key(seed)
        first_env = jax.process_index() * groups * size
        steps = Steps(self.spec, self.num_envs, size, ro.rollout_length(algo))
        devices = [device for device in self._actor_devices() for _ in range(self.topology.groups)]
        shelf = None
        if remote is not None and remote.policy:
            shelf = Shelf(remote)
        elif remote is not None:
            env = RemoteRecipe(env, remote, remote.actors // groups)
        try:
            with distributed.jointly("building environments"):
                for number, device in enumerate(devices):
                    place = first_env + number * size
                    if shelf is not None:
                        self._collectors.append(RemoteCollector(env, remote, steps, shelf, seed, place, device))
                    else:
                        self._collectors.append(self._collector(env, steps, seed, place, device))
            moments = [collector.first_moment() for collector in self._collectors]
            first = jax.tree.map(lambda *x: np.concatenate(x), *moments)
            if self._processes > 1:
                first = meshes.from_processes(first, self._learning.mesh, PartitionSpec("data"))
                key = self.place(key)
            state = jax.eval_shape(self._learning.init, algo, first, key, dataset)
            learner.check_memory(algo, state, self._learning.mesh_devices(), saved=saved)
            return self._learning.started(algo, first, key, dataset)
        except BaseException:
            self.close()
            raise

    def _collector(self, env, steps, seed, place, device):
        key, ready = jax.random.key(seed), self.topology.ready
        if ready is None:
            kind, host = Collector, env.build(steps.group, seed, place)
        else:
            kind, host = ReadyCollector, env.build_async(steps.group, ready, seed, place)
        return first_call(partial(kind, steps, host, key, place, device), host, self.topology.step_timeout)

    def _actor_devices(self):
        """The device of each actor thread: after the learner's where there are so many, else among the same."""
        here, wanted = jax.local_devices(), self.topology.actor_devices
        learning = self.devices // self._processes
        apart = here[learning : learning + wanted]
        devices = apart if len(apart) == wanted else here[:wanted]
        return [devices[number % len(devices)] for number in range(self.topology.threads)]

    def not_in_checkpoints(self, fresh: RunState) -> dict[str, Any]:
        """The parts of a state that a resumed run takes from a fresh one: host environments cannot be saved."""
        return {"timestep": fresh.timestep, "carry": fresh.carry}

    def emptied(self, algo: Algorithm, env: HostRecipe, state: RunState, dataset: Rings | None = None) -> RunState:
        """`state` with new buffers in place of what it has."""
        return self._learning.with_empty_buffers(algo, state.replace(buffers={}), dataset)

    def chunk(
        self,
        algo: Algorithm,
        env: HostRecipe,
        state: RunState,
        length: int,
        total_ticks: int,
        dataset: Rings | None = None,
    ) -> tuple[RunState, Report]:
        """`length` iterations. The buffers of `state` are donated.

        Raises:
          EnvironmentFailedError: environments hang, or failed too often.
          Exception: whatever else an actor raised.
        """
        return self._chunk(algo, state, length, total_ticks, dataset, lambda rollouts, version: None)

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        """What `recorded_chunk` is told, to record about one in `every` episodes."""
        return Recorded.every(every, self.num_envs, ro.rollout_length(algo) * ro.row_bytes(self.spec))

    def recorded_chunk(
        self,
        algo: Algorithm,
        env: HostRecipe,
        state: RunState,
        length: int,
        total_ticks: int,
        dataset: Rings | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Fetch]:
        """`chunk`, and what fetches its rows."""
        kept, versions, time = [], [], ro.rollout_length(algo)
        size = self.num_envs // (self._processes * len(self._collectors))
        first = jax.process_index() * (self.num_envs // self._processes)
        places = [recorded.within(first + number * size, size) for number in range(len(self._collectors))]

        def keep(rollouts, version):
            rows = [ro.bare(rollout.batch.rows) for rollout in rollouts]
            kept.append([(x, place) for x, place in zip(rows, places, strict=True) if place])
            versions.append(version)

        state, report = self._chunk(algo, state, length, total_ticks, dataset, keep)
        return state, report, lambda: (from_rollouts(kept), np.repeat(versions, time))

    def _chunk(self, algo, state, length, total_ticks, dataset, keep):
        """`keep` is handed the rollouts of every iteration, and the version that acted."""
        threads = self._running(algo, state)
        total, lags, since = None, [], time.monotonic()
        before = threads.metrics()
        # What crosses processes is begun in this thread alone: from two it could come in another order elsewhere.
        with jax.thread_guard(self._processes > 1):
            for number in range(length):
                resolved, actor = self._learning.prepare(algo, state, np.float32(total_ticks))
                published = Published(*meshes.local((resolved, actor)), np.int32(self._updates))
                threads.publish(self._updates, published)
                rollouts, version = threads.rollouts(self._updates, _under_way(state))
                lags.append(self._updates - version)
                keep(rollouts, version)
                rollouts = self._learning.gathered(rollouts)
                state, report = self._learning.learn(
                    resolved, state.replace(buffers={}), state.buffers, rollouts, dataset
                )
                self._updates += 1
                total = summed(total, report, np.int32(number))
        figures = {name: value - before[name] for name, value in threads.metrics().items() if name != "queue_depth"}
        figures |= {"queue_depth": threads.metrics()["queue_depth"], "policy_lag": float(np.mean(lags))}
        group = self.num_envs // (self._processes * len(self._collectors))
        figures |= {"inference_batch": float(self.topology.ready or group)}
        figures["seconds"] = time.monotonic() - since
        return state, total.replace(actors={name: np.float32(value) for name, value in figures.items()})

    def _running(self, algo, state):
        """The actor threads; they begin with the first chunk, where the run stands by then."""
        if self._threads is None:
            if not self._collectors:
                raise RuntimeError("the environments were closed; call start() again")
            self._updates = int(state.ticks) // ro.rollout_length(algo)
            for collector in self._collectors:
                collector.begin_at(int(state.ticks))
            each, topology = self.topology.groups, self.topology
            self._threads = ActorThreads(
                [self._collectors[i : i + each] for i in range(0, len(self._collectors), each)],
                self._actor_devices(),
                first=self._updates,
                lag=topology.lag if topology.lockstep else None,
                depth=topology.queue,
                step_timeout=topology.step_timeout,
            )
        return self._threads

    def close(self) -> None:
        """Ends the threads and closes the environments; may be called at any time and twice."""
        threads, self._threads = self._threads, None
        collectors, self._collectors = self._collectors, []
        if threads is not None:
            threads.close()
        else:
            for collector in collectors:
                collector.host.close()


def _under_way(state):
    """What tells whether the update that `state` came of is still being computed."""
    ticks = state.ticks.low
    return lambda: not ticks.is_ready()
