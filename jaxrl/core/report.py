"""Reports on iterations: statistics as sums over iterations, chunks and devices, and locations of non-finite values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core.run_state import RunState
from jaxrl.core.types import Metrics, PyTree, Replicas, TimeStep


class EpisodeSums(struct.PyTreeNode):
    """Sums over finished episodes, which can be added over iterations, devices and chunks.

    `squares` sums the squared deviations from the mean and is merged accordingly (Chan, Golub and LeVeque, 1979).
    Computed from float32 squares of large returns, the variance would be mostly rounding error.
    """

    count: jax.Array
    returns: jax.Array
    squares: jax.Array  # sum of the squared deviations of returns from their mean
    length: jax.Array
    steps: jax.Array  # environment steps: rows of weight 1
    lost: jax.Array  # rows of weight 0 without the end of an episode, because a host environment failed
    lives: "EpisodeSums | None" = None  # the same sums over lives, if a game has several
    info: dict[str, jax.Array] | None = None  # sums of the episodes' reduced values of `TimeStep.info`

    @classmethod
    def zero(cls) -> "EpisodeSums":
        return cls(*(jnp.float32(0.0) for _ in range(6)))

    def __add__(self, other: "EpisodeSums") -> "EpisodeSums":
        total = jax.tree.map(jnp.add, self, other)
        apart = jnp.where((self.count > 0) & (other.count > 0), self._mean() - other._mean(), 0.0)
        between = jnp.square(apart) * (self.count * other.count / jnp.maximum(total.count, 1.0))
        lives = None if self.lives is None or other.lives is None else self.lives + other.lives
        return total.replace(squares=total.squares + between, lives=lives)

    def merged(self, total: Callable[[PyTree], PyTree], xp: Any = jnp) -> "EpisodeSums":
        """Return these sums merged over several parts, such as devices.

        Args:
          total: function that sums the arrays of a tree over the parts.
          xp: module of the arrays, numpy or jax.numpy.
        """
        whole = total(self)
        between = total(self.count * xp.square(self._mean(xp) - whole._mean(xp)))
        lives = None if self.lives is None else self.lives.merged(total, xp)
        return whole.replace(squares=whole.squares + between, lives=lives)

    def _mean(self, xp: Any = jnp) -> jax.Array:
        return self.returns / xp.maximum(self.count, 1.0)

    def metrics(self) -> Metrics:
        """Return means over finished episodes, NaN if there are none; if a game has lives, also means over lives."""
        lives = {} if self.lives is None else {f"life_{name}": x for name, x in self.lives.means().items()}
        lives |= {} if self.lives is None else {"lives": self.lives.count}
        with np.errstate(divide="ignore", invalid="ignore"):
            info = {f"info/{name}": total / self.count for name, total in (self.info or {}).items()}
        return {"episodes": self.count, **self.means(), "transitions": self.steps, **lives, **info}

    def means(self) -> Metrics:
        """Return the means of returns and lengths, and the returns' standard deviation."""
        with np.errstate(divide="ignore", invalid="ignore"):  # may be numpy arrays, which warn of 0 / 0
            mean = self.returns / self.count
            variance = self.squares / self.count
            length = self.length / self.count
        return {"return_mean": mean, "return_std": variance**0.5, "length_mean": length}


