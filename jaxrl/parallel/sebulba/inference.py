"""Dynamic batching, as in PolyBeast (Küttler et al., 2019, arXiv:1910.03552): who is ready is acted for in one batch.

One `Inference` per actor device holds what acting needs of all groups there: carries, previous actions, random keys
and the storage of their rollouts. The actor threads ask it for actions. Whichever of them completes a batch runs the
policy for all in it; there is no further thread.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

import jax
import numpy as np

from jaxrl.core import registry
from jaxrl.core.types import Algorithm, HostEnvironment, PyTree, Rollout, TimeStep
from jaxrl.envs.host.watchdog import Stepper
from jaxrl.parallel.host_rollout import HostSteps, Storage
from jaxrl.parallel.sebulba.collector import Collected, GroupActor, Published, Stepping, with_episodes

_SIZES = 4  # that are compiled, at most: the largest batch and its halves


@dataclasses.dataclass(frozen=True)
class DynamicBatching:
    """Inference for whichever environments are ready, over all actor threads of a device.

    Args:
      smallest: environments that a batch waits for. It goes earlier if no others can come, or when `patience` is over.
      largest: environments of a batch at most; None: all of the device.
      patience: seconds that a batch waits for `smallest` environments, from when the first of it was ready.
    """

    smallest: int = 1
    largest: int | None = None
    patience: float = 0.01

    def problems(self, envs: int, at_once: int) -> list[str]:
        """What is wrong with these settings.

        Args:
          envs: environments of a device, the one with the fewest.
          at_once: environments that ask together: a group, or those of it that are ready first.
        """
        found = []
        if self.smallest < 1:
            found.append(f"batching.smallest={self.smallest} must be at least 1")
        if not self.patience >= 0:
            found.append(f"batching.patience={self.patience} must be at least 0 seconds")
        if self.largest is not None and self.largest < max(self.smallest, 1):
            found.append(f"batching.largest={self.largest} must be at least smallest={self.smallest}")
        elif self.largest is not None and self.largest < at_once:
            found.append(
                f"batching.largest={self.largest} is less than the {at_once} environments that step together; use at "
                f"least {at_once}, or more actors"
            )
        elif self.smallest > (most := self._most(envs, at_once)):
            found.append(
                f"batching.smallest={self.smallest} is more than a batch can have: environments step {at_once} "
                f"together, a device has {envs}; use at most {most}"
            )
        return found

    def sizes(self, envs: int, at_once: int) -> list[int]:
        """The batch sizes that are compiled, in order; a smaller batch is padded to the next."""
        most = self._most(envs, at_once)
        sizes = {-(-most // 2**halved) for halved in range(_SIZES)}
        least = max(self.smallest, at_once)
        return sorted(size for size in sizes if size >= least) or [most]

    def _most(self, envs, at_once):
        return min(self.largest or envs, envs) // at_once * at_once


registry.add("topology", DynamicBatching)


class ClosedError(Exception):
    """To who waits for a batch: the actors are closed."""


class Batches[T]:
    """Which requests for actions make the next batch.

    All requests are for as many environments, `at_once`. A batch is of one version of the parameters, its oldest
    requests first, as many as fit into the largest size. It is due as soon as

    - there are requests for the smallest size,
    - or every group that is at a rollout of this version waits, so no others can come,
    - or the oldest request has waited for `patience` seconds.

    No request waits forever, even with endless patience. Of the groups at rollouts of its version, either all wait,
    and the batch is due; or some group's environments are at work. These return, and their group asks or ends its
    rollout, or they hang, which ends the run (`step_timeout`). A rollout has a fixed number of steps, so a group that
    never waits ends it. Groups that are between two rollouts, blocked by a full queue for example, are not waited for.

    Args:
      batching: the settings.
      envs: environments of the device.
      at_once: environments of a request.
    """

    def __init__(self, batching: DynamicBatching, envs: int, at_once: int):
        self._enough = -(-batching.smallest // at_once)  # requests
        self._most, self._patience = batching.sizes(envs, at_once)[-1] // at_once, batching.patience
        self._groups: dict[int, int] = {}  # by version: those at a rollout
        self._waiting: dict[int, list[tuple[float, T]]] = {}  # by version: since when, and who

    def enter(self, version: int) -> None:
        """A group begins a rollout."""
        self._groups[version] = self._groups.get(version, 0) + 1

    def leave(self, version: int) -> None:
        """A group asks no more in its rollout."""
        self._groups[version] -= 1
        if not self._groups[version]:
            del self._groups[version]

    def ask(self, version: int, request: T, now: float) -> None:
        """A group waits for actions, at the time `now` in seconds."""
        self._waiting.setdefault(version, []).append((now, request))

    def take(self, now: float) -> tuple[list[T], float]:
        """The next batch if one is due, else none; and the seconds that its requests have waited, summed."""
        for version, waiting in sorted(self._waiting.items(), key=lambda item: item[1][0][0]):
            complete = len(waiting) >= min(self._enough, self._groups.get(version, 0))
            if complete or now >= waiting[0][0] + self._patience:
                batch, rest = waiting[: self._most], waiting[self._most :]
                self._waiting[version] = rest
                if not rest:
                    del self._waiting[version]
                return [request for _, request in batch], sum(now - since for since, _ in batch)
        return [], 0.0

    def seconds_left(self, now: float) -> float | None:
        """Until a batch is due that nobody joins; None: nobody waits, or patience is endless."""
        oldest = min((waiting[0][0] for waiting in self._waiting.values()), default=float("inf"))
        seconds = max(oldest + self._patience - now, 0.0)
        return None if seconds == float("inf") else min(seconds, threading.TIMEOUT_MAX)

    @property
    def requests(self) -> list[T]:
        """Those that wait, the oldest first."""
        waiting = sorted((entry for each in self._waiting.values() for entry in each), key=lambda entry: entry[0])
        return [request for _, request in waiting]


class Request:
    """Environments that wait for actions.

    Args:
      published: what is acted with.
      timestep: what they show, numpy `[B, ...]`.
      env_ids: which of the device's environments they are, int32 [B].
      ticks: what their random numbers are named by, uint32 [B].
      numbers: steps of the rollout that they are at, int32 [B].
    """

    def __init__(
        self,
        published: Published,
        timestep: TimeStep[np.ndarray],
        env_ids: np.ndarray,
        ticks: np.ndarray,
        numbers: np.ndarray,
    ):
        self.published, self.timestep = published, timestep
        self.env_ids, self.ticks, self.numbers = env_ids, ticks, numbers
        # Whoever waits is woken when it is done, or has to look for the next batch. In C, and without the lock of all.
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done = False
        self.action: PyTree = None
        self.error: BaseException | None = None


class Inference:
    """Who acts for all groups of a device, in batches of whichever environments are ready.

    Args:
      steps: the compiled pieces of one group.
      batching: the settings.
      at_once: environments of a request.
      key: the run's root key.
      first_envs: for each group the index of its first environment among all.
      device: where it acts.
      clock: seconds.
    """

    def __init__(
        self,
        steps: HostSteps,
        batching: DynamicBatching,
        at_once: int,
        key: jax.Array,
        first_envs: Sequence[int],
        device: jax.Device,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.steps, self._device, self._clock = steps, device, clock
        self._all = dataclasses.replace(steps, group=steps.group * len(first_envs))
        self._sizes = batching.sizes(self._all.group, at_once)
        env_index = np.concatenate([first + np.arange(steps.group, dtype=np.int32) for first in first_envs])
        self._key, self._env_index = jax.device_put((key, env_index), jax.sharding.SingleDeviceSharding(device))
        self.groups = [BatchedGroup(self, number * steps.group) for number in range(len(first_envs))]
        # Who waits for what:
        self._lock, self._batches = threading.Lock(), Batches[Request](batching, self._all.group, at_once)
        self._busy = self._closed = False
        self._calls, self._rows, self._waited = 0, 0, 0.0
        # On the device; each is replaced by what the next call gives, in the order of the calls:
        self._on_device = threading.Lock()
        self._storage: Storage | None = None  # of all groups' rollouts
        self._carry: PyTree = None
        self._action: PyTree = None
        self._roots: jax.Array | None = None

    # --- for the groups ------------------------------------------------------------------------------------------

    def begin(self, published: Published, timestep: TimeStep[np.ndarray], first: int) -> PyTree:
        """Begin a rollout of the group whose first environment here is `first`, at `timestep`; return its carry."""
        with self._on_device:
            if self._storage is None:
                self._allocate(published, timestep)
            carry = _of_group(self._carry, np.int32(first), self.steps.group, 0)
        with self._lock:
            self._batches.enter(int(published.version))
        return carry

    def leave(self, version: int) -> None:
        """A group asks no more in its rollout."""
        with self._lock:
            self._batches.leave(version)
            oldest = self._oldest()
        _wake(oldest)

    def act(self, request: Request) -> PyTree:
        """The actions of its environments, numpy `[B, ...]`; waits for others that act with them.

        Raises:
          ClosedError: nobody will act any more.
          Exception: what the policy raised.
        """
        with self._lock:
            self._batches.ask(int(request.published.version), request, self._clock())
        while batch := self._next(request):
            self._run(batch)
        if request.error is not None:
            raise request.error
        return request.action

    def finish(self, published: Published, timestep: TimeStep[np.ndarray], first: int, initial: PyTree) -> Rollout:
        """The rollout of a group, whose environments have all acted and show `timestep`; `initial` is of `begin`."""
        with self._on_device:
            assert self._storage is not None
            storage = _of_group(self._storage, np.int32(first), self.steps.group, 1)
            carry, action = _of_group((self._carry, self._action), np.int32(first), self.steps.group, 0)
        return self.steps.finish(
            published.algo, published.actor, storage, timestep, action, initial, carry, published.version
        )

    # --- for the run ---------------------------------------------------------------------------------------------

    def metrics(self) -> tuple[float, float, float]:
        """Since the beginning: calls of the policy, environments in them, seconds that groups waited for the calls."""
        with self._lock:
            return float(self._calls), float(self._rows), self._waited

    def close(self) -> None:
        """Lets everybody go who waits; may be called twice."""
        with self._lock:
            self._closed, waiting = True, self._batches.requests
        _wake(waiting)

    # --- batches -------------------------------------------------------------------------------------------------

    def _next(self, request):
        """The next batch, which the caller has to run; none once `request` is done."""
        while not request.done:
            with self._lock:
                if self._closed:
                    raise ClosedError
                batch, seconds = [], None
                if not self._busy:
                    batch, waited = self._batches.take(self._clock())
                    self._waited, self._busy = self._waited + waited, bool(batch)
                    seconds = self._batches.seconds_left(self._clock())
            if batch:
                return batch
            with contextlib.suppress(queue.Empty):
                request.woken.get(timeout=seconds)
        return []

    def _run(self, batch):
        try:
            self._answer(batch)
        except BaseException as error:  # each of them raises it
            for request in batch:
                request.error = error
        with self._lock:
            self._busy, self._calls = False, self._calls + 1
            self._rows += sum(request.env_ids.size for request in batch)
            oldest = self._oldest()
        for request in batch:
            request.done = True
        _wake(batch + oldest)

    def _oldest(self):
        """Of those that wait the one that looks whether a batch is due, if none is under way."""
        return [] if self._busy else self._batches.requests[:1]

    def _answer(self, batch):
        sizes = [request.env_ids.size for request in batch]
        padding = next(size for size in self._sizes if size >= sum(sizes)) - sum(sizes)
        timestep = _joined([request.timestep for request in batch], padding)
        ticks, numbers = (_joined([getattr(request, of) for request in batch], padding) for of in ("ticks", "numbers"))
        # What pads is of environments that are not there: nothing of it is written.
        env_ids = np.concatenate([*(request.env_ids for request in batch), self._nobody(padding)])
        action = jax.device_get(self._act(batch[0].published, timestep, ticks, numbers, env_ids))
        ends = np.cumsum(sizes)
        for request, begin, end in zip(batch, ends - sizes, ends, strict=True):
            request.action = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], action)

    def _nobody(self, count):
        return np.arange(self._all.group, self._all.group + count, dtype=np.int32)

    def _act(self, published, timestep, ticks, numbers, env_ids):
        with self._on_device:
            return self._act_on_device(published, timestep, ticks, numbers, env_ids)

    def _act_on_device(self, published, timestep, ticks, numbers, env_ids):
        self._storage, self._action, self._carry, action = self._all.act_some(
            published.algo,
            published.actor,
            self._storage,
            timestep,
            self._carry,
            self._action,
            self._roots,
            ticks,
            numbers,
            env_ids,
        )
        return action

    def _allocate(self, published, timestep):
        """Room for all groups' rollouts, their first carries, and the programs of every batch size."""
        algo: Algorithm = published.algo
        self._roots = self._all.roots(self._key, self._env_index)
        self._carry, self._action = self._all.beginnings(algo, self._env_index)

        def of_size(size):
            return jax.tree.map(lambda x: np.repeat(x[:1], size, axis=0), timestep)

        everybody = of_size(self._all.group)
        with jax.default_device(self._device):
            self._storage = self._all.storage(algo, published.actor, everybody, self._carry, self._action, self._roots)
        for size in self._sizes:  # else each would be compiled where the run first meets it, by chance
            zeros = np.zeros(size, np.int32)
            self._act_on_device(published, of_size(size), zeros.astype(np.uint32), zeros, self._nobody(size))


