"""Connection to a Ray cluster (Moritz et al., 2018, arXiv:1712.05889), its resources, and its actors, without JAX."""

import contextlib
import functools
import importlib.util
import logging
import os
from typing import Any

from jaxrl.core import interrupts
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.parallel.remote.backend import ActorRaisedError, LostActorError

START_TIMEOUT = 120.0  # seconds for an actor to be placed on a machine, import modules and build its environments


def connect(address: str | None = None) -> Any:
    """Connect to a Ray cluster, and return the module `ray`.

    Args:
      address: address of the cluster; None: RAY_ADDRESS if set, otherwise a cluster of only this machine.

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
            interrupts.own()  # again, as Ray installs a handler for SIGTERM
    return ray


def room(ray: Any, cpus_per_run: float, gpus_per_run: float) -> int:
    """Return the number of runs with these CPUs and GPUs that fit on the cluster if it is otherwise idle.

    Raises:
      ConfigError: not even one run fits; Ray would wait forever for more machines.
    """
    shares = {"CPU": cpus_per_run, "GPU": gpus_per_run}
    there = {name: ray.cluster_resources().get(name, 0) for name in shares}
    most = min((int(there[name] // share) for name, share in shares.items() if share), default=1)
    if most < 1:
        raise ConfigError(
            f"cpus_per_run={cpus_per_run:g} and gpus_per_run={gpus_per_run:g}: the Ray cluster has "
            f"{there['CPU']:g} CPUs and {there['GPU']:g} GPUs; use fewer, or add machines"
        )
    return most


def free(ray: Any) -> str:
    """Describe the free resources of the cluster in a sentence."""
    there = ray.available_resources()
    return f"Ray has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs free"


def actor_class(ray: Any, cls: type, cpus: float, gpus: float = 0.0, strategy: Any = "SPREAD") -> Any:
    """Return `cls` as a class of Ray actors, which Ray does not restart and by default spreads over the machines."""
    return ray.remote(cls).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=strategy)


def kill(ray: Any, actor: Any) -> None:
    """Kill an actor; do nothing if it has ended."""
    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)


class RayActors:
    """The `Backend` of actors on a Ray cluster.

    Args:
      address: as for `connect`.
      cpus: CPUs that Ray reserves for each actor.

    Raises:
      MissingExtraError: Ray is not installed.
    """

    kind = "Ray actor"

    def __init__(self, address: str | None, cpus: float):
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("a topology with remote actors", "ray")
        self._address, self._cpus = address, cpus

    @functools.cached_property
    def _ray(self):
        return connect(self._address)

    def start(self, cls: type, arguments: tuple[Any, ...]) -> Any:
        return actor_class(self._ray, cls, self._cpus).remote(*arguments)

    def call(self, actor: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(actor, method).remote(*arguments)

    def answer(self, reference: Any, timeout: float) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout)
        except exceptions.GetTimeoutError:
            raise TimeoutError(f"; {free(self._ray)}") from None
        except exceptions.RayActorError as error:
            how = "could not be reached" if isinstance(error, exceptions.ActorUnavailableError) else "died"
            raise LostActorError(f"{how} ({str(error).splitlines()[0]})", str(error)) from error
        except exceptions.RayTaskError as error:
            raise ActorRaisedError(str(error)) from error.cause
        except exceptions.RayError as error:
            raise LostActorError(f"was lost ({str(error).splitlines()[0]})", str(error)) from error

    def shared(self, value: Any) -> Any:
        return self._ray.put(value)

    def kill(self, actor: Any) -> None:
        kill(self._ray, actor)
