"""The learner of host environments: the compiled pieces around what actors collected."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.replay import ReplayState
from jaxrl.core.report import EpisodeSums, reported
from jaxrl.core.run_state import RunState
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, PyTree, Rollout, TimeStep
from jaxrl.parallel import learner
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.program import Layout
from jaxrl.parallel.rollout import Acting
from jaxrl.parallel.sebulba.collector import Collected


@dataclasses.dataclass(frozen=True)
class HostRollouts:
    """How a run over host environments begins: at their first time steps. Static: a key of the compilation cache."""

    layout: Layout

    def begin(self, algo: Algorithm, source: TimeStep, key: jax.Array) -> Acting:
        """The environments' own states are out of reach."""
        spec, num_envs = self.layout.spec, self.layout.num_envs
        env_index = jnp.arange(num_envs, dtype=jnp.int32)
        carry = jax.vmap(lambda index: algo.initial_carry(spec, index, num_envs))(env_index)
        return Acting((), ro.first_timestep(source, spec), carry)

    def empty_buffers(
        self, algo: Algorithm, source: TimeStep, state: RunState, dataset: Rings | None
    ) -> dict[str, ReplayState]:
        rows = jax.eval_shape(lambda: self._example(resolve_schedules(algo, jnp.float32(0.0)), state))
        return self.layout.experience(algo).empty(rows, state.carry, dataset)

    def partition(self, algo: Algorithm) -> RunState:
        return self.layout.partition(algo)

    def _example(self, algo, state):
        spec, num_envs = self.layout.spec, self.layout.num_envs
        steps = HostSteps(spec, num_envs, num_envs, 1)
        roots = steps.roots(state.key, jnp.arange(num_envs, dtype=jnp.int32))
        action = ro.no_action(spec, num_envs)
        actor, shown = algo.actor(state.learner), state.timestep.replace(previous_action=None)
        storage = steps.storage(algo, actor, shown, state.carry, action, roots)
        return steps.finish(algo, actor, storage, shown, action, state.carry, state.carry, jnp.int32(0)).rows


