"""Actor threads: each serves one group of host environments, or two in turn, and hands rollouts to a learner.

What may go wrong in them is told to whoever waits for a rollout: an error is raised there as it was, and environments
that take too long are named.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.buffers.limiter import HostLimiter, queue
from jaxrl.parallel.collector import Collected, Collector, Published
from jaxrl.watchdog import GOODBYE, TURN, Stepper, Watch

_GLANCE = 2e-3  # seconds between two looks at the learner, while it learns


class Bulletin:
    """What is published, by version; every group's k-th rollout is acted with the same one.

    Args:
      lag: how many versions behind, exactly; None: whatever is newest when the first group begins the rollout.
      apart: how many rollouts the groups may be apart.
    """

    def __init__(self, lag: int | None, apart: int):
        self._lag, self._apart, self._changed = lag, apart, threading.Condition()
        self._published: dict[int, Any] = {}
        self._chosen: dict[int, int] = {}  # the version of each rollout
        self._closed = False

    def publish(self, version: int, what: Any) -> None:
        """Versions come in order."""
        with self._changed:
            self._published[version] = what
            # What a rollout was given is held by its actor; what none can be given any more goes.
            oldest = version if self._lag is None else version - self._lag
            self._published = {v: x for v, x in self._published.items() if v >= oldest or v in self._chosen.values()}
            self._changed.notify_all()

    def for_rollout(self, number: int, first: int = 0) -> Any | None:
        """What the rollout `number` is acted with, as soon as it is there; None once closed.

        Args:
          number: counted over the whole run.
          first: the number of the first one since the actors began.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._choose(number, first) is not None)
            return None if self._closed else self._published[self._chosen[number]]

    def version_of(self, number: int) -> int:
        """The version that a rollout was acted with, one of the last few."""
        with self._changed:
            return self._chosen[number]

    def _choose(self, number, first):
        if number not in self._chosen:
            wanted = max(self._published, default=None) if self._lag is None else max(number - self._lag, first)
            if wanted is None or wanted not in self._published:
                return None
            self._chosen[number] = wanted
            self._chosen = {n: v for n, v in self._chosen.items() if n >= number - self._apart}
        return self._chosen[number]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ActorThreads:
    """The threads of a run.

    Args:
      threads: for each thread its collectors, one or two.
      devices: for each thread the device it acts on.
      first: the number of the first rollout.
      lag: as of `Bulletin`.
      depth: how many rollouts of a group may wait for the learner.
      step_timeout: seconds that environments have for one step.
    """

    def __init__(
        self,
        threads: list[list[Collector]],
        devices: list[jax.Device],
        *,
        first: int,
        lag: int | None,
        depth: int,
        step_timeout: float,
    ):
        self._bulletin, self._first = Bulletin(lag, depth + 2), first
        self._devices = list(dict.fromkeys(devices))
        self._collectors = [collector for mine in threads for collector in mine]
        self._watches = {collector: Watch(collector.host, step_timeout) for collector in self._collectors}
        self._waiting: dict[Collector, list[Collected]] = {collector: [] for collector in self._collectors}
        self._slots = {collector: HostLimiter(queue(depth)) for collector in self._collectors}
        self._learner_idle = 0.0  # seconds that the learner had nothing to learn from
        self._unpublished = dict.fromkeys(self._collectors, 0.0)  # seconds that groups had nothing to act with
        self._error: BaseException | None = None
        self._closed = False
        self._steppers = {collector: Stepper() for mine in threads for collector in mine if len(mine) > 1}
        self._threads = []
        for number, mine in enumerate(threads):
            step = {c: _beside(self._steppers[c], c) if len(mine) > 1 else c.step_now for c in mine}
            self._threads.append(
                threading.Thread(
                    target=self._serve, args=(mine, step, devices[number]), name=f"actor-{number}", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    # --- the learner's side --------------------------------------------------------------------------------------

    def publish(self, version: int, published: Published) -> None:
        """Makes `published` what the next rollouts are acted with."""
        there = jax.tree.leaves(published.actor)[0].devices()
        copies = {
            device: published if there == {device} else jax.device_put(published, device) for device in self._devices
        }
        self._bulletin.publish(version, copies)

    def rollouts(self, number: int, learning: Callable[[], bool] = lambda: False) -> tuple[list[Collected], int]:
        """The rollout `number` of every group, the next one, in the order of their environments; waits for them.

        Args:
          number: as counted by `publish`.
          learning: whether the learner is still at what it was given; then it does not wait, whoever asks for more.

        Returns:
          The rollouts, and the version that they were acted with.

        Raises:
          EnvironmentFailedError: environments took longer than `step_timeout`; the stacks are on standard error.
          Exception: what an actor thread raised.
        """
        next_ = [self._next(collector, learning) for collector in self._collectors]
        return next_, self._bulletin.version_of(number)

    def _next(self, collector, learning):
        there = False
        while not there:
            busy, began = learning(), time.monotonic()
            there = self._slots[collector].await_sample(timeout=_GLANCE if busy else TURN)
            if not busy:
                self._learner_idle += time.monotonic() - began
            if not there:
                self._look()
        while not self._waiting[collector]:  # it was counted, and comes at once
            self._look()
            time.sleep(1e-4)
        return self._waiting[collector].pop(0)

    def _look(self):
        if self._error is not None:
            raise self._error
        for collector, watch in self._watches.items():
            watch.look(collector.stepping_since)
        if self._closed:
            raise RuntimeError("the actors were closed")

    def metrics(self) -> dict[str, float]:
        """Figures since the beginning: seconds, of actors summed over groups, and how many rollouts wait now."""
        slots = [limiter.metrics() for limiter in self._slots.values()]
        return {
            "queue_depth": sum(s["balance"] for s in slots) / len(slots),
            "actor_blocked_seconds": sum(s["insert_blocked_seconds"] for s in slots) + sum(self._unpublished.values()),
            "learner_blocked_seconds": self._learner_idle,
            "stepping_seconds": sum(c.stepping_seconds for c in self._collectors),
            "failures": float(sum(getattr(c.host, "failures", 0) for c in self._collectors)),
        }

    def close(self) -> None:
        """Ends the threads and closes the environments, within seconds even where one hangs. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._bulletin.close()
        for limiter in self._slots.values():
            limiter.close()
        until = time.monotonic() + GOODBYE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for stepper in self._steppers.values():
            stepper.close(max(0.0, until - time.monotonic()))
        for collector in self._collectors:
            # An environment that is at work in a thread cannot be closed from another one.
            if collector.stepping_since is None:
                collector.host.close()

    # --- the actors' side ----------------------------------------------------------------------------------------

    def _serve(self, mine, step, device):
        try:
            number = self._first
            while not self._closed:
                began = time.monotonic()
                what = self._bulletin.for_rollout(number, self._first)
                for collector in mine:
                    self._unpublished[collector] += time.monotonic() - began
                if what is None:
                    return
                for collector, collected in self._in_turn(mine, what[device], step):
                    if not self._slots[collector].await_insert():
                        return
                    self._waiting[collector].append(collected)
                number += 1
        except BaseException as error:  # whoever waits for a rollout raises it
            self._error = self._error or error

    def _in_turn(self, collectors, published, step):
        """One rollout of each; while the environments of one are at work another acts. Gives (collector, rollout).

        Stops between two steps once it is closed.
        """
        at_work = [(collector, collector.collect(published, step[collector])) for collector in collectors]
        while at_work and not self._closed:
            still = []
            for collector, rollout in at_work:
                try:
                    next(rollout)
                    still.append((collector, rollout))
                except StopIteration as end:
                    yield collector, end.value
            at_work = still


def _beside(stepper, collector):
    """A collector's `step` in another thread, so that its own may act for other environments meanwhile."""

    def begin(action):
        stepper.begin(lambda: collector.step_now(action)())
        return stepper.wait

    return begin
