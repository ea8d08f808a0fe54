"""Sebulba (Hessel et al., 2021, arXiv:2104.06272): a learner on the accelerator with environments on the host.

Actor threads step groups of environments and act on actor devices. The learner, in the caller's thread, learns from
one rollout of every group at a time, or from rollouts as they become full. Rollouts wait in bounded queues, so neither
the actors nor the learner gets far ahead.

With several processes, each has a part of the environments and of the learner's devices. Each process acts only in its
own environments. The rollouts form one batch, whose rows stay in their processes, and gradients are all-reduced. Each
process takes its rollouts in its own order; all processes make each update together.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl.buffers.fixed import Rings
from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.host_types import AsyncRecipe
from jaxrl.core.limits import count_problems, divisors, multiples, number_problems
from jaxrl.core.planning import Planner
from jaxrl.core.types import Algorithm, Environment, Episodes, HostRecipe, Replay, Rollouts, env_spec
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.experience import Pool
from jaxrl.parallel.layout import checked_layout
from jaxrl.parallel.program import Program
from jaxrl.parallel.remote.actors import Remote
from jaxrl.parallel.sebulba import rate_limit
from jaxrl.parallel.sebulba.host_loop import SebulbaLoop
from jaxrl.parallel.sebulba.learning import HostRollouts
from jaxrl.parallel.sebulba.selection import Selection, batches_at_hand
from jaxrl.parallel.topology import Topology, needs_environment


@dataclasses.dataclass(frozen=True)
class Sebulba(Topology):
    """The topology of a learner and of actor threads that step host environments.

    Args:
      num_envs: number of environments over all groups and processes. None: as in `Anakin`, rounded up to a number that
        is divisible as the other settings require.
      actors: number of actor threads in each process.
      groups: groups of environments per actor thread; with 2, one group's environments step while the other acts.
      devices: number of devices for learning; the environments are divided over them. With several processes: the total
        number. None: one in each process.
      actor_devices: number of devices that act in each process: the devices after the learner's devices if there are
        enough, otherwise the learner's devices; threads are assigned to them in turn.
      actor_platform: platform of the devices that act. With "cpu", actors use the processor while an accelerator
        learns. This suits small networks, for which the overhead of a call on an accelerator exceeds the time of its
        arithmetic. None: the learner's platform.
      shards: number of logical groups of environments, as in `Anakin`.
      lockstep: whether runs are deterministic: every rollout is collected with parameters that are exactly `lag`
        updates old, instead of the newest parameters. None: True, unless the algorithm learns from data of any age
        (replays, V-trace), or `ready` or `learner_batch` is set.
      lag: with lockstep, the age of the acting parameters in updates, 0 or 1. With 0, actors wait for the learner, and
        the run equals a run of `Anakin` with the same environments; with 1, actors act while the learner updates. None:
        1 if `lockstep` is None, too, and the algorithm allows it (PPO), otherwise 0 (A2C).
      queue: number of rollouts of each group that may wait for the learner.
      learner_batch: number of environments whose rollouts an update learns from, a multiple of the environments of a
        group. The oldest full rollouts are used first, so that groups do not wait for each other. A replay stores the
        rollouts of each group independently, in the order in which they are full. None: all environments, with one
        rollout each.
      max_lag: with `learner_batch`, the maximum age of a rollout's parameters, in updates, when an update learns from
        the rollout. The learner waits for rollouts that would become older. None: 16 times the number of batches that
        the rollouts of all groups make; no limit if the algorithm learns only from replays, as their data has any age.
      parameter_period: number of updates after which actors receive new parameters. Rollouts may be up to
        `parameter_period - 1` updates older than `lag`, even if the algorithm does not allow such an age. A larger
        period saves transfers, especially to remote actors with the policy.
      ready: number of environments to act for at a time: the environments of a group that are ready first. It must
        divide the number of environments of a group. None: the whole group.
      error_buffer: maximum deviation from the replay ratio, as a number of sampled transitions (as in Reverb). The
        learner samples from the replay while actors insert, and the side that is too far ahead waits. None: an
        algorithm with a replay learns from it after every round of rollouts, and keeps its replay ratio exactly.
      step_timeout: time limit in seconds for one step or reset, after which the run ends with an error that names the
        environments. Replacing failed workers or actors may take additional time.
      remote: other processes of this machine, or Ray actors on other machines, that run the environments; None: this
        process runs them. If they have a copy of the policy, each is a separate group, served by one thread.
    """

    num_envs: int | None = None
    actors: int = 1
    groups: int = 1
    devices: int | None = None
    actor_devices: int = 1
    actor_platform: str | None = None
    shards: int | None = None
    lockstep: bool | None = None
    lag: int | None = None
    queue: int = 1
    learner_batch: int | None = None
    max_lag: int | None = None
    parameter_period: int = 1
    ready: int | None = None
    error_buffer: float | None = None
    step_timeout: float = STEP_TIMEOUT
    remote: Remote | None = None

    @property
    def in_process(self) -> bool:
        return self.remote is None

    def problems(self, env: Environment | HostRecipe | None) -> list[str]:
        if not isinstance(env, Environment):
            return needs_environment(env)
        return [f"Sebulba needs an environment on the host, but {env.name} is in JAX; use Anakin"]

    def absent_resources(self, env: Environment | HostRecipe | None) -> dict[str, str]:
        workers = getattr(env, "workers", None)
        if self.remote is not None and self.remote.backend == "ray":
            return dict.fromkeys(("environments", "worker_memory"), "Ray assigns cores to its actors (remote.cpus)")
        if env is None or workers or self.remote is not None:
            return {}
        absent = {"worker_memory": f"{env.name} has no worker processes; make it with workers=N"}
        if workers == 0:
            absent["environments"] = "actor threads step the environments; set actors, or use workers=N"
        return absent

    def worker_processes(self, env: Environment | HostRecipe | None) -> int:
        if self.remote is not None:
            return self.remote.actors if self.remote.backend == "processes" else 0
        return (getattr(env, "workers", None) or 0) * self.threads * self.groups

    @property
    def batch_envs(self) -> int | None:
        return self.num_envs if self.learner_batch is None else self.learner_batch

    def _num_envs(self, algo: Algorithm) -> int:
        if self.num_envs is not None:
            return self.num_envs
        processes, remote = jax.process_count(), self.remote
        holders = 1 if remote is None or remote.policy else max(remote.actors * processes // self.all_groups, 1)
        multiple = self.all_groups * math.lcm(max(self.ready or 1, 1), holders)  # a group must be divisible by both
        # Without `learner_batch`, a batch has all environments, and it is divided over devices and shards.
        devices, shards = (self.devices or processes, self.shards or 1) if self.learner_batch is None else (1, 1)
        return ro.default_num_envs(algo, math.lcm(multiple, max(devices, 1), max(shards, 1)))

    @property
    def all_groups(self) -> int:
        """Number of groups of environments over all processes."""
        return max(self.threads * self.groups, 1) * jax.process_count()

    @property
    def threads(self) -> int:
        """Number of actor threads in each process; with the policy in remote actors, one thread per actor."""
        return self.remote.actors if self.remote is not None and self.remote.policy else self.actors

    def resolve(self, algo: Algorithm, agents: int = 1) -> "Sebulba":
        """Return the topology with `num_envs`, `lockstep`, `lag` and `max_lag` set for `algo` where they are None."""
        lockstep, lag, max_lag, num_envs = self.lockstep, self.lag, self.max_lag, self._num_envs(algo)
        if self.learner_batch is not None and max_lag is None and _sources(algo, Rollouts | Episodes):
            max_lag = 16 * self.batches_at_hand(num_envs) + self.parameter_period - 1
        if lockstep is None:
            sources = _sources(algo, Rollouts | Episodes).values()
            most = [source.max_policy_lag for source in sources if source.max_policy_lag is not None]
            in_step = self.ready is None and self.learner_batch is None
            lockstep = lag is not None or (bool(most) and in_step)
            if lag is None:
                # A period of several updates already makes the parameters older.
                lag = min([1, *most]) if lockstep and self.parameter_period == 1 else 0
        return dataclasses.replace(self, num_envs=num_envs, lockstep=lockstep, lag=lag or 0, max_lag=max_lag)

    def batches_at_hand(self, num_envs: int) -> int:
        """Return the maximum number of batches that all full rollouts and all rollouts being collected make."""
        groups_of_a_batch = (self.learner_batch or num_envs) * self.all_groups // max(num_envs, 1)
        return batches_at_hand(max(groups_of_a_batch, 1), self.all_groups, self.queue)

    def bind(
        self, algo: Algorithm, env: Environment | HostRecipe, dataset_fraction: float = 0.0
    ) -> Program[HostRecipe, Rings]:
        """Check everything that can be checked before an environment is built, and return the program.

        Args:
          algo, env: the algorithm and a host environment.
          dataset_fraction: the fraction of every batch that comes from a dataset.

        Raises:
          ConfigError: the settings are invalid; the error lists all problems.
        """
        if isinstance(env, Environment):
            raise ConfigError(self.problems(env))
        topology, num_envs = self.resolve(algo), self._num_envs(algo)
        if problems := list(_problems(topology, num_envs, algo, env)):
            raise ConfigError(problems)
        devices = jax.process_count() if self.devices is None else self.devices
        batch_envs, groups = self.learner_batch or num_envs, self.threads * self.groups
        pool, shards = None, self.shards
        if self.learner_batch is not None and _sources(algo, Replay):
            pool, shards = Pool(self.all_groups, num_envs // self.all_groups), devices
        try:
            layout = checked_layout(algo, env_spec(env), batch_envs, devices, shards, dataset_fraction, pool=pool)
        except ConfigError as error:
            if self.learner_batch is None:
                raise
            # In `checked_layout`, the environments of a batch are called `num_envs`.
            raise ConfigError([line.replace("num_envs=", "learner_batch=") for line in error.problems]) from None
        if self.error_buffer is not None:
            if problems := rate_limit.problems(layout.experience(algo), self.error_buffer):
                raise ConfigError(problems)
        lag, max_lag = topology.lag if topology.lockstep else None, topology.max_lag
        if self.learner_batch is not None and max_lag is None:
            max_lag = math.inf
        size = groups * batch_envs // num_envs  # in this process
        loop = SebulbaLoop(
            layout,
            Selection(size, groups, self.queue, lag, self.parameter_period, max_lag),
            self._devices_of_threads(layout),
            ready=self.ready,
            error_buffer=self.error_buffer,
            step_timeout=self.step_timeout,
            remote=self.remote,
        )
        return Program(layout, HostRollouts(layout), loop)

    def _devices_of_threads(self, layout):
        """Return one device per actor thread: devices after the learner's if there are enough, otherwise the first."""
        here = jax.local_devices(backend=self.actor_platform)
        learning = sum(device in layout.mesh.local_devices for device in here)
        apart = here[learning : learning + self.actor_devices]
        devices = apart if len(apart) == self.actor_devices else here[: self.actor_devices]
        return [devices[number % len(devices)] for number in range(self.threads)]


