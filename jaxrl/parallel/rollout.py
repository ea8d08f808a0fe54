"""Acting, alike in every topology: the one loop that acts, and counting the episodes that ended."""

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
from jaxrl.envs.model import model as model_of


def rollout_length(algo: Algorithm) -> int:
    """How many rows of every environment one iteration collects: the longest that any source asks for."""
    lengths = [1]  # where all comes from a dataset
    for source in algo.experience.values():
        if isinstance(source, Rollouts | Episodes):
            lengths.append(source.length)
        elif isinstance(source, Replay):
            lengths.append(source.rollout_length)
    return max(lengths)


def default_num_envs(algo: Algorithm, multiple: int, agents: int = 1) -> int:
    """How many environments an algorithm acts in unless told: 1 where it learns from a replay of transitions, else 8.

    Those were published with one environment. They act on what they learned up to the last update, which in more
    environments is less.

    Args:
      algo: may be unresolved.
      multiple: what they must divide by, such as the number of devices; the next multiple is taken.
      agents: of an environment, each of which is a row.
    """
    sources = algo.experience.values()
    least = 1 if any(isinstance(source, Replay) and source.sequence is None for source in sources) else 8
    return -(-least // multiple) * multiple * agents


def with_previous_action(timestep: TimeStep, action: PyTree) -> TimeStep:
    """The time step that followed `action` [B, ...], which it holds unless it begins an episode."""

    def zero_where_first(x):
        mask = timestep.first.reshape(timestep.first.shape + (1,) * (x.ndim - timestep.first.ndim))
        return jnp.where(mask, jnp.zeros_like(x), x)

    return timestep.replace(previous_action=jax.tree.map(zero_where_first, action))


def executed(rows: Trajectory, spec: EnvSpec) -> Trajectory:
    """Rows with the actions that the environments took, which are the algorithm's within the bounds of a box."""
    return rows.replace(action=spaces.clip(rows.action, spec.action_space))


def bare(rows: Trajectory, spec: EnvSpec) -> Trajectory:
    """Rows as they happened, without what only the algorithm that acted has use for."""
    return executed(rows, spec).replace(action_mask=None, extras={})


def row_bytes(spec: EnvSpec) -> int:
    """What a bare row takes in memory."""
    example = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    return 8 + sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(example))


def no_action(spec: EnvSpec, batch: int) -> PyTree:
    """Actions [batch, ...] of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), spaces.zeros(spec.action_space))


def first_timestep(timestep: TimeStep, spec: EnvSpec) -> TimeStep:
    """A run's first time step [B, ...], with a previous action of zeros."""
    return timestep.replace(previous_action=no_action(spec, timestep.first.shape[0]))


class Acting(struct.PyTreeNode):
    """Where the environments stand, and who acts in them."""

    env_state: PyTree  # [B, ...]
    timestep: TimeStep  # [B, ...] to act at
    carry: Carry  # [B, ...]


def nothing_acts() -> Acting:
    """Of runs without environments."""
    parts: dict[str, PyTree] = {"env_state": (), "timestep": (), "carry": ()}
    return Acting(**parts)


def begin(
    algo: Algorithm, env: Environment, roots: jax.Array, env_index: jax.Array, *, spec: EnvSpec, num_envs: int
) -> Acting:
    """The first time step of every environment; pure.

    Args:
      algo, env, spec: as of `unroll`.
      roots: the root keys of the environments, `[B]`.
      env_index: their indices `[B]` among `num_envs`.
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
    """One step of acting; a `Planner` plans where there is a model.

    Returns:
      What the environments show `[B, ...]`, with the action that came before; what the algorithm does; and its action
      within the bounds of a box, which is the one to hand to the environments. An unbounded policy may sample others:
      the algorithm learns from its sample, whose log-probability it knows.
    """
    timestep = with_previous_action(timestep, previous_action)
    if model is not None and isinstance(algo, Planner):
        output = algo.plan(actor, timestep, carry, keys, model=model, spec=spec, explore=explore)
    else:
        output = algo.act(actor, timestep, carry, keys, spec=spec, explore=explore)
    if not isinstance(output, ActorOutput):
        raise ConfigError(f"{type(algo).__name__}.act returned a {type(output).__name__}; return an ActorOutput")
    return timestep, output, spaces.clip(output.action, spec.action_space)


def write(storage: PyTree, step: PyTree, number: jax.Array | int) -> PyTree:
    """`storage` [T, ...] with `step` [...] at `number`."""
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
    """Acts for T steps in each of B environments; pure, and compiled by whoever calls it.

    Args:
      algo: with its schedules resolved.
      actor: what acting needs.
      env: one environment; it resets by itself.
      acting: where they stand.
      keys: of the environments' steps and of the actions, each `[T, B]`.
      spec: of `env`.
      explore: sample as in training, else the best action.

    Returns:
      Where they stand then, and the rollout.
    """
    length = keys[0].shape[0]
    # What the loop carries and stores is packed: each array of its own would take kernels of its own in every step.
    newest = acting.timestep.replace(previous_action=None)
    state = acting.env_state, newest, acting.timestep.previous_action, acting.carry
    batch = keys[0].shape[1]
    of_state, of_row = Packing.of(state, batch), Packing.of(acting.timestep, batch)
    # With the last time step from the beginning: to append it afterwards would copy all observations.
    room = [jnp.empty((length + 1, *x.shape), x.dtype) for x in of_row.pack(acting.timestep)]
    of_output: list[Packing] = []

    def step(carried, inputs):
        state, rows = carried
        number, (env_keys, act_keys) = inputs
        env_state, newest, previous_action, carry = of_state.unpack(state)
        # Agents that share an episode move at once: the search of one would move the others by their own searches.
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
    """The rollout of training with what its algorithm adds to complete ones (`types.RolloutExtras`)."""
    if not explore or not isinstance(algo, RolloutExtras):
        return rollout
    return rollout.replace(extras={**rollout.extras, **algo.rollout_extras(actor, rollout, spec=spec)})


def episode_sums(rollout: Rollout) -> EpisodeSums:
    """What ended within a rollout, whose time steps hold the episodes' statistics."""
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
    assert episode is not None  # prepared environments count
    ended = (rows.terminated | rows.truncated).astype(jnp.float32)
    if episode.life is not None:
        lives = sums(episode.life, ended)
    if episode.complete is not None:
        # Of a game that is over, also for an agent that had ended before: its row has weight 0.
        complete = episode.complete[1:] & rollout.timesteps.last[1:]
        if rollout.whole_episodes:
            complete = complete & (jnp.cumsum(rollout.timesteps.first[1:].astype(jnp.int32), axis=0) == 0)
        ended = complete.astype(jnp.float32)
    return sums(episode, ended, lives)
