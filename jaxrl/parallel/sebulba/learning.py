"""The learner for host environments: compiled functions that learn from the actors' rollouts."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.buffers import fixed
from jaxrl.core.report import EpisodeSums, make_report
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm, PyTree, Rollout, TimeStep
from jaxrl.parallel import iteration
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.layout import Layout
from jaxrl.parallel.rollout import Acting
from jaxrl.parallel.sebulba.collector import Collected

_AXES = {"timesteps": 1, "action": 1, "extras": 1, "carry": 0, "final_carry": 0}  # axes of environments in a `Rollout`


@dataclasses.dataclass(frozen=True)
class HostRollouts:
    """A `RolloutCollector` for host environments; its source is their first time steps, or a collected rollout."""

    layout: Layout

    def steps_per_env(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo)

    def begin(self, algo: Algorithm, source: TimeStep, key: jax.Array) -> Acting:
        """Return the initial acting state, without the states of the host environments."""
        spec, num_envs = self.layout.spec, self.layout.num_envs
        env_index = jnp.arange(num_envs, dtype=jnp.int32)
        carry = jax.vmap(lambda index: algo.initial_carry(spec, index, num_envs))(env_index)
        return Acting((), ro.first_timestep(source, spec), carry)

    def example(self, algo: Algorithm, source: TimeStep, state: RunState) -> Rollout:
        spec, num_envs = self.layout.spec, self.layout.num_envs
        steps = HostSteps(spec, num_envs, num_envs, 1)
        roots = steps.roots(state.key, jnp.arange(num_envs, dtype=jnp.int32))
        action = ro.no_action(spec, num_envs)
        actor, timestep = algo.actor(state.learner), state.timestep.replace(previous_action=None)
        storage = steps.storage(algo, actor, timestep, state.carry, action, roots)
        return steps.finish(algo, actor, storage, timestep, action, state.carry, state.carry, jnp.int32(0))

    def collect(
        self, algo: Algorithm, source: Rollout, state: RunState, first_env: jax.Array | int
    ) -> tuple[RunState, Rollout, EpisodeSums]:
        """Update the state from a collected rollout; the actors have already counted the episodes that ended."""
        steps_per_env = state.steps_per_env.add(ro.rollout_length(algo))
        state = state.replace(timestep=source.final, carry=source.final_carry, steps_per_env=steps_per_env)
        return state, source, EpisodeSums.zero()


@dataclasses.dataclass(frozen=True)
class HostLearning:
    """The learner's compiled functions for one run. Hashable, as it is a static argument of these functions.

    Args:
      layout: the layout of the learner over its devices.
      pooled: whether the rollouts of a batch may have different versions.
    """

    layout: Layout
    pooled: bool

    @partial(jax.jit, static_argnums=0)
    def prepare(self, algo, state, total_steps_per_env):
        """Return the algorithm with its schedules resolved, and the actor state."""
        algo = self.layout.resolve(algo, state, total_steps_per_env)
        return algo, algo.actor(state.learner)

    def gathered(self, rollouts: list[Collected]) -> list[Collected]:
        """Move a batch's rollouts to the learner's device; if it has several devices, join and shard the rollouts."""
        layout = self.layout
        first = layout.mesh.local_devices[0]
        rollouts = [rollout if _is_on(rollout, first) else jax.device_put(rollout, first) for rollout in rollouts]
        if layout.devices == 1:
            return rollouts  # `learn` joins them when it reads them, which saves a copy of the frames
        whole = self._whole(rollouts)
        if jax.process_count() > 1:  # versions may differ between processes
            whole = whole.replace(rollout=whole.rollout.replace(version=None))
        everywhere: PyTree = PartitionSpec()
        specs = Collected(self._rollout_specs(), everywhere)
        if jax.process_count() > 1:
            # Each process has counted the episodes of its own environments; `_on_devices` sums the counts.
            nothing = jnp.zeros(layout.devices // jax.process_count(), jnp.float32)
            whole = whole.replace(episodes=jax.tree.map(lambda x: nothing.at[0].set(x), whole.episodes))
            specs = specs.replace(episodes=PartitionSpec("data"))
        return [meshes.from_processes(whole, layout.mesh, specs)]

    def _whole(self, rollouts):
        return rollouts[0] if len(rollouts) == 1 and not self.pooled else self._joined(rollouts)

    def _statistics(self, parts):
        """Return the statistics used for acting: a single set, or one set per environment if versions may differ."""
        if not self.pooled:
            return parts[0].statistics

        group = parts[0].timesteps.first.shape[1]  # number of environments of each rollout

        def of_environments(*leaves):
            return jnp.concatenate([jnp.broadcast_to(x[None], (group, *x.shape)) for x in leaves])

        return jax.tree.map(of_environments, *(part.statistics for part in parts))

    @partial(jax.jit, static_argnums=0)
    def _joined(self, rollouts):
        """Join rollouts into one batch, with the version of the last rollout, which is the newest."""
        parts = [collected.rollout for collected in rollouts]
        whole = {
            name: jax.tree.map(lambda *x, axis=axis: jnp.concatenate(x, axis), *(getattr(part, name) for part in parts))
            for name, axis in _AXES.items()
        }
        whole |= {"statistics": self._statistics(parts), "version": parts[-1].version}
        if self.layout.pool is not None:
            whole["groups"] = jnp.stack([part.groups for part in parts])
        episodes = rollouts[0].episodes
        for collected in rollouts[1:]:
            episodes = episodes + collected.episodes
        return Collected(Rollout(**whole), episodes)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def learn(self, algo, state, buffers, rollouts, dataset):
        """Store the rollouts from `gathered`, and make the updates; the schedules of `algo` are resolved."""
        return self._on_devices(_learn, algo, state, buffers, rollouts, dataset, None)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def store(self, algo, state, buffers, rollouts):
        """Store the rollouts from `gathered` without an update."""
        return self._on_devices(_store, algo, state, buffers, rollouts, None, None)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def update(self, algo, state, buffers, dataset, number):
        """Make update `number`, counted since rows were last stored; the schedules of `algo` are resolved."""
        return self._on_devices(_update, algo, state, buffers, [], dataset, number)

    def _on_devices(self, function, algo, state, buffers, rollouts, dataset, number):
        layout, partition, everywhere = self.layout, self.layout.partition(algo), PartitionSpec()
        collected = None if not rollouts else rollouts[0] if layout.devices > 1 else self._whole(rollouts)
        rollout = None if collected is None else collected.rollout

        def one_device(algo, state, rollout, dataset, number):
            state, report = function(HostRollouts(layout), algo, state, rollout, dataset, number)
            return state, report.with_state(state, jnp.int32(0)).all_reduce(layout.replicas)

        advance = one_device
        if layout.devices > 1:
            rings = None if dataset is None else fixed.partition(dataset, "data")
            rows = None if rollout is None else self._rollout_specs()
            specs = (everywhere, partition, rows, rings, everywhere)
            advance = meshes.over_devices(one_device, layout.mesh, specs, (partition, everywhere))
        state, report = advance(algo, state.replace(buffers=buffers), rollout, dataset, number)
        if collected is None:
            return state, report
        episodes = collected.episodes
        if jax.process_count() > 1:
            episodes = episodes.merged(partial(jax.tree.map, jnp.sum))
        return state, report.replace(episodes=episodes)

    def _rollout_specs(self) -> Rollout:
        """Return a prefix tree of partition specs for a rollout."""
        environments, everywhere = PartitionSpec("data"), PartitionSpec()
        specs: dict[str, PyTree] = {
            name: PartitionSpec(None, "data") if axis else environments for name, axis in _AXES.items()
        }
        specs |= {"statistics": environments if self.pooled else everywhere, "version": everywhere}
        if self.layout.pool is not None:
            specs["groups"] = environments
        return Rollout(**specs)


def _learn(collects, algo, state, rollout, dataset, number):
    return iteration.iterate(collects, algo, rollout, state, dataset)[:2]


def _store(collects, algo, state, rollout, dataset, number):
    state, rollout, episodes = collects.collect(algo, rollout, state, 0)
    state, broken = iteration.store(collects.layout.experience(algo), state, rollout)
    return state, make_report(episodes, {}, jnp.float32(0.0), broken)


def _update(collects, algo, state, rollout, dataset, number):
    experience, tick = collects.layout.experience(algo), state.steps_per_env.low
    state, metrics, made = iteration.run_updates(experience, state, {}, True, tick=tick, first=number, dataset=dataset)
    return state, make_report(EpisodeSums.zero(), metrics, made, {})


def _is_on(tree, device) -> bool:
    """Return whether the arrays of `tree`, which one program computed, are on `device`."""
    return jax.tree.leaves(tree)[0].devices() == {device}
