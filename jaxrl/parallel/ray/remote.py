"""Actors on CPU machines for a learner elsewhere, with Ray (Moritz et al., 2018, arXiv:1712.05889).

Ray actors hold host environments, without (`ray.environments`) or with a copy of the policy (`ray.policy`). They are
lost with their process, their machine or its connection; then others replace them, at most `restarts` times.
"""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.core import interrupts, registry
from jaxrl.core.errors import ConfigError, EnvironmentFailedError, MissingExtraError

START_TIMEOUT = 120.0  # seconds for an actor to find its place, import what it needs and make its environments


@dataclasses.dataclass(frozen=True)
class Remote:
    """Ray actors that hold the environments of a run.

    Args:
      actors: number of Ray actors per process; the environments are divided over them.
      policy: whether they also act, each for its own environments: whole rollouts come back, and parameters are sent
        out. Without it they only step, and this process acts.
      restarts: how many failed actors of one group are replaced.
      step_timeout: seconds for one step; an actor that takes longer counts as failed.
      cpus: CPUs that Ray reserves for each actor.
      address: of the Ray cluster; None: RAY_ADDRESS if set, else a cluster on this machine.
    """

    actors: int = 2
    policy: bool = False
    restarts: int = 3
    step_timeout: float = 30.0
    cpus: float = 1.0
    address: str | None = None

    @property
    def patience(self) -> float:
        """Time limit in seconds for giving up an actor and replacing it."""
        return self.step_timeout + START_TIMEOUT

    def problems(self, groups: int, group: int) -> list[str]:
        """Return the errors in these settings for `groups` groups of `group` environments in this process.

        Raises:
          MissingExtraError: Ray is not installed.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("a topology with remote actors", "ray")
        found = []
        if self.actors < 1 or self.actors % groups:
            found.append(f"remote.actors={self.actors} must be a multiple of the {groups} groups (actors * groups)")
        elif group % (self.actors // groups):
            found.append(f"remote.actors={self.actors} do not divide the {groups * group} environments of this process")
        for name, least in (("restarts", self.restarts >= 0), ("step_timeout", self.step_timeout > 0)):
            if not least:
                found.append(f"remote.{name}={getattr(self, name)} is negative or 0")
        if self.cpus < 0:
            found.append(f"remote.cpus={self.cpus} must be at least 0")
        return found


registry.add("topology", Remote)


class ActorPool:
    """A pool of Ray actors of one class, each with its share of a group's environments; lost actors are replaced.

    Args:
      cls: the actors' class; called with the number of environments, their seed, the first one's index and `arguments`.
      arguments: further arguments of `cls`.
      name: the environment's name.
      remote: the settings of the actors.
      actors, num_envs: numbers of this group.
      seed, first_env: the seed and first index of its environments.

    Attributes:
      shares: the environments of each actor, as slices.
      failures: number of actors that were lost and replaced.
    """

    def __init__(
        self,
        cls: type,
        arguments: tuple[Any, ...],
        name: str,
        remote: Remote,
        actors: int,
        num_envs: int,
        seed: int,
        first_env: int,
    ):
        self.name, self.failures = name, 0
        each = num_envs // actors
        self.shares = [slice(start, start + each) for start in range(0, num_envs, each)]
        self._ray = connect(remote.address)
        self._remote, self._arguments, self._seed, self._first_env = remote, arguments, seed, first_env
        self._class = self._ray.remote(cls).options(num_cpus=remote.cpus, scheduling_strategy="SPREAD", max_restarts=0)
        self._waiting: list[int] = []
        self._closed = False
        self._pending: Any = None
        self._actors = [self._started(place, seed) for place in range(actors)]

    def wait(self) -> None:
        """Wait until every actor is ready.

        Raises:
          EnvironmentFailedError: an actor could not be started, or could not make its environments.
        """
        for place, actor in enumerate(self._actors):
            try:
                self._ray.get(actor.__ray_ready__.remote(), timeout=START_TIMEOUT)
            except self._ray.exceptions.GetTimeoutError:
                free = self._ray.available_resources().get("CPU", 0)
                self._stop(place, f"did not start within {START_TIMEOUT:g} s; Ray has {free:g} CPUs free")
            except self._ray.exceptions.RayError as error:
                self._stop(place, f"could not be started:\n{error}", error)

    @property
    def doing(self) -> str:
        # A replacement changes this text, so that the watchdog gives the next actor its full time.
        after = f", after {self.failures} that were lost" if self.failures else ""
        return "; ".join(f"their step, in {self._described(place)}{after}" for place in list(self._waiting))

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Call `method` of each actor with its arguments, without waiting."""
        references = [getattr(actor, method).remote(*mine) for actor, mine in zip(self._actors, arguments, strict=True)]
        self._pending = method, arguments, references, time.monotonic()
        self._waiting = list(range(len(references)))

    def finish(self, *, again: str, steps: int = 1) -> list[Any]:
        """Wait for the method of each actor, and return the results.

        Args:
          again: the method to call in an actor that replaces another; with the same arguments if it is the same method,
            otherwise without.
          steps: number of environment steps that the method takes.

        Raises:
          EnvironmentFailedError: environments raised, or an actor was lost once more than `restarts` allows.
        """
        method, arguments, references, since = self._pending
        until, answers = since + steps * self._remote.step_timeout, []
        for place, reference in enumerate(references):
            answer, lost = self._answer(place, reference, until - time.monotonic())
            while lost:
                actor = self._replaced(place, lost)
                mine = arguments[place] if again == method else ()
                patience = START_TIMEOUT + steps * self._remote.step_timeout
                answer, lost = self._answer(place, getattr(actor, again).remote(*mine), patience)
            answers.append(answer)
            self._waiting.remove(place)
        return answers

    def close(self) -> None:
        """End the actors; may be called twice, and while another thread waits for them."""
        self._closed = True
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)

    def _started(self, place, seed):
        share = self.shares[place]
        return self._class.remote(share.stop - share.start, seed, self._first_env + share.start, *self._arguments)

    def _answer(self, place, reference, patience):
        """Return the answer, and how the actor was lost ("" if it was not)."""
        try:
            return self._ray.get(reference, timeout=max(patience, 0.0)), ""
        except self._ray.exceptions.GetTimeoutError:
            return None, f"did not answer within {max(patience, 0.0):.0f} s"
        except self._ray.exceptions.RayActorError as error:
            cut = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            return None, f"{'could not be reached' if cut else 'died'} ({str(error).splitlines()[0]})"
        except self._ray.exceptions.RayTaskError as error:
            self._stop(place, f"raised:\n{error}", error.cause)

    def _replaced(self, place, how):
        with contextlib.suppress(Exception):
            self._ray.kill(self._actors[place], no_restart=True)
        if self._closed:
            self._stop(place, "was closed")
        if self.failures == self._remote.restarts:
            self._stop(place, f"{how}, and restarts={self._remote.restarts} is used up")
        self.failures += 1
        warnings.warn(
            f"{self._described(place)} {how}; it is replaced ({self.failures} of restarts={self._remote.restarts})",
            RuntimeWarning,
            stacklevel=5,
        )
        # Another seed: the same one would repeat the same episodes.
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self.failures, self._first_env))
        self._actors[place] = self._started(place, int(sequence.generate_state(1)[0] >> np.uint32(1)))
        return self._actors[place]

    def _described(self, place):
        share = self.shares[place]
        first, last = self._first_env + share.start, self._first_env + share.stop - 1
        return f"{self.name}: the Ray actor of environments {first} to {last}"

    def _stop(self, place, what, cause=None):
        self.close()
        index, seed, action = (getattr(cause, name, None) for name in ("index", "seed", "action"))
        raise EnvironmentFailedError(f"{self._described(place)} {what}", index, seed, action) from cause


