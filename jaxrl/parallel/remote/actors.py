"""Actors that run environments in other processes of this machine, or on other machines of a Ray cluster.

Actors either only step host environments (`ActorPool`), or also act in them with a copy of the policy
(`RemoteCollector`): they receive parameters and return rollouts. An actor is lost if its process, its machine or its
connection fails. New actors replace lost ones, at most `restarts` times, and lost steps are masked as for worker
processes.
"""

import dataclasses
import faulthandler
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxrl.core import keys, registry
from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.core.limits import divisors, number_problems
from jaxrl.core.types import HostRecipe, PyTree, Rollout, TimeStep
from jaxrl.envs.host.watchdog import Stepper
from jaxrl.parallel.host_rollout import HostSteps, complete
from jaxrl.parallel.ray.cluster import START_TIMEOUT, RayActors
from jaxrl.parallel.remote.backend import ActorRaisedError, Backend, LostActorError
from jaxrl.parallel.remote.processes import LocalProcesses
from jaxrl.parallel.sebulba.collector import Collected, Published, StepCollector, Stepping


@dataclasses.dataclass(frozen=True)
class Remote:
    """Settings of the actors in other processes that run the environments.

    Args:
      actors: number of actors per learner process; the environments are divided over them.
      policy: whether actors also act in their environments, so that they receive parameters and return whole rollouts.
        If False, actors only step, and this process acts.
      restarts: maximum number of failed actors to replace in each group.
      step_timeout: seconds for one step; an actor that takes longer counts as failed.
      backend: "processes" of this machine, or "ray" for a cluster (Moritz et al., 2018, arXiv:1712.05889).
      cpus: CPUs that Ray reserves for each actor.
      address: address of the Ray cluster; None: RAY_ADDRESS if set, otherwise a cluster of only this machine.
    """

    actors: int = 2
    policy: bool = False
    restarts: int = 3
    step_timeout: float = 30.0
    backend: Literal["processes", "ray"] = "processes"
    cpus: float = 1.0
    address: str | None = None

    def problems(self, groups: int, group: int) -> Iterator[str]:
        """Yield the errors in these settings for `groups` groups of `group` environments in this process.

        Raises:
          MissingExtraError: Ray is not installed.
        """
        if self.backend not in ("processes", "ray"):
            yield f"remote.backend={self.backend!r} must be 'processes' or 'ray'"
        elif self.backend == "processes" and self.address is not None:
            yield f"remote.address={self.address!r} is an address of a Ray cluster; use remote.backend='ray'"
        else:
            self.connect()
        if self.actors < 1 or self.actors % groups:
            yield f"remote.actors={self.actors} must be a multiple of the {groups} groups (actors * groups)"
        elif group % (self.actors // groups):
            yield (
                f"remote.actors={self.actors} does not divide the {groups * group} environments of this process; use "
                f"{groups} times {divisors(group, self.actors // groups)}"
            )
        for name, limits in (("restarts", {"low": 0}), ("step_timeout", {"above": 0}), ("cpus", {"low": 0})):
            yield from number_problems(f"remote.{name}", getattr(self, name), limits)

    def connect(self) -> Backend:
        """Return the backend."""
        return RayActors(self.address, self.cpus) if self.backend == "ray" else LocalProcesses()


registry.add("topology", Remote)


class EnvironmentActor:
    """An actor that steps host environments; it has the methods of a `HostEnvironment`."""

    def __init__(self, num_envs: int, seed: int, first_env: int, recipe: HostRecipe):
        jax.config.update("jax_platforms", "cpu")  # otherwise, environments in JAX would use an accelerator
        self.num_envs, self._host = num_envs, recipe.build(num_envs, seed, first_env)

    def wait(self) -> None:
        """Do nothing; an answer shows that the environments are built."""

    def reset(self) -> TimeStep[np.ndarray]:
        return self._host.reset()

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        return self._host.step(actions)

    def close(self) -> None:
        self._host.close()


class RolloutActor(EnvironmentActor):
    """An actor that steps environments and acts in them.

    If a step of the environments takes longer than `step_timeout`, the actor ends its process. The loss is then noticed
    before the timeout of the whole rollout.
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
        self._step_timeout = step_timeout
        self._collector = StepCollector(steps, self, keys.root_key(run_seed), first_env, jax.devices()[0])

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        # The timer runs in C, and ends the process even if Python is blocked.
        faulthandler.dump_traceback_later(self._step_timeout, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            return super().step(actions)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def first_timestep(self) -> TimeStep[np.ndarray]:
        return self._collector.first_timestep()

    def rollout(self, published: Published, steps_per_env: int) -> tuple[Collected, float]:
        """Return a rollout as numpy arrays, and the total seconds that the environments have taken so far."""
        self._collector.begin_at(steps_per_env)
        collected = complete(self._collector.collect(published, None))
        return jax.device_get(collected), self._collector.stepping.seconds


class ActorPool:
    """A `HostEnvironment` whose environments are divided over actors of one class.

    Args:
      cls: the class of the actors; called with the number of environments, their seed, the index of the first one,
        `recipe` and `arguments`.
      recipe: the recipe of the environments.
      remote: the settings of the actors.
      actors, num_envs: number of actors and of environments in this group.
      seed, first_env: seed of the environments, and index of the first one.
      *arguments: further arguments of `cls`.

    Attributes:
      name: name of the environment.
      failures: number of actors that were lost and replaced.
      patience: additional seconds for a step during which an actor is replaced.
    """

    def __init__(
        self,
        cls: type[EnvironmentActor],
        recipe: HostRecipe,
        remote: Remote,
        actors: int,
        num_envs: int,
        seed: int,
        first_env: int,
        *arguments: Any,
    ):
        self.name, self.num_envs, self.failures = recipe.name, num_envs, 0
        self.patience = remote.step_timeout + START_TIMEOUT
        each = num_envs // actors
        self._shares = [slice(start, start + each) for start in range(0, num_envs, each)]
        self._backend, self._class = remote.connect(), cls
        self._remote, self._arguments, self._seed, self._first_env = remote, (recipe, *arguments), seed, first_env
        self._waiting: list[int] = []
        self._closed = False
        self._pending: Any = None
        self._actors = [self._started(place, seed) for place in range(actors)]

    def wait(self) -> None:
        """Wait until every actor is ready.

        Raises:
          EnvironmentFailedError: an actor could not be started, or could not build its environments.
        """
        for place, reference in enumerate(self._called("wait", [()] * len(self._actors))):
            try:
                self._backend.answer(reference, START_TIMEOUT)
            except TimeoutError as error:
                self._stop(place, f"did not start within {START_TIMEOUT:g} s{error}")
            except (LostActorError, ActorRaisedError) as error:
                self._stop(place, f"could not be started:\n{error}", error.__cause__ or error)

    @property
    def doing(self) -> str:
        # The text changes with each replacement, so that the watchdog allows the new actor its full time.
        after = f" (actors lost so far: {self.failures})" if self.failures else ""
        return "; ".join(f"their step, in {self._described(place)}{after}" for place in list(self._waiting))

    def reset(self) -> TimeStep[np.ndarray]:
        return _joined(self.answers("reset"))

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        self.begin("step", [(jax.tree.map(lambda x, share=share: x[share], actions),) for share in self._shares])
        return _joined(self.finish(again="reset"))

    def answers(self, method: str) -> list[Any]:
        """Call `method` of each actor without arguments, and return the answers."""
        self.begin(method, [()] * len(self._shares))
        return self.finish(again=method)

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Call `method` of each actor with its arguments, without waiting."""
        references = self._called(method, arguments)
        self._pending = method, arguments, references, time.monotonic()
        self._waiting = list(range(len(references)))

    def finish(self, *, again: str, steps: int = 1, patience: float = 0.0) -> list[Any]:
        """Wait for the actors, and return their answers to the calls of `begin`.

        Args:
          again: method to call on the replacement of a lost actor. If it is the method passed to `begin`, it is called
            with the same arguments; any other method is called without arguments.
          steps: number of environment steps that the method takes.
          patience: additional seconds, for example for compiling.

        Raises:
          EnvironmentFailedError: environments raised an error, or more actors were lost than `restarts` allows.
        """
        method, arguments, references, since = self._pending
        until, answers = since + steps * self._remote.step_timeout + patience, []
        for place, reference in enumerate(references):
            answer, lost = self._answer(place, reference, until - time.monotonic())
            while lost:
                actor = self._replaced(place, lost)
                mine = arguments[place] if again == method else ()
                patience = START_TIMEOUT + steps * self._remote.step_timeout
                answer, lost = self._answer(place, self._backend.call(actor, again, mine), patience)
            answers.append(answer)
            self._waiting.remove(place)
        return answers

    def close(self) -> None:
        """End the actors; may be called more than once, even while another thread waits for them."""
        self._closed = True
        for actor in self._actors:
            self._backend.kill(actor)

    def _started(self, place, seed):
        share = self._shares[place]
        own = share.stop - share.start, seed, self._first_env + share.start
        return self._backend.start(self._class, (*own, *self._arguments))

    def _called(self, method, arguments):
        return [self._backend.call(actor, method, mine) for actor, mine in zip(self._actors, arguments, strict=True)]

    def _answer(self, place, reference, patience):
        """Return the actor's answer and ""; if the actor was lost, None and the reason."""
        try:
            return self._backend.answer(reference, max(patience, 0.0)), ""
        except TimeoutError:
            return None, f"did not answer within {max(patience, 0.0):.0f} s"
        except LostActorError as error:
            return None, error.how
        except ActorRaisedError as error:
            self._stop(place, f"raised:\n{error}", error.__cause__)

    def _replaced(self, place, how):
        self._backend.kill(self._actors[place])
        if self._closed:
            self._stop(place, "was closed")
        if self.failures == self._remote.restarts:
            self._stop(place, f"{how}, and restarts={self._remote.restarts} is exhausted")
        self.failures += 1
        warnings.warn(
            f"{self._described(place)} {how}; it is replaced ({self.failures} of restarts={self._remote.restarts})",
            RuntimeWarning,
            stacklevel=4,
        )
        # A different seed, as the same seed would repeat the same episodes.
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self.failures, self._first_env))
        self._actors[place] = self._started(place, int(sequence.generate_state(1)[0] >> np.uint32(1)))
        if self._closed:  # meanwhile
            self._stop(place, "was closed")
        return self._actors[place]

    def _described(self, place):
        share = self._shares[place]
        first, last = self._first_env + share.start, self._first_env + share.stop - 1
        return f"{self.name}: the {self._backend.kind} of environments {first} to {last}"

    def _stop(self, place, what, cause=None):
        self.close()
        index, seed, action = (getattr(cause, name, None) for name in ("index", "seed", "action"))
        raise EnvironmentFailedError(f"{self._described(place)} {what}", index, seed, action) from cause


