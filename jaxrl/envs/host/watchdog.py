"""Threads with time limits for host environments that may block.

Code of other libraries can block in ways that signals do not interrupt. So it runs in a separate thread, which is
left running if the code does not return.
"""

import contextlib
import faulthandler
import functools
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np

from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.core.types import HostEnvironment, HostRecipe, PyTree, TimeStep

STEP_TIMEOUT = 60.0  # seconds
TURN = 0.2  # seconds between two checks
WARN_AFTER = 20.0  # seconds of waiting before a warning
GOODBYE = 3.0  # seconds within which threads must end
_LAST_STEP = 3.0  # seconds that a step may take after the run was asked to end

_ending_since: float | None = None  # in seconds of time.monotonic()


def ask_to_end(ending: bool) -> None:
    """Record whether the run was asked to end, for example by a signal, so that a step may only take a few seconds."""
    global _ending_since
    _ending_since = (_ending_since or time.monotonic()) if ending else None


class Watch:
    """A watchdog that measures how long environments have made no progress.

    Environments that report their current work (`WatchedEnvironment.doing`) make progress when the report changes: if
    many environments are stepped in turn, each of them may take `step_timeout`.

    Args:
      host: the host environments, or the recipe that builds them.
      step_timeout: seconds without progress before `look` raises an error. If `host.patience` exists, it is added, as
        the time that the environments need to replace their workers.
      what: a description of the environments' work, for environments that do not report it.
    """

    def __init__(self, host: Any, step_timeout: float, what: str = "their step"):
        self._host, self._step_timeout, self._what = host, step_timeout, what
        self._seen: tuple[float | None, str] = None, ""
        self._moved, self._warned = 0.0, False

    def look(self, since: float | None) -> None:
        """Check that the environments make progress; warn once after `WARN_AFTER` seconds of the same work.

        Args:
          since: when the environments began to work, in seconds of `time.monotonic()`; None if they are idle.

        Raises:
          EnvironmentFailedError: there was no progress for too long; the stacks of all threads are written to standard
            error.
        """
        if since is None:
            return
        doing, now = getattr(self._host, "doing", ""), time.monotonic()
        if (since, doing) != self._seen:
            self._moved = now if since == self._seen[0] else since
            self._seen, self._warned = (since, doing), False
        waited, patience = now - self._moved, getattr(self._host, "patience", 0.0)
        name = getattr(self._host, "name", type(self._host).__name__)
        at = f"environments of {name} have been busy with {doing or self._what} for {waited:.0f} s"
        if _ending_since is not None and now - max(_ending_since, self._moved) > _LAST_STEP:
            limit = f"and the run was asked to end {now - _ending_since:.0f} s ago"
        elif waited > self._step_timeout + patience:
            limit = f"step_timeout is {self._step_timeout:g} s"
            limit += f", plus {patience:g} s to replace lost environments" if patience else ""
        else:
            if waited > WARN_AFTER and not self._warned:
                self._warned = True
                limit = "" if self._step_timeout == float("inf") else f"; step_timeout is {self._step_timeout:g} s"
                warnings.warn(f"{at}{limit}", RuntimeWarning, stacklevel=2)
            return
        if sys.__stderr__ is not None:  # None in programs without a console
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        raise EnvironmentFailedError(
            f"{at}, {limit}; the stacks of all threads are on standard error. The environments' thread "
            "remains until they return or this process ends"
        )


