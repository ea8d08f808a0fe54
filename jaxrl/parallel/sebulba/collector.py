"""Collection of rollouts in a group of host environments, with one compiled call per step."""

import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Protocol, cast

import jax
import numpy as np
from flax import struct

from jaxrl.core.host_types import AsyncEnvironment
from jaxrl.core.report import EpisodeSums
from jaxrl.core.types import ActorState, Algorithm, HostEnvironment, PyTree, Rollout, TimeStep
from jaxrl.envs.host.watchdog import Stepper
from jaxrl.parallel.host_rollout import HostActing, HostSteps, new_storage, unroll
from jaxrl.parallel.rollout import episode_sums


class Published(struct.PyTreeNode):
    """The data that a learner sends to its actors: the algorithm with its schedules resolved, and the actor state."""

    algo: Algorithm
    actor: ActorState
    version: jax.Array | np.int32  # int32, increases with each publication


class Collected(struct.PyTreeNode):
    """A group's share of the data of one iteration."""

    rollout: Rollout  # [T + 1, group]
    episodes: EpisodeSums


class Stepping:
    """A clock that measures the time spent in the environments' steps and resets."""

    def __init__(self):
        self.since: float | None = None  # start of the running step in monotonic seconds; None between steps
        self.seconds = 0.0  # total

    def __enter__(self) -> "Stepping":
        self.since = self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began
        self.since = None


class Collector(Protocol):
    """A group of host environments in which an actor thread collects rollouts."""

    @property
    def host(self) -> HostEnvironment:
        """The environments, in this or another process; closed with the collector."""
        ...

    @property
    def stepping(self) -> Stepping: ...

    def begin_at(self, steps_per_env: int) -> None:
        """Set the number of steps of each environment before the next rollout, which is folded into the acting keys."""
        ...

    def first_timestep(self) -> TimeStep[np.ndarray]:
        """Return the time step at which the run begins, as numpy arrays `[group, ...]`."""
        ...

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collect one rollout, and return it.

        Yields while the environments are stepping, so that the thread can serve another group.

        Args:
          published: the algorithm and the parameters, on this collector's device.
          stepper: a thread that steps the environments while this one acts for another group; None: this thread steps.
        """
        ...

    def give_back(self, rollout: Rollout, is_learned: Callable[[], bool]) -> None:
        """Take back a rollout of this collector to overwrite its memory, which is faster than writing to new memory.

        Args:
          rollout: a rollout that is only read by programs that were already dispatched.
          is_learned: function that returns whether these programs are done; an earlier write would wait for them.
        """
        ...


class ReadyScheduler:
    """A scheduler that lets the policy act `length` times in every environment of a group, for `ready` at a time.

    A batch has exactly `ready` different environments, because acting is compiled for this number, and the host
    receives this number of environments at a time. Batches are sent and received as a whole, and `ready` divides the
    group. So if any environments are stepping, there are enough of them to receive a batch.

    The scheduler could only get stuck at the end of a rollout, if fewer than `ready` environments still have to act.
    The remaining steps can be divided into batches of different environments if and only if no environment has more
    steps left than there are batches left: `max(left) <= sum(left) / ready`. This condition is true at the beginning,
    and `take` does not return a batch that would violate it. Environments with the most steps left act first. These
    include the (at most `ready`) environments with as many steps left as there are batches left. So a batch can only
    violate the condition if one of these environments is stepping, in which case it can be received first. If no
    environment is stepping, `ready` of them can act, since `sum(left) <= count * max(left)`. Therefore, the scheduler
    never stops before the end.

    Args:
      group: number of environments; none of them is stepping.
      ready: number of environments that act at the same time; divides `group`.
      length: number of steps of each environment.
    """

    def __init__(self, group: int, ready: int, length: int):
        self._ready, self._length = ready, length
        self._left = np.full(group, length, np.int32)
        self._at_work = np.zeros(group, np.bool_)

    @property
    def over(self) -> bool:
        """True if all environments have made all of their steps, and the results were received."""
        return not (self._at_work.any() or self._left.any())

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the indices of the environments that act next and their steps in the rollout, both int32 [ready].

        These environments count as stepping afterwards. Return None if other environments must be received first.
        """
        waiting = np.flatnonzero(~self._at_work & (self._left > 0)).astype(np.int32)
        env_ids = waiting[np.argsort(-self._left[waiting], kind="stable")[: self._ready]]
        left = self._left.copy()
        left[env_ids] -= 1
        if env_ids.size < self._ready or left.max() * self._ready > left.sum():
            return None
        numbers = self._length - self._left[env_ids]
        self._left = left
        self._at_work[env_ids] = True
        return env_ids, numbers

    def came(self, env_ids: np.ndarray) -> None:
        """Record that the results of these environments were received."""
        self._at_work[env_ids] = False


