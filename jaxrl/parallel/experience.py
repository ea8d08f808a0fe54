"""Where batches come from: what a run lived through itself, a dataset, or some of both.

The dataset's fraction says how much of every batch comes from it: 0 without one, 1 where there is no environment. A
source that a dataset alone can serve gets all of its batch from it, whatever the fraction.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property

import jax
import jax.numpy as jnp

from jaxrl.buffers import checks, fixed, replay
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.flashbax import FlashbaxReplay
from jaxrl.buffers.replay import Batch, Buffer, ReplayBuffer, ReplayState
from jaxrl.buffers.ring import Ring
from jaxrl.core.sources import Dataset, Replay
from jaxrl.core.types import Algorithm, Counter, EnvSpec, Metrics, PyTree, Replicas, Trajectory
from jaxrl.parallel import replay_ratio
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.parallel.rollout import executed, rollout_length


@dataclasses.dataclass(frozen=True)
class Experience:
    """What an algorithm learns from in one run: its replays and a dataset, bound to their rules; pure functions.

    States are `ReplayState`s by name; a part that comes from the dataset has the name of `of_dataset`, and its ring is
    not part of its state: nothing writes to it, and no checkpoint holds it.

    Args:
      algo: gives the sources. With its schedules resolved where batches are drawn.
      spec: of the environment.
      num_envs: environments over all devices.
      shards: logical shards over all devices.
      dataset_fraction: of every batch of a `Replay` that comes from a dataset.
      replicas: the devices, where rows are stored and drawn.
    """

    algo: Algorithm
    spec: EnvSpec
    num_envs: int
    shards: int
    dataset_fraction: float = 0.0
    replicas: Replicas = SingleReplica()

    @cached_property
    def online_sources(self) -> dict[str, Replay]:
        """The sources that are served from what the run lives through, with their part of the batch."""
        if self.dataset_fraction == 1.0:
            return {}
        return {
            name: dataclasses.replace(source, batch_size=source.batch_size - self._from_dataset(source))
            for name, source in self.algo.experience.items()
            if isinstance(source, Replay)
        }

    @cached_property
    def dataset_sources(self) -> dict[str, Replay]:
        """The sources that are served from a dataset, with their part of the batch."""
        found = {}
        for name, source in self.algo.experience.items():
            if isinstance(source, Dataset):
                found[name] = fixed.source_of(source)
            elif isinstance(source, Replay) and self.dataset_fraction > 0.0:
                found[name] = dataclasses.replace(fixed.source_of(source), batch_size=self._from_dataset(source))
        return found

    def _from_dataset(self, source: Replay) -> int:
        """How many items of a batch come from the dataset: the same number of every shard."""
        here = source.batch_size // self.shards
        least, most = (0, here) if self.dataset_fraction in (0.0, 1.0) else (1, here - 1)
        return min(max(round(here * self.dataset_fraction), least), most) * self.shards

    @cached_property
    def online(self) -> dict[str, Buffer]:
        """The replays of what the run lives through, by source."""
        length = rollout_length(self.algo)
        rings = {name: source for name, source in self.online_sources.items() if source.storage == "ring"}
        others = {
            name: FlashbaxReplay(name, source, self.num_envs, length, self.shards, self.replicas)
            for name, source in self.online_sources.items()
            if source.storage == "flashbax"
        }
        return {**self._bound(rings, length), **others}

    @cached_property
    def dataset(self) -> dict[str, ReplayBuffer]:
        """The replays of what a dataset holds, by the name of their state."""
        return {of_dataset(name): buffer for name, buffer in self._bound(self.dataset_sources, 1).items()}

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """All that an update draws from, by the name of its state."""
        return {**self.online, **self.dataset}

    def _bound(self, sources: Mapping[str, Replay], length: int) -> dict[str, ReplayBuffer]:
        carry = ()
        if any(source.sequence is not None for source in sources.values()):
            carry = self.algo.initial_carry(self.spec, jnp.int32(0), self.num_envs)
        return replay.bind(
            sources,
            num_envs=self.num_envs,
            rollout_length=length,
            shards=self.shards,
            replicas=self.replicas,
            initial_carry=carry,
        )

    @property
    def updates_per_iteration(self) -> Fraction:
        """Updates of an iteration on average, the most that any replay asks for; 1 where there is none."""
        ratios = [source.replay_ratio for source in self.online_sources.values()]
        if not ratios:
            return Fraction(1)
        return replay_ratio.updates_per_iteration(max(ratios), self.num_envs, rollout_length(self.algo))

    def updates_now(self, steps_per_env: Counter) -> int | jax.Array:
        """Updates of the iteration that brought every environment to `steps_per_env` steps."""
        return replay_ratio.updates_now(self.updates_per_iteration, steps_per_env, rollout_length(self.algo))

    # --- before anything is compiled -----------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Why these sources cannot be served; empty if they can."""
        found = checks.source_problems(self.online_sources, self.num_envs, rollout_length(self.algo), self.shards)
        found += checks.source_problems(self.dataset_sources, self.num_envs, 1, self.shards)
        for source in self.online_sources.values():
            found += replay_ratio.problems(source.replay_ratio, self.num_envs, rollout_length(self.algo))
        found += [
            f"source {name!r}: of batch_size={source.batch_size} over {self.shards} shards "
            f"dataset_fraction={self.dataset_fraction} gives no part to the "
            f"{'run' if self._from_dataset(source) else 'dataset'}; use batches of {2 * self.shards} at least"
            for name, source in self.algo.experience.items()
            if isinstance(source, Replay) and 0.0 < self.dataset_fraction < 1.0 and source.batch_size < 2 * self.shards
        ]
        return [f"{type(self.algo).__name__} {line}" for line in found]

    def partition(self, axis: str) -> dict[str, ReplayState]:
        """How states lie on a mesh whose axis `axis` shards the environments: a prefix tree of partition specs."""
        online = {name: buffer.partition(axis) for name, buffer in self.online.items()}
        dataset = {name: buffer.partition(axis).replace(ring=None) for name, buffer in self.dataset.items()}
        return online | dataset

    # --- a run ---------------------------------------------------------------------------------------------------

    def empty(self, rows: Trajectory, carry: PyTree, dataset: Rings | None = None) -> dict[str, ReplayState]:
        """An empty replay for each source that keeps one, and an index for each that draws from a dataset; pure.

        Args:
          rows: example rows `[T, num_envs, ...]` or their shapes.
          carry: `[num_envs, ...]` or its shapes.
          dataset: its rings, by name.
        """
        online = {name: buffer.init(rows, carry) for name, buffer in self.online.items()}
        return online | self.dataset_indices(dataset or {})

    def dataset_indices(self, dataset: Rings) -> dict[str, ReplayState]:
        """An index for each source that draws from a dataset; pure."""
        margins = fixed.margins(self.dataset_sources) if self.dataset_sources else (0, 0)
        return {
            name: ReplayState(None, fixed.index_of(buffer, dataset[self._ring(name)], margins))
            for name, buffer in self.dataset.items()
        }

    def store(self, states: Mapping[str, ReplayState], rows: Trajectory, carry: PyTree) -> dict[str, ReplayState]:
        """Stores a rollout: rows `[T, B, ...]` with their extras, and the carry `[B, ...]` at the first."""
        rows = executed(rows, self.spec)
        rings = {name: buffer for name, buffer in self.online.items() if isinstance(buffer, ReplayBuffer)}
        stored = replay.add(rings, {name: states[name] for name in rings}, rows, carry) if rings else {}
        others = {name: buffer for name, buffer in self.online.items() if name not in rings}
        stored |= {name: buffer.add(states[name], rows, carry) for name, buffer in others.items()}
        return dict(states) | stored

    def rings(self, states: Mapping[str, ReplayState], dataset: Rings | None) -> dict[str, Ring]:
        """What every buffer draws from, by the name of its state."""
        stored = {name: state.ring for name, state in states.items() if state.ring is not None} | dict(dataset or {})
        return {name: stored[self._ring(name)] for name in self.buffers}

    def _ring(self, name: str) -> str:
        """The name of the ring that the buffer `name` draws from."""
        over = self.buffers[name].source.over
        if over is None:
            return name
        return over if name in self.online else of_dataset(over)

    def sample(
        self, states: Mapping[str, ReplayState], key: jax.Array, number: jax.Array
    ) -> tuple[dict[str, ReplayState], dict[str, Batch]]:
        """The batches of one update.

        Args:
          states: with their rings.
          key: of this round of updates.
          number: of the update in this round, int32.

        Returns:
          The states, and a batch for each source, of which this device has its part.
        """
        states, parts = dict(states), {}
        for place, (name, buffer) in enumerate(self.buffers.items()):
            draw_key = jax.random.fold_in(key, number * len(self.buffers) + place)
            states[name], part = buffer.sample(states[name], draw_key)
            parts.setdefault(buffer.name, []).append(part)
        return states, {name: replay.join(found, self.replicas.shards) for name, found in parts.items()}

    def update_priorities(
        self, states: Mapping[str, ReplayState], batches: Mapping[str, Batch], priorities: Mapping[str, jax.Array]
    ) -> dict[str, ReplayState]:
        """Gives the items of each source's batch new priorities [batch], in the replay that each item came from."""
        states = dict(states)
        for source, given in priorities.items():
            for name, (info, part) in self._parts(source, (batches[source].sample_info, given)).items():
                states[name] = self.buffers[name].update_priorities(states[name], info, part)
        return states

    def statistics(self, states: Mapping[str, ReplayState], batches: Mapping[str, Batch]) -> Metrics:
        """Figures of every replay and of what was drawn from it, over all devices: float32 scalars."""
        metrics = {}
        for source, batch in batches.items():
            for name, info in self._parts(source, batch.sample_info).items():
                figures = self.buffers[name].statistics(states[name], info)
                metrics |= {f"{name}_{figure}": value for figure, value in figures.items()}
        return metrics

    def _parts(self, source: str, values: PyTree) -> dict[str, PyTree]:
        """What belongs to each buffer of a source's batch, of leaves [batch]."""
        names = [name for name, buffer in self.buffers.items() if buffer.name == source]
        sizes = [self.buffers[name].source.batch_size // self.replicas.devices for name in names]
        return dict(zip(names, replay.split(values, sizes, self.replicas.shards), strict=True))


def of_dataset(name: str) -> str:
    """The name of the state of a source's part that comes from the dataset."""
    return f"{name}_dataset"


def dataset_problems(algo: Algorithm, spec: EnvSpec, dataset_fraction: float, *, dataset: bool) -> list[str]:
    """Why `algo` cannot learn with or without a dataset; one line each."""
    kind, sources = type(algo).__name__, algo.experience.values()
    if not dataset:
        only = any(isinstance(source, Dataset) for source in sources)
        return [f"{kind} learns from a dataset; pass one to train, as dataset='rlds:DIR'"] if only else []
    found = []
    if not 0.0 <= dataset_fraction <= 1.0:
        found.append(f"dataset_fraction={dataset_fraction} must be between 0 and 1")
    if not all(isinstance(source, Replay | Dataset) for source in sources):
        return [*found, f"{kind} is on-policy and cannot learn from a dataset; use an algorithm with a replay buffer"]
    if 0.0 < dataset_fraction < 1.0 and not any(isinstance(source, Replay) for source in sources):
        found.append(f"{kind} learns from a dataset alone; pass eval_env= to train, and no environment")
    if spec.masked:
        found.append(f"{spec.name} has action masks, which datasets do not hold")
    for name, source in algo.experience.items():
        if isinstance(source, Replay) and dataset_fraction > 0.0 and source.extras:
            found.append(f"{kind}'s source {name!r} stores {source.extras} when acting, which a dataset does not hold")
    return found
