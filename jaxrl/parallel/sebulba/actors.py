"""Actor threads: each serves one group of host environments, or two in turn, and passes rollouts to a learner.

An error in a thread is reraised, unchanged, when the learner waits for rollouts; environments that take too long are
named then.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl.core import resources
from jaxrl.envs.host.watchdog import GOODBYE, TURN, Stepper, Watch, close_all
from jaxrl.parallel.sebulba.collector import Collected, Collector, Published, Rebuilt, RecyclingCollector
from jaxrl.parallel.sebulba.selection import Selection

_POLL_INTERVAL = 2e-3  # seconds between two polls of the learner, while it learns
_COMPILING = 60.0  # seconds that a compilation may still take at the end


class ParameterServer:
    """The published parameters by version; every group's k-th rollout uses the same version, or each the newest.

    Args:
      period: actors only get versions that are multiples of it, and the first one.
      lag: number of versions that rollouts are behind, exactly, or rounded down to a multiple of `period`; None: the
        newest version when the first group begins the rollout.
      apart: number of rollouts that groups may be apart; None: each group's rollouts use the newest version.
      changed: notified when a version is published.
    """

    def __init__(self, lag: int | None, apart: int | None, changed: threading.Condition | None = None, period: int = 1):
        self._lag, self._apart, self._changed = lag, apart, changed or threading.Condition()
        self._period = period
        self._published: dict[int, Any] = {}
        self._chosen: dict[int, int] = {}  # the version of each rollout
        self._closed = False

    def is_due(self, version: int) -> bool:
        """Return whether actors get this version."""
        return not self._published or version % self._period == 0

    def publish(self, version: int, what: Any) -> None:
        """Publish a version that is due; versions must come in order."""
        with self._changed:
            self._published[version] = what
            # Actors hold the versions that they use; versions that no rollout can use any more are dropped.
            oldest = version if self._lag is None else version - self._lag - self._period + 1
            self._published = {v: x for v, x in self._published.items() if v >= oldest or v in self._chosen.values()}
            self._changed.notify_all()

    def for_rollout(self, number: int, first: int = 0) -> tuple[int, Any] | None:
        """Wait for the parameters of rollout `number`; return their version and the parameters, or None once closed.

        Args:
          number: number of the rollout in the whole run.
          first: number of the first rollout since the actors began.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._choose(number, first) is not None)
            if self._closed:
                return None
            version = self._choose(number, first)
            return version, self._published[version]

    def _choose(self, number, first):
        if number in self._chosen:
            return self._chosen[number]
        if self._lag is None:
            version = max(self._published, default=None)
        else:
            version = max((number - self._lag) // self._period * self._period, first)
        if version is None or version not in self._published:
            return None
        if self._apart is not None:
            self._chosen[number] = version
            self._chosen = {n: v for n, v in self._chosen.items() if n >= number - self._apart}
        return version

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Taken(NamedTuple):
    """A rollout of a batch."""

    group: int  # index of the group that collected it
    version: int  # version of the parameters that acted
    collected: Collected


class ActorThreads:
    """The threads of a run.

    Args:
      threads: for each thread its collectors, one or two.
      devices: for each thread the device it acts on.
      selection: chooses the rollouts of a batch.
      first: number of the first rollout.
      lag, period: as in `ParameterServer`.
      depth: number of rollouts of a group that may wait for the learner.
      step_timeout: seconds that environments have for one step.
    """

    def __init__(
        self,
        threads: list[list[Collector]],
        devices: list[jax.Device],
        *,
        selection: Selection,
        first: int,
        lag: int | None,
        period: int,
        depth: int,
        step_timeout: float,
    ):
        # Notified when a rollout is full or taken, when parameters are published, and at the end.
        self._changed = threading.Condition()
        self._parameters = ParameterServer(lag, depth + 2 if selection.one_version else None, self._changed, period)
        self._selection, self._first, self._depth = selection, first, depth
        self._devices = list(dict.fromkeys(devices))
        self._collectors = [collector for mine in threads for collector in mine]
        self._watches = {collector: Watch(collector.host, step_timeout) for collector in self._collectors}
        self._full: list[deque[Taken]] = [deque() for _ in self._collectors]
        self._collecting: dict[int, int] = {}  # by group: the version with which it acts now
        self._no_room = dict.fromkeys(self._collectors, 0.0)  # seconds that groups waited for room for a rollout
        self._learner_idle = 0.0  # seconds that the learner waited for rollouts
        self._unpublished = dict.fromkeys(self._collectors, 0.0)  # seconds that groups waited for parameters
        self._error: BaseException | None = None
        self._closed = False
        with resources.on("actors"):
            self._steppers = {collector: Stepper() for mine in threads for collector in mine if len(mine) > 1}
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
            for thread in self._threads:
                thread.start()

    # --- the learner's side --------------------------------------------------------------------------------------

    def publish(self, version: int, published: Published) -> None:
        """Publish the parameters for the next rollouts, if this version is due."""
        if not self._parameters.is_due(version):
            return
        # As an array of only that device, which costs no copy if it is there already: the learner's mesh is part of an
        # array's type, so the actors' programs would be compiled a second and a third time.
        copies = {
            device: jax.device_put(published, jax.sharding.SingleDeviceSharding(device)) for device in self._devices
        }
        self._parameters.publish(version, copies)

    def rollouts(self, version: int, learning: Callable[[], bool] = lambda: False) -> list[Taken]:
        """Wait for the next batch and return it, sorted by version, oldest first, and then by group.

        Args:
          version: version of the parameters that will learn from it.
          learning: whether the learner still computes the last update; that time is excluded from its waiting time.

        Raises:
          EnvironmentFailedError: environments took longer than `step_timeout`; the stacks are on standard error.
          Exception: any error that an actor thread raised.
        """
        batch: list[Taken] = []
        while True:
            self._look()  # first, as some groups may fill batches while another hangs or has raised
            busy, began = learning(), time.monotonic()
            with self._changed:
                batch += self._take(batch, version)
                if len(batch) < self._selection.size:
                    self._changed.wait(_POLL_INTERVAL if busy else TURN)
                    batch += self._take(batch, version)
            if not busy:
                self._learner_idle += time.monotonic() - began
            if len(batch) == self._selection.size:
                return sorted(batch, key=lambda taken: taken[:2][::-1])

    def _take(self, batch, version):
        """Return the rollouts of the next batch that are full now; the lock must be held."""
        full = [[taken.version for taken in waiting] for waiting in self._full]
        groups = self._selection.choose(full, self._collecting, [taken.group for taken in batch], version)
        if groups:
            self._changed.notify_all()
        return [self._full[group].popleft() for group in groups]

    def give_back(self, batch: Sequence[Taken], is_learned: Callable[[], bool]) -> None:
        """Let the actors overwrite the rollouts of a batch, once `is_learned` returns True.

        Args:
          batch: a result of `rollouts`.
          is_learned: whether the programs that read the rollouts are done.
        """
        for taken in batch:
            collector = self._collectors[taken.group]
            if isinstance(collector, RecyclingCollector):
                collector.give_back(taken.collected.rollout, is_learned)

    def is_round_ready(self) -> bool:
        """Return whether the next rollout of every group is full, so that `rollouts` does not wait.

        Raises:
          Exception: the errors of `rollouts`.
        """
        self._look()
        return all(self._full)

    def _look(self):
        if self._error is not None:
            raise self._error
        for collector, watch in self._watches.items():
            watch.look(collector.stepping.since)
        if self._closed:
            raise RuntimeError("the actors were closed")

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the beginning, for actors summed over groups, and the current queues."""
        at_hand = sum(map(len, self._full)) + len(self._collecting)
        return {
            "batches_at_hand": at_hand / self._selection.size,
            "queue_depth": sum(min(len(waiting), self._depth) for waiting in self._full) / len(self._full),
            "actor_blocked_seconds": sum(self._no_room.values()) + sum(self._unpublished.values()),
            "learner_blocked_seconds": self._learner_idle,
            "stepping_seconds": sum(c.stepping.seconds for c in self._collectors),
        }

    @property
    def failures(self) -> int:
        """Number of environments' workers or actors that were lost and replaced since the beginning."""
        return sum(c.host.failures for c in self._collectors if isinstance(c.host, Rebuilt))

    def close(self) -> None:
        """End the threads and close the environments, within seconds even if one hangs. May be called twice.

        A thread that compiles a program is waited for: it cannot be stopped, and would crash with the interpreter.
        """
        if self._closed:
            return
        self._closed = True
        self._parameters.close()
        until = time.monotonic() + GOODBYE
        for thread, mine in self._threads.items():
            _wait(thread, mine, until)
        for stepper in self._steppers.values():
            stepper.close(max(0.0, until - time.monotonic()))
        # An environment that is stepping in one thread cannot be closed from another.
        close_all(collector.host for collector in self._collectors if collector.stepping.since is None)

    # --- the actors' side ----------------------------------------------------------------------------------------

    def _serve(self, mine, device):
        try:
            number = self._first
            while self._has_room(mine):
                began = time.monotonic()
                with self._changed:  # atomic: `_collecting` must have the version as soon as it is chosen
                    newest = self._parameters.for_rollout(number, self._first)
                    if newest is None:
                        return
                    version, published = newest
                    self._collecting |= dict.fromkeys(mine, version)
                for collector in mine.values():
                    self._unpublished[collector] += time.monotonic() - began
                for group, collected in self._in_turn(mine, published[device]):
                    with self._changed:
                        del self._collecting[group]
                        self._full[group].append(Taken(group, version, collected))
                        self._changed.notify_all()
                number += 1
        except BaseException as error:  # reraised in the thread that waits for a rollout
            self._error = self._error or error

    def _has_room(self, mine):
        """Wait until the learner has taken enough of the groups' rollouts; return False once closed."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or all(len(self._full[group]) <= self._depth for group in mine))
        for collector in mine.values():
            self._no_room[collector] += time.monotonic() - began
        return not self._closed

    def _in_turn(self, mine, published):
        """Collect one rollout of each group, acting for one while another steps. Yield (group, rollout).

        Stops between two steps once closed.
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
    """Wait for a thread to end: up to `until` if an environment of it is stepping, otherwise while it may compile."""
    while thread.is_alive() and time.monotonic() < until + _COMPILING:
        thread.join(TURN)
        if time.monotonic() > until and any(collector.stepping.since is not None for collector in collectors):
            return