class StepCollector:
    """A `Collector` of environments in this process, which act together or, with `ready`, as they become ready.

    With `ready`, it acts for the `host.batch_size` environments that are ready first. Every environment has its own
    column of the rollout. An environment that has filled its column waits for the others, so that a rollout is complete
    and has one version. The order in which environments are ready does not change the rollout, as environment and step
    are folded into the random keys.

    Args:
      steps: the compiled functions for acting.
      host: the environments.
      key: the run's root key.
      first_env: index of the group's first environment among all environments.
      device: the device that acts.
      ready: whether to act for the environments that are ready first; `host` must be an `AsyncEnvironment`.
    """

    def __init__(
        self,
        steps: HostSteps,
        host: HostEnvironment,
        key: jax.Array,
        first_env: int,
        device: jax.Device,
        *,
        ready: bool = False,
    ):
        self.host, self.stepping = host, Stepping()
        self._steps, self._async = steps, cast(AsyncEnvironment, host) if ready else None
        self._steps_per_env = 0
        self._acting: HostActing | None = None  # set when the algorithm is known
        self._recycled: deque[tuple[Rollout, Callable[[], bool]]] = deque()
        env_index = first_env + np.arange(steps.group, dtype=np.int32)
        self._key, self._env_index = jax.device_put((key, env_index), jax.sharding.SingleDeviceSharding(device))
        with self.stepping:
            self._first = host.reset() if self._async is None else _async_reset(self._async)

    def begin_at(self, steps_per_env: int) -> None:
        self._steps_per_env = steps_per_env

    def first_timestep(self) -> TimeStep[np.ndarray]:
        return self._first

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collect one rollout; with `ready`, `stepper` is not used."""
        steps, algo, actor, version = self._steps, published.algo, published.actor, published.version
        if self._acting is None:
            self._acting = steps.begin(algo, self._first, self._key, self._env_index)
        acting, storage = self._acting, self._storage(self._acting)
        acting.steps_per_env = self._steps_per_env
        if self._async is None:
            step = self._step if stepper is None else partial(self._step_in, stepper)
            unrolling = unroll(steps, algo, actor, acting, step, version, storage)
        else:
            unrolling = self._unroll_ready(self._async, published, acting, storage)
        rollout = yield from unrolling
        self._steps_per_env += steps.length
        return Collected(rollout, _episode_sums(rollout))

    def give_back(self, rollout: Rollout, is_learned: Callable[[], bool]) -> None:
        self._recycled.append((rollout, is_learned))

    def _storage(self, acting):
        """Return the storage of the oldest rollout that was given back, or None if programs may still read it."""
        if not self._recycled or not self._recycled[0][1]():
            return None
        rollout, _ = self._recycled.popleft()
        return acting.storage(rollout)

    def _step(self, action: PyTree) -> Callable[[], TimeStep[np.ndarray]]:
        with self.stepping:
            timestep = self.host.step(action)
        return lambda: timestep

    def _step_in(self, stepper: Stepper, action: PyTree) -> Callable[[], TimeStep[np.ndarray]]:
        stepper.begin(lambda: self._step(action)())
        return stepper.wait

    def _unroll_ready(self, host, published, acting, storage):
        """Collect a rollout from the environments that are ready first; yield and return as `unroll` does."""
        steps, algo, actor, initial = self._steps, published.algo, published.actor, acting.carry
        storage = new_storage(steps, algo, actor, acting) if storage is None else storage
        turns = ReadyScheduler(steps.group, host.batch_size, steps.length)
        while not turns.over:
            turn = turns.take()
            if turn is None:
                yield
                with self.stepping:
                    came, timesteps = host.recv()
                for newest, x in zip(jax.tree.leaves(acting.timestep), jax.tree.leaves(timesteps), strict=True):
                    newest[came] = x
                turns.came(came)
                continue
            env_ids, numbers = turn
            timestep = jax.tree.map(lambda x, ids=env_ids: x[ids], acting.timestep)
            ticks = acting.tick() + numbers.astype(np.uint32)
            carry, previous_action, roots = acting.carry, acting.previous_action, acting.roots
            storage, acting.previous_action, acting.carry, action = steps.act_some(
                algo, actor, storage, timestep, carry, previous_action, roots, ticks, numbers, env_ids
            )
            host.send(jax.device_get(action), env_ids)
        acting.steps_per_env += steps.length
        # A copy, as the time steps of the next rollout overwrite these, possibly before the program has read them.
        timestep, carry, previous_action = jax.tree.map(np.copy, acting.timestep), acting.carry, acting.previous_action
        return steps.finish(algo, actor, storage, timestep, previous_action, initial, carry, published.version)


def _async_reset(host):
    """Return the first time step of all environments, in arrays that the caller may overwrite."""
    host.async_reset()
    came = [host.recv() for _ in range(host.num_envs // host.batch_size)]
    env_ids, timesteps = jax.tree.map(lambda *x: np.concatenate(x), *came)
    return jax.tree.map(lambda x: x[np.argsort(env_ids)], timesteps)


_episode_sums = jax.jit(episode_sums)
