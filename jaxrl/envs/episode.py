"""Episodes of JAX environments: time steps, returns, lengths, time limits and automatic resets.

With automatic resets, the next episode begins on the step after an episode's last time step. That step ignores its
action and returns the first observation of the new episode (`first` is set, the reward is 0, and neither `terminated`
nor `truncated` is set). So the last observation of every episode is returned, as a separate row.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core import episode_info
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.types import Environment, Episode, PyTree, TimeStep
from jaxrl.envs.delegate import Wrapper, check_arguments


def restart(
    observation: PyTree,
    action_mask: PyTree | None = None,
    info: Iterable[str] = (),
    discount: jax.Array | float | None = None,
    active: jax.Array | bool | None = None,
) -> TimeStep:
    """Return the first time step of an episode.

    Args:
      observation: an element of the observation space.
      action_mask: bool, True where an action is allowed; None allows all actions.
      info: names of the scalars in `TimeStep.info` of the later time steps; in the first one, they are 0.
      discount: 1 if the later time steps have discounts, otherwise None.
      active: True if the later time steps have `active`, otherwise None.
    """
    return TimeStep(
        observation=observation,
        reward=jnp.zeros((), jnp.float32),
        terminated=jnp.zeros((), jnp.bool_),
        truncated=jnp.zeros((), jnp.bool_),
        first=jnp.ones((), jnp.bool_),
        action_mask=action_mask,
        info={name: jnp.zeros((), jnp.float32) for name in info} or None,
        discount=_scalar("discount", discount, jnp.float32),
        active=_scalar("active", active, jnp.bool_),
    )


def transition(
    observation: PyTree,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    action_mask: PyTree | None = None,
    info: Mapping[str, jax.Array] | None = None,
    discount: jax.Array | float | None = None,
    active: jax.Array | bool | None = None,
) -> TimeStep:
    """Return the time step after an action; an episode that both terminates and is truncated counts as terminated.

    Args:
      observation: an element of the observation space.
      reward: a scalar.
      terminated: bool, whether the task ended.
      truncated: bool, whether a limit cut the episode off.
      action_mask: bool, True where an action is allowed; None allows all actions.
      info: further scalars by name, with the same names at every step.
      discount: the environment's discount of later rewards, a scalar in [-1, 1] other than 0 (any number if the task
        ended). It is negative if the other player of a zero-sum game moves next. None means 1.
      active: bool, False for an agent that can no longer act but is rewarded until its team's episode is over. None
        means that all agents can act.

    Raises:
      EnvironmentContractError: `reward`, `terminated`, `truncated`, `discount`, `active` or a value of `info` is not a
        single number.
    """
    terminated = _scalar("terminated", terminated, jnp.bool_)
    return TimeStep(
        observation=observation,
        reward=_scalar("reward", reward, jnp.float32),
        terminated=terminated,
        truncated=_scalar("truncated", truncated, jnp.bool_) & ~terminated,
        first=jnp.zeros((), jnp.bool_),
        action_mask=action_mask,
        info={name: _scalar(f"info[{name!r}]", x, jnp.float32) for name, x in (info or {}).items()} or None,
        discount=None if discount is None else jnp.where(terminated, 0.0, _scalar("discount", discount, jnp.float32)),
        active=_scalar("active", active, jnp.bool_),
    )


def _scalar(name, value, dtype):
    """Convert a value to a scalar array of this dtype; return None for None."""
    if value is None:
        return None
    array = jnp.asarray(value, dtype)
    if array.size != 1:
        raise EnvironmentContractError(f"{name} has shape {array.shape}; a single number is required")
    return array.reshape(())


class EpisodeStatisticsState(struct.PyTreeNode):
    """The environment's state and the running episode's statistics."""

    env: PyTree
    episode: Episode


class EpisodeStatistics(Wrapper):
    """A wrapper that sets `TimeStep.episode` to the episode's return and length so far, using the rewards of `env`.

    `TimeStep.episode` also has the episode's summaries of `TimeStep.info` (`jaxrl.core.episode_info`).
    """

    of_all_agents = True

    def reset(self, key: jax.Array) -> tuple[EpisodeStatisticsState, TimeStep]:
        state, time_step = self.env.reset(key)
        info, agents = jax.tree.map(jnp.zeros_like, time_step.info), time_step.reward.shape
        zeros = jnp.zeros(agents, jnp.float32), jnp.zeros(agents, jnp.int32)
        episode = Episode(*zeros, complete=_complete(time_step), info=info)
        return EpisodeStatisticsState(state, episode), time_step.replace(episode=episode)

    def step(
        self, state: EpisodeStatisticsState, action: PyTree, key: jax.Array
    ) -> tuple[EpisodeStatisticsState, TimeStep]:
        env_state, time_step = self.env.step(state.env, action, key)
        going = ~time_step.first
        length, so_far, reported = state.episode.length + 1, state.episode.info or {}, time_step.info or {}

        def folded(name):
            return jnp.where(going, episode_info.fold(name, so_far[name], reported[name], length, jnp), 0.0)

        episode = Episode(
            returns=jnp.where(going, state.episode.returns + time_step.reward, 0.0),
            length=jnp.where(going, length, 0),
            complete=_complete(time_step),
            info={name: folded(name) for name in reported} or None,
        )
        return EpisodeStatisticsState(env_state, episode), time_step.replace(episode=episode)


def _complete(time_step: TimeStep) -> jax.Array | None:
    """Return whether the episode of all agents is over, with shape [agents]; None for a single agent."""
    return jnp.broadcast_to(jnp.all(time_step.last), time_step.last.shape) if time_step.last.ndim else None


class AutoResetState(struct.PyTreeNode):
    """The environment's state and whether its episode is over."""

    env: PyTree
    last: jax.Array  # bool: the latest time step was the last one for all agents