@contextlib.contextmanager
def warn_if_slow(name: str, what: str) -> Generator[None]:
    """Warn if the `with` block takes longer than `WARN_AFTER` seconds, without interrupting it.

    Args:
      name: the environment's name.
      what: a description of the block, for the message.
    """
    text = f"{name}: {what} has taken {WARN_AFTER:g} s so far; still waiting"
    timer = threading.Timer(WARN_AFTER, lambda: warnings.warn(text, RuntimeWarning, stacklevel=2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Stepper:
    """A thread that runs one function at a time, so that the caller can do something else in the meantime."""

    def __init__(self):
        # `SimpleQueue` is implemented in C; a slower queue would matter, because a step may take microseconds.
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], Any]) -> None:
        """Queue `work` to run after all work that was queued before."""
        self._work.put(work)

    def run(self, work: Callable[[], Any], watch: Watch) -> Any:
        """Run `work` and return its result; raise its error, or the error of `watch`."""
        self.begin(work)
        return self.wait(watch)

    def wait(self, watch: Watch | None = None) -> Any:
        """Wait for the queued work and return its result; raise its error, or the error of `watch`."""
        since = time.monotonic()
        while True:
            try:
                result, error = self._done.get(timeout=None if watch is None else TURN)
                break
            except queue.Empty:
                if watch is not None:
                    watch.look(since)
        if error is not None:
            raise error
        return result

    def _run(self):
        while (work := self._work.get()) is not None:
            try:
                self._done.put((work(), None))
            except BaseException as error:  # `wait` raises it
                self._done.put((None, error))

    def close(self, patience: float) -> None:
        """End the thread after its current work, waiting at most `patience` seconds."""
        self._work.put(None)
        self._thread.join(patience)

    @property
    def failure(self) -> str:
        """A description of the last work's failure, or ""; read it once, after `close`, instead of calling `wait`."""
        if self._thread.is_alive():
            return f"has not returned within {GOODBYE:g} s; its thread is left running"
        _, error = self._done.get()
        return "" if error is None else f"raised {error!r}; the error is ignored"


def close_all(hosts: Iterable[Any], what: str = "") -> None:
    """Close environments in separate threads, within `GOODBYE` seconds; warn about those that hang or raise.

    Args:
      hosts: objects with a method `close`.
      what: a name for all of them in the warning; by default each object's name.
    """
    closing = [(host, Stepper()) for host in hosts]
    for host, stepper in closing:
        stepper.begin(host.close)
    until = time.monotonic() + GOODBYE
    for host, stepper in closing:
        stepper.close(max(0.0, until - time.monotonic()))
        if failure := stepper.failure:
            name = what or getattr(host, "name", type(host).__name__)
            warnings.warn(f"{name}: close() {failure}", RuntimeWarning, stacklevel=3)


class Supervised:
    """A wrapper that runs host environments in a separate thread, with a time limit on each reset and step.

    The environments are also built and closed in that thread, because some only work in the thread that made them.

    Args:
      recipe, num_envs, seed, first_env: as for `HostRecipe.build`.
      step_timeout: as for `Watch`.
    """

    def __init__(self, recipe: HostRecipe, num_envs: int, seed: int, first_env: int = 0, *, step_timeout: float):
        self._stepper = Stepper()
        try:
            build = functools.partial(recipe.build, num_envs, seed, first_env)
            self._host: HostEnvironment = self._stepper.run(build, Watch(recipe, float("inf"), "their construction"))
        except BaseException:
            self._stepper.close(GOODBYE)
            raise
        self._watch = Watch(self._host, step_timeout)

    def reset(self) -> TimeStep[np.ndarray]:
        """Reset the environments within the time limit.

        Raises:
          EnvironmentFailedError: the reset takes too long. Errors of the environments are raised unchanged.
        """
        return self._stepper.run(self._host.reset, self._watch)

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        """Step the environments within the time limit.

        Raises:
          EnvironmentFailedError: the step takes too long. Errors of the environments are raised unchanged.
        """
        return self._stepper.run(functools.partial(self._host.step, actions), self._watch)

    def close(self) -> None:
        """Close the environments, waiting at most `GOODBYE` seconds; hung ones are closed when their step returns."""
        self._stepper.begin(self._host.close)
        self._stepper.close(GOODBYE)


def first_call(work: Callable[[], Any], host: Any, step_timeout: float) -> Any:
    """Run `work`, which steps or resets `host`, in a separate thread with a time limit, and return its result.

    If `work` fails, `host` is closed.

    Raises:
      EnvironmentFailedError: `work` takes too long. Errors of `work` are raised unchanged.
    """
    stepper = Stepper()
    try:
        return stepper.run(work, Watch(host, step_timeout))
    except BaseException:
        stepper.begin(host.close)
        raise
    finally:
        stepper.close(GOODBYE)
