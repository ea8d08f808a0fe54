"""The acting loop that all topologies share, and the statistics of episodes that ended."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core import episode_info, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.keys import reset_keys
from jaxrl.core.packing import Packing
from jaxrl.core.planning import Model, Planner
from jaxrl.core.report import EpisodeSums
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    Algorithm,
    Carry,
    Environment,
    EnvSpec,
    Episodes,
    PyTree,
    Replay,
    Rollout,
    RolloutExtras,
    Rollouts,
    TimeStep,
    Trajectory,
    num_agents,
)
from jaxrl.envs.suite import model_of


def rollout_length(algo: Algorithm) -> int:
    """Return the number of rows per environment that an iteration collects: the maximum over the sources."""
    lengths = [1]  # the result if all data comes from a dataset
    for source in algo.experience.values():
        if isinstance(source, Rollouts | Episodes):
            lengths.append(source.length)
        elif isinstance(source, Replay):
            lengths.append(source.rollout_length)
    return max(lengths)


def default_num_envs(algo: Algorithm, multiple: int, agents: int = 1) -> int:
    """Return the default number of environments: 1 for algorithms that replay transitions, otherwise 8.

    Algorithms that replay transitions were published with one environment. With more environments, they act with
    parameters that are older on average.

    Args:
      algo: the algorithm, which may be unresolved.
      multiple: the result is rounded up to a multiple of this, such as the number of devices.
      agents: number of agents of an environment, each of which counts as an environment.
    """
    sources = algo.experience.values()
    least = 1 if any(isinstance(source, Replay) and source.sequence is None for source in sources) else 8
    return -(-least // multiple) * multiple * agents


def with_previous_action(timestep: TimeStep, action: PyTree) -> TimeStep:
    """Return `timestep` with `action` [B, ...] as its previous action, or zeros where an episode begins."""

    def zero_where_first(x):
        mask = timestep.first.reshape(timestep.first.shape + (1,) * (x.ndim - timestep.first.ndim))
        return jnp.where(mask, jnp.zeros_like(x), x)

    return timestep.replace(previous_action=jax.tree.map(zero_where_first, action))


def executed(rows: Trajectory, spec: EnvSpec) -> Trajectory:
    """Return rows with the executed actions: the algorithm's actions, clipped to the bounds of a box."""
    return rows.replace(action=spaces.clip(rows.action, spec.action_space))


def bare(rows: Trajectory, spec: EnvSpec) -> Trajectory:
    """Return rows with the executed actions, without the fields that only the acting algorithm uses."""
    return executed(rows, spec).replace(action_mask=None, extras={})


def row_bytes(spec: EnvSpec) -> int:
    """Return the number of bytes of one row in the result of `bare`."""
    example = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    return 8 + sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(example))


def no_action(spec: EnvSpec, batch: int) -> PyTree:
    """Return actions that are all zeros, with shapes [batch, ...]."""
    return jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), spaces.zeros(spec.action_space))


def first_timestep(timestep: TimeStep, spec: EnvSpec) -> TimeStep:
    """Return a run's first time step [B, ...], with a previous action of zeros."""
    return timestep.replace(previous_action=no_action(spec, timestep.first.shape[0]))


class Acting(struct.PyTreeNode):
    """The acting state of all environments: environment state, current time step, recurrent carry."""

    env_state: PyTree  # [B, ...]
    timestep: TimeStep  # [B, ...], the next one to act at
    carry: Carry  # [B, ...]


def begin(
    algo: Algorithm, env: Environment, roots: jax.Array, env_index: jax.Array, *, spec: EnvSpec, num_envs: int
) -> Acting:
    """Return the acting state at the first time step of every environment. Pure.

    Args:
      algo, env, spec: as in `unroll`.
      roots: root keys of the environments, `[B]`.
      env_index: indices of these environments in the whole run, `[B]`.
      num_envs: total number of environments in the run.
    """
    env_state, timestep = jax.vmap(env.reset)(reset_keys(roots))
    carry = jax.vmap(lambda index: algo.initial_carry(spec, index, num_envs))(env_index)
    return Acting(env_state, first_timestep(timestep, spec), carry)


def act(
    algo: Algorithm,
    actor: ActorState,
    timestep: TimeStep,
    previous_action: PyTree,
    carry: Carry,
    keys: jax.Array,
    *,
    spec: EnvSpec,
    explore: bool,
    model: Model | None = None,
) -> tuple[TimeStep, ActorOutput, PyTree]:
    """Act for one step; a `Planner` plans if there is a model.

    Returns:
      The time step `[B, ...]` with its previous action, the algorithm's output, and the action for the environments:
      the algorithm's action, clipped to the bounds of a box. With an unbounded policy, the algorithm learns from the
      unclipped sample, since its log-probability is known.
    """
    timestep = with_previous_action(timestep, previous_action)
    if model is not None and isinstance(algo, Planner):
        output = algo.plan(actor, timestep, carry, keys, model=model, spec=spec, explore=explore)
    else:
        output = algo.act(actor, timestep, carry, keys, spec=spec, explore=explore)
    if not isinstance(output, ActorOutput):
        raise ConfigError(f"{type(algo).__name__}.act returned a {type(output).__name__}; it must be an ActorOutput")
    return timestep, output, spaces.clip(output.action, spec.action_space)


