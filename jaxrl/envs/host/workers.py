"""Batches of Gymnasium and dm_env environments, in this process or in worker processes that are replaced if lost."""

import collections
import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core import resources
from jaxrl.core.errors import ConfigError, EnvironmentFailedError
from jaxrl.envs.host import worker_program
from jaxrl.envs.host.time_steps import environment_seeds
from jaxrl.envs.host.watchdog import warn_if_slow

Command = tuple[str, Any]  # ("reset", seed or None) or ("step", action)
# Observation, reward, terminated, truncated, discount, info.
Outcome = tuple[Any, float, bool, bool, float, tuple[float, ...]]

_POLL_INTERVAL = 0.005  # seconds between two checks of a process that is ending
_LOOK = 1.0  # seconds between two checks of processes that do not answer
CLOSE_TIMEOUT = 2.0  # seconds for all workers together to close their environments


class Batch(NamedTuple):
    """The arguments for making a batch of environments.

    Attributes:
      name: the environment's name, for errors.
      spec: the argument `spec` of `worker_program.made`.
      options: keyword arguments that the environment is made with.
      info: names of the numbers in the info that each step reports.
      num_envs, seed, first_env: as for `HostRecipe.build`.
    """

    name: str
    spec: Any
    options: dict[str, Any]
    info: tuple[str, ...]
    num_envs: int
    seed: int
    first_env: int


class _Numbered:
    """The base class of batches of environments, which stores their seeds and names them in messages.

    Attributes:
      name: the environment's name.
      failures: number of workers that were replaced.
      patience: seconds that it may take to detect a hung worker and start another.
      seeds: the seed of each environment's first reset.
    """

    failures, patience = 0, 0.0

    def __init__(self, batch: Batch):
        self.name, self._batch, self._first_env = batch.name, batch, batch.first_env
        self.seeds = self._new_seeds()

    def _new_seeds(self) -> list[int]:
        return environment_seeds(self._batch.seed, self._batch.num_envs, self.failures, self._first_env)

    @property
    def frames_per_second(self) -> float:
        """The frame rate of videos."""
        return 30.0

    def render(self) -> np.ndarray | None:
        """Return a rendered frame of the first environment, or None."""
        return None

    def _described(self, index: int, command: Command) -> str:
        call, argument = command
        doing = f"step with the action {argument!r}" if call == "step" else "reset"
        return f"{self.name}: environment {index + self._first_env} (seed {self.seeds[index]}) in {doing}"

    def _failed(self, index: int, command: Command, what: str) -> EnvironmentFailedError:
        action = command[1] if command[0] == "step" else None
        text = f"{self._described(index, command)} {what}"
        return EnvironmentFailedError(text, index + self._first_env, self.seeds[index], action)


class InProcess(_Numbered):
    """Environments that are stepped one after another in this process, and not replaced if they fail.

    Attributes:
      environments: the suite's environments.
      spaces: the suite's observation space and action space, and whether to learn from the environments' discounts.
    """

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self._now: tuple[int, Command] | None = None
        self.environments: list[Any] = []
        try:
            for _ in range(batch.num_envs):
                self.environments.append(worker_program.made(batch.spec, batch.options))
            self.spaces = worker_program.spaces(self.environments[0])
        except BaseException:
            self.close()
            raise

    @property
    def doing(self) -> str:
        now = self._now  # read once, because the stepping thread may change it
        return "" if now is None else self._described(*now)

    def run(self, commands: Sequence[Command]) -> tuple[list[Outcome], list[int]]:
        """Run each environment's command; return the outcomes, and an empty list, because no environment is rebuilt.

        Raises:
          EnvironmentFailedError: an environment raised.
        """
        outcomes = []
        for index, (environment, command) in enumerate(zip(self.environments, commands, strict=True)):
            self._now = index, command
            try:
                outcomes.append(worker_program.outcome(environment, self._batch.info, *command))
            except worker_program.RAISED as error:
                raise self._failed(index, command, f"raised {type(error).__name__}: {error}") from error
        self._now = None
        return outcomes, []

    @property
    def frames_per_second(self) -> float:
        """The frame rate of the first environment's videos."""
        return float(self.environments[0].metadata.get("render_fps") or 30.0)

    def render(self) -> np.ndarray | None:
        """Return a rendered frame of the first environment; None if its render mode does not return arrays."""
        frame = self.environments[0].render()
        return frame if isinstance(frame, np.ndarray) else None

    def close(self) -> None:
        """Close the environments; may be called twice."""
        environments, self.environments = self.environments, []
        for environment in environments:
            with contextlib.suppress(Exception):
                environment.close()


