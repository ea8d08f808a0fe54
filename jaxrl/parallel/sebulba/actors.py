"""Actor threads, each of which collects rollouts in one or two groups of host environments for a learner.

While the learner waits for rollouts, it reraises errors of the actor threads unchanged, and raises an error if a step
takes too long.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxrl.core import resources
from jaxrl.core.host_types import WatchedEnvironment
from jaxrl.envs.host.watchdog import GOODBYE, TURN, Stepper, Watch, close_all
from jaxrl.parallel.remote.actors import ActorPool
from jaxrl.parallel.sebulba.collector import Collected, Collector, Published
from jaxrl.parallel.sebulba.selection import Selection

_POLL_INTERVAL = 2e-3  # seconds between two polls of the learner, while it learns
_COMPILING = 60.0  # maximum seconds to wait for a compilation at the end


class Progress(NamedTuple):
    """The number of updates and iterations of a learner so far."""

    updates: int
    iterations: int


class Taken(NamedTuple):
    """A rollout that was taken from a queue for a batch."""

    version: int  # version of the parameters used for acting
    group: int  # index of the group that collected it
    progress: Progress  # progress of the learner when it published this version
    collected: Collected


class ActorThreads:
    """The actor threads of a run.

    Args:
      threads: the collectors of each thread, one or two.
      devices: the device that each thread acts on.
      selection: the rule that selects the parameters of each rollout and the rollouts of a batch.
      first: number of the first rollout.
      step_timeout: time limit in seconds for one step of the environments.
    """

    def __init__(
        self,
        threads: list[list[Collector]],
        devices: list[jax.Device],
        selection: Selection,
        first: int,
        step_timeout: float,
    ):
        # Notified when a rollout is full or taken, when parameters are published, and at the end.
        self._changed = threading.Condition()
        self._selection, self._first, self._closed = selection, first, False
        self._published: dict[int, tuple[dict[jax.Device, Published], Progress]] = {}  # by version
        self._versions: dict[int, int] = {}  # version by rollout number, if all groups must use the same version
        self._devices = list(dict.fromkeys(devices))
        self._collectors = [collector for mine in threads for collector in mine]
        self._watches = {collector: Watch(collector.host, step_timeout) for collector in self._collectors}
        self._full: list[deque[Taken]] = [deque() for _ in self._collectors]
        self._collecting: dict[int, int] = {}  # by group: the version that it is acting with
        self._blocked = dict.fromkeys(self._collectors, 0.0)  # seconds that groups waited for room or parameters
        self._learner_idle = 0.0  # seconds that the learner waited for rollouts
        self._error: BaseException | None = None
        numbers = iter(range(len(self._collectors)))
        self._threads = {
            threading.Thread(
                target=self._serve,
                args=({next(numbers): collector for collector in mine}, devices[number]),
                name=f"actor-{number}",
                daemon=True,
            ): mine
            for number, mine in enumerate(threads)
        }
        with resources.on("actors"):
            self._steppers = {collector: Stepper() for mine in threads for collector in mine if len(mine) > 1}
            for thread in self._threads:
                thread.start()

    # --- the learner's side --------------------------------------------------------------------------------------

    def publish(self, version: int, published: Published, progress: Progress) -> None:
        """Publish the parameters for the next rollouts, with the learner's progress; versions must be ascending."""
        if self._published and version % self._selection.period:
            return
        # Convert to arrays of a single device, without a copy if they are already on that device. The types of arrays
        # on the learner's mesh include the mesh, so the actors' programs would be compiled again for them.
        copies = {
            device: jax.device_put(published, jax.sharding.SingleDeviceSharding(device)) for device in self._devices
        }
        with self._changed:
            # Actors keep references to the versions that they use; versions that no later rollout can use are removed.
            lag, period = self._selection.lag, self._selection.period
            oldest = version if lag is None else version - lag - period + 1
            self._published[version] = copies, progress
            self._published = {v: x for v, x in self._published.items() if v >= oldest or v in self._versions.values()}
            self._changed.notify_all()

    def rollouts(self, version: int, learning: Callable[[], bool] = lambda: False) -> list[Taken]:
        """Wait for the next batch and return it, sorted by version, oldest first, and then by group.

        Args:
          version: version of the parameters that will learn from the batch.
          learning: function that returns whether the learner is still computing the last update; the time of that
            computation is excluded from the learner's waiting time.

        Raises:
          EnvironmentFailedError: environments took longer than `step_timeout`; stack traces are on standard error.
          Exception: any error that an actor thread raised.
        """
        while True:
            self._look()  # first, as some groups may fill batches while another one hangs or has raised
            busy, began = learning(), time.monotonic()
            with self._changed:
                groups = self._changed.wait_for(lambda: self._next_batch(version), _POLL_INTERVAL if busy else TURN)
                batch = [self._full[group].popleft() for group in groups]
                if batch:
                    self._changed.notify_all()
            if not busy:
                self._learner_idle += time.monotonic() - began
            if batch:
                return sorted(batch, key=lambda taken: taken[:2])

    def _next_batch(self, version):
        """Return the groups whose rollouts form the next batch, or [] if it is incomplete; the lock must be held."""
        full = [[taken.version for taken in waiting] for waiting in self._full]
        return self._selection.choose(full, self._collecting, version)

    def give_back(self, batch: Sequence[Taken], is_learned: Callable[[], bool]) -> None:
        """Let the actors overwrite the rollouts of a batch after `is_learned` returns True.

        Args:
          batch: a result of `rollouts`.
          is_learned: function that returns whether the programs that read the rollouts are done.
        """
        for taken in batch:
            self._collectors[taken.group].give_back(taken.collected.rollout, is_learned)

    def is_round_ready(self, version: int) -> bool:
        """Return whether the next batch is complete, so that `rollouts(version)` would not wait.

        Raises:
          Exception: as in `rollouts`.
        """
        self._look()
        with self._changed:
            return bool(self._next_batch(version))

    def _look(self):
        if self._error is not None:
            raise self._error
        for collector, watch in self._watches.items():
            watch.look(collector.stepping.since)
        if self._closed:
            raise RuntimeError("the actors were closed")

    def metrics(self) -> dict[str, float]:
        """Return total times so far in seconds, for actors summed over groups, and the current queue lengths."""
        at_hand, queue = sum(map(len, self._full)) + len(self._collecting), self._selection.queue
        return {
            "batches_at_hand": at_hand / self._selection.size,
            "queue_depth": sum(min(len(waiting), queue) for waiting in self._full) / len(self._full),
            "actor_blocked_seconds": sum(self._blocked.values()),
            "learner_blocked_seconds": self._learner_idle,
            "stepping_seconds": sum(c.stepping.seconds for c in self._collectors),
        }

    @property
    def failures(self) -> int:
        """The total number of worker processes or remote actors that were lost and replaced."""
        return sum(c.host.failures for c in self._collectors if isinstance(c.host, WatchedEnvironment))

    def close(self) -> None:
        """End the threads and close the environments, within seconds even if one hangs; may be called more than once.

        This waits for threads that compile a program: they cannot be stopped, and would crash at the interpreter's end.
        """
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for collector in self._collectors:
            if isinstance(collector.host, ActorPool):  # ends the calls that its thread waits for
                collector.host.close()
        until = time.monotonic() + GOODBYE
        for thread, mine in self._threads.items():
            _wait(thread, mine, until)
        for stepper in self._steppers.values():
            stepper.close(max(0.0, until - time.monotonic()))
        # An environment that is stepping in one thread cannot be closed from another one.
        close_all(collector.host for collector in self._collectors if collector.stepping.since is None)

    # --- the actors' side ----------------------------------------------------------------------------------------

    def _serve(self, mine, device):
        try:
            number = self._first
            while (begun := self._begun(mine, number)) is not None:
                version, copies, progress = begun
                for group, collected in self._in_turn(mine, copies[device]):
                    with self._changed:
                        del self._collecting[group]
                        self._full[group].append(Taken(version, group, progress, collected))
                        self._changed.notify_all()
                number += 1
        except BaseException as error:  # reraised in the thread that waits for a rollout
            self._error = self._error or error

    def _begun(self, mine, number):
        """Wait until the queues have room for rollout `number` of these groups, and its parameters are published.

        Returns:
          The version, the parameters by device, and the learner's progress when it published them; None if closed.
        """
        began, begun = time.monotonic(), None
        with self._changed:  # atomic, as `_collecting` must contain the version as soon as it is chosen
            self._changed.wait_for(lambda: self._closed or self._version_for(mine, number) is not None)
            if not self._closed:
                version = self._version_for(mine, number)
                self._collecting |= dict.fromkeys(mine, version)
                begun = version, *self._published[version]
        for collector in mine.values():
            self._blocked[collector] += time.monotonic() - began
        return begun

    def _version_for(self, mine, number):
        """Return the version for rollout `number`, or None if it is not published yet or the queue is full."""
        queue = self._selection.queue
        if any(len(self._full[group]) > queue for group in mine):
            return None
        if number in self._versions:
            return self._versions[number]
        version = self._selection.version_for(number, self._first, self._published)
        if version is not None and self._selection.max_lag is None:
            apart = queue + 2  # maximum difference between the numbers of two groups' rollouts
            self._versions = {n: v for n, v in self._versions.items() if n >= number - apart} | {number: version}
        return version

    def _in_turn(self, mine, published):
        """Collect one rollout of each group, acting for one group while the other one steps; yield (group, rollout).

        If the actors are closed, stop between two steps.
        """
        at_work = [(group, one.collect(published, self._steppers.get(one))) for group, one in mine.items()]
        while at_work and not self._closed:
            still = []
            for group, rollout in at_work:
                try:
                    next(rollout)
                    still.append((group, rollout))
                except StopIteration as end:
                    yield group, end.value
            at_work = still


def _wait(thread, collectors, until):
    """Wait for a thread to end, until the time `until`.

    If no environment is stepping at that time, the thread may be compiling, so wait up to `_COMPILING` more seconds.
    """
    while thread.is_alive() and time.monotonic() < until + _COMPILING:
        thread.join(TURN)
        if time.monotonic() > until and any(collector.stepping.since is not None for collector in collectors):
            return