registry.add("topology", Sebulba)


def _sources(algo: Algorithm, kind: Any) -> dict[str, Any]:
    """Return the sources of an algorithm that are of a class or a union of classes."""
    return {name: source for name, source in algo.experience.items() if isinstance(source, kind)}


def _problems(topology: Sebulba, num_envs: int, algo: Algorithm, env: HostRecipe) -> Iterator[str]:
    """Yield all problems of a resolved topology that can be found without the environment's spaces."""
    counts = ("actors", "groups", "actor_devices", "queue", "parameter_period")
    yield from count_problems(**{name: (getattr(topology, name), 1) for name in counts})
    if topology.groups > 2:
        yield f"groups={topology.groups} must be 1 or 2; use more actors instead"
    if topology.lag not in (0, 1) or (topology.lag and not topology.lockstep):
        yield f"lag={topology.lag} must be 0, or 1 with lockstep=True"
    platform = topology.actor_platform
    try:
        jax.local_devices(backend=platform)
    except (RuntimeError, AttributeError):
        yield (
            f"actor_platform={platform!r} must be 'cpu', None, or a platform that JAX has started in this process; if "
            "JAX_PLATFORMS is set, it must contain both platforms, such as cuda,cpu"
        )
    yield from number_problems("step_timeout", topology.step_timeout, {"above": 0})
    if isinstance(algo, Planner):
        yield (
            f"{type(algo).__name__} plans in the environment itself, but {env.name} is on the host; use an environment "
            "in JAX"
        )
    yield from _not_together(topology)
    yield from _not_divisible(topology, num_envs, env)
    yield from _not_in_any_order(topology, num_envs, algo)


