"""A group of host environments of which those act that are ready first, so that a slow one does not stop the others."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrl.parallel.collector import Collector, Published, Watched
from jaxrl.types import AsyncEnvironment, AsyncRecipe, HostRecipe, PyTree

# What does not go together with it, and why.
_APART = {
    "groups": "with groups=2: some environments step already while others act; use groups=1",
    "lockstep": "with lockstep=True: who is ready first differs by run; use ready=None",
    "remote": "with remote: Ray actors step all their environments at once; use ready=None",
}


def problems(ready: int, group: int, env: HostRecipe, without: dict[str, bool]) -> list[str]:
    """What is wrong with acting for `ready` environments at once.

    Args:
      ready: how many.
      group: environments of a group.
      env: what they are.
      without: of each of "groups", "lockstep" and "remote" whether the topology has none.
    """
    found = [f"ready={ready} {why}" for name, why in _APART.items() if not without[name]]
    if not isinstance(env, AsyncRecipe):
        found.append(f"ready={ready}: {env.name} steps all its environments at once; use ready=None")
    if ready < 1 or group % ready:
        fit = ", ".join(str(size) for size in range(1, group + 1) if group % size == 0)
        found.append(f"ready={ready} does not divide the {group} environments of a group; use one of {fit}")
    return found


class ReadyCollector(Collector):
    """One group, acting for the `host.batch_size` environments that are ready first: the same calls as `Collector`.

    Every environment has its own place in the rollout. One that has filled its share waits for the others, so that a
    rollout is whole and of one version. What is collected does not depend on who was ready when: random numbers are
    named by environment and tick.

    Args:
      steps, key, first_env, device: as of `Collector`.
      host: the environments; the collector closes them.
    """

    step_now = None  # it sends and receives by itself

    host: AsyncEnvironment

    def _reset(self) -> Any:
        self.host.async_reset()
        came = [self.host.recv() for _ in range(self._steps.group // self.host.batch_size)]
        env_ids, moments = jax.tree.map(lambda *x: np.concatenate(x), *came)
        # The newest moment of each environment; rows are written to as they come.
        return jax.tree.map(lambda x: x[np.argsort(env_ids)], moments)

    def collect(self, published: Published, step: Callable[[PyTree], Callable[[], Any]]) -> Iterator[None]:
        """As of `Collector`; `step` is not used, environments are sent actions in parts."""
        steps, algo, actor = self._steps, published.algo, published.actor
        if self._carry is None:
            self._carry, self._action = steps.beginnings(algo, self._env_index)
        initial = self._carry
        storage = steps.storage(algo, actor, self._following, self._carry, self._action, self._roots)
        turns = Turns(steps.group, self.host.batch_size, steps.length)
        while not turns.over:
            turn = turns.take()
            if turn is None:
                yield
                self._receive(turns)
                continue
            env_ids, places = turn
            storage, self._action, self._carry, action = steps.act_some(
                algo,
                actor,
                storage,
                jax.tree.map(lambda x, ids=env_ids: x[ids], self._following),
                self._carry,
                self._action,
                self._roots,
                np.uint32(self._ticks % 2**32) + places.astype(np.uint32),
                places,
                env_ids,
            )
            self.host.send(jax.device_get(action), env_ids)
        self._ticks += steps.length
        # A copy: the next rollout's moments are written over these, maybe before the program has read them.
        final = jax.tree.map(np.copy, self._following)
        return steps.finish(storage, final, self._action, initial, self._carry, actor.statistics, published.version)

    def _receive(self, turns):
        with Watched(self):
            env_ids, moments = self.host.recv()
        for newest, x in zip(jax.tree.leaves(self._following), jax.tree.leaves(moments), strict=True):
            newest[env_ids] = x
        turns.came(env_ids)


class Turns:
    """Whose turn it is, until every environment of a group has acted `length` times, in batches of `ready`.

    A batch is of `ready` different environments, no fewer: what acts is compiled for so many, and so many are what
    environments give back. Batches leave and come back whole and `ready` divides the group, so whenever some
    environments are at work, there are enough to receive a batch.

    The end of a rollout is where that could fail, with fewer than `ready` environments left that have to act. What is
    left to do can be done in batches of different environments exactly if none has more left than there are batches
    left: `max(left) <= sum(left) / ready`. This holds at the beginning, and no turn is taken that breaks it. Those
    that have the most left go first, among them the at most `ready` that have as many left as there are batches; so a
    turn would break it only where one of these is at work, and can be waited for. If nobody is at work, there are
    `ready` that can act, since `sum(left) <= count * max(left)`. Hence it never stops before the end.

    Args:
      group: environments, all of them received.
      ready: how many act at once; divides `group`.
      length: how often each has to act.
    """

    def __init__(self, group: int, ready: int, length: int):
        self._ready, self._length = ready, length
        self._left = np.full(group, length, np.int32)
        self._at_work = np.zeros(group, np.bool_)

    @property
    def over(self) -> bool:
        """Whether all have acted and were received."""
        return not (self._at_work.any() or self._left.any())

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The environments that act now and the place in the rollout of each, int32 [ready]; they are at work then.

        None: some must come first.
        """
        waiting = np.flatnonzero(~self._at_work & (self._left > 0)).astype(np.int32)
        env_ids = waiting[np.argsort(-self._left[waiting], kind="stable")[: self._ready]]
        left = self._left.copy()
        left[env_ids] -= 1
        if env_ids.size < self._ready or left.max() * self._ready > left.sum():
            return None
        places = self._length - self._left[env_ids]
        self._left = left
        self._at_work[env_ids] = True
        return env_ids, places

    def came(self, env_ids: np.ndarray) -> None:
        """These were at work and have been received."""
        self._at_work[env_ids] = False
