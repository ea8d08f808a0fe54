"""Ways to launch a run, as settings."""

import dataclasses

from jaxrl.core import presentation


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
      restarts: number of times that all processes are started again after one failed, and resume from the newest
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
      gpus: GPUs that Ray reserves for each process that trains; with 0 it computes on CPUs.
      evaluators: as in `Processes`; Ray also reserves `cpus` for the evaluator.
    """

    count: int = 2
    restarts: int = 0
    cpus: int = 1
    gpus: int = 0
    evaluators: int = 0


Several = Processes | RayProcesses
Launch = Here | Cluster | Several