class BatchedGroup:
    """Who acts for one group of an `Inference`: a `GroupActor`.

    Args:
      inference: of its device.
      first: its first environment there.
    """

    def __init__(self, inference: Inference, first: int):
        self.steps, self._inference, self._first, self._steps_per_env = inference.steps, inference, first, 0

    def begin_at(self, steps_per_env: int) -> None:
        self._steps_per_env = steps_per_env

    @contextlib.contextmanager
    def rollout(self, published: Published, timestep: TimeStep[np.ndarray]) -> Generator["BatchedRollout"]:
        initial = self._inference.begin(published, timestep, self._first)
        rollout = BatchedRollout(self._inference, published, self._first, self._steps_per_env, initial)
        try:
            yield rollout
        finally:
            rollout.leave()
        self._steps_per_env += self.steps.length


class BatchedRollout:
    """A rollout of one group of an `Inference`."""

    def __init__(self, inference: Inference, published: Published, first: int, steps_per_env: int, initial: PyTree):
        self._inference, self._published, self._first, self._initial = inference, published, first, initial
        self._steps_per_env, self._left = steps_per_env, inference.steps.group * inference.steps.length
        self._inside = True

    def act(self, timestep: TimeStep[np.ndarray], numbers: np.ndarray, env_ids: np.ndarray) -> PyTree:
        ticks = np.uint32(self._steps_per_env % 2**32) + numbers.astype(np.uint32)
        action = self._inference.act(Request(self._published, timestep, self._first + env_ids, ticks, numbers))
        self._left -= env_ids.size
        if not self._left:  # others need not wait for its last steps
            self.leave()
        return action

    def leave(self) -> None:
        """It asks no more; may be called twice."""
        if self._inside:
            self._inside = False
            self._inference.leave(int(self._published.version))

    def finish(self, timestep: TimeStep[np.ndarray]) -> Rollout:
        return self._inference.finish(self._published, timestep, self._first, self._initial)


