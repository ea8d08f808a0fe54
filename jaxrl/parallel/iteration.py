"""One iteration in any topology: collecting and storing rollouts, updating the learner, and reporting."""

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.buffers import replay
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.replay import ReplayState
from jaxrl.core import keys
from jaxrl.core.report import EpisodeSums, Report, make_report
from jaxrl.core.run_state import RunState
from jaxrl.core.shared_batch import shared_batch
from jaxrl.core.types import (
    Algorithm,
    Episodes,
    Metrics,
    Rollout,
    Rollouts,
)
from jaxrl.parallel.experience import Experience
from jaxrl.parallel.layout import Layout
from jaxrl.parallel.rollout import Acting


class RolloutCollector[Env](Protocol):
    """A strategy for collecting the rollouts of a run. Hashable, as it is a static argument of compiled functions."""

    def __hash__(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def steps_per_env(self, algo: Algorithm) -> int:
        """Return the number of steps of each environment per iteration; without environments, the number of updates."""
        ...

    def begin(self, algo: Algorithm, source: Env, key: jax.Array) -> Acting:
        """Return the initial acting state of all environments. Pure."""
        ...

    def example(self, algo: Algorithm, source: Env, state: RunState) -> Rollout | None:
        """Return a rollout of all environments, used only for its shapes; None without environments. Pure.

        Args:
          algo: the algorithm, with its schedules resolved.
          source: as for `begin`.
          state: the state of a run that has not begun, without buffers.
        """
        ...

    def collect(
        self, algo: Algorithm, source: Env, state: RunState, first_env: jax.Array | int
    ) -> tuple[RunState, Rollout | None, EpisodeSums]:
        """Step this device's environments for an iteration, acting with the current learner. Pure.

        Args:
          algo: the algorithm, with its schedules resolved.
          source: the environment, or the collected rollout if the host acts.
          state: this device's part of the state.
          first_env: index of this device's first environment.

        Returns:
          The state after these steps, the rollout, and the sums over the episodes that ended in it.
        """
        ...


def iterate[Env](
    collects: RolloutCollector[Env], algo: Algorithm, source: Env, state: RunState, dataset: Rings | None
) -> tuple[RunState, Report, Rollout | None]:
    """Run one iteration of one run on this device: collect, store, update, report. Pure.

    Args:
      collects: the collector.
      algo: the algorithm, with its schedules resolved.
      source: as in `RolloutCollector.collect`.
      state: this device's part of the state.
      dataset: the rings of a dataset, by name.

    Returns:
      The state, this device's report of the iteration, and the rollout (None without environments).
    """
    layout, tick = collects.layout, state.steps_per_env.low  # `tick` is folded into this iteration's keys
    first_env = layout.replicas.first_shard * (layout.num_envs // layout.shards)
    state, collected, episodes = collects.collect(algo, source, state, first_env)
    experience, rollouts, broken = layout.experience(algo), {}, {}
    if collected is not None:
        state, broken = store(experience, state, collected)
        # Learning does not use the statistics of episodes.
        learned = collected.replace(timesteps=collected.timesteps.replace(episode=None, info=None), groups=None)
        sources = experience.algo.experience.items()
        rollouts = {name: learned for name, source in sources if isinstance(source, Rollouts | Episodes)}
    # All runs of a mapped batch share the counters, so this stays a branch under vmap.
    held = state.steps_per_env.since(state.empty_at) * experience.num_envs
    online = experience.online_sources.values()
    enough = held >= max((replay.least_size(source, experience.all_envs) for source in online), default=0)
    if collected is None:
        updates = 1  # without environments, there are no steps for a replay ratio
    elif experience.episodes:
        updates = experience.complete_batches(state.buffers)
    else:
        updates = experience.updates_now(state.steps_per_env)
    state, metrics, made = run_updates(
        experience,
        state,
        rollouts,
        enough if online else True,
        updates=updates,
        tick=tick,
        dataset=dataset,
    )
    return state, make_report(episodes, metrics, made, broken), collected


def store(experience: Experience, state: RunState, collected: Rollout) -> tuple[RunState, dict[str, jax.Array]]:
    """Store this device's rows in the replays, and locate actions, observations or rewards that are not finite. Pure.

    Returns:
      The state, and a number for each array: 0 if all values are finite, otherwise (T + 1 - t) N - b + 1, where the
      first value that is not finite is at time t (0 to T) in environment b (0 to N - 1). Earlier values have larger
      numbers.
    """
    time, envs = collected.timesteps.first.shape
    env = experience.replicas.first_shard * (experience.num_envs // experience.shards) + jnp.arange(envs)
    place = (time - jnp.arange(time))[:, None] * experience.num_envs - env[None] + 1
    parts = {
        "action": collected.action,
        "observation": collected.timesteps.observation,
        "reward": collected.rows.reward,
    }
    broken = {}
    for path, x in jax.tree.leaves_with_path(parts):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            here = place[name == "reward" :][: x.shape[0]]  # a reward belongs to the next time step
            here = jnp.expand_dims(here, range(2, x.ndim))
            broken[name] = jnp.max(jnp.where(jnp.isfinite(x), 0, here))
    return state.replace(buffers=experience.store(state.buffers, collected)), broken


def run_updates(
    experience: Experience,
    state: RunState,
    rollouts: Mapping[str, Rollout],
    enough: jax.Array | bool,
    *,
    updates: int | jax.Array = 1,
    tick: jax.Array,
    first: int | jax.Array = 0,
    dataset: Rings | None = None,
) -> tuple[RunState, Metrics, jax.Array]:
    """Run one round of updates of the learner. Pure.

    Args:
      experience: the experience of the algorithm with its schedules resolved, on this device.
      state: the state, after this iteration's data was stored.
      rollouts: the newest rollout for each source that is not a replay.
      enough: whether there is enough data to learn from; if False, nothing changes.
      updates: number of updates; an int32 array if it differs between iterations.
      tick: number that is folded into the keys of this round, uint32.
      first: index of this call's first update within the round, int32, for a round that is divided over several calls.
      dataset: the rings of a dataset, by name.

    Returns:
      The state, the means of the metrics, and the number of updates that were made, float32.
    """
    algo, spec, replicas = experience.algo, experience.spec, experience.replicas
    rings = experience.rings(state.buffers, dataset)
    update_key, sample_key = keys.update_key(state.key, tick), keys.sample_key(state.key, tick)

    def update(carried, number):
        learner, indices = carried
        replays = {name: ReplayState(rings[name], index) for name, index in indices.items()}
        replays, batches = experience.sample(replays, sample_key, number)
        key = jax.random.fold_in(update_key, number)
        replays, taken = experience.take(replays, rollouts)

        def learn(batch):
            with shared_batch(replicas):
                return algo.update(learner, batch, spec=spec, key=key, replicas=replicas)

        found = dict(rollouts) | taken | batches
        learner, info = experience.cut_to_length(learn, found) if taken else learn(found)
        replays = experience.update_priorities(replays, batches, info.priorities)
        metrics = dict(info.metrics) | experience.statistics(replays, batches)
        for batch in taken.values():
            metrics["learned_transitions"] = replicas.sum(jnp.sum(batch.rows.weight, dtype=jnp.float32))
        indices = {name: replay.index for name, replay in replays.items()}
        return (learner, indices), jax.tree.map(jnp.float32, metrics)

    def all_updates(carried):
        carried, metrics = jax.lax.scan(update, carried, first + jnp.arange(updates, dtype=jnp.int32))
        return carried, jax.tree.map(jnp.mean, metrics)

    def one_more(number, carried):
        carried, sums = carried
        carried, metrics = update(carried, jnp.asarray(number, jnp.int32))
        return carried, jax.tree.map(jnp.add, sums, metrics)

    def no_metrics(function, *arguments):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *arguments)[1])

    # The loop carries only what an update changes: the learner and the indices, not the rows.
    carried = (state.learner, {name: state.buffers[name].index for name in rings})
    if not isinstance(updates, int):
        # A loop of length `made`, not a branch: with a replay, `made` is the same for all runs of a mapped batch.
        made = jnp.where(enough, updates, 0)
        zeros = no_metrics(update, carried, jnp.int32(0))
        carried, sums = jax.lax.fori_loop(0, made, one_more, (carried, zeros))
        made = made.astype(jnp.float32)
        metrics = jax.tree.map(lambda x: x / jnp.maximum(made, 1.0), sums)
    elif isinstance(enough, bool):
        carried, metrics = all_updates(carried) if rings else update(carried, jnp.int32(0))
        made = jnp.float32(updates)
    else:

        def wait(carried):
            return carried, no_metrics(all_updates, carried)

        carried, metrics = jax.lax.cond(enough, all_updates, wait, carried)
        made = enough.astype(jnp.float32) * updates
    learner, indices = carried
    buffers = {name: state.buffers[name].replace(index=indices[name]) for name in rings}
    return state.replace(learner=learner, buffers=buffers), metrics, made
