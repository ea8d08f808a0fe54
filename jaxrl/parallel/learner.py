"""What every topology does alike with what was collected: store it, update, and report."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import keys
from jaxrl.buffers import memory, replay
from jaxrl.parallel.rollout import EpisodeSums, RunState, rollout_length
from jaxrl.types import Algorithm, EnvSpec, Metrics, PyTree, Replay, Replicas, RolloutBatch, Trajectory


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
        episodes |= {f"actors/{name}": value for name, value in self.actors.items()}
        return episodes | {f"update/{name}": value / self.iterations for name, value in self.updates.items()}


def lasting(state: RunState) -> dict[str, PyTree]:
    """The parts of a state that must be finite; environments may hold infinities, and rows are checked as they come."""
    timestep = {"observation": state.timestep.observation, "reward": state.timestep.reward}
    return {"learner": state.learner, "carry": state.carry, "timestep": timestep}


def replays(algo: Algorithm) -> dict[str, Replay]:
    """The sources that keep a buffer."""
    return {name: source for name, source in algo.experience.items() if isinstance(source, Replay)}


def empty_buffers(algo: Algorithm, rows: Trajectory, carry: PyTree, *, num_envs: int, shards: int) -> dict[str, PyTree]:
    """A replay for each source that keeps one.

    Args:
      algo: gives the sources.
      rows: example rows `[T, num_envs, ...]` or their shapes.
      carry: `[num_envs, ...]` or its shapes.
      num_envs, shards: over all devices.
    """
    return replay.init(replays(algo), rows, carry, num_envs=num_envs, rollout=rollout_length(algo), shards=shards)


def check_memory(
    algo: Algorithm, state: RunState, devices: list[jax.Device], *, runs: int = 1, saved: bool = True
) -> None:
    """Raises if the replays of a run's state, given as shapes, would not fit in memory.

    Args:
      algo: gives the sources.
      state: as from `jax.eval_shape`.
      devices: that share the replays.
      runs: how many such runs there are, over all devices.
      saved: whether checkpoints will hold the replays.

    Raises:
      ConfigError: with the capacity that would fit.
    """
    memory.check(state.buffers, replays(algo), devices=devices, runs=runs, saved=saved)


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
    buffers = replay.add(state.buffers, sources, collected.rows, collected.carry, replicas)
    rings = {name: buffers[source.over or name].ring for name, source in sources.items()}
    rollouts: dict[str, Any] = {name: collected for name in algo.experience if name not in sources}
    update_key, sample_key = keys.update_key(state.key, tick), keys.sample_key(state.key, tick)
    initial_carry = algo.initial_carry(spec, jnp.int32(0), num_envs)

    def update(carried, number):
        learner, indices = carried
        batch, drawn = dict(rollouts), {}
        for place, (name, source) in enumerate(sources.items()):
            key = jax.random.fold_in(sample_key, number * len(sources) + place)
            indices[name], batch[name] = replay.sample(
                rings[name], indices[name], source, replay.storage(sources, name), key, replicas, initial_carry
            )
            drawn[name] = batch[name].drawn
        key = jax.random.fold_in(update_key, number)
        learner, info = algo.update(learner, batch, spec=spec, key=key, replicas=replicas)
        metrics = dict(info.metrics)
        for name, source in sources.items():
            if name in info.priorities:
                indices[name] = replay.update_priorities(
                    rings[name], indices[name], source, drawn[name], info.priorities[name]
                )
            figures = replay.statistics(indices[name], drawn[name], replicas)
            metrics |= {f"{name}_{figure}": value for figure, value in figures.items()}
        return (learner, indices), jax.tree.map(jnp.float32, metrics)

    def updates(carried):
        numbers = jnp.arange(max(source.updates for source in sources.values()), dtype=jnp.int32)
        carried, metrics = jax.lax.scan(update, carried, numbers)
        return carried, jax.tree.map(jnp.mean, metrics)

    # Only what an update changes goes round: the learner and the indices, and not the rows.
    carried = (state.learner, {name: buffers[name].index for name in sources})
    if not sources:
        carried, metrics = update(carried, jnp.int32(0))
        updated = jnp.float32(1.0)
    else:
        shapes = jax.eval_shape(updates, carried)[1]

        def wait(carried):
            return carried, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        # The counters are one for all runs of a mapped batch, hence this stays a branch under vmap.
        stored = state.ticks.since(state.empty_at) * num_envs
        enough = stored >= max(source.min_size for source in sources.values())
        carried, metrics = jax.lax.cond(enough, updates, wait, carried)
        updated = enough.astype(jnp.float32)
    learner, indices = carried
    buffers = {name: buffers[name].replace(index=indices[name]) for name in sources}

    finite = {name: jnp.isfinite(value) for name, value in metrics.items()}
    finite["reward"] = jnp.all(jnp.isfinite(collected.rows.reward))
    observations = [x for x in jax.tree.leaves(collected.rows.observation) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if observations:
        finite["observation"] = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in observations]))
    fine = jnp.all(jnp.stack(list(finite.values())))
    report = Report(episodes, metrics, updated, finite, jnp.where(fine, jnp.int32(-1), jnp.int32(0)))
    return state.replace(learner=learner, buffers=buffers), report
