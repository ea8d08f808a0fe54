"""What iterations tell: sums that can be added over iterations, chunks and devices, and whether all was finite."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.parallel.rollout import EpisodeSums, RunState
from jaxrl.types import Metrics, PyTree, Replicas, TimeStep


@struct.dataclass
class Report:
    """What happened, as sums, so that iterations, chunks and devices can be added."""

    episodes: EpisodeSums
    updates: Metrics  # summed over the iterations that had an update
    iterations: jax.Array  # that had an update, float32
    finite: dict[str, jax.Array]  # bool by metric, and of the reward: at the first iteration in which one was not
    failed_at: jax.Array  # int32: the number of that iteration within the chunk, or -1
    actors: dict[str, Any] = struct.field(default_factory=dict)  # of host actors, means over the chunk

    @classmethod
    def zeros_like(cls, shapes: "Report") -> "Report":
        """The empty sum, for reports of the given shapes."""
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        finite = jax.tree.map(jnp.ones_like, zero.finite)
        return zero.replace(finite=finite, failed_at=jnp.full_like(zero.failed_at, -1))

    def add(self, other: "Report", number: jax.Array) -> "Report":
        """With iteration `number`'s report added."""
        new = (other.failed_at >= 0) & (self.failed_at < 0)
        return Report(
            episodes=self.episodes + other.episodes,
            updates=jax.tree.map(jnp.add, self.updates, other.updates),
            iterations=self.iterations + other.iterations,
            finite=jax.tree.map(lambda old, now: jnp.where(new, now, old), self.finite, other.finite),
            failed_at=jnp.where(new, jnp.asarray(number, jnp.int32), self.failed_at),
        )

    def over(self, replicas: Replicas) -> "Report":
        """The same for all devices together; updates are reduced already."""
        return self.replace(
            episodes=replicas.sum(self.episodes),
            finite=jax.tree.map(lambda fine: ~replicas.any(~fine), self.finite),
            failed_at=replicas.max(self.failed_at),
        )

    def with_state(self, state: RunState, last: jax.Array) -> "Report":
        """With what `state`, that iteration `last` left behind, says: it counts as failed unless all is finite.

        The metrics of an iteration are of the parameters before its last update, so they cannot vouch for the state.
        """
        shape = self.failed_at.shape  # of the runs, if this is of many

        def fine(x):
            return jnp.all(jnp.isfinite(x).reshape(*shape, -1), axis=-1)

        flags = [fine(x) for x in jax.tree.leaves(lasting(state)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        failed = ~jnp.all(jnp.stack(flags), axis=0) & (self.failed_at < 0)
        return self.replace(failed_at=jnp.where(failed, jnp.asarray(last, jnp.int32), self.failed_at))

    def metrics(self) -> dict[str, jax.Array]:
        """Means by name: `train/...` of episodes that ended, `update/...` of updates, `actors/...` of host actors."""
        episodes = {f"train/{name}": value for name, value in self.episodes.metrics().items()}
        if self.actors:
            episodes |= {f"actors/{name}": value for name, value in self.actors.items()}
            episodes["actors/lost_rows"] = self.episodes.lost
        return episodes | {f"update/{name}": value / self.iterations for name, value in self.updates.items()}


def lasting(state: RunState) -> dict[str, PyTree]:
    """The parts of a state that must be finite; environments may hold infinities, and rows are checked as they come."""
    parts = {"learner": state.learner, "carry": state.carry}
    if isinstance(state.timestep, TimeStep):
        parts["timestep"] = {"observation": state.timestep.observation, "reward": state.timestep.reward}
    return parts


def reported(episodes: EpisodeSums, metrics: Metrics, updated: jax.Array, finite: dict[str, jax.Array]) -> Report:
    """The report of one iteration on this device."""
    fine = jnp.all(jnp.stack(list(finite.values())))
    return Report(episodes, metrics, updated, finite, jnp.where(fine, jnp.int32(-1), jnp.int32(0)))


@jax.jit
def summed(total: Report | None, report: Report, number: jax.Array) -> Report:
    """`total`, None at first, with iteration `number`'s report added."""
    return (Report.zeros_like(report) if total is None else total).add(report, number)
