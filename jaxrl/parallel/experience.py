"""Sampling of batches from a run's own experience, a dataset, or both.

`dataset_fraction` is the fraction of every batch that comes from the dataset: 0 without a dataset, 1 without an
environment. A `Dataset` source takes its whole batch from the dataset, regardless of the fraction.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.buffers import checks, fixed, index, replay
from jaxrl.buffers.batches import Batch, join, split
from jaxrl.buffers.episode_buffer import EpisodeBuffer
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.flashbax import FlashbaxReplay
from jaxrl.buffers.replay import Buffer, ReplayBuffer, ReplayState
from jaxrl.buffers.ring import Ring
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import Dataset, Episodes, Prioritized, Replay, Uniform, sources_by_priority
from jaxrl.core.types import Algorithm, Counter, EnvSpec, Metrics, PyTree, Replicas, Rollout, SampleInfo
from jaxrl.parallel import replay_ratio
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.parallel.rollout import executed, rollout_length


@dataclasses.dataclass(frozen=True)
class Pool:
    """Groups of environments of which an iteration learns from any rollouts, possibly several of the same group.

    Args:
      groups: number of groups.
      size: number of environments of each group.
    """

    groups: int
    size: int


@dataclasses.dataclass(frozen=True)
class Experience:
    """The data that an algorithm learns from in one run: its replays and a dataset. All functions are pure.

    The states are a mapping from names to `ReplayState`s. The states of dataset replays are named by `of_dataset`, and
    do not contain the dataset's rings, which are never written to and not saved in checkpoints.

    Args:
      algo: the algorithm, whose `experience` defines the sources; its schedules must be resolved before sampling.
      spec: the spec of the environment.
      num_envs: number of environments that an iteration has rollouts of, over all devices.
      shards: number of logical shards over all devices.
      dataset_fraction: fraction of every batch of a `Replay` that comes from a dataset.
      replicas: the devices that store and sample rows.
      pool: the groups that store their rollouts independently, with one shard on each device; None: every rollout is
        one of all environments.
    """

    algo: Algorithm
    spec: EnvSpec
    num_envs: int
    shards: int
    dataset_fraction: float = 0.0
    replicas: Replicas = SingleReplica()
    pool: Pool | None = None

    @property
    def all_envs(self) -> int:
        """The number of environments whose rows the replays store, over all devices."""
        return self.num_envs if self.pool is None else self.pool.groups * self.pool.size

    @cached_property
    def online_sources(self) -> dict[str, Replay]:
        """The sources that sample from the run's own replay; each `batch_size` only counts items from this replay."""
        if self.dataset_fraction == 1.0:
            return {}
        return {
            name: dataclasses.replace(source, batch_size=source.batch_size - self.items_of_dataset(source))
            for name, source in self.algo.experience.items()
            if isinstance(source, Replay)
        }

    @cached_property
    def dataset_sources(self) -> dict[str, Replay]:
        """The sources that sample from a dataset; each `batch_size` only counts items from the dataset."""
        found = {}
        for name, source in self.algo.experience.items():
            if isinstance(source, Dataset):
                found[name] = fixed.source_of(source)
            elif isinstance(source, Replay) and self.dataset_fraction > 0.0:
                found[name] = dataclasses.replace(fixed.source_of(source), batch_size=self.items_of_dataset(source))
        return found

    def items_of_dataset(self, source: Replay) -> int:
        """Return the number of items from the dataset in a batch; a mixed batch has at least one item of each kind."""
        least = 0 if self.dataset_fraction in (0.0, 1.0) else 1
        return min(max(round(source.batch_size * self.dataset_fraction), least), source.batch_size - least)

    @cached_property
    def online(self) -> dict[str, Buffer]:
        """The replays of the run's own experience, keyed by source name."""
        length = rollout_length(self.algo)
        rings = {name: source for name, source in self.online_sources.items() if source.storage != "flashbax"}
        others = {
            name: FlashbaxReplay(name, source, self.num_envs, length, self.shards, self.replicas)
            for name, source in self.online_sources.items()
            if source.storage == "flashbax"
        }
        return {**self._bound(rings, length, None if self.pool is None else self.pool.groups), **others}

    @cached_property
    def dataset(self) -> dict[str, ReplayBuffer]:
        """The replays of the dataset, keyed by the name of their state."""
        return {of_dataset(name): buffer for name, buffer in self._bound(self.dataset_sources, 1).items()}

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """All replays that an update samples from, keyed by the name of their state."""
        return {**self.online, **self.dataset}

    @cached_property
    def episodes(self) -> dict[str, EpisodeBuffer]:
        """The buffers of whole episodes, keyed by source name."""
        return {
            name: EpisodeBuffer(
                source,
                self.num_envs,
                self.shards,
                self.replicas,
                self.algo.initial_carry(self.spec, jnp.int32(0), self.num_envs),
            )
            for name, source in self.algo.experience.items()
            if isinstance(source, Episodes)
        }

    def _bound(self, sources: Mapping[str, Replay], length: int, groups: int | None = None) -> dict[str, ReplayBuffer]:
        carry = ()
        if any(source.sequence is not None for source in sources.values()):
            carry = self.algo.initial_carry(self.spec, jnp.int32(0), self.all_envs)
        return replay.bind(
            sources,
            num_envs=self.all_envs,
            rollout_length=length,
            shards=self.shards,
            replicas=self.replicas,
            initial_carry=carry,
            groups=groups,
        )

    @property
    def updates_per_iteration(self) -> Fraction:
        """The mean number of updates per iteration, for the largest replay ratio of the sources; 1 without a replay."""
        ratios = [source.replay_ratio for source in self.online_sources.values()]
        if not ratios:
            return Fraction(1)
        return replay_ratio.updates_per_iteration(max(ratios), self.num_envs, rollout_length(self.algo))

    @property
    def samples_per_update(self) -> int:
        """The number of transitions of the run's own experience that an update samples, over all devices."""
        return sum(source.batch_size * source.transitions for source in self.online_sources.values())

    def updates_now(self, steps_per_env: Counter) -> int | jax.Array:
        """Return the number of updates in the iteration after which each environment has made `steps_per_env` steps."""
        return replay_ratio.updates_now(self.updates_per_iteration, steps_per_env, rollout_length(self.algo))

    # --- before anything is compiled -----------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return one line per problem of the sources in this setup; empty if the sources are valid."""
        found = checks.source_problems(self.online_sources, self.all_envs, rollout_length(self.algo), self.shards)
        found += checks.source_problems(self.dataset_sources, self.num_envs, 1, self.shards)
        for name, source in self.online_sources.items():
            if self.pool is not None:
                found += checks.group_problems(name, source)
            found += replay_ratio.problems(source.replay_ratio, self.num_envs, rollout_length(self.algo))
        for name, source in self.algo.experience.items():
            if not isinstance(source, Replay) or self.dataset_fraction in (0.0, 1.0):
                continue
            size, items, shards = source.batch_size, self.items_of_dataset(source), self.shards
            if size < 2 or size % shards or items % shards:
                each = max(size // shards, 2)
                nearest = min(max(round(self.dataset_fraction * each), 1), each - 1) / each
                found.append(
                    f"source {name!r}: dataset_fraction={self.dataset_fraction} takes {items} of batch_size={size} "
                    f"items, and both numbers must be divisible by {shards} shards; use batch_size={each * shards} and "
                    f"dataset_fraction={nearest}"
                )
        for name, buffer in self.episodes.items():
            found += [f"source {name!r}: {line}" for line in buffer.problems()]
        return [f"{type(self.algo).__name__} {line}" for line in found]

    def partition(self, axis: str) -> dict[str, ReplayState]:
        """Return prefix trees of partition specs that shard the states' environments over the mesh axis `axis`."""
        online = {name: buffer.partition(axis) for name, buffer in (self.online | self.episodes).items()}
        dataset = {name: buffer.partition(axis).replace(ring=None) for name, buffer in self.dataset.items()}
        return online | dataset

    # --- a run ---------------------------------------------------------------------------------------------------

    def empty(self, rollout: Rollout | None, dataset: Rings | None = None) -> dict[str, ReplayState]:
        """Return empty buffers, and an index for each source that samples from a dataset.

        Args:
          rollout: a rollout of all environments, or its shapes; None without environments.
          dataset: the dataset's rings, by name.
        """
        empty = {
            name: ReplayState(None, fixed.index_of(buffer, (dataset or {})[self._ring(name)]))
            for name, buffer in self.dataset.items()
        }
        if rollout is not None:
            rows = jax.eval_shape(lambda x: x.rows, rollout)
            empty |= {name: buffer.init(rows, rollout.carry) for name, buffer in self.online.items()}
            empty |= {name: buffer.init(rollout) for name, buffer in self.episodes.items()}
        return empty

    def store(self, states: Mapping[str, ReplayState], rollout: Rollout) -> dict[str, ReplayState]:
        """Store a rollout of this device's environments."""
        rows, carry = executed(rollout.rows, self.spec), rollout.carry
        rings = {name: buffer for name, buffer in self.online.items() if isinstance(buffer, ReplayBuffer)}
        stored = {name: states[name] for name in rings}
        if rings and rollout.groups is None:
            stored = replay.add(rings, stored, rows, carry)
        elif rollout.groups is not None:
            size = rows.reward.shape[1] // len(rollout.groups)
            for number, group in enumerate(rollout.groups):
                part = slice(number * size, (number + 1) * size)
                of_group = jax.tree.map(lambda x, part=part: x[:, part], rows)
                stored = replay.add(rings, stored, of_group, jax.tree.map(lambda x, part=part: x[part], carry), group)
        others = {name: buffer for name, buffer in self.online.items() if name not in rings}
        stored |= {name: buffer.add(states[name], rows, carry) for name, buffer in others.items()}
        stored |= {name: buffer.add(states[name], rollout) for name, buffer in self.episodes.items()}
        return dict(states) | stored

    def rings(self, states: Mapping[str, ReplayState], dataset: Rings | None) -> dict[str, Ring]:
        """Return the rings that the buffers sample from, keyed by the name of the buffer's state."""
        stored = {name: state.ring for name, state in states.items() if state.ring is not None} | dict(dataset or {})
        return {name: stored[self._ring(name)] for name in self.buffers} | {
            name: stored[name] for name in self.episodes
        }

    def _ring(self, name: str) -> str:
        """Return the name of the ring that the buffer `name` samples from."""
        over = self.buffers[name].source.over
        if over is None:
            return name
        return over if name in self.online else of_dataset(over)

    def sample(
        self, states: Mapping[str, ReplayState], key: jax.Array, number: jax.Array
    ) -> tuple[dict[str, ReplayState], dict[str, Batch]]:
        """Sample the batches of one update.

        Args:
          states: the state of each buffer, with its ring.
          key: key of this round of updates.
          number: index of the update within this round, int32.

        Returns:
          The new states, and this device's part of each source's batch, keyed by source name.
        """
        states, parts = dict(states), {}
        for place, (name, buffer) in enumerate(self.buffers.items()):
            draw_key = jax.random.fold_in(key, number * len(self.buffers) + place)
            states[name], part = buffer.sample(states[name], draw_key)
            parts.setdefault(buffer.name, []).append(part)
        return states, {name: join(found, self.replicas.shards) for name, found in parts.items()}

    def complete_batches(self, states: Mapping[str, ReplayState]) -> jax.Array:
        """Return the number of updates for which there are enough whole episodes, int32."""
        least = [buffer.batches(states[name]) for name, buffer in self.episodes.items()]
        return functools.reduce(jnp.minimum, least)

    def take(
        self, states: Mapping[str, ReplayState], rollouts: Mapping[str, Rollout]
    ) -> tuple[dict[str, ReplayState], dict[str, Rollout]]:
        """Remove the whole episodes of one update from the states; return the states and the episodes.

        Args:
          states: the state of each buffer, with its ring.
          rollouts: the newest rollout of each source.
        """
        taken = {name: buffer.take(states[name], rollouts[name]) for name, buffer in self.episodes.items()}
        after = {name: state for name, (state, _) in taken.items()}
        return dict(states) | after, {name: batch for name, (_, batch) in taken.items()}

    def cut_to_length[T](self, learn: Callable[[dict[str, Any]], T], batches: dict[str, Any]) -> T:
        """Call `learn` with the batches of all sources; batches of whole episodes are cut to the necessary length."""
        for name, buffer in self.episodes.items():
            learn = functools.partial(_with_one_cut, learn, name, buffer)
        return learn(batches)

    def update_priorities(
        self, states: Mapping[str, ReplayState], batches: Mapping[str, Batch], priorities: Mapping[str, jax.Array]
    ) -> dict[str, ReplayState]:
        """Write the new priorities [batch] of each source's batch to the replays that the items were sampled from."""
        states = dict(states)
        needed = sources_by_priority(self.algo.experience)
        if {*needed} != {*priorities}:
            raise ConfigError(
                f"{type(self.algo).__name__}.update must return UpdateInfo(metrics, priorities) with priorities for "
                f"{needed}, which sample or remove by priority, not for {[*priorities]}"
            )
        for source, values in priorities.items():
            drawn = batches[source].sample_info
            assert drawn is not None  # every batch from a replay has a `SampleInfo`
            for name, (info, part) in self._parts(source, drawn, values).items():
                # Datasets have no priorities if the sampler only applies to items that are added and removed.
                if name in self.online or not index.dense(self.buffers[name].source):
                    states[name] = self.buffers[name].update_priorities(states[name], info, part)
        return states

    def statistics(self, states: Mapping[str, ReplayState], batches: Mapping[str, Batch]) -> Metrics:
        """Return statistics of every replay and its last batch over all devices, as float32 scalars."""
        metrics = {}
        for source, batch in batches.items():
            assert batch.sample_info is not None
            for name, (info, _) in self._parts(source, batch.sample_info, None).items():
                figures = self.buffers[name].statistics(states[name], info)
                metrics |= {f"{name}_{figure}": value for figure, value in figures.items()}
        return metrics

    def _parts(self, source: str, info: SampleInfo, values: PyTree) -> dict[str, tuple[SampleInfo, PyTree]]:
        """Split `info` and `values` of a batch of `source`, with leaves [batch, ...], by the buffer of each item."""
        names = [name for name, buffer in self.buffers.items() if buffer.name == source]
        sizes = [self.buffers[name].source.batch_size // self.replicas.devices for name in names]
        return dict(zip(names, split((info, values), sizes, self.replicas.shards), strict=True))


def _with_one_cut(learn, name, buffer, batches):
    return buffer.cut_to_length(batches[name], lambda cut: learn(batches | {name: cut}))


def of_dataset(name: str) -> str:
    """Return the state name of the dataset replay that the source `name` samples from."""
    return f"{name}_dataset"


def has_separate_dataset(algo: Algorithm) -> bool:
    """Return whether an algorithm has a source for a dataset and another source for its own experience."""
    sources = algo.experience.values()
    return any(isinstance(x, Dataset) for x in sources) and any(isinstance(x, Replay) for x in sources)


def learns_from_dataset(algo: Algorithm) -> bool:
    """Return whether an algorithm has a source that needs a dataset."""
    return any(isinstance(source, Dataset) for source in algo.experience.values())


def deciding_settings(algo: Algorithm, holds: Callable[[Algorithm], bool]) -> dict[str, Any]:
    """Return the settings of `algo` that `holds` depends on: if any of them had its default, `holds` would be False."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(algo)
        if (not field.metadata.get("pytree_node", True) or field.metadata.get("part"))
        and field.default is not dataclasses.MISSING
    }
    return {
        name: getattr(algo, name)
        for name, default in defaults.items()
        if getattr(algo, name) != default and not holds(dataclasses.replace(algo, **{name: default}))
    }


def dataset_settings(algo: Algorithm) -> dict[str, Any]:
    """Return the settings that make `algo` learn from a dataset; empty if it learns from one with any settings."""
    return deciding_settings(algo, learns_from_dataset)


def _stores_extras(algo: Algorithm) -> bool:
    return any(isinstance(source, Replay) and source.extras for source in algo.experience.values())


def dataset_problems(algo: Algorithm, spec: EnvSpec, dataset_fraction: float, *, dataset: bool) -> list[str]:
    """Return one line per reason why `algo` cannot learn with a dataset, or without one if `dataset` is False."""
    kind, sources = type(algo).__name__, algo.experience.values()
    if not dataset:
        if not learns_from_dataset(algo):
            return []
        return [f"{kind}{_with(dataset_settings(algo))} learns from a dataset; pass one, such as dataset='rlds:DIR'"]
    found = []
    if not 0.0 <= dataset_fraction <= 1.0:
        found.append(f"dataset_fraction={dataset_fraction} must be between 0 and 1")
    if not all(isinstance(source, Replay | Dataset) for source in sources):
        return [*found, f"{kind} is on-policy and cannot learn from a dataset; use an algorithm with a replay buffer"]
    if dataset_fraction == 1.0 and has_separate_dataset(algo):
        found.append(f"{kind} with these settings learns from a dataset and its own experience; also pass env=")
    if 0.0 < dataset_fraction < 1.0 and not any(isinstance(source, Replay) for source in sources):
        found.append(f"{kind} learns only from a dataset; pass eval_env= instead of env=")
    if spec.masked:
        found.append(f"{spec.name} has action masks, which datasets do not contain; use another environment")
    for name, source in algo.experience.items():
        if isinstance(source, Replay) and dataset_fraction == 1.0 and _needs_inserts(source):
            found.append(
                f"{kind}'s source {name!r} has a sampler, remover or max_times_sampled for items that are "
                "added and removed, but a dataset is fixed; leave these at their defaults"
            )
    if dataset_fraction > 0.0 and _stores_extras(algo):
        names = [name for source in sources if isinstance(source, Replay) for name in source.extras]
        settings = _with(deciding_settings(algo, _stores_extras))
        found.append(
            f"{kind}{settings} learns from {' and '.join(names)}, recorded while acting, which a dataset does not "
            "contain; train without a dataset" + (" or these settings" if settings else "")
        )
    return found


def _with(settings):
    words = " and ".join(f"{name}={value!r}" for name, value in settings.items())
    return words and f" with {words}"


def _needs_inserts(source: Replay) -> bool:
    """Return whether a replay's settings are meaningful only if items are added during training."""
    in_turn = not isinstance(source.sampler, Uniform | Prioritized)
    return in_turn or bool(source.max_times_sampled) or index.bounded(source)