class Workers(_Numbered):
    """Environments that are distributed over worker processes.

    A worker that is killed, or that hangs for `step_timeout` seconds in one environment, is replaced together with its
    environments, at most `restarts` times in total. An exception in an environment ends all workers, because it would
    occur again.

    Attributes:
      spaces: the suite's observation space and action space, and whether to learn from the environments' discounts.
    """

    def __init__(self, batch: Batch, *, workers: int, step_timeout: float, start_timeout: float, restarts: int):
        super().__init__(batch)
        self.patience = step_timeout + start_timeout
        self._timeout, self._start_timeout, self._restarts = step_timeout, start_timeout, restarts
        self._waiting = False
        self._commands: Sequence[Command] = ()
        try:
            self._recipe = pickle.dumps((batch.spec, batch.options, batch.info))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{self.name} cannot be sent to a worker process ({error}); use workers=0, or register the environment "
                "with the entry point 'module:Class'"
            ) from error
        self._workers: list[_Worker] = []
        # Also runs when this object is garbage-collected, and when the program ends.
        self._finalizer = weakref.finalize(self, _close, self._workers)
        shares = [list(range(batch.num_envs))[start::workers] for start in range(min(workers, batch.num_envs))]
        try:
            for share in shares:  # one by one, so that `close` ends the started ones if the next fails
                self._workers.append(_Worker(share, self._recipe))
            self.spaces = [self._started(worker) for worker in self._workers][0]
        except BaseException:
            self.close()
            raise

    @property
    def doing(self) -> str:
        pending = [tuple(worker.pending) for worker in list(self._workers)]  # copies: another thread may change them
        return "; ".join(self._described(mine[0], self._commands[mine[0]]) for mine in pending if mine)

    def run(self, commands: Sequence[Command]) -> tuple[list[Outcome], list[int]]:
        """Run each environment's command; return the outcomes, and the indices of environments that were rebuilt.

        The outcome of a rebuilt environment is the result of its first reset.

        Raises:
          EnvironmentFailedError: an environment raised, or more workers were lost than `restarts` allows.
          RuntimeError: an earlier call was interrupted, so that replies are still pending.
        """
        if self._waiting:
            raise RuntimeError(f"{self.name}: an earlier step was interrupted; call close() and build a new one")
        self._waiting, self._commands = True, commands
        outcomes: list[Any] = [None] * len(commands)
        rebuilt: list[int] = []
        for worker, how in self._exchange(self._workers, outcomes).items():
            rebuilt += worker.indices
            self._replace(worker, how, outcomes)
        self._waiting = False
        return outcomes, rebuilt

    def close(self) -> None:
        """End the workers within a bounded time; may be called twice."""
        self._finalizer()

    def _exchange(self, workers: list["_Worker"], outcomes: list[Any]) -> dict["_Worker", str]:
        """Send workers their commands and fill in `outcomes`; return the lost workers, and how each died or hung."""
        lost = {worker: "died" for worker in workers if not worker.ask(self._commands, self._timeout)}
        pending = {worker.connection: worker for worker in workers if worker not in lost}
        while pending:
            patience = min(worker.deadline for worker in pending.values()) - time.monotonic()
            ready = set(wait(list(pending), min(max(patience, 0.0), _LOOK)))
            for connection, worker in [item for item in pending.items() if item[0] in ready]:
                try:
                    index, failure, outcome = connection.recv()
                except (EOFError, OSError):
                    lost[worker] = "died"
                    del pending[connection]
                    continue
                if failure is not None:
                    self._stop(f"raised, in its worker:\n{failure}", index)
                outcomes[index] = outcome
                worker.pending.popleft()
                worker.deadline = time.monotonic() + self._timeout
                if not worker.pending:
                    del pending[connection]
            now = time.monotonic()
            for connection, worker in list(pending.items()):
                # After a worker's death, processes that its environments started may keep its end of the pipe open.
                died = not ready and worker.ended(now)
                # A reply that arrived while others were being read is not late.
                if (died or worker.deadline <= now) and not connection.poll():
                    lost[worker] = "died" if died else f"hung for step_timeout={self._timeout:g} seconds"
                    del pending[connection]
        return lost

    def _replace(self, worker: "_Worker", how: str, outcomes: list[Any]) -> None:
        while True:
            index = worker.pending[0] if worker.pending else worker.indices[0]
            code = worker.kill()
            if how == "died":
                how = f"died ({exit_reason(code)})"
            if self.failures == self._restarts:
                self._stop(f"{how}, after all restarts={self._restarts} were used", index)
            self.failures += 1
            lost = f"{self._described(index, self._commands[index])} {how}"
            warnings.warn(
                f"{lost}; replacing its worker ({self.failures} of restarts={self._restarts})",
                RuntimeWarning,
                stacklevel=4,
            )
            seeds = self._new_seeds()
            for mine in worker.indices:
                self.seeds[mine] = seeds[mine]
            fresh = _Worker(worker.indices, self._recipe)
            self._workers[self._workers.index(worker)] = fresh
            self._started(fresh)
            self._commands = [("reset", seed) for seed in self.seeds]
            again = self._exchange([fresh], outcomes)
            if not again:
                return
            worker, how = fresh, again[fresh]

    def _started(self, worker: "_Worker") -> Any:
        """Wait for the worker to create its environments; return their spaces."""
        try:
            with warn_if_slow(self.name, f"making environments in a worker (start_timeout={self._start_timeout:g})"):
                ready = worker.connection.poll(self._start_timeout)
            if ready:
                failure, spaces = worker.connection.recv()
            else:
                failure = f"it was not ready within start_timeout={self._start_timeout:g} seconds"
        except (EOFError, OSError):
            failure = f"it died ({exit_reason(worker.kill())})"
        if failure is None:
            return spaces
        self.close()
        indices = [index + self._first_env for index in worker.indices]
        raise EnvironmentFailedError(
            f"{self.name}: environments {', '.join(map(str, indices))} could not be made in a worker:\n{failure}",
            indices[0],
        )

    def _stop(self, what: str, index: int) -> None:
        self.close()
        raise self._failed(index, self._commands[index], what)