def _not_together(topology):
    """Yield problems of settings that exclude each other."""
    processes, groups, ready, remote = jax.process_count(), topology.groups, topology.ready, topology.remote
    out_of_step = {
        "learner_batch": "groups that finish first vary between runs; use lockstep=None and lag=None",
        "ready": "the environments that are ready first vary between runs; use ready=None",
        "error_buffer": "in lockstep, the learner waits for its actors; use lockstep=False and lag=None, or "
        "error_buffer=None",
    }
    for name, why in out_of_step.items():
        value = getattr(topology, name)
        if value is not None and topology.lockstep:
            yield f"{name}={value} cannot be used with lockstep=True: {why}"
    if processes > 1 and topology.error_buffer is not None:
        yield (
            f"error_buffer={topology.error_buffer}: {processes} processes cannot choose between storing and learning "
            "independently; use error_buffer=None"
        )
    if remote is not None and remote.policy:
        if topology.actors * groups > 1:
            yield f"actors={topology.actors}, groups={groups}: both must be 1 with remote.policy=True"
        if (platform := topology.actor_platform) is not None:
            yield f"actor_platform={platform!r} with remote.policy=True: this process does not act; use None"
    if ready is not None and groups == 2:
        yield f"ready={ready} with groups=2: some environments already step while others act; use groups=1"
    if ready is not None and remote is not None:
        yield f"ready={ready} with remote: remote actors step all of their environments together; use ready=None"


