"""Sebulba (Hessel et al., 2021, arXiv:2104.06272): environments on the host feed a learner on the accelerator.

Actor threads step groups of environments and act on actor devices; the learner, in the caller's thread, learns from
one rollout of every group at a time. Rollouts wait in a bounded queue, so neither side runs away from the other.

With several processes each has its share of the environments and of the learner's devices. Acting never leaves a
process; what was collected becomes one batch, of which each process holds its own rows, and the learners all-reduce.
"""

import dataclasses
import math
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.buffers.fixed import Rings
from jaxrl.core import keys, registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.recorded import Fetch, Recorded
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, Environment, Episodes, HostRecipe, PyTree, Rollouts, env_spec
from jaxrl.envs.host.watchdog import STEP_TIMEOUT, close_all, first_call, warn_if_slow
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.program import Layout, reset_buffers, start, template
from jaxrl.parallel.ray.environments import RemoteRecipe
from jaxrl.parallel.ray.policy import ParameterStore, RemoteCollector
from jaxrl.parallel.ray.remote import Remote
from jaxrl.parallel.recorded import from_rollouts
from jaxrl.parallel.sebulba import checks, rate_limit
from jaxrl.parallel.sebulba.actors import ActorThreads
from jaxrl.parallel.sebulba.collector import Collector, Group, StepCollector
from jaxrl.parallel.sebulba.inference import BatchedGroup, DynamicBatching, Inference, InferenceCollector
from jaxrl.parallel.sebulba.learning import HostLearning, HostRollouts
from jaxrl.parallel.sebulba.ready_collector import LocalPolicy, ReadyCollector
from jaxrl.parallel.sebulba.rounds import EveryRound, RateLimited, Rounds
from jaxrl.parallel.topology import Topology, needs_environment