def write(storage: PyTree, step: PyTree, number: jax.Array | int) -> PyTree:
    """Return `storage` [T, ...] with `step` [...] written at `number`."""
    return jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, number, 0), storage, step)


def unroll(
    algo: Algorithm,
    actor: ActorState,
    env: Environment,
    acting: Acting,
    keys: tuple[jax.Array, jax.Array],
    *,
    spec: EnvSpec,
    explore: bool,
) -> tuple[Acting, Rollout]:
    """Act for T steps in each of B environments. Pure; the caller compiles it.

    Args:
      algo: the algorithm, with its schedules resolved.
      actor: the state that acting needs.
      env: one environment, which resets itself.
      acting: the acting state.
      keys: the keys for the environments' steps, and the keys for the actions, each `[T, B]`.
      spec: the spec of `env`.
      explore: True to sample actions as in training, False to take the best actions.

    Returns:
      The acting state afterwards, and the rollout.
    """
    length = keys[0].shape[0]
    # The loop carries and stores packed arrays, as every separate array would need its own kernels in each step.
    newest = acting.timestep.replace(previous_action=None)
    state = acting.env_state, newest, acting.timestep.previous_action, acting.carry
    batch = keys[0].shape[1]
    of_state, of_row = Packing.of(state, batch), Packing.of(acting.timestep, batch)
    # With room for the last time step, as appending it afterwards would copy all observations.
    room = [jnp.empty((length + 1, *x.shape), x.dtype) for x in of_row.pack(acting.timestep)]
    of_output: list[Packing] = []

    def step(carried, inputs):
        state, rows = carried
        number, (env_keys, act_keys) = inputs
        env_state, newest, previous_action, carry = of_state.unpack(state)
        # Agents that share an episode act at the same time, so one agent's search would need the others' searches.
        model = model_of(env, env_state) if num_agents(env) == 1 else None
        timestep, output, action = act(
            algo, actor, newest, previous_action, carry, act_keys, spec=spec, explore=explore, model=model
        )
        env_state, newest = jax.vmap(env.step)(env_state, action, env_keys)
        rows = write(rows, of_row.pack(timestep), number)
        stored = output.action, output.extras
        of_output[:] = [Packing.of(stored, batch)]
        return (of_state.pack((env_state, newest, action, output.carry)), rows), of_output[0].pack(stored)

    inputs = jnp.arange(length, dtype=jnp.int32), jnp.stack(keys, axis=1)
    (state, rows), outputs = jax.lax.scan(step, (of_state.pack(state), room), inputs)
    action, extras = of_output[0].unpack(outputs)
    env_state, newest, previous_action, carry = of_state.unpack(state)
    final = with_previous_action(newest, previous_action)
    rollout = Rollout(
        timesteps=of_row.unpack(write(rows, of_row.pack(final), length)),
        action=action,
        extras=extras,
        carry=acting.carry,
        final_carry=carry,
        statistics=actor.statistics,
    )
    return Acting(env_state, final, carry), with_extras(algo, actor, rollout, spec=spec, explore=explore)


def with_extras(algo: Algorithm, actor: ActorState, rollout: Rollout, *, spec: EnvSpec, explore: bool) -> Rollout:
    """Add the extras that the algorithm computes at the end of a training rollout (`types.RolloutExtras`)."""
    if not explore or not isinstance(algo, RolloutExtras):
        return rollout
    return rollout.replace(extras={**rollout.extras, **algo.rollout_extras(actor, rollout, spec=spec)})


def episode_sums(rollout: Rollout) -> EpisodeSums:
    """Return sums over the episodes that ended within a rollout, from the statistics in its time steps."""
    rows, last = rollout.rows, rollout.timesteps.last[:-1]
    steps, lost = (jnp.sum(x.astype(jnp.float32)) for x in (rows.weight, ~last & rollout.timesteps.first[1:]))

    def sums(episode, ended, lives=None):
        returns, count = episode.returns[1:].astype(jnp.float32), jnp.sum(ended)
        total = jnp.sum(returns * ended)
        apart = returns - total / jnp.maximum(count, 1.0)
        length = episode.length[1:].astype(jnp.float32)

        def over_episodes(name, totals):
            return jnp.sum(episode_info.of_episode(name, totals[1:].astype(jnp.float32), length, jnp) * ended)

        info = None
        if episode.info is not None:
            info = {name: over_episodes(name, totals) for name, totals in episode.info.items()}
        return EpisodeSums(
            count=count,
            returns=total,
            squares=jnp.sum(jnp.square(apart) * ended),
            length=jnp.sum(length * ended),
            steps=steps,
            lost=lost,
            lives=lives,
            info=info,
        )

    episode, lives = rollout.timesteps.episode, None
    assert episode is not None  # prepared environments add episode statistics
    ended = (rows.terminated | rows.truncated).astype(jnp.float32)
    if episode.life is not None:
        lives = sums(episode.life, ended)
    if episode.complete is not None:
        # A finished game also counts for agents that ended before, whose rows have weight 0.
        complete = episode.complete[1:] & rollout.timesteps.last[1:]
        if rollout.whole_episodes:
            complete = complete & (jnp.cumsum(rollout.timesteps.first[1:].astype(jnp.int32), axis=0) == 0)
        ended = complete.astype(jnp.float32)
    return sums(episode, ended, lives)