def _not_divisible(topology, num_envs, env):
    """Yield problems of dividing the environments into groups, and each group into its parts."""
    processes, groups, ready = jax.process_count(), topology.all_groups, topology.ready
    if num_envs % groups or num_envs < groups:
        product = f"actors * groups{' * processes' if processes > 1 else ''}"
        use = multiples(max(num_envs, 1), groups)
        yield f"num_envs={num_envs} is not divisible by {groups} groups ({product}); use {use}"
        return
    group = num_envs // groups
    if topology.remote is not None:
        yield from topology.remote.problems(groups // processes, group)
    if ready is not None and not isinstance(env, AsyncRecipe):
        yield f"ready={ready}: {env.name} steps all of its environments together; use ready=None"
    if ready is not None and (ready < 1 or group % ready):
        use = divisors(group, max(ready, 1))
        yield f"ready={ready} does not divide the {group} environments of a group; use {use}"
    batch = topology.learner_batch
    least = group * processes  # a group of each process
    if batch is not None and (batch % least or not 0 < batch <= num_envs):
        use = min(max(batch // least, 1) * least, num_envs)
        yield (
            f"learner_batch={batch} must be a multiple of {least}, the environments of a group in each process, and at "
            f"most num_envs={num_envs}; use {use}, or another num_envs"
        )


def _not_in_any_order(topology, num_envs, algo):
    """Yield problems of learning from rollouts in the order in which they become full."""
    batch, lag, period = topology.learner_batch, topology.max_lag, topology.parameter_period
    processes = jax.process_count()
    if batch is None:
        if lag is not None:
            yield f"max_lag={lag} needs learner_batch; set learner_batch, or use max_lag=None"
        return
    kind = type(algo).__name__
    if storing := [*_sources(algo, Episodes)]:
        yield (
            f"learner_batch={batch}: {kind}'s source {storing[0]!r} stores rollouts of all environments together; use "
            "learner_batch=None"
        )
    for name, value in {"devices": topology.devices, "shards": topology.shards}.items():
        if value not in (None, processes) and _sources(algo, Replay):
            yield (
                f"{name}={value} with learner_batch={batch}: {kind}'s replay can only be divided over processes; use "
                f"{name}={processes}"
            )
    if not _sources(algo, Rollouts | Episodes):
        if lag is not None:
            yield f"max_lag={lag}: {kind} learns from data of any age; use max_lag=None"
        return
    at_hand = topology.batches_at_hand(num_envs)
    if lag < at_hand + period:
        plus = f"parameter_period={period}" if period > 1 else "1"
        yield (
            f"max_lag={lag} must be at least {at_hand}, the batches in the rollouts of all groups, plus {plus}; "
            f"use at least {at_hand + period}, or max_lag=None"
        )
