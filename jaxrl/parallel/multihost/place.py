"""The ways to launch a run, and the place of a launched process in its run.

Everything in this module can be used before JAX is imported.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from typing import Any, Literal

from jaxrl.core import interrupts, presentation
from jaxrl.core.errors import ConfigError

VARIABLE = "JAXRL_LAUNCHED"  # the environment variable with the place of a started process


@dataclasses.dataclass(frozen=True)
class Here:
    """Only this process, with its threads."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Processes that were started by a cluster: TPU pods, Slurm, Open MPI and Kubernetes are detected."""


@presentation.finish
@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes on this machine that are started, watched and ended together.

    The cores and GPUs that this process may use are divided among them in order. If there are more processes than
    cores, all share the cores.

    Args:
      count: number of processes that train.
      restarts: number of times to start all processes again after one of them failed; they resume from the newest
        checkpoint in their `run_dir`. Invalid settings and signals to this process do not lead to a restart.
      evaluators: 0 or 1: an additional process that evaluates every checkpoint of the run (see `launch`). It has the
        last share of the cores and computes on CPUs; GPUs are for the processes that train.
    """

    count: int = 2
    restarts: int = 0
    evaluators: int = 0


@presentation.finish
@dataclasses.dataclass(frozen=True)
class RayProcesses:
    """Several processes on the machines of a Ray cluster that are started, watched and ended together.

    The cluster is the one at RAY_ADDRESS if that is set, otherwise a cluster of only this machine. Ray places the
    processes on as many machines as possible. Each machine needs this program, its packages and the run's folder under
    the same paths. Processes inherit the environment variables of this process whose names begin with JAX, XLA,
    PYTHONPATH or OMP_NUM_THREADS.

    Args:
      count: number of processes that train.
      restarts: as in `Processes`; other machines replace a machine that was lost.
      cpus: CPUs that Ray reserves for each process.
      gpus: GPUs that Ray reserves for each process that trains; with 0, these processes compute on CPUs.
      evaluators: as in `Processes`; Ray also reserves `cpus` for the evaluator.
    """

    count: int = 2
    restarts: int = 0
    cpus: int = 1
    gpus: int = 0
    evaluators: int = 0


Several = Processes | RayProcesses
Launch = Here | Cluster | Several


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in its run: its index, the number of processes, and the coordinator's address.

    Attributes:
      coordinator, num_processes, process_id: the arguments of `distributed.initialize`; evaluators are not counted, and
        their indices follow those of the learners.
      evaluators: number of evaluators of the run.
      start: random text, which is the same for all processes that are started together.
    """

    coordinator: str
    num_processes: int
    process_id: int
    evaluators: int = 0
    start: str = ""

    @property
    def role(self) -> Literal["learner", "evaluator"]:
        return "learner" if self.process_id < self.num_processes else "evaluator"


_own: list[Place] = []  # the place of this process; empty until it is read
_learners_ended: list[float] = []  # times at which the parent notified this evaluator that the learners have ended


def own_place() -> Place | None:
    """Return the place of this process, or None if `run_processes` did not start it."""
    if not _own and (text := os.environ.pop(VARIABLE, None)) is not None:  # removed, so that children do not inherit it
        place = json.loads(text)
        pipe = place.pop("pipe")
        threading.Thread(target=_hear_parent, args=(pipe,), name="launched", daemon=True).start()
        _own.append(Place(**place))
        interrupts.unblock()
    return _own[0] if _own else None


def is_evaluator() -> bool:
    """Return whether this process was started to evaluate the checkpoints of the learners."""
    place = own_place()
    return place is not None and place.role == "evaluator"


def evaluator_problems(run_dir: Any) -> list[str]:
    """Return one line per reason why an evaluator that was launched with this run could not follow it.

    Args:
      run_dir: the run directory of the training.
    """
    place = own_place()
    if place is None or not place.evaluators or run_dir is not None:
        return []
    return ["run_dir=None: the evaluator launched with this run needs the checkpoints; pass run_dir="]


def check_no_evaluator(what: str) -> None:
    """Raise an error in all processes if there is an evaluator, which could not follow `what` and would repeat it.

    Args:
      what: the name of the operation.

    Raises:
      ConfigError: this program was launched with an evaluator.
    """
    place = own_place()
    if place is not None and place.evaluators:
        raise ConfigError(f"{what} does not support evaluators; launch this program with evaluators=0")


def have_learners_ended(seconds: float = 0.0) -> bool:
    """Return whether this is an evaluator, and all learners ended without error at least `seconds` ago."""
    return bool(_learners_ended) and time.monotonic() - _learners_ended[0] >= seconds


def _hear_parent(pipe):
    """Record the end of the learners, and send SIGTERM to this process when its parent has ended.

    The parent reports the end of the learners by a byte in the pipe. The kernel closes the pipe when the parent ends.
    """
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            _learners_ended.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)