def connect(address: str | None = None) -> Any:
    """Connect to a Ray cluster, and return the module `ray`.

    Args:
      address: the cluster's address; None: RAY_ADDRESS if set, otherwise a cluster of only this machine.

    Raises:
      MissingExtraError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("Ray", "ray") from None
    if not ray.is_initialized():
        if address or os.environ.get("RAY_ADDRESS"):
            ray.init(address=address, logging_level=logging.ERROR)
        else:
            ray.init(include_dashboard=False, logging_level=logging.ERROR)
        if interrupts.owned():
            interrupts.own()  # Ray installs its own handler for SIGTERM
    return ray


def room(ray: Any, cpus_per_run: float, gpus_per_run: float) -> int:
    """Return the number of runs with these CPUs and GPUs that fit on the cluster if it is otherwise idle.

    Raises:
      ConfigError: not even one fits; Ray would wait forever for more machines.
    """
    shares = {"CPU": cpus_per_run, "GPU": gpus_per_run}
    there = {name: ray.cluster_resources().get(name, 0) for name in shares}
    most = min((int(there[name] // share) for name, share in shares.items() if share), default=1)
    if most < 1:
        raise ConfigError(
            f"cpus_per_run={cpus_per_run:g} and gpus_per_run={gpus_per_run:g}: the Ray cluster has "
            f"{there['CPU']:g} CPUs and {there['GPU']:g} GPUs. Ask for less, or add machines"
        )
    return most
