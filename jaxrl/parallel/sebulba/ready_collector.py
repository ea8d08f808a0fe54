"""A collector that acts for the environments that are ready first, so that a slow one does not stop the others."""

from collections.abc import Generator

import jax
import numpy as np

from jaxrl.core.host_types import AsyncEnvironment, AsyncRecipe
from jaxrl.core.types import HostRecipe, PyTree, Rollout, TimeStep
from jaxrl.envs.host.watchdog import Stepper
from jaxrl.parallel.host_rollout import HostActing, HostSteps
from jaxrl.parallel.sebulba.collector import Collected, Group, Published, Stepping, with_episodes


def problems(ready: int, group: int, env: HostRecipe) -> list[str]:
    """Return the reasons why `ready` environments cannot be acted for at once.

    Args:
      ready: number of environments to act for.
      group: number of environments of a group.
      env: the environment.
    """
    found = []
    if not isinstance(env, AsyncRecipe):
        found.append(f"ready={ready}: {env.name} steps all its environments at once; use ready=None")
    if ready < 1 or group % ready:
        fit = ", ".join(str(size) for size in range(1, group + 1) if group % size == 0)
        found.append(f"ready={ready} does not divide the {group} environments of a group; use one of {fit}")
    return found


class RolloutInParts:
    """A rollout of a group in which some environments act at a time.

    Args:
      steps: the compiled pieces.
      published: the parameters to act with.
      acting: the acting state.
      timestep: the current time step, numpy `[group, ...]`.
    """

    def __init__(self, steps: HostSteps, published: Published, acting: HostActing, timestep: TimeStep[np.ndarray]):
        self._steps, self._published, self._acting, self._initial = steps, published, acting, acting.carry
        self._storage = steps.storage(
            published.algo, published.actor, timestep, acting.carry, acting.previous_action, acting.roots
        )

    def act(self, timestep: TimeStep[np.ndarray], numbers: np.ndarray, env_ids: np.ndarray) -> PyTree:
        """Act for some environments.

        Args:
          timestep: their time step, numpy `[B, ...]`.
          numbers: the step of the rollout for each, int32 [B].
          env_ids: their indices in the group, int32 [B].

        Returns:
          Their actions, numpy `[B, ...]`.
        """
        acting = self._acting
        self._storage, acting.previous_action, acting.carry, action = self._steps.act_some(
            self._published.algo,
            self._published.actor,
            self._storage,
            timestep,
            acting.carry,
            acting.previous_action,
            acting.roots,
            acting.tick() + numbers.astype(np.uint32),
            numbers,
            env_ids,
        )
        return jax.device_get(action)

    def finish(self, timestep: TimeStep[np.ndarray]) -> Rollout:
        """Return the rollout, after all have acted; `timestep` is the one that followed, numpy `[group, ...]`."""
        of, acting = self._published, self._acting
        acting.steps_per_env += self._steps.length
        return self._steps.finish(
            of.algo, of.actor, self._storage, timestep, acting.previous_action, self._initial, acting.carry, of.version
        )


class ReadyCollector:
    """A `Collector` that acts for the `env.batch_size` environments that are ready first.

    Every environment has its own column of the rollout. One that has filled its share waits for the others, so that a
    rollout is complete and of one version. The rollout does not depend on which were ready first: environment and step
    are folded into the random keys.

    Args:
      group: acts for them.
      host: the environments.
    """

    def __init__(self, group: Group, host: AsyncEnvironment):
        self.host: AsyncEnvironment = host
        self.stepping = Stepping()
        self._group = group
        # The newest time step of each environment; entries are overwritten as they arrive.
        self._timestep = self._reset()

    def begin_at(self, steps_per_env: int) -> None:
        self._group.begin_at(steps_per_env)

    def first_timestep(self) -> TimeStep[np.ndarray]:
        return self._timestep

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collect one rollout. Environments are sent actions in parts, so `stepper` is not used."""
        steps = self._group.steps
        turns = ReadyScheduler(steps.group, self.host.batch_size, steps.length)
        acting = self._group.acting(published.algo, self._timestep)
        rollout = RolloutInParts(steps, published, acting, self._timestep)
        while not turns.over:
            turn = turns.take()
            if turn is None:
                yield
                self._receive(turns)
                continue
            env_ids, numbers = turn
            timestep = jax.tree.map(lambda x, ids=env_ids: x[ids], self._timestep)
            self.host.send(rollout.act(timestep, numbers, env_ids), env_ids)
        # A copy: the next rollout's time steps overwrite these, maybe before the program has read them.
        return with_episodes(rollout.finish(jax.tree.map(np.copy, self._timestep)))

    def _reset(self):
        with self.stepping:
            self.host.async_reset()
            came = [self.host.recv() for _ in range(self._group.steps.group // self.host.batch_size)]
        env_ids, timesteps = jax.tree.map(lambda *x: np.concatenate(x), *came)
        return jax.tree.map(lambda x: x[np.argsort(env_ids)], timesteps)

    def _receive(self, turns):
        with self.stepping:
            env_ids, timesteps = self.host.recv()
        for newest, x in zip(jax.tree.leaves(self._timestep), jax.tree.leaves(timesteps), strict=True):
            newest[env_ids] = x
        turns.came(env_ids)


class ReadyScheduler:
    """A scheduler that lets every environment of a group act `length` times, in batches of `ready`.

    A batch has exactly `ready` different environments: acting is compiled for that many, and the environments return
    that many. Batches are sent and received whole and `ready` divides the group, so whenever some environments are
    stepping, there are enough to receive a batch.

    This could only fail at the end of a rollout, with fewer than `ready` environments that still have to act. The
    remaining steps can be divided into batches of different environments exactly if no environment has more steps left
    than there are batches left: `max(left) <= sum(left) / ready`. This holds at the beginning, and no turn is taken
    that breaks it. Environments with the most steps left go first, among them the at most `ready` with as many steps
    left as there are batches; so a turn would break it only if one of these is stepping, and can be waited for. If none
    is stepping, `ready` of them can act, since `sum(left) <= count * max(left)`. Hence it never stops before the end.

    Args:
      group: number of environments, all of them received.
      ready: number of environments that act at once; divides `group`.
      length: number of steps of each environment.
    """

    def __init__(self, group: int, ready: int, length: int):
        self._ready, self._length = ready, length
        self._left = np.full(group, length, np.int32)
        self._at_work = np.zeros(group, np.bool_)

    @property
    def over(self) -> bool:
        """True if all have acted and were received."""
        return not (self._at_work.any() or self._left.any())

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the environments that act now, and the step of the rollout for each, int32 [ready].

        They count as stepping from then on. None: others must be received first.
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
        """Record that these environments were received."""
        self._at_work[env_ids] = False
