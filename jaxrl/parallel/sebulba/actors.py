"""Actor threads: each serves one group of host environments, or two in turn, and hands rollouts to a learner.

What may go wrong in them is told to whoever waits for a rollout: an error is raised there as it was, and environments
that take too long are named.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl.core import resources
from jaxrl.envs.host.watchdog import GOODBYE, TURN, Stepper, Watch, close_all
from jaxrl.parallel.sebulba.collector import Collected, Collector, Published, Rebuilt, RecyclingCollector
from jaxrl.parallel.sebulba.inference import ClosedError, Inference

_POLL_INTERVAL = 2e-3  # seconds between two looks at the learner, while it learns
_COMPILING = 60.0  # seconds that a program may take to compile when all is to end


class ParameterServer:
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
            version = max(self._published, default=None) if self._lag is None else max(number - self._lag, first)
            if version is None or version not in self._published:
                return None
            self._chosen[number] = version
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
      lag: as of `ParameterServer`.
      depth: how many rollouts of a group may wait for the learner.
      step_timeout: seconds that environments have for one step.
      inferences: who acts for several of the collectors at once; closed with the threads.
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
        inferences: Sequence[Inference] = (),
    ):
        self._inferences = inferences
        self._parameters, self._first = ParameterServer(lag, depth + 2), first
        self._devices = list(dict.fromkeys(devices))
        self._collectors = [collector for mine in threads for collector in mine]
        self._watches = {collector: Watch(collector.host, step_timeout) for collector in self._collectors}
        self._rollouts: dict[Collector, queue.Queue[Collected]] = {c: queue.Queue(depth) for c in self._collectors}
        self._full = dict.fromkeys(self._collectors, 0.0)  # seconds that groups had no room for a rollout
        self._learner_idle = 0.0  # seconds that the learner had nothing to learn from
        self._unpublished = dict.fromkeys(self._collectors, 0.0)  # seconds that groups had nothing to act with
        self._error: BaseException | None = None
        self._closed = False
        with resources.on("actors"):
            self._steppers = {collector: Stepper() for mine in threads for collector in mine if len(mine) > 1}
        self._threads = {
            threading.Thread(
                target=self._serve, args=(mine, devices[number]), name=f"actor-{number}", daemon=True
            ): mine
            for number, mine in enumerate(threads)
        }
        with resources.on("actors"):
            for thread in self._threads:
                thread.start()

    # --- the learner's side --------------------------------------------------------------------------------------

    def publish(self, version: int, published: Published) -> None:
        """Makes `published` what the next rollouts are acted with."""
        # As an array of the device alone, which costs no copy where it is there: by the mesh of the learner, which is
        # part of an array's type, programs of the actors would be compiled a second and a third time.
        copies = {
            device: jax.device_put(published, jax.sharding.SingleDeviceSharding(device)) for device in self._devices
        }
        self._parameters.publish(version, copies)

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
        return next_, self._parameters.version_of(number)

    def give_back(self, rollouts: Sequence[Collected], is_learned: Callable[[], bool]) -> None:
        """Has the actors write over rollouts that `rollouts` gave, as soon as `is_learned` says that nobody reads them.

        Args:
          rollouts: of every group.
          is_learned: whether the programs that read them are done.
        """
        for collector, collected in zip(self._collectors, rollouts, strict=True):
            if isinstance(collector, RecyclingCollector):
                collector.give_back(collected.rollout, is_learned)

    def is_round_ready(self) -> bool:
        """Whether the next rollout of every group is there, so that `rollouts` need not wait.

        Raises:
          as `rollouts`.
        """
        self._look()
        return not any(waiting.empty() for waiting in self._rollouts.values())

    def _next(self, collector, learning):
        while True:
            busy, began = learning(), time.monotonic()
            try:
                return self._rollouts[collector].get(timeout=_POLL_INTERVAL if busy else TURN)
            except queue.Empty:
                self._look()
            finally:
                if not busy:
                    self._learner_idle += time.monotonic() - began

    def _look(self):
        if self._error is not None:
            raise self._error
        for collector, watch in self._watches.items():
            watch.look(collector.stepping.since)
        if self._closed:
            raise RuntimeError("the actors were closed")

    def metrics(self) -> dict[str, float]:
        """Figures since the beginning: seconds, of actors summed over groups, and how many rollouts wait now."""
        return {
            "queue_depth": sum(waiting.qsize() for waiting in self._rollouts.values()) / len(self._rollouts),
            "actor_blocked_seconds": sum(self._full.values()) + sum(self._unpublished.values()),
            "learner_blocked_seconds": self._learner_idle,
            "stepping_seconds": sum(c.stepping.seconds for c in self._collectors),
        }

    @property
    def failures(self) -> int:
        """How many environments' workers or actors were lost and replaced since the beginning."""
        return sum(c.host.failures for c in self._collectors if isinstance(c.host, Rebuilt))

    def close(self) -> None:
        """Ends the threads and closes the environments, within seconds even where one hangs. May be called twice.

        A thread that compiles a program is waited for: it cannot be stopped, and would die with the interpreter.
        """
        if self._closed:
            return
        self._closed = True
        self._parameters.close()
        for inference in self._inferences:
            inference.close()
        until = time.monotonic() + GOODBYE
        for thread, mine in self._threads.items():
            _wait(thread, mine, until)
        for stepper in self._steppers.values():
            stepper.close(max(0.0, until - time.monotonic()))
        # An environment that is at work in a thread cannot be closed from another one.
        close_all(collector.host for collector in self._collectors if collector.stepping.since is None)

    # --- the actors' side ----------------------------------------------------------------------------------------

    def _serve(self, mine, device):
        try:
            number = self._first
            while not self._closed:
                began = time.monotonic()
                what = self._parameters.for_rollout(number, self._first)
                for collector in mine:
                    self._unpublished[collector] += time.monotonic() - began
                if what is None:
                    return
                for collector, collected in self._in_turn(mine, what[device]):
                    self._put(collector, collected)
                number += 1
        except ClosedError:
            pass
        except BaseException as error:  # whoever waits for a rollout raises it
            self._error = self._error or error

    def _put(self, collector, collected):
        """Waits until the learner has taken enough of the group's rollouts; or until it is closed."""
        while not self._closed:
            began = time.monotonic()
            try:
                self._rollouts[collector].put(collected, timeout=TURN)
                return
            except queue.Full:
                pass
            finally:
                self._full[collector] += time.monotonic() - began

    def _in_turn(self, collectors, published):
        """One rollout of each; while the environments of one are at work another acts. Gives (collector, rollout).

        Stops between two steps once it is closed.
        """
        at_work = [(collector, collector.collect(published, self._steppers.get(collector))) for collector in collectors]
        while at_work and not self._closed:
            still = []
            for collector, rollout in at_work:
                try:
                    next(rollout)
                    still.append((collector, rollout))
                except StopIteration as end:
                    yield collector, end.value
            at_work = still


def _wait(thread, collectors, until):
    """Waits for the end of a thread: up to `until` if an environment of it is at work, else while it may compile."""
    while thread.is_alive() and time.monotonic() < until + _COMPILING:
        thread.join(TURN)
        if time.monotonic() > until and any(collector.stepping.since is not None for collector in collectors):
            return
