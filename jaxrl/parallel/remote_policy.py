"""Rollouts that Ray actors collect with a copy of the policy: parameters go out, rollouts come back."""

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxrl.parallel.collector import Collected, Collector, Published, Steps
from jaxrl.parallel.remote import Crew, Remote, connect
from jaxrl.parallel.remote_environments import EnvironmentActor
from jaxrl.types import HostRecipe, PyTree, TimeStep


class RolloutActor(EnvironmentActor):
    """What a Ray actor is: environments, and who acts in them.

    One whose environments are at a step for longer than `step_timeout` ends its process. So it is lost then, rather
    than when all of its rollout should have come.
    """

    def __init__(
        self,
        num_envs: int,
        seed: int,
        first_env: int,
        recipe: HostRecipe,
        steps: Steps,
        run_seed: int,
        step_timeout: float,
    ):
        super().__init__(num_envs, seed, first_env, recipe)
        self._step_timeout = step_timeout
        self._collector = Collector(steps, self._host, jax.random.key(run_seed), first_env, jax.devices()[0])

    def first_moment(self) -> TimeStep:
        return self._collector.first_moment()

    def rollout(self, published: Published, ticks: int) -> tuple[Collected, float]:
        """One rollout, as numpy, and the seconds that the environments have taken so far."""
        self._collector.begin_at(ticks)
        rollout = self._collector.collect(published, self._step)
        while True:
            try:
                next(rollout)
            except StopIteration as end:
                return jax.device_get(end.value), self._collector.stepping_seconds

    def _step(self, action):
        # Its clock runs in C, and ends the process whatever Python is at.
        faulthandler.dump_traceback_later(self._step_timeout, exit=True, file=sys.__stderr__)
        try:
            return self._collector.step_now(action)
        finally:
            faulthandler.cancel_dump_traceback_later()


class Shelf:
    """What was published last, where Ray's processes find it: it is sent to a machine once, not once an actor."""

    def __init__(self, remote: Remote):
        self._ray, self._lock = connect(remote.address), threading.Lock()
        self._version, self._reference = -1, None

    def put(self, published: Published) -> Any:
        with self._lock:
            version = int(published.version)
            if version != self._version:
                self._version, self._reference = version, self._ray.put(jax.device_get(published))
            return self._reference


class RemoteCollector:
    """A group whose environments and copy of the policy a Ray actor holds: the same calls as `Collector`.

    An actor that takes the place of a lost one begins its rollout with new episodes; nothing of the lost rollout is
    seen.

    Args:
      recipe: of the environments.
      remote: how they are held.
      steps: the compiled pieces.
      shelf: of all groups.
      seed: of the environments, and of the run.
      first_env: the index of the first environment among all.
      device: where rollouts are put.
    """

    step_now = None  # the actor steps them

    def __init__(
        self,
        recipe: HostRecipe,
        remote: Remote,
        steps: Steps,
        shelf: Shelf,
        seed: int,
        first_env: int,
        device: jax.Device,
    ):
        self.stepping_since: float | None = None  # the crew itself sees to it that an answer comes in time
        self.stepping_seconds = 0.0
        self._steps, self._shelf, self._device, self._ticks = steps, shelf, device, 0
        arguments = recipe, steps, seed, remote.step_timeout
        self.host = Crew(RolloutActor, arguments, recipe.name, remote, 1, steps.group, seed, first_env)

    def begin_at(self, ticks: int) -> None:
        """As of `Collector`."""
        self._ticks = ticks

    def first_moment(self) -> TimeStep:
        """The moment that the run begins at, numpy `[group, ...]`; waits until the actor is there."""
        self.host.wait()
        self.host.begin("first_moment", [()])
        return self.host.finish(again="first_moment")[0]

    def collect(self, published: Published, step: Callable[[PyTree], Callable[[], Any]]) -> Iterator[None]:
        """As of `Collector`; `step` is not used, the actor steps its environments."""
        self.host.begin("rollout", [(self._shelf.put(published), self._ticks)])
        yield
        [(collected, self.stepping_seconds)] = self.host.finish(again="rollout", steps=self._steps.length)
        self._ticks += self._steps.length
        return jax.device_put(collected, self._device)