@dataclasses.dataclass(frozen=True)
class Sebulba(Topology):
    """Host environments in actor threads, and a learner.

    Args:
      num_envs: number of environments over all groups, of all processes. None: as `Anakin`, or the next number that
        divides as the other settings need it.
      actors: number of actor threads in each process.
      groups: groups of environments per actor thread; with 2, one group's environments step while the other acts.
      devices: number of devices that learn; the environments are divided over them. With several processes: of all of
        them together. None: one of each process.
      actor_devices: number of devices that act, in each process: those after the learner's if there are enough, else
        the same; threads are assigned to them in turn.
      shards: logical groups of environments, as in `Anakin`.
      lockstep: deterministic runs: every rollout is collected with parameters exactly `lag` updates old. Without
        it, with the newest parameters. Several processes need lockstep. None: with lockstep, unless the algorithm
        learns from data of any age, as replays and V-trace do, or `ready` or `batching` is set.
      lag: with lockstep, 0 or 1. With 0 actors wait for the learner, and the run equals `Anakin`'s with the same
        environments; with 1 they act while it updates. None: 0, or if `lockstep` is None too, 1 where the algorithm
        allows it (PPO), else 0 (A2C).
      queue: rollouts of each group that may wait for the learner.
      ready: number of environments to act for at once: the first of their group that are ready; must divide the group.
        None: the whole group, in step.
      batching: dynamic batching: one inference batch for whichever environments are ready, over all actor threads of a
        device. None: every thread acts for its own environments.
      error_buffer: transitions that draws may be ahead of or behind the samples per insert: the learner then draws from
        the replay while actors insert, and whichever side is further ahead waits. None: an algorithm with a replay
        learns from it after every round of rollouts, and keeps its replay ratio exactly.
      step_timeout: seconds for one step or reset; after that the run ends and names the environments. Environments that
        replace failed workers or actors get the time for that in addition.
      remote: Ray actors that hold the environments, for example on other machines; None: this process holds them. With
        a copy of the policy, each actor is a group of its own, served by one thread.
    """

    num_envs: int | None = None
    actors: int = 1
    groups: int = 1
    devices: int | None = None
    actor_devices: int = 1
    shards: int | None = None
    lockstep: bool | None = None
    lag: int | None = None
    queue: int = 1
    ready: int | None = None
    batching: DynamicBatching | None = None
    error_buffer: float | None = None
    step_timeout: float = STEP_TIMEOUT
    remote: Remote | None = None

    @property
    def in_process(self) -> bool:
        return self.remote is None

    def problems(self, env: Environment | HostRecipe | None) -> list[str]:
        if not isinstance(env, Environment):
            return needs_environment(env)
        return [f"Sebulba acts in environments on the host, and {env.name} is in JAX; use Anakin"]

    def absent_resources(self, env: Environment | HostRecipe | None) -> dict[str, str]:
        workers = getattr(env, "workers", None)
        if not self.in_process:
            return dict.fromkeys(("environments", "worker_memory"), "Ray places its actors, by remote.cpus")
        if env is None or workers:
            return {}
        absent = {"worker_memory": f"{env.name} has no worker processes; make it with workers=N"}
        if workers == 0:
            absent["environments"] = "the actor threads step these; set actors, or make it with workers=N"
        return absent

    def worker_processes(self, env: Environment | HostRecipe | None) -> int:
        return (getattr(env, "workers", None) or 0) * self.threads * self.groups if self.in_process else 0

    def steps_per_iteration(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo) * self._num_envs(algo)

    def _num_envs(self, algo: Algorithm) -> int:
        if self.num_envs is not None:
            return self.num_envs
        processes, remote = jax.process_count(), self.remote
        holders = 1 if remote is None or remote.policy else max(remote.actors * processes // self.all_groups, 1)
        multiple = self.all_groups * math.lcm(max(self.ready or 1, 1), holders)  # of a group's environments
        devices, shards = self.devices or processes, self.shards or 1
        return ro.default_num_envs(algo, math.lcm(multiple, max(devices, 1), max(shards, 1)))

    @property
    def all_groups(self) -> int:
        """How many groups of environments there are, over all processes."""
        return max(self.threads * self.groups, 1) * jax.process_count()

    @property
    def threads(self) -> int:
        """How many there are in each process: one for every Ray actor that has the policy."""
        return self.remote.actors if self.remote is not None and self.remote.policy else self.actors

    def resolve(self, algo: Algorithm) -> "Sebulba":
        """With `num_envs`, `lockstep` and `lag` as the algorithm needs them where they are None."""
        lockstep, lag = self.lockstep, self.lag
        if lockstep is None:
            sources = [source for source in algo.experience.values() if isinstance(source, Rollouts | Episodes)]
            most = [source.max_policy_lag for source in sources if source.max_policy_lag is not None]
            alone = jax.process_count() == 1
            in_step = self.ready is None and self.batching is None
            lockstep = lag is not None or not alone or (bool(most) and in_step)
            if lag is None:
                lag = min([1, *most]) if lockstep else 0
        return dataclasses.replace(self, num_envs=self._num_envs(algo), lockstep=lockstep, lag=lag or 0)

    def bind(self, algo: Algorithm, env: Environment | HostRecipe, dataset_fraction: float = 0.0) -> "SebulbaProgram":
        """Checks everything that can be checked before an environment is built.

        Args:
          algo, env: what runs; an environment on the host.
          dataset_fraction: the part of every batch that comes from a dataset.

        Raises:
          ConfigError: with every problem found.
        """
        if isinstance(env, Environment):
            raise ConfigError(self.problems(env))
        if self.num_envs is None or self.lockstep is None or self.lag is None:
            return self.resolve(algo).bind(algo, env, dataset_fraction)
        if problems := checks.problems(self, self.num_envs, algo, env):
            raise ConfigError(problems)
        processes, spec = jax.process_count(), env_spec(env)
        devices = processes if self.devices is None else self.devices
        shards = meshes.checked_layout(algo, spec, self.num_envs, devices, self.shards, dataset_fraction)
        layout = Layout(spec, self.num_envs, devices, shards, dataset_fraction)
        if self.error_buffer is not None:
            steps = self.steps_per_iteration(algo)
            if problems := rate_limit.problems(layout.experience(algo), self.error_buffer, steps):
                raise ConfigError(problems)
        return SebulbaProgram(self, layout)


registry.add("topology", Sebulba)


class SebulbaProgram:
    """A `Program` over host environments: its loop is on the host.

    Args:
      topology: the settings.
      layout: of the learner over its devices.
    """

    def __init__(self, topology: Sebulba, layout: Layout):
        self.topology, self.layout = topology, layout
        self._processes, self._begins = jax.process_count(), HostRollouts(layout)
        self._learning = HostLearning(layout, self._processes)
        self._collectors: list[Collector] = []
        self._inferences: list[Inference] = []  # with dynamic batching: one for each device that acts
        self._threads: ActorThreads | None = None
        self._rounds: Rounds | None = None  # there as long as the threads are
        self._failures_told = 0  # of environments, in the reports so far

    def steps_per_iteration(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo) * self.layout.num_envs

    def start(
        self, algo: Algorithm, env: HostRecipe, seed: int, *, saved: bool = True, dataset: Rings | None = None
    ) -> RunState:
        """Build the environments and begin their first episodes."""
        self._build(algo, env, seed)
        try:
            return start(self._begins, algo, self._first_timesteps(), seed, saved=saved, dataset=dataset)
        except BaseException:
            self.close()
            raise

    def template(
        self, algo: Algorithm, env: HostRecipe, seed: int, *, saved: bool = True, dataset: Rings | None = None
    ) -> RunState:
        """Build the environments and begin their first episodes."""
        self._build(algo, env, seed)
        try:
            return template(self._begins, algo, self._first_timesteps(), seed, saved=saved, dataset=dataset)
        except BaseException:
            self.close()
            raise

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """Host environments cannot be saved, and begin new episodes."""
        begin = jax.jit(self._begins.begin, out_shardings=self.layout.on_mesh(PartitionSpec("data")))
        resolved = resolve_schedules(algo, jnp.float32(0.0))
        acting = begin(
            resolved, self._first_timesteps(), self.layout.place(keys.root_key(0))
        )  # nothing random is in it
        return {"timestep": acting.timestep, "carry": acting.carry}

    def _first_timesteps(self):
        first = jax.tree.map(lambda *x: np.concatenate(x), *(c.first_timestep() for c in self._collectors))
        specs = PartitionSpec("data")
        if self._processes > 1:
            return meshes.from_processes(first, self.layout.mesh, specs)
        return jax.device_put(first, self.layout.on_mesh(specs))

    def _build(self, algo, env, seed):
        """New environments, and what collects from them."""
        self.close()
        groups, remote = self.topology.threads * self.topology.groups, self.topology.remote
        size = self.layout.num_envs // (groups * self._processes)
        first_env = jax.process_index() * groups * size
        length, whole = ro.rollout_length(algo), ro.in_whole_episodes(algo)
        steps = HostSteps(self.layout.spec, self.layout.num_envs, size, length, whole_episodes=whole)
        devices = [device for device in self._actor_devices() for _ in range(self.topology.groups)]
        acting = self._acting(steps, seed, [first_env + number * size for number in range(groups)], devices)
        store = None
        if remote is not None and remote.policy:
            store = ParameterStore(remote)
        elif remote is not None:
            env = RemoteRecipe(env, remote, remote.actors // groups)
        try:
            with distributed.collective_errors("building environments"):
                for number, device in enumerate(devices):
                    env_offset = first_env + number * size
                    if store is not None and remote is not None:
                        self._collectors.append(RemoteCollector(env, remote, steps, store, seed, env_offset, device))
                    else:
                        self._collectors.append(self._collector(env, seed, env_offset, acting[number]))
        except BaseException:
            self.close()
            raise

    def _acting(self, steps, seed, first_envs, devices):
        """Who acts for each group, by itself or with dynamic batching."""
        key, batching = keys.root_key(seed), self.topology.batching
        self._inferences = []
        if batching is None:
            return [Group(steps, key, first, device) for first, device in zip(first_envs, devices, strict=True)]
        acting: dict[int, BatchedGroup] = {}
        for device in dict.fromkeys(devices):
            here = [number for number, where in enumerate(devices) if where == device]
            first, at_once = [first_envs[number] for number in here], self.topology.ready or steps.group
            inference = Inference(steps, batching, at_once, key, first, device)
            self._inferences.append(inference)
            acting |= dict(zip(here, inference.groups, strict=True))
        return [acting[number] for number in range(len(devices))]

    def _collector(self, env, seed, env_offset, acting):
        ready, size, timeout = self.topology.ready, acting.steps.group, self.topology.step_timeout
        alone = isinstance(acting, Group)
        with warn_if_slow(env.name, "building the environments"):
            if ready is not None:
                host = env.build_async(size, ready, seed, env_offset)
            else:
                host = env.build(size, seed, env_offset)
        if ready is not None:
            acting = LocalPolicy(acting) if alone else acting
            return first_call(lambda: ReadyCollector(acting, host), host, timeout)
        if alone:
            return first_call(lambda: StepCollector(acting, host), host, timeout)
        return first_call(lambda: InferenceCollector(acting, host), host, timeout)

    def _actor_devices(self):
        """The device of each actor thread: after the learner's where there are so many, else among the same."""
        here, wanted = jax.local_devices(), self.topology.actor_devices
        learning = self.layout.devices // self._processes
        apart = here[learning : learning + wanted]
        devices = apart if len(apart) == wanted else here[:wanted]
        return [devices[number % len(devices)] for number in range(self.topology.threads)]

    def reset_buffers(
        self, algo: Algorithm, env: HostRecipe, state: RunState, dataset: Rings | None = None
    ) -> RunState:
        return reset_buffers(self._begins, algo, state.timestep, state, dataset)

    def chunk(
        self,
        algo: Algorithm,
        env: HostRecipe,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Rings | None = None,
    ) -> tuple[RunState, Report]:
        """Collect and learn from as many rollouts as the chunk has iterations.

        Raises:
          EnvironmentFailedError: environments hang, or failed too often.
          Exception: whatever else an actor raised.
        """
        return self._chunk(algo, state, length, total_steps_per_env, dataset, lambda rollouts, version: None)

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        return self.layout.recorded(algo, every)

    def recorded_chunk(
        self,
        algo: Algorithm,
        env: HostRecipe,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Rings | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Fetch]:
        kept, versions, time = [], [], ro.rollout_length(algo)
        size = self.layout.num_envs // (self._processes * len(self._collectors))
        first = jax.process_index() * (self.layout.num_envs // self._processes)
        columns = [
            np.asarray(recorded.within(first + number * size, size), np.int32)
            for number in range(len(self._collectors))
        ]

        def keep(rollouts, version):
            groups = zip(rollouts, columns, strict=True)
            kept.append(
                [_recorded_rows(collected.rollout, mine, self.layout.spec) for collected, mine in groups if mine.size]
            )
            versions.append(version)

        state, report = self._chunk(algo, state, length, total_steps_per_env, dataset, keep)
        return state, report, lambda: (from_rollouts(kept), np.repeat(versions, time))

    def _chunk(self, algo, state, length, total_steps_per_env, dataset, keep):
        """`keep` gets the rollouts of every iteration, and from how many the policy that acted had learned."""
        threads, rounds = self._running(algo, state)
        since, before, batches = time.monotonic(), threads.metrics(), self._batches()
        horizon = self.layout.place(np.float32(total_steps_per_env))
        state, total, figures = rounds.chunk(algo, state, length, horizon, dataset, keep)
        now = threads.metrics()
        figures |= {name: value - before[name] for name, value in now.items()}
        figures |= {"queue_depth": now["queue_depth"]}
        # Seconds are of this chunk. Failures are not: actors go on between two chunks, and none may be left out.
        failures = threads.failures
        figures["failures"], self._failures_told = float(failures - self._failures_told), failures
        group = self.layout.num_envs // (self._processes * len(self._collectors))
        figures |= {"inference_batch": float(self.topology.ready or group)}
        if self._inferences:
            calls, rows, seconds = self._batches() - batches
            figures |= {"inference_batch": rows / max(calls, 1.0), "batching_seconds": seconds}
        figures["seconds"] = time.monotonic() - since
        return state, total.replace(actors={name: np.float32(value) for name, value in figures.items()})

    def _batches(self):
        """Of dynamic batching since the beginning: calls of the policy, environments in them, seconds before them."""
        return np.sum([inference.metrics() for inference in self._inferences], axis=0) if self._inferences else 0.0

    def _running(self, algo, state):
        """The actor threads, and the learner's rounds with them; they begin with the first chunk."""
        if self._threads is None or self._rounds is None:
            if not self._collectors:
                raise RuntimeError("the environments were closed; call start() again")
            iterations = int(state.steps_per_env) // ro.rollout_length(algo)
            for collector in self._collectors:
                collector.begin_at(int(state.steps_per_env))
            each, topology = self.topology.groups, self.topology
            self._failures_told = 0
            self._threads = ActorThreads(
                [self._collectors[i : i + each] for i in range(0, len(self._collectors), each)],
                self._actor_devices(),
                first=iterations,
                lag=topology.lag if topology.lockstep else None,
                depth=topology.queue,
                step_timeout=topology.step_timeout,
                inferences=self._inferences,
            )
            self._rounds = self._rounds_with(self._threads, algo, state, iterations)
        return self._threads, self._rounds

    def _rounds_with(self, threads, algo, state, iterations) -> Rounds:
        if self.topology.error_buffer is None:
            return EveryRound(self._learning, threads, iterations)
        experience = self.layout.experience(algo)
        limit = rate_limit.rate_limit(experience, self.topology.error_buffer, self.steps_per_iteration(algo))
        counts = rate_limit.counts_of(experience, state.buffers)
        return RateLimited(self._learning, threads, limit, counts, iterations)

    def close(self) -> None:
        """Ends the threads and closes the environments; may be called at any time and twice."""
        threads, self._threads, self._rounds = self._threads, None, None
        collectors, self._collectors = self._collectors, []
        if threads is not None:
            threads.close()
        else:
            close_all(collector.host for collector in collectors)


@partial(jax.jit, static_argnums=2)
def _recorded_rows(rollout, columns, spec):
    """The bare rows of some of a group's environments."""
    return jax.tree.map(lambda x: x[:, columns], ro.bare(rollout.rows, spec))
