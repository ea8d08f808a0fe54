"""The rounds in which a learner takes batches of rollouts from its actors and updates.

`EveryRound` learns from each batch at once, so with one rollout of every group its updates are those of the compiled
program. `RateLimited` stores rounds, one rollout of every group each, when its rate limit allows it, and makes updates
in between.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxrl.buffers.fixed import Rings
from jaxrl.core.report import Report, accumulate
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.layout import Layout
from jaxrl.parallel.sebulba.actors import ActorThreads, Taken
from jaxrl.parallel.sebulba.collector import Published
from jaxrl.parallel.sebulba.learning import HostLearning
from jaxrl.parallel.sebulba.rate_limit import Counts, Move, RateLimit

Keep = Callable[[list[Taken], int], None]


class Rounds(Protocol):
    """The rounds of a learner and its actors, since the actors began."""

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Rings | None,
        keep: Keep,
    ) -> tuple[RunState, Report, dict[str, float]]:
        """Take `length` rounds, at least one.

        Args:
          algo, state, dataset: as in `Program`.
          length: number of rounds.
          total_steps_per_env: the total of the run, float32, on the learner's devices.
          keep: called with the rollouts of every batch, and the number of batches that their newest policy has seen.

        Returns:
          The state, the report, and metrics of the actors.
        """
        ...


class EveryRound:
    """The `Rounds` of a learner that learns from each round at once.

    Args:
      learning: the learner's compiled functions.
      threads: the actors.
      iterations: iterations of the run so far; counted here, so as not to wait for the learner.
    """

    def __init__(self, learning: HostLearning, threads: ActorThreads, iterations: int):
        self._learning, self._threads, self._iterations = learning, threads, iterations

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Rings | None,
        keep: Keep,
    ) -> tuple[RunState, Report, dict[str, float]]:
        learning, threads, total, lags = self._learning, self._threads, Total(self._learning.layout), []
        # Only this thread dispatches cross-process programs: from two threads, their order could differ by process.
        with jax.thread_guard(learning.processes > 1):
            for number in range(length):
                resolved, actor = learning.prepare(algo, state, total_steps_per_env)
                threads.publish(self._iterations, published(resolved, actor, self._iterations))
                batch = threads.rollouts(self._iterations, _under_way(state))
                lags += [self._iterations - taken.version for taken in batch]
                keep(batch, batch[-1].version)
                gathered = learning.gathered([taken.collected for taken in batch])
                state, report = learning.learn(resolved, state.replace(buffers={}), state.buffers, gathered, dataset)
                threads.give_back(batch, state.steps_per_env.low.is_ready)
                self._iterations += 1
                total.add(report, number)
        return state, total.sum, _lag_figures(lags)


class Progress(NamedTuple):
    """The progress of the learner."""

    updates: int
    iterations: int


class RateLimited:
    """The `Rounds` of a learner that stores rounds when a rate limit allows it, with updates in between.

    Args:
      learning: the learner's compiled functions.
      threads: the actors.
      limit: decides between storing and updating.
      counts: insertions and updates of the replays so far.
      iterations: iterations of the run so far.
    """

    def __init__(
        self, learning: HostLearning, threads: ActorThreads, limit: RateLimit, counts: Counts, iterations: int
    ):
        self._learning, self._threads, self._limit, self._counts = learning, threads, limit, counts
        self._iterations, self._updates_since_stored = iterations, 0
        self._version = iterations  # the newest published version; there is also one after every update
        self._published_at: dict[int, Progress] = {}  # by version, for versions that current rollouts may have
        self._begun = counts.updates

    def chunk(
        self,
        algo: Algorithm,
        state: RunState,
        length: int,
        total_steps_per_env: jax.Array,
        dataset: Rings | None,
        keep: Keep,
    ) -> tuple[RunState, Report, dict[str, float]]:
        stored, updated, lags, under_way = Total(self._learning.layout), Total(self._learning.layout), [], None
        resolved = self._publish(algo, state, total_steps_per_env)
        while stored.count < length:
            move = self._limit.next_move(self._counts, is_round_ready=self._threads.is_round_ready())
            if move is Move.SAMPLE:
                state, report = self._update(resolved, state, dataset)
                # Dispatch only one update ahead of the running one: dispatched moves can no longer be changed.
                if under_way is not None:
                    under_way.block_until_ready()
                under_way = report.made
                updated.add(report, stored.count)
            else:
                state, report, lag = self._store(resolved, state, keep)
                stored.add(report, stored.count)
                lags.append(lag)
            self._counts = self._limit.after(self._counts, move)
            resolved = self._publish(algo, state, total_steps_per_env)
        report = stored.sum.with_updates(updated.sum, length - 1) if updated.count else stored.sum
        learned_from = max(self._counts.inserted - self._limit.min_size, 1)
        figures = {"replay_ratio": self._counts.updates / learned_from}
        figures["compiled"] = float(0 < updated.count == self._counts.updates - self._begun)
        return state, report, _lag_figures(lags) | figures

    def _update(self, resolved, state, dataset):
        number = self._learning.layout.place(np.int32(self._updates_since_stored))
        self._updates_since_stored += 1
        return self._learning.update(resolved, state.replace(buffers={}), state.buffers, dataset, number)

    def _store(self, resolved, state, keep):
        """Store the next round, after waiting for it; return also how many updates ago its policy was published."""
        batch = self._threads.rollouts(self._version, _under_way(state))
        version = batch[-1].version  # the same for all
        acted = self._published_at[version]
        keep(batch, acted.iterations)
        gathered = self._learning.gathered([taken.collected for taken in batch])
        state, report = self._learning.store(resolved, state.replace(buffers={}), state.buffers, gathered)
        self._threads.give_back(batch, state.steps_per_env.low.is_ready)
        self._published_at = {v: at for v, at in self._published_at.items() if v >= version}
        self._iterations, self._updates_since_stored = self._iterations + 1, 0
        return state, report, self._counts.updates - acted.updates

    def _publish(self, algo, state, total_steps_per_env):
        """Publish the parameters to act with from now on; return the algorithm with its schedules resolved."""
        resolved, actor = self._learning.prepare(algo, state, total_steps_per_env)
        self._version += 1
        self._published_at[self._version] = Progress(self._counts.updates, self._iterations)
        self._threads.publish(self._version, published(resolved, actor, self._version))
        return resolved


class Total:
    """The sum of the reports of a chunk.

    Args:
      layout: the layout of the learner over its devices.

    Attributes:
      count: number of reports.
    """

    def __init__(self, layout: Layout):
        self._layout, self._sum, self.count = layout, None, 0

    @property
    def sum(self) -> Report:
        """The accumulated report; there must be at least one."""
        assert self._sum is not None
        return self._sum

    def add(self, report: Report, number: int) -> None:
        """Add the report of iteration `number` of the chunk."""
        first = self._sum is None
        which, begins = self._layout.place((np.int32(number), np.bool_(first)))
        self._sum = accumulate(report if first else self._sum, report, which, begins)
        self.count += 1


def published(resolved, actor, version: int) -> Published:
    """Return this process's copy of the parameters, for its actors."""
    return Published(*meshes.local((resolved, actor)), np.int32(version))


def _lag_figures(lags):
    """Return metrics of the updates by which the learner was ahead of the policies that acted."""
    return {"policy_lag": float(np.mean(lags)), "policy_lag_max": float(np.max(lags))}


def _under_way(state):
    """Return a function that checks whether the update that made `state` is still running."""
    steps_per_env = state.steps_per_env.low
    return lambda: not steps_per_env.is_ready()
