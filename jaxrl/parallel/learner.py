"""What every topology does alike with what was collected, or is there from before: store it, and update."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl import keys
from jaxrl.buffers import fixed, index, memory, replay
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.replay import ReplayState
from jaxrl.parallel import experience
from jaxrl.parallel.report import Report, reported
from jaxrl.parallel.rollout import EpisodeSums, RunState, rollout_length
from jaxrl.types import (
    Algorithm,
    EnvSpec,
    Episodes,
    Metrics,
    PyTree,
    Replay,
    Replicas,
    Rollout,
    RolloutBatch,
    Trajectory,
)


def empty_buffers(
    algo: Algorithm,
    rows: Trajectory,
    carry: PyTree,
    *,
    num_envs: int,
    shards: int,
    share: float = 0.0,
    dataset: Rings | None = None,
) -> dict[str, PyTree]:
    """A replay for each source that keeps one, and an index for each that draws from a dataset.

    Args:
      algo: gives the sources.
      rows: example rows `[T, num_envs, ...]` or their shapes.
      carry: `[num_envs, ...]` or its shapes.
      num_envs, shards: over all devices.
      share: of every batch that the dataset gives.
      dataset: its rings, by name.
    """
    own = experience.own(algo, shards, share)
    states = replay.init(own, rows, carry, num_envs=num_envs, rollout=rollout_length(algo), shards=shards)
    return states | given_indices(algo, dataset or {}, shards=shards, share=share)


def given_indices(algo: Algorithm, dataset: Rings, *, shards: int, share: float) -> dict[str, ReplayState]:
    """An index for each source that draws from a dataset; pure."""
    given = experience.given(algo, shards, share)
    return {
        experience.of_dataset(name): ReplayState(
            None, fixed.index_of(given, name, dataset[experience.of_dataset(source.over or name)], shards)
        )
        for name, source in given.items()
    }


def partition(algo: Algorithm, axis: str, shards: int, share: float) -> dict[str, ReplayState]:
    """How buffers lie on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
    specs = replay.partition(experience.own(algo, shards, share), axis)
    for name in experience.given(algo, shards, share):
        specs[experience.of_dataset(name)] = ReplayState(None, index.partition(axis))
    return specs


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
    memory.check(state.buffers, experience.own(algo), devices=devices, runs=runs, saved=saved)


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
    share: float = 0.0,
    dataset: Rings | None = None,
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
      share: of every batch that a dataset gives.
      dataset: its rings, by name.

    Returns:
      The state, and this iteration's report on this device.
    """
    own = experience.own(algo, replicas.shards * replicas.devices, share)
    stored = replay.add({name: state.buffers[name] for name in own}, own, collected.rows, collected.carry, replicas)
    state = state.replace(buffers=state.buffers | stored)
    # The counters are one for all runs of a mapped batch, hence this stays a branch under vmap.
    rows = state.ticks.since(state.empty_at) * num_envs
    enough = rows >= max((source.min_size for source in own.values()), default=0)
    rollouts = {name: collected for name, source in algo.experience.items() if isinstance(source, Rollout | Episodes)}
    state, metrics, updated = improve(
        algo,
        state,
        rollouts,
        enough if own else True,
        tick=tick,
        spec=spec,
        num_envs=num_envs,
        replicas=replicas,
        share=share,
        dataset=dataset,
    )
    finite = {name: jnp.isfinite(value) for name, value in metrics.items()}
    finite["reward"] = jnp.all(jnp.isfinite(collected.rows.reward))
    observations = [x for x in jax.tree.leaves(collected.rows.observation) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if observations:
        finite["observation"] = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in observations]))
    return state, reported(episodes, metrics, updated, finite)


def improve(
    algo: Algorithm,
    state: RunState,
    rollouts: Mapping[str, RolloutBatch],
    enough: jax.Array | bool,
    *,
    tick: jax.Array,
    spec: EnvSpec,
    num_envs: int,
    replicas: Replicas,
    share: float = 0.0,
    dataset: Rings | None = None,
) -> tuple[RunState, Metrics, jax.Array]:
    """One round of updates of the learner. Pure.

    Args:
      algo: with its schedules resolved.
      state: with everything stored that there is to draw from.
      rollouts: batches of the sources that are no replay.
      enough: whether there is enough to learn from; else nothing changes.
      tick: names the keys of this round, uint32.
      spec, num_envs, replicas, share, dataset: as of `learn`.

    Returns:
      The state, the metrics, and whether there was an update, float32.
    """
    shards = replicas.shards * replicas.devices
    draws = experience.draws(algo, shards, share)
    rings = {name: buffer.ring for name, buffer in state.buffers.items() if buffer.ring is not None} | dict(
        dataset or {}
    )
    update_key, sample_key = keys.update_key(state.key, tick), keys.sample_key(state.key, tick)
    initial_carry = algo.initial_carry(spec, jnp.int32(0), num_envs)

    def update(carried, number):
        learner, indices = carried
        parts, drawn = {}, {}
        for place, (name, draw) in enumerate(draws.items()):
            key = jax.random.fold_in(sample_key, number * len(draws) + place)
            indices[name], part = replay.sample(
                rings[draw.ring], indices[name], draw.source, draw.stored, key, replicas, initial_carry
            )
            drawn[name] = part.drawn
            parts.setdefault(draw.name, []).append(part)
        batch = dict(rollouts) | {name: replay.joined(found, replicas.shards) for name, found in parts.items()}
        key = jax.random.fold_in(update_key, number)
        learner, info = algo.update(learner, batch, spec=spec, key=key, replicas=replicas)
        metrics = dict(info.metrics)
        for source, priorities in info.priorities.items():
            names = [name for name, draw in draws.items() if draw.name == source]
            sizes = [drawn[name].place.shape[0] for name in names]
            for name, new in zip(names, replay.parted(priorities, sizes, replicas.shards), strict=True):
                draw = draws[name]
                indices[name] = replay.update_priorities(rings[draw.ring], indices[name], draw.source, drawn[name], new)
        for name in draws:
            figures = replay.statistics(indices[name], drawn[name], replicas)
            metrics |= {f"{name}_{figure}": value for figure, value in figures.items()}
        return (learner, indices), jax.tree.map(jnp.float32, metrics)

    def updates(carried):
        numbers = jnp.arange(updates_of(algo), dtype=jnp.int32)
        carried, metrics = jax.lax.scan(update, carried, numbers)
        return carried, jax.tree.map(jnp.mean, metrics)

    # Only what an update changes goes round: the learner and the indices, and not the rows.
    carried = (state.learner, {name: state.buffers[name].index for name in draws})
    if enough is True:
        carried, metrics = updates(carried) if draws else update(carried, jnp.int32(0))
        updated = jnp.float32(1.0)
    else:
        shapes = jax.eval_shape(updates, carried)[1]

        def wait(carried):
            return carried, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        carried, metrics = jax.lax.cond(enough, updates, wait, carried)
        updated = enough.astype(jnp.float32)
    learner, indices = carried
    buffers = {name: state.buffers[name].replace(index=indices[name]) for name in draws}
    return state.replace(learner=learner, buffers=buffers), metrics, updated


def updates_of(algo: Algorithm) -> int:
    """How many updates a round has."""
    return max((source.updates for source in algo.experience.values() if isinstance(source, Replay)), default=1)