class _Resetting(Wrapper):
    """The base class of wrappers that begin the next episode on the step after an episode's end."""

    of_all_agents = resets = True

    def reset(self, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        state, time_step = self.env.reset(key)
        return AutoResetState(state, jnp.all(time_step.last)), time_step


class AutoReset(_Resetting):
    """A wrapper that begins each new episode with `env.reset` and the key of the step.

    Every step computes a reset for every environment.
    """

    def step(self, state: AutoResetState, action: PyTree, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        # Both are computed, as in a `cond` under `vmap`. Only one result is used, so both may use the same key.
        fresh = self.env.reset(key)
        moved = self.env.step(state.env, action, key)
        env_state, time_step = jax.tree.map(functools.partial(jnp.where, state.last), fresh, moved)
        return AutoResetState(env_state, jnp.all(time_step.last)), time_step


class PooledReset(_Resetting):
    """A wrapper like `AutoReset` for costly resets: under `vmap`, it only resets environments whose episodes ended.

    At every step, these environments are reset, `slots` at a time; if no episode ended, no reset is computed. The
    episodes begin as with `AutoReset`, from the same keys. No reset is used twice, so there is no bias and no
    dependence on the batch or the device. (In contrast, the usual pool of *stored* states begins several episodes in
    the same state, and the choice of the state depends on the batch.)

    It is faster than `AutoReset` if a reset costs more than copying a few states; `benchmarks/resets.py` measures this.

    Args:
      env: the environment.
      slots: number of resets that are computed at once; None means one sixteenth of the batch, but at least 8.

    Raises:
      ConfigError: `slots` is not a whole number of at least 1.
    """

    slots: int | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        check_arguments(self, whole=True, slots={"low": 1})

    def step(self, state: AutoResetState, action: PyTree, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        moved = self.env.step(state.env, action, key)
        leaves, structure = jax.tree.flatten(self.env)
        env_state, time_step = _renewal(self.slots, structure)(leaves, state.last, key, moved)
        return AutoResetState(env_state, jnp.all(time_step.last)), time_step


def with_rows(size: int, tree: PyTree, batched: PyTree) -> PyTree:
    """Broadcast the leaves for which `batched` is False, which have no batch axis, to `size` rows."""
    return jax.tree.map(lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), tree, batched)


@functools.lru_cache(maxsize=256)
def _renewal(slots: int | None, structure: jax.tree_util.PyTreeDef):
    """Return a function `(leaves, ended, key, moved)` that resets an environment if its episode ended.

    The arguments are the leaves of the environment, a bool, the key of the reset, and the result of a step, which is
    returned if the episode did not end.
    """

    @jax.custom_batching.custom_vmap
    def renew(leaves, ended, key, moved):
        return jax.lax.cond(ended, lambda: structure.unflatten(leaves).reset(key), lambda: moved)

    @renew.def_vmap
    def renew_batch(axis_size, in_batched, leaves, ended, keys, moved):
        ended, keys, moved = with_rows(axis_size, (ended, keys, moved), tuple(in_batched[1:]))
        size = min(axis_size, slots or max(8, axis_size // 16))
        # Indices of the ended environments, padded with an index that is out of range, so that its writes are dropped.
        turns = jnp.nonzero(ended, size=-(-axis_size // size) * size, fill_value=axis_size)[0]
        mapped = in_batched[0]

        def fresh(rows):
            some = [leaf[rows] if b else leaf for leaf, b in zip(leaves, mapped, strict=True)]
            axes = ([0 if b else None for b in mapped], 0)
            return jax.vmap(lambda one, key: structure.unflatten(one).reset(key), axes)(some, keys[rows])

        def serve(carry):
            served, result = carry
            rows = jax.lax.dynamic_slice(turns, (served,), (size,))
            result = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), result, fresh(rows))
            return served + size, result

        count = jnp.sum(ended, dtype=jnp.int32)
        _, result = jax.lax.while_loop(lambda carry: carry[0] < count, serve, (jnp.zeros((), jnp.int32), moved))
        return result, jax.tree.map(lambda _: True, result)

    return renew


class TimeLimitState(struct.PyTreeNode):
    """The environment's state and the episode's length so far."""

    env: PyTree
    steps: jax.Array  # int32, transitions of this episode so far


class TimeLimit(Wrapper):
    """A wrapper that truncates an episode after `max_steps` transitions.

    Put this wrapper inside the auto-reset, which must see the truncation to begin the next episode.

    Args:
      env: an environment that does not reset itself.
      max_steps: number of transitions, at least 1.

    Raises:
      ConfigError: `env` resets itself, or `max_steps` is not a whole number of at least 1.
    """

    max_steps: Any

    of_all_agents = True

    def __post_init__(self):
        check_arguments(self, whole=True, max_steps={"low": 1})
        # JAX rebuilds pytrees with placeholders for `env`, which have no `resets`.
        if getattr(self.env, "resets", False) is True:
            raise ConfigError(
                "TimeLimit around an environment that resets itself would never begin the next episode; put it inside "
                "the auto-reset: make(name, wrappers=(lambda env: TimeLimit(env, max_steps),))"
            )

    def reset(self, key: jax.Array) -> tuple[TimeLimitState, TimeStep]:
        state, time_step = self.env.reset(key)
        return TimeLimitState(state, jnp.zeros((), jnp.int32)), time_step

    def step(self, state: TimeLimitState, action: PyTree, key: jax.Array) -> tuple[TimeLimitState, TimeStep]:
        env_state, time_step = self.env.step(state.env, action, key)
        steps = state.steps + 1
        truncated = (time_step.truncated | (steps >= self.max_steps)) & ~time_step.terminated
        return TimeLimitState(env_state, steps), time_step.replace(truncated=truncated)


def with_auto_reset(env: Environment) -> Environment:
    """Return `env` if it resets itself, otherwise `AutoReset(env)`."""
    return env if env.resets else AutoReset(env)