@dataclasses.dataclass(frozen=True)
class HostLearning:
    """The learner's compiled pieces of one run, static: a key of the compilation cache."""

    layout: Layout
    processes: int = 1

    @partial(jax.jit, static_argnums=0)
    def prepare(self, algo, state, total_steps_per_env):
        """The algorithm with its schedules resolved, and what acting needs."""
        algo = self.layout.resolve(algo, state, total_steps_per_env)
        return algo, algo.actor(state.learner)

    def gathered(self, rollouts: list[Collected]) -> list[Collected]:
        """All groups' rollouts on the learner's device, or as one batch on its devices."""
        layout = self.layout
        first = layout.mesh.local_devices[0]
        rollouts = [rollout if _lies_on(rollout, first) else jax.device_put(rollout, first) for rollout in rollouts]
        if layout.devices == 1:
            return rollouts  # `learn` joins them where it reads them, which saves a pass over the frames
        whole = rollouts[0] if len(rollouts) == 1 else self._joined(rollouts)
        everywhere: PyTree = PartitionSpec()
        specs = Collected(_rollout_specs(whole.rollout), everywhere)
        if self.processes == 1:
            return [jax.device_put(whole, layout.on_mesh(specs))]
        # Each process counted the episodes of its own environments: they are summed where they are used.
        nothing = jnp.zeros(layout.devices // self.processes, jnp.float32)
        apart = jax.tree.map(lambda x: nothing.at[0].set(x), whole.episodes)
        specs = specs.replace(episodes=PartitionSpec("data"))
        return [meshes.from_processes(whole.replace(episodes=apart), layout.mesh, specs)]

    @partial(jax.jit, static_argnums=0)
    def _joined(self, rollouts):
        parts = [collected.rollout for collected in rollouts]
        along_time = lambda *x: jnp.concatenate(x, axis=1)  # noqa: E731
        at_once = lambda *x: jnp.concatenate(x, axis=0)  # noqa: E731
        whole = Rollout(
            timesteps=jax.tree.map(along_time, *(part.timesteps for part in parts)),
            action=jax.tree.map(along_time, *(part.action for part in parts)),
            extras=jax.tree.map(along_time, *(part.extras for part in parts)),
            carry=jax.tree.map(at_once, *(part.carry for part in parts)),
            final_carry=jax.tree.map(at_once, *(part.final_carry for part in parts)),
            # Every group acted with the same version.
            statistics=parts[0].statistics,
            version=parts[0].version,
            whole_episodes=parts[0].whole_episodes,
        )
        episodes = rollouts[0].episodes
        for collected in rollouts[1:]:
            episodes = episodes + collected.episodes
        return Collected(whole, episodes)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def learn(self, algo, state, buffers, rollouts, dataset):
        """Stores what `gathered` gave and updates, on all devices. `algo` has its schedules resolved."""
        collected = rollouts[0] if len(rollouts) == 1 else self._joined(rollouts)
        state = state.replace(buffers=buffers)
        if self.layout.devices == 1:
            state, report = self._learn(algo, state, collected.rollout, dataset)
        else:
            partition, everywhere = self.layout.partition(algo), PartitionSpec()
            rings = None if dataset is None else fixed.partition(dataset, "data")
            specs = (everywhere, partition, _rollout_specs(collected.rollout), rings)
            state, report = meshes.over_devices(self._learn, self.layout.mesh, specs, (partition, everywhere))(
                algo, state, collected.rollout, dataset
            )
        episodes = collected.episodes
        if self.processes > 1:
            episodes = episodes.merged(partial(jax.tree.map, jnp.sum))
        return state, report.replace(episodes=episodes)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def store(self, algo, state, buffers, rollouts):
        """Stores what `gathered` gave, and makes no update; for a learner that is not in step with its actors."""
        collected = rollouts[0] if len(rollouts) == 1 else self._joined(rollouts)
        partition, everywhere = self.layout.partition(algo), PartitionSpec()
        specs = (everywhere, partition, _rollout_specs(collected.rollout))
        state, report = self._everywhere(self._store, specs, algo, state.replace(buffers=buffers), collected.rollout)
        return state, report.replace(episodes=collected.episodes)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def update(self, algo, state, buffers, dataset, number):
        """The update `number` since rows were stored last. `algo` has its schedules resolved."""
        partition, everywhere = self.layout.partition(algo), PartitionSpec()
        rings = None if dataset is None else fixed.partition(dataset, "data")
        specs = (everywhere, partition, rings, everywhere)
        return self._everywhere(self._update, specs, algo, state.replace(buffers=buffers), dataset, number)

    def _everywhere(self, function, specs, algo, *arguments):
        """What `function` makes of the state, on all devices, and its report."""
        if self.layout.devices == 1:
            return function(algo, *arguments)
        out_specs = (self.layout.partition(algo), PartitionSpec())
        return meshes.over_devices(function, self.layout.mesh, specs, out_specs)(algo, *arguments)

    def _store(self, algo, state, rollout):
        state = self._moved_on(algo, state, rollout)
        state, finite = learner.store(self.layout.experience(algo), state, rollout)
        report = reported(EpisodeSums.zero(), {}, jnp.float32(0.0), finite)
        return state, report.with_state(state, jnp.int32(0)).over(self.layout.replicas)

    def _update(self, algo, state, dataset, number):
        experience, tick = self.layout.experience(algo), state.steps_per_env.low
        state, metrics, made = learner.run_updates(
            experience, state, {}, True, tick=tick, first=number, dataset=dataset
        )
        finite = {name: jnp.isfinite(value) for name, value in metrics.items()}
        report = reported(EpisodeSums.zero(), metrics, made, finite)
        return state, report.with_state(state, jnp.int32(0)).over(self.layout.replicas)

    def _moved_on(self, algo, state, rollout):
        """The state where the environments stand after a rollout."""
        steps_per_env = state.steps_per_env.add(ro.rollout_length(algo))
        return state.replace(timestep=rollout.final, carry=rollout.final_carry, steps_per_env=steps_per_env)

    def _learn(self, algo, state, rollout, dataset):
        tick = state.steps_per_env.low
        state = self._moved_on(algo, state, rollout)
        state, report = self.layout.store_and_update(
            algo, state, rollout, EpisodeSums.zero(), tick=tick, dataset=dataset
        )
        return state, report.with_state(state, jnp.int32(0)).over(self.layout.replicas)


def _lies_on(tree, device) -> bool:
    """Whether the arrays of `tree`, which one program made, are on `device` already."""
    return jax.tree.leaves(tree)[0].devices() == {device}


def _rollout_specs(rollout: Rollout) -> Rollout:
    """How a rollout lies on the mesh: a prefix tree of partition specs."""
    over_time, environments, everywhere = PartitionSpec(None, "data"), PartitionSpec("data"), PartitionSpec()
    specs: dict[str, PyTree] = {
        "timesteps": over_time,
        "action": over_time,
        "extras": over_time,
        "carry": environments,
        "final_carry": environments,
        "statistics": everywhere,
        "version": everywhere,
    }
    return Rollout(**specs, whole_episodes=rollout.whole_episodes)
