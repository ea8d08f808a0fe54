"""A group of host environments, and the rollouts that are collected in it, one compiled call a step."""

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
    """What a learner gives its actors: the algorithm with its schedules resolved, and what acting needs."""

    algo: Algorithm
    actor: ActorState
    version: jax.Array | np.int32  # int32, greater with each publication


class Collected(struct.PyTreeNode):
    """A group's share of what one iteration learns from."""

    rollout: Rollout  # [T + 1, group]
    episodes: EpisodeSums


class Stepping:
    """A clock that runs while `env.step` does."""

    def __init__(self):
        self.since: float | None = None  # monotonic seconds, while `env.step` is running
        self.seconds = 0.0  # all in all

    def __enter__(self) -> "Stepping":
        self.since = self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began
        self.since = None


class Closable(Protocol):
    """Environments, wherever they are."""

    def close(self) -> None: ...


@runtime_checkable
class Rebuilt(Closable, Protocol):
    """Environments that are built again where they fail."""

    @property
    def failures(self) -> int:
        """How often."""
        ...


class Collector(Protocol):
    """One group of host environments, from which an actor thread collects rollouts."""

    @property
    def host(self) -> Closable:
        """The environments, or what holds them; closed with the collector."""
        ...

    @property
    def stepping(self) -> Stepping: ...

    def begin_at(self, steps_per_env: int) -> None:
        """The next rollout begins after so many steps of each environment: they name the random numbers of acting."""
        ...

    def first_timestep(self) -> TimeStep[np.ndarray]:
        """The time step that the run begins at, numpy `[group, ...]`."""
        ...

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collects one rollout, and returns it.

        Yields whenever `env.step` is running, so that one thread can serve another group meanwhile.

        Args:
          published: on this collector's device.
          stepper: another thread to step in, while this one acts for another group; None: in this one.
        """
        ...


@runtime_checkable
class RecyclingCollector(Protocol):
    """A `Collector` that writes rollouts over earlier ones, as fresh memory costs more than what is written to it."""

    def give_back(self, rollout: Rollout, is_learned: Callable[[], bool]) -> None:
        """Takes a rollout back, which it had collected.

        Args:
          rollout: nobody looks at it from now on, but for programs that were dispatched before.
          is_learned: whether those are done; before, to write would be to wait for them.
        """
        ...


class Group:
    """What acts for one group in this process: the compiled pieces, and who its environments are.

    Args:
      steps: the compiled pieces.
      key: the run's root key.
      first_env: the index of its first environment among all.
      device: where it acts.
    """

    def __init__(self, steps: HostSteps, key: jax.Array, first_env: int, device: jax.Device):
        self.steps = steps
        self._begin_at = 0
        self._acting: HostActing | None = None  # until there is an algorithm
        env_index = first_env + np.arange(steps.group, dtype=np.int32)
        self._key, self._env_index = jax.device_put((key, env_index), jax.sharding.SingleDeviceSharding(device))

    def begin_at(self, steps_per_env: int) -> None:
        self._begin_at = steps_per_env
        if self._acting is not None:
            self._acting.steps_per_env = steps_per_env

    def acting(self, algo: Algorithm, first: TimeStep[np.ndarray]) -> HostActing:
        """Where the environments stand; `first` is the time step that they began at."""
        if self._acting is None:
            self._acting = self.steps.begin(algo, first, self._key, self._env_index)
            self._acting.steps_per_env = self._begin_at
        return self._acting


class StepCollector:
    """A `Collector` of environments that all step at once.

    Args:
      group: who acts for them.
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
        """That of the oldest rollout given back, if it is learned from by now."""
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
    """A rollout, with what ended in it counted where it was collected."""
    return Collected(rollout, _episode_sums(rollout))
