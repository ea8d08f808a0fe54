"""Rollouts that Ray actors collect with a copy of the policy: parameters go out, rollouts come back."""

import faulthandler
import sys
import threading
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from jaxrl.core import keys
from jaxrl.core.types import HostEnvironment, HostRecipe, PyTree, TimeStep
from jaxrl.envs.host.watchdog import Stepper
from jaxrl.parallel.host_rollout import HostSteps, complete
from jaxrl.parallel.ray.environments import EnvironmentActor
from jaxrl.parallel.ray.remote import ActorPool, Remote, connect
from jaxrl.parallel.sebulba.collector import Collected, Group, Published, StepCollector, Stepping


class RolloutActor(EnvironmentActor):
    """The class of Ray actors that hold environments and act in them.

    An actor ends its process if a step of its environments takes longer than `step_timeout`. It is lost then, rather
    than at the timeout of its whole rollout.
    """

    def __init__(
        self,
        num_envs: int,
        seed: int,
        first_env: int,
        recipe: HostRecipe,
        steps: HostSteps,
        run_seed: int,
        step_timeout: float,
    ):
        super().__init__(num_envs, seed, first_env, recipe)
        group = Group(steps, keys.root_key(run_seed), first_env, jax.devices()[0])
        self._collector = StepCollector(group, Timed(self._host, step_timeout))

    def first_timestep(self) -> TimeStep[np.ndarray]:
        return self._collector.first_timestep()

    def rollout(self, published: Published, steps_per_env: int) -> tuple[Collected, float]:
        """Return one rollout, as numpy, and the seconds that the environments have taken so far."""
        self._collector.begin_at(steps_per_env)
        collected = complete(self._collector.collect(published, None))
        return jax.device_get(collected), self._collector.stepping.seconds


class Timed:
    """Host environments that end the process if a step takes longer than `step_timeout` seconds."""

    def __init__(self, host: HostEnvironment, step_timeout: float):
        self.num_envs, self._host, self._step_timeout = host.num_envs, host, step_timeout

    def reset(self) -> TimeStep[np.ndarray]:
        return self._host.reset()

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        # The timer runs in C, and ends the process even if Python is blocked.
        faulthandler.dump_traceback_later(self._step_timeout, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            return self._host.step(actions)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        self._host.close()


class ParameterStore:
    """The newest published parameters in Ray's object store: sent once per machine, not once per actor."""

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
    """A `Collector` whose environments and copy of the policy a Ray actor holds.

    An actor that replaces a lost one begins its rollout with new episodes; the lost rollout is discarded.

    Args:
      recipe: the recipe of the environments.
      remote: the settings of the actors.
      steps: the compiled pieces.
      shelf: the parameters, shared by all groups.
      seed: the seed of the environments and of the run.
      first_env: the index of the first environment among all.
      device: the device to put rollouts on.
    """

    def __init__(
        self,
        recipe: HostRecipe,
        remote: Remote,
        steps: HostSteps,
        shelf: ParameterStore,
        seed: int,
        first_env: int,
        device: jax.Device,
    ):
        self.stepping = Stepping()  # never running: the pool has its own timeout for answers
        self._steps, self._shelf, self._device, self._steps_per_env = steps, shelf, device, 0
        arguments = recipe, steps, seed, remote.step_timeout
        self.host = ActorPool(RolloutActor, arguments, recipe.name, remote, 1, steps.group, seed, first_env)

    def begin_at(self, steps_per_env: int) -> None:
        self._steps_per_env = steps_per_env

    def first_timestep(self) -> TimeStep[np.ndarray]:
        """Return the time step at which the run begins, numpy `[group, ...]`; wait until the actor is ready."""
        self.host.wait()
        self.host.begin("first_timestep", [()])
        return self.host.finish(again="first_timestep")[0]

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collect one rollout. The actor steps its environments, so `stepper` is not used."""
        self.host.begin("rollout", [(self._shelf.put(published), self._steps_per_env)])
        yield
        [(collected, self.stepping.seconds)] = self.host.finish(again="rollout", steps=self._steps.length)
        self._steps_per_env += self._steps.length
        return jax.device_put(collected, self._device)
