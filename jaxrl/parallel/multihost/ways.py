"""The ways to start a run that a user can choose."""

import dataclasses

from jaxrl.core import presentation


@dataclasses.dataclass(frozen=True)
class Here:
    """A single process, this one, with its threads."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Processes that a cluster started: TPU pods, Slurm, Open MPI and Kubernetes are detected."""


@presentation.finish
@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes of this machine, started, watched and ended together.

    The processor cores that this process may use, and its GPUs, are divided among them in order; more processes than
    cores share them all.

    Args:
      count: number of processes that train.
      restarts: how often all are started again after one failed; they go on from the newest checkpoint of their
        `run_dir`. Wrong settings and signals to this process are no such failures.
      evaluators: 0, or 1: one process more, which evaluates every checkpoint of the run (`launch` says how). It has a
        share of the cores, the last one, as each of the others, and computes on them: GPUs are for those that train.
    """

    count: int = 2
    restarts: int = 0
    evaluators: int = 0


@presentation.finish
@dataclasses.dataclass(frozen=True)
class RayProcesses:
    """Several processes on the machines of a Ray cluster, started, watched and ended together.

    The cluster is the one that RAY_ADDRESS names, otherwise one of only this machine. Ray places the processes on as
    many machines as it can. Each machine needs this program, its packages and the run's folder under the same paths. A
    process has those environment variables of this one whose names begin with JAX, XLA, PYTHONPATH or OMP_NUM_THREADS.

    Args:
      count: number of processes that train.
      restarts: as of `Processes`; where a machine was lost, others take its place.
      cpus: CPUs that Ray keeps for each process.
      gpus: GPUs that Ray gives each process that trains; with 0 it computes on processors.
      evaluators: as of `Processes`; Ray keeps `cpus` for it, too.
    """

    count: int = 2
    restarts: int = 0
    cpus: int = 1
    gpus: int = 0
    evaluators: int = 0


Several = Processes | RayProcesses
Launch = Here | Cluster | Several
