"""The collection of rollouts in a group of host environments, one compiled call per step."""

import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from flax import struct

from jaxrl.core.report import EpisodeSums
from jaxrl.core.types import ActorState, Algorithm, HostEnvironment, PyTree, Rollout, TimeStep
from jaxrl.envs.host.watchdog import Stepper
from jaxrl.parallel.host_rollout import HostActing, HostSteps, unroll
from jaxrl.parallel.rollout import episode_sums


class Published(struct.PyTreeNode):
    """The data that a learner sends its actors: the algorithm with its schedules resolved, and the actor state."""

    algo: Algorithm
    actor: ActorState
    version: jax.Array | np.int32  # int32, increases with each publication


class Collected(struct.PyTreeNode):
    """A group's share of the data of one iteration."""

    rollout: Rollout  # [T + 1, group]
    episodes: EpisodeSums


class Stepping:
    """A clock that runs while `env.step` does."""

    def __init__(self):
        self.since: float | None = None  # monotonic seconds, while `env.step` is running
        self.seconds = 0.0  # total

    def __enter__(self) -> "Stepping":
        self.since = self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began
        self.since = None


class Closable(Protocol):
    """Environments in this or another process."""

    def close(self) -> None: ...


@runtime_checkable
class Rebuilt(Closable, Protocol):
    """Environments that are rebuilt after a failure."""

    @property
    def failures(self) -> int:
        """The number of rebuilds."""
        ...


class Collector(Protocol):
    """A group of host environments, from which an actor thread collects rollouts."""

    @property
    def host(self) -> Closable:
        """The environments, or the object that holds them; closed with the collector."""
        ...

    @property
    def stepping(self) -> Stepping: ...

    def begin_at(self, steps_per_env: int) -> None:
        """Set the steps of each environment before the next rollout, which are folded into the keys of acting."""
        ...

    def first_timestep(self) -> TimeStep[np.ndarray]:
        """Return the time step at which the run begins, numpy `[group, ...]`."""
        ...

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collect one rollout, and return it.

        Yields whenever `env.step` is running, so that the thread can serve another group meanwhile.

        Args:
          published: the parameters, on this collector's device.
          stepper: another thread to step in, while this one acts for another group; None: step in this thread.
        """
        ...


@runtime_checkable
class RecyclingCollector(Protocol):
    """A `Collector` that writes rollouts over earlier ones, since fresh memory costs more than the writes do."""

    def give_back(self, rollout: Rollout, is_learned: Callable[[], bool]) -> None:
        """Take back a rollout that it collected, to overwrite it.

        Args:
          rollout: from now on only read by programs that were dispatched before.
          is_learned: whether those programs are done; a write before that would wait for them.
        """
        ...


class Group:
    """The acting side of one group in this process: the compiled pieces, and the indices of its environments.

    Args:
      steps: the compiled pieces.
      key: the run's root key.
      first_env: the index of its first environment among all.
      device: the device that acts.
    """

    def __init__(self, steps: HostSteps, key: jax.Array, first_env: int, device: jax.Device):
        self.steps = steps
        self._begin_at = 0
        self._acting: HostActing | None = None  # set when the algorithm is known
        env_index = first_env + np.arange(steps.group, dtype=np.int32)
        self._key, self._env_index = jax.device_put((key, env_index), jax.sharding.SingleDeviceSharding(device))

    def begin_at(self, steps_per_env: int) -> None:
        self._begin_at = steps_per_env
        if self._acting is not None:
            self._acting.steps_per_env = steps_per_env

    def acting(self, algo: Algorithm, first: TimeStep[np.ndarray]) -> HostActing:
        """Return the acting state; `first` is the environments' first time step."""
        if self._acting is None:
            self._acting = self.steps.begin(algo, first, self._key, self._env_index)
            self._acting.steps_per_env = self._begin_at
        return self._acting


class StepCollector:
    """A `Collector` of environments that all step at once.

    Args:
      group: acts for them.
      host: the environments.
    """

    def __init__(self, group: Group, host: HostEnvironment):
        self.host, self.stepping = host, Stepping()
        self._group = group
        self._recycled: deque[tuple[Rollout, Callable[[], bool]]] = deque()
        with self.stepping:
            self._first = host.reset()

    def begin_at(self, steps_per_env: int) -> None:
        self._group.begin_at(steps_per_env)

    def first_timestep(self) -> TimeStep[np.ndarray]:
        return self._first

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        algo, actor, version = published.algo, published.actor, published.version
        acting = self._group.acting(algo, self._first)
        step = self._step if stepper is None else partial(self._step_in, stepper)
        storage = self._storage(acting)
        return with_episodes((yield from unroll(self._group.steps, algo, actor, acting, step, version, storage)))

    def give_back(self, rollout: Rollout, is_learned: Callable[[], bool]) -> None:
        self._recycled.append((rollout, is_learned))

    def _storage(self, acting):
        """Return the storage of the oldest rollout that was given back, or None if a program may still read it."""
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


_episode_sums = jax.jit(episode_sums)


def with_episodes(rollout: Rollout) -> Collected:
    """Return a rollout with the sums over its ended episodes, computed on the device that collected it."""
    return Collected(rollout, _episode_sums(rollout))