class InferenceCollector:
    """A `Collector` of environments that all step at once, and are acted for together with those of other groups.

    Args:
      acting: who acts for them.
      host: the environments.
    """

    def __init__(self, acting: GroupActor, host: HostEnvironment):
        self.host, self.stepping = host, Stepping()
        self._acting = acting
        with self.stepping:
            self._first = self._timestep = host.reset()

    def begin_at(self, steps_per_env: int) -> None:
        self._acting.begin_at(steps_per_env)

    def first_timestep(self) -> TimeStep[np.ndarray]:
        return self._first

    def collect(self, published: Published, stepper: Stepper | None) -> Generator[None, None, Collected]:
        """`stepper` is not used, the thread has no other group."""
        steps = self._acting.steps
        if steps.whole_episodes:
            with self.stepping:
                self._timestep = self.host.reset()
        everybody = np.arange(steps.group, dtype=np.int32)
        numbers = np.repeat(np.arange(steps.length, dtype=np.int32)[:, None], steps.group, axis=1)
        with self._acting.rollout(published, self._timestep) as rollout:
            for number in numbers:
                action = rollout.act(self._timestep, number, everybody)
                yield
                with self.stepping:
                    self._timestep = self.host.step(action)
        return with_episodes(rollout.finish(self._timestep))


@partial(jax.jit, static_argnums=(2, 3))
def _of_group(tree, first, size, axis):
    """The `size` columns from `first` on."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, axis), tree)


def _wake(requests):
    for request in requests:
        request.woken.put(None)


def _joined(parts, padding):
    """Trees of numpy arrays one after another, and the first row as often as `padding` says; one alone as it is."""
    if len(parts) == 1 and not padding:
        return parts[0]
    return jax.tree.map(lambda *x: np.concatenate([*x, np.repeat(x[0][:1], padding, axis=0)]), *parts)
