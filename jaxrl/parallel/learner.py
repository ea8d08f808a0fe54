"""What every topology does alike with what was collected: store it, update, and report."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import keys
from jaxrl.buffers import uniform
from jaxrl.parallel.rollout import EpisodeSums, RunState
from jaxrl.types import Algorithm, EnvSpec, Metrics, PyTree, Replay, Replicas, RolloutBatch, Trajectory


@struct.dataclass
class Report:
    """What happened, as sums, so that iterations, chunks and devices can be added."""

    episodes: EpisodeSums
    updates: Metrics  # summed over the iterations that had an update
    iterations: jax.Array  # that had an update, float32
    finite: dict[str, jax.Array]  # bool by metric, and of the reward: at the first iteration in which one was not
    failed_at: jax.Array  # int32: the number of that iteration within the chunk, or -1

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

    def metrics(self) -> dict[str, jax.Array]:
        """Means by name: `train/...` of the episodes that ended, `update/...` of the updates."""
        episodes = {f"train/{name}": value for name, value in self.episodes.metrics().items()}
        return episodes | {f"update/{name}": value / self.iterations for name, value in self.updates.items()}


def replays(algo: Algorithm) -> dict[str, Replay]:
    """The sources that keep a buffer."""
    return {name: source for name, source in algo.experience.items() if isinstance(source, Replay)}


def empty_buffers(algo: Algorithm, rows: Trajectory, num_envs: int) -> dict[str, PyTree]:
    """A buffer for each replay source; `rows` are example rows `[T, num_envs, ...]` or their shapes."""
    rows = rows.replace(extras={})
    return {name: uniform.init(rows, source, num_envs) for name, source in replays(algo).items()}


def learn(
    algo: Algorithm,
    state: RunState,
    collected: RolloutBatch,
    episodes: EpisodeSums,
    *,
    tick: jax.Array,
    spec: EnvSpec,
    num_envs: int,
    replicas: Replicas,
) -> tuple[RunState, Report]:
    """Stores what was collected and updates the learner. Pure.

    Args:
      algo: with its schedules resolved.
      state: after collecting, so that its ticks count the new rows.
      collected: this device's rows.
      episodes: what ended in them.
      tick: the one at which the rows begin, uint32; it names this iteration's keys.
      spec, num_envs: of all devices together.
      replicas: what the update is averaged over.

    Returns:
      The state, and this iteration's report on this device.
    """
    sources = replays(algo)
    buffers = {name: uniform.add(state.buffers[name], collected.rows.replace(extras={})) for name in sources}
    state = state.replace(buffers=buffers)
    rollouts = {name: collected for name in algo.experience if name not in sources}
    update_key, sample_key = keys.update_key(state.key, tick), keys.sample_key(state.key, tick)

    def update(learner, number):
        batch = dict(rollouts)
        for name, source in sources.items():
            batch[name] = uniform.sample(buffers[name], jax.random.fold_in(sample_key, number), source, replicas)
        key = jax.random.fold_in(update_key, number)
        learner, info = algo.update(learner, batch, spec=spec, key=key, replicas=replicas)
        return learner, jax.tree.map(jnp.float32, info.metrics)

    def updates(learner):
        numbers = jnp.arange(max(source.updates for source in sources.values()), dtype=jnp.int32)
        learner, metrics = jax.lax.scan(update, learner, numbers)
        return learner, jax.tree.map(jnp.mean, metrics)

    if not sources:
        new, metrics = update(state.learner, jnp.int32(0))
        updated = jnp.float32(1.0)
    else:
        shapes = jax.eval_shape(updates, state.learner)[1]

        def wait(learner):
            return learner, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        # The counter is one for all runs of a mapped batch, hence this stays a branch under vmap.
        enough = state.ticks.as_float() * num_envs >= max(source.min_size for source in sources.values())
        new, metrics = jax.lax.cond(enough, updates, wait, state.learner)
        updated = enough.astype(jnp.float32)

    finite = {name: jnp.isfinite(value) for name, value in metrics.items()}
    finite["reward"] = jnp.all(jnp.isfinite(collected.rows.reward))
    fine = jnp.all(jnp.stack(list(finite.values())))
    report = Report(episodes, metrics, updated, finite, jnp.where(fine, jnp.int32(-1), jnp.int32(0)))
    return state.replace(learner=new), report
