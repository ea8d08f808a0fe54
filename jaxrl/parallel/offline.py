"""Offline learning from a dataset, without environments."""

import dataclasses

import jax

from jaxrl.buffers.fixed import Rings
from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.report import EpisodeSums
from jaxrl.core.run_state import RunState
from jaxrl.core.sources import Replay, Uniform
from jaxrl.core.types import Algorithm, Environment, HostRecipe, PyTree, env_spec
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import streamed
from jaxrl.parallel.layout import Layout, checked_layout
from jaxrl.parallel.program import Program
from jaxrl.parallel.rollout import Acting
from jaxrl.parallel.streamed import Stream, StreamLoop
from jaxrl.parallel.topology import Topology

_EVERYTHING = 1.0  # the dataset's share of every batch


@dataclasses.dataclass(frozen=True)
class Offline(Topology):
    """The topology that learns only from a dataset, on the accelerators; a step is one gradient update.

    Args:
      devices: number of devices, as in `Anakin`; every batch and the dataset are divided over them.
      shards: number of equal parts of the dataset, from each of which an equal part of every batch is sampled; the same
        number gives the same run on any number of devices. None: the largest of 8, 4, 2, 1 that divides the batch.
      stream: read batches from disk in shuffled order instead of keeping the dataset in memory; None: only if it does
        not fit.
    """

    devices: int | None = None
    shards: int | None = None
    stream: bool | None = None

    def problems(self, env: Environment | HostRecipe | None) -> list[str]:
        if env is None:
            return []
        return ["topology=Offline() learns only from a dataset; leave env out and pass eval_env"]

    def steps_per_iteration(self, algo: Algorithm) -> int:
        """Return the updates of an iteration, 1, as there are no environment steps for a replay ratio."""
        return 1

    def bind(
        self, algo: Algorithm, env: Environment | HostRecipe, dataset_fraction: float = _EVERYTHING
    ) -> Program[None, Rings] | Program[None, Stream]:
        devices = meshes.device_count(self.devices)
        spec = env_spec(env)
        # Rows have one column per shard.
        columns = self.shards or max(8, devices)
        layout = checked_layout(algo, spec, columns, devices, self.shards, _EVERYTHING)
        layout = dataclasses.replace(layout, num_envs=1, streams=bool(self.stream))
        if not layout.streams:
            return Program(layout, NoRollouts(layout))
        (name, source), *others = algo.experience.items()
        problems = []
        if others:
            problems.append(
                f"a stream serves only one source, but {type(algo).__name__} has {sorted(algo.experience)}; use "
                "stream=False"
            )
        if isinstance(source, Replay) and not isinstance(source.sampler, Uniform):
            problems.append(f"a stream samples uniformly, but source {name!r} has {source.sampler}; use stream=False")
        if jax.process_count() > 1:
            problems.append("several processes cannot stream a dataset; use stream=False, which divides it over them")
        if problems:
            raise ConfigError(problems)
        block = streamed.block(algo, layout.spec)
        return Program(layout, NoRollouts(layout, updates=block), StreamLoop(layout, block))


registry.add("topology", Offline)


@dataclasses.dataclass(frozen=True)
class NoRollouts:
    """A `RolloutCollector` that does not act: an iteration is `updates` updates, which count as steps."""

    layout: Layout
    updates: int = 1

    def begin(self, algo: Algorithm, source: None, key: jax.Array) -> Acting:
        """Return an empty acting state, as there are no environments."""
        parts: dict[str, PyTree] = {"env_state": (), "timestep": (), "carry": ()}
        return Acting(**parts)

    def example(self, algo: Algorithm, source: None, state: RunState) -> None:
        """Return None, as nothing acts."""

    def steps_per_env(self, algo: Algorithm) -> int:
        return self.updates

    def collect(
        self, algo: Algorithm, source: None, state: RunState, first_env: jax.Array | int
    ) -> tuple[RunState, None, EpisodeSums]:
        state = state.replace(steps_per_env=state.steps_per_env.add(self.updates))
        return state, None, EpisodeSums.zero()