class Report(struct.PyTreeNode):
    """Statistics stored as sums, which can be added over iterations, chunks and devices."""

    episodes: EpisodeSums
    updates: Metrics  # summed over the iterations that had an update
    iterations: jax.Array  # iterations that had an update, float32
    made: jax.Array  # number of updates of the learner, float32
    # Flags of the first iteration with non-finite values, int32 by name: 0 if finite; 1 for a non-finite metric; for
    # collected values, a larger number the earlier they appeared (`jaxrl.parallel.iteration.store`).
    broken: dict[str, jax.Array]
    failed_at: jax.Array  # int32: the number of that iteration within the chunk, or -1
    actors: Metrics = struct.field(default_factory=dict)  # metrics of host actors, over the chunk
    learned: jax.Array | None = None  # transitions of whole episodes used for learning, float32

    @classmethod
    def zeros_like(cls, shapes: "Report") -> "Report":
        """Return an empty report of these shapes, to which reports can be added."""
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return zero.replace(failed_at=jnp.full_like(zero.failed_at, -1))

    def add(self, other: "Report", number: jax.Array) -> "Report":
        """Return the sum of this report and the report of iteration `number`."""
        new = (other.failed_at >= 0) & (self.failed_at < 0)
        return Report(
            episodes=self.episodes + other.episodes,
            updates=jax.tree.map(jnp.add, self.updates, other.updates),
            iterations=self.iterations + other.iterations,
            made=self.made + other.made,
            broken=jax.tree.map(lambda old, now: jnp.where(new, now, old), self.broken, other.broken),
            failed_at=jnp.where(new, jnp.asarray(number, jnp.int32), self.failed_at),
            learned=None if self.learned is None or other.learned is None else self.learned + other.learned,
        )

    def with_updates(self, updates: "Report", last: int) -> "Report":
        """Return this report of stored rollouts merged with a report of updates; the last iteration is `last`."""
        here, there = self.failed_at, jnp.minimum(updates.failed_at, last)
        both = (here >= 0) & (there >= 0)
        return updates.replace(
            episodes=self.episodes,
            broken=self.broken | updates.broken,
            failed_at=jnp.where(both, jnp.minimum(here, there), jnp.maximum(here, there)),
        )

    def all_reduce(self, replicas: Replicas) -> "Report":
        """Return the report reduced over all devices, except its update metrics, which are already reduced."""
        return self.replace(
            episodes=self.episodes.merged(replicas.sum),
            broken=jax.tree.map(replicas.max, self.broken),
            failed_at=replicas.max(self.failed_at),
        )

    def with_state(self, state: RunState, last: jax.Array) -> "Report":
        """Return the report with iteration `last` marked as failed unless the `state` after it is finite.

        The metrics of an iteration depend on the parameters before its last update, so they do not verify the state.
        """
        shape = self.failed_at.shape  # one per run, if there are many
        # Concatenate the leaves of each dtype: separate reductions per leaf were a sixth of a chunk's kernels.
        by_type: dict[jnp.dtype, list[jax.Array]] = {}
        for x in jax.tree.leaves(persistent_state(state)):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                by_type.setdefault(x.dtype, []).append(x.reshape(*shape, -1))
        vectors = [jnp.concatenate(leaves, axis=-1) for leaves in by_type.values()]
        fine = jnp.stack([jnp.all(jnp.isfinite(x), axis=-1) for x in vectors])
        failed = ~jnp.all(fine, axis=0) & (self.failed_at < 0)
        return self.replace(failed_at=jnp.where(failed, jnp.asarray(last, jnp.int32), self.failed_at))

    def metrics(self) -> dict[str, jax.Array]:
        """Return means by name: `train/...` over episodes, `update/...` over updates, `actors/...` over host actors."""
        episodes = {f"train/{name}": value for name, value in self.episodes.metrics().items()}
        episodes["train/updates"] = self.made
        if self.learned is not None:
            episodes["train/learned_fraction"] = self.learned / self.episodes.steps
        if self.actors:
            episodes |= {f"actors/{name}": value for name, value in self.actors.items()}
            episodes["actors/lost_transitions"] = self.episodes.lost
        return episodes | {f"update/{name}": value / self.iterations for name, value in self.updates.items()}


def joined(parts: Sequence[tuple[Report, int]]) -> Report:
    """Join the reports of consecutive chunks without failures into one, in numpy.

    Args:
      parts: each report, with its leaves on the host, and its number of iterations.
    """
    if len(parts) == 1:
        return parts[0][0]
    reports, lengths = zip(*parts, strict=True)
    # Not every chunk has updates: a learner that samples while actors insert may only store in a chunk.
    names = sorted({name for one in reports for name in one.updates})
    updates = {name: np.sum([one.updates[name] for one in reports if name in one.updates], axis=0) for name in names}
    stacked = jax.tree.map(lambda *xs: np.asarray(xs), *(one.replace(broken={}, updates={}) for one in reports))
    whole = _summed(stacked).replace(updates=updates)
    actors = {name: _joined_figure(name, [one.actors[name] for one in reports], lengths) for name in whole.actors}
    episodes = stacked.episodes.merged(_summed, np)
    return whole.replace(episodes=episodes, broken=reports[-1].broken, failed_at=reports[-1].failed_at, actors=actors)


def _summed(stacked):
    return jax.tree.map(lambda x: np.sum(x, axis=0), stacked)


def _joined_figure(name, values, lengths):
    """Combine an actor metric of several chunks: by maximum, sum or average, depending on `name`."""
    if name.endswith("_max"):
        return np.max(values)
    if name.endswith("seconds") or name == "failures":
        return np.sum(values)
    return np.average(values, weights=lengths)


def persistent_state(state: RunState) -> dict[str, PyTree]:
    """Return the parts of a state that must be finite.

    Environment states are excluded, because they may contain infinities. Rows are excluded, because they are checked
    separately.
    """
    parts = {"learner": state.learner, "carry": state.carry}
    if isinstance(state.timestep, TimeStep):
        parts["timestep"] = {"observation": state.timestep.observation, "reward": state.timestep.reward}
    return parts


def make_report(episodes: EpisodeSums, metrics: Metrics, made: jax.Array, collected: dict[str, jax.Array]) -> Report:
    """Return the report of one iteration on this device.

    Args:
      episodes: sums over the episodes that ended.
      metrics: means over the updates.
      made: number of updates, float32.
      collected: entries of `Report.broken` for collected values.
    """
    broken = collected | {name: (~jnp.isfinite(value)).astype(jnp.int32) for name, value in metrics.items()}
    fine = jnp.max(jnp.stack(list(broken.values()))) == 0
    iterations = (made > 0.0).astype(jnp.float32)
    learned = metrics["learned_transitions"] * made if "learned_transitions" in metrics else None
    failed_at = jnp.where(fine, jnp.int32(-1), jnp.int32(0))
    return Report(episodes, metrics, iterations, made, broken, failed_at, learned=learned)


@jax.jit
def accumulate(total: Report, report: Report, number: jax.Array, begins: jax.Array) -> Report:
    """Add the report of iteration `number` to `total`, or to an empty report if `begins` (a bool) is True.

    The same compiled program is thus used for the first report of a chunk and for all others.
    """
    nothing = Report.zeros_like(report)
    return jax.tree.map(lambda old, none: jnp.where(begins, none, old), total, nothing).add(report, number)