def _joined(parts: Sequence[TimeStep[np.ndarray]]) -> TimeStep[np.ndarray]:
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


class ParameterStore:
    """The newest published parameters. Ray's object store sends them once per machine, not once per actor."""

    def __init__(self, remote: Remote):
        self._backend, self._lock = remote.connect(), threading.Lock()
        self._version, self._reference = -1, None

    def put(self, published: Published) -> Any:
        with self._lock:
            version = int(published.version)
            if version != self._version:
                self._version, self._reference = version, self._backend.shared(jax.device_get(published))
            return self._reference


class RemoteCollector:
    """A `Collector` whose environments and policy run in another process.

    If the actor is lost, its rollout is discarded, and the new actor begins a rollout with new episodes.

    Args:
      recipe: the recipe of the environments.
      remote: the settings of the actors.
      steps: the compiled functions.
      store: the parameters, shared by all groups.
      seed: the seed of the environments and of the run.
      first_env: index of this group's first environment among all environments.
      device: the device to put rollouts on.
    """

    def __init__(
        self,
        recipe: HostRecipe,
        remote: Remote,
        steps: HostSteps,
        store: ParameterStore,
        seed: int,
        first_env: int,
        device: jax.Device,
    ):
        self.stepping = Stepping()  # its clock is never started, as the pool has a timeout for answers
        self._steps, self._store, self._device, self._steps_per_env = steps, store, device, 0
        self._compiled = False  # whether the actor has compiled its programs, in its first rollout
        own = steps, seed, remote.step_timeout
        self.host = ActorPool(RolloutActor, recipe, remote, 1, steps.group, seed, first_env, *own)

    def begin_at(self, steps_per_env: int) -> None:
        self._steps_per_env = steps_per_env

    def first_timestep(self) -> TimeStep[np.ndarray]:
        """Wait until the actor is ready, and return the time step at which the run begins, numpy `[group, ...]`."""
        self.host.wait()
        return self.host.answers("first_timestep")[0]

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """Collect one rollout. The actor steps its environments, so `stepper` is not used."""
        self.host.begin("rollout", [(self._store.put(published), self._steps_per_env)])
        yield
        patience, self._compiled = 0.0 if self._compiled else START_TIMEOUT, True
        finished = self.host.finish(again="rollout", steps=self._steps.length, patience=patience)
        [(collected, self.stepping.seconds)] = finished
        self._steps_per_env += self._steps.length
        return jax.device_put(collected, self._device)

    def give_back(self, rollout: Rollout, is_learned: Callable[[], bool]) -> None:
        """Do nothing, as every rollout arrives in new memory."""