class WorkerProcess:
    """A process that runs `worker_program`, and ends when this process ends.

    Args:
      part: the part of the run whose cores the process uses, as in `resources.on`.
      module: name of the module whose function `serve` the process calls; "": it serves environments.
      setup: the last argument of that function.
      files: descriptors of further files that the process inherits.

    Attributes:
      connection: the pipe to the process.
    """

    def __init__(self, part: str, module: str, setup: Any, files: Sequence[int] = ()):
        self.connection, theirs = multiprocessing.Pipe()
        held, self._lifeline = os.pipe()
        try:
            # -P leaves the script's folder out of sys.path, because its `gymnasium.py` would shadow the library.
            with resources.on(part):
                self._process = subprocess.Popen(
                    [sys.executable, "-P", worker_program.__file__, str(theirs.fileno()), str(held)],
                    pass_fds=(theirs.fileno(), held, *files),
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # a new group, to kill processes that environments start, too
                    # An environment that uses JAX would otherwise take the learner's accelerator.
                    env={**os.environ, "JAX_PLATFORMS": "cpu"},
                )
            resources.limit_worker(self._process.pid)
        except BaseException:
            self._release()
            raise
        finally:
            theirs.close()
            os.close(held)
        with contextlib.suppress(OSError):
            self.connection.send((sys.path, module, setup))

    def dismiss(self) -> None:
        """Ask the worker to close its environments and end."""
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def ended(self, deadline: float) -> bool:
        """Wait for the process until `deadline`; return whether it ended. Only `kill` reaps it and frees its ID."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # reaped by the system, because the program ignores SIGCHLD
            while self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, how) is None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_INTERVAL)
        return True

    def kill(self) -> int:
        """Kill the process group unless the process was reaped; return its exit status."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._release()
        return code

    def _release(self) -> None:
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class _Worker(WorkerProcess):
    """A worker process with environments, and its pending requests."""

    def __init__(self, indices: list[int], recipe: bytes):
        self.indices, self.pending = indices, collections.deque[int]()
        self.deadline = 0.0  # of its next reply, in seconds of time.monotonic()
        super().__init__("environments", "", (recipe, indices))

    def ask(self, commands: Sequence[Command], timeout: float) -> bool:
        """Send the worker its share of `commands`; return False if it has died."""
        self.pending.extend(self.indices)
        self.deadline = time.monotonic() + timeout
        try:
            self.connection.send([(index, *commands[index]) for index in self.indices])
        except OSError:
            return False
        return True


def _close(workers: list[_Worker]) -> None:
    remaining, workers[:] = list(workers), []
    for worker in remaining:
        worker.dismiss()
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for worker in remaining:
        worker.ended(deadline)
        worker.kill()


def exit_reason(code: int) -> str:
    """Describe how a process ended, from the return code of `subprocess`."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
