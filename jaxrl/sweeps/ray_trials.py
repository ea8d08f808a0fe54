"""Concurrent trials of a search, which Ray actors train; the search itself runs in the calling process."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from jaxrl.core.errors import ConfigError, NonFiniteError, PeerError
from jaxrl.parallel.mesh import use_cpu_devices
from jaxrl.parallel.ray.cluster import START_TIMEOUT, actor_class, connect, free, kill, room
from jaxrl.run.compile_cache import keep_compiled_programs
from jaxrl.run.directory.sweep_directory import Trial

if TYPE_CHECKING:
    from jaxrl.sweeps.study import Study, UnderWay

Evaluations = Callable[[dict[str, Any]], Iterator[tuple[float, bool]]]


@dataclasses.dataclass(frozen=True)
class Actors:
    """Settings of the Ray actors of a search.

    Args:
      cpus_per_run, gpus_per_run: resources that Ray reserves for each actor.
      max_concurrent: maximum number of actors at once; None: as many as fit on the cluster.
      address: the cluster's address; None: RAY_ADDRESS if set, otherwise a cluster of only this machine.
    """

    cpus_per_run: float = 1.0
    gpus_per_run: float = 0.0
    max_concurrent: int | None = None
    address: str | None = None

    @property
    def devices(self) -> int:
        """The default number of devices of each actor."""
        return max(1, int(self.gpus_per_run or self.cpus_per_run))

    def problems(self, devices: int | None) -> list[str]:
        """Return one error message for each conflict among these settings and `devices`, the number per actor."""
        found = []
        if self.max_concurrent is None and not self.cpus_per_run and not self.gpus_per_run:
            found.append("cpus_per_run=0 and gpus_per_run=0 do not limit the number of actors; set max_concurrent")
        if self.gpus_per_run and devices is not None and devices > self.devices:
            found.append(f"devices={devices} must be at most {self.devices}, since gpus_per_run={self.gpus_per_run:g}")
        return found


def side_by_side(
    study: "Study",
    evaluations: Evaluations,
    trials: int,
    how: Actors,
    devices: int,
    report: Callable[[int, Trial], None],
) -> None:
    """Run several trials at once until `trials` trials of the study have ended.

    If an actor is lost or raises an unexpected error, its trial counts as failed, and another actor replaces it.

    Args:
      study: the study, which chooses the settings and the trials to prune.
      evaluations: function that trains and evaluates a trial, as in `Study.run`; every actor receives a copy.
      trials: number of trials, including those that ended earlier.
      how: settings of the actors.
      devices: number of JAX devices that each actor splits its CPU into.
      report: function that is called with the number and the record of each trial that ended.

    Raises:
      ConfigError: the cluster has no room for a trial.
      PeerError: no actor could be started.
    """
    ray = connect(how.address)
    cls = actor_class(ray, TrialActor, how.cpus_per_run, how.gpus_per_run)
    # The reference is in a list, so that Ray does not load the value before the actor's code runs: loading arrays
    # initializes JAX.
    arguments = [ray.put(evaluations)], devices, how.gpus_per_run > 0
    actors: list[Any] = []
    pending: dict[Any, tuple[Any, UnderWay | None]] = {}  # actor and trial by request; no trial while it starts

    def start():
        actors.append(cls.remote(*arguments))
        pending[actors[-1].__ray_ready__.remote()] = actors[-1], None

    try:
        for _ in range(min(how.max_concurrent or room(ray, how.cpus_per_run, how.gpus_per_run), trials - study.begun)):
            start()
        while len(study.trials()) < trials:
            reference = _first(ray, pending)
            actor, under_way = pending.pop(reference)
            outcome = _outcome(ray, reference)
            if under_way is not None:
                ended = study.take(under_way, outcome)
                if ended is None:
                    pending[actor.evaluate.remote()] = actor, under_way
                    continue
                report(under_way.number, ended)
            if isinstance(outcome, PeerError):
                kill(ray, actor)
                if under_way is None:
                    if not pending:
                        raise PeerError(f"no process for trials could be started: {outcome.__cause__ or outcome}")
                    what = f"a process for trials could not be started: {outcome}"
                    warnings.warn(what, RuntimeWarning, stacklevel=3)
                elif study.begun < trials:
                    start()
            elif study.begun < trials:
                under_way = study.begin()
                pending[actor.evaluate.remote(under_way.settings)] = actor, under_way
    finally:
        for actor in actors:
            kill(ray, actor)


class TrialActor:
    """A Ray actor that trains one trial after another; each call of `evaluate` trains until the next evaluation.

    Args:
      evaluations: Ray's reference to the function that trains and evaluates a trial, in a list.
      devices: number of JAX devices to split the CPU into.
      gpu: whether the actor has GPUs.
    """

    def __init__(self, evaluations: list[Any], devices: int, gpu: bool):
        import ray

        if not gpu:
            jax.config.update("jax_platforms", "cpu")
            use_cpu_devices(devices)
        keep_compiled_programs()
        self._evaluations: Evaluations = ray.get(evaluations[0])
        self._under_way: Iterator[tuple[float, bool]] = iter(())

    def evaluate(self, settings: dict[str, Any] | None = None) -> tuple[float, bool]:
        """Return the score of the next evaluation and whether it was the last.

        If `settings` is given, a new trial starts.
        """
        if settings is not None:
            self._under_way = self._evaluations(settings)
        return next(self._under_way)


def _first(ray, pending):
    """Return the pending request that completes first.

    Raises:
      ConfigError: no trial is running, and no actor could be started in time.
    """
    trained = any(under_way is not None for _, under_way in pending.values())
    ready, _ = ray.wait(list(pending), timeout=None if trained else START_TIMEOUT)
    if not ready:
        raise ConfigError(
            f"no process for trials started within {START_TIMEOUT:g} s; {free(ray)}; reduce cpus_per_run and "
            "gpus_per_run, or add machines"
        )
    return ready[0]


def _outcome(ray, reference):
    """Return the result of a request, or the error that prevented it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        of_trial = isinstance(error.cause, ConfigError | NonFiniteError)
        return error.cause if of_trial else PeerError(f"the trial's process raised {error.cause!r:.500}")
    except ray.exceptions.RayError as error:
        lost = PeerError(f"the trial's process was lost: {str(error).splitlines()[0]}")
        lost.__cause__ = error
        return lost
