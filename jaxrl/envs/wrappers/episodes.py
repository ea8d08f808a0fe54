"""Wrappers that count: episode statistics and time limits."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core import episode_info
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, Episode, PyTree, TimeStep
from jaxrl.envs.wrappers.delegate import check_arguments, same


class EpisodeStatisticsState(struct.PyTreeNode):
    """The environment's state, and the running episode's statistics."""

    env: PyTree
    episode: Episode


class EpisodeStatistics(struct.PyTreeNode):
    """Fills `TimeStep.episode` with the return and the length so far, of the rewards as `env` gives them.

    It also holds what is kept of `TimeStep.info` (`jaxrl.core.episode_info`).
    """

    env: Environment

    name, resets = same("name"), same("resets")
    observation_space, action_space = same("observation_space"), same("action_space")

    def reset(self, key: jax.Array) -> tuple[EpisodeStatisticsState, TimeStep]:
        state, time_step = self.env.reset(key)
        info = jax.tree.map(jnp.zeros_like, time_step.info)
        episode = Episode(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), info=info)
        return EpisodeStatisticsState(state, episode), time_step.replace(episode=episode)

    def step(
        self, state: EpisodeStatisticsState, action: PyTree, key: jax.Array
    ) -> tuple[EpisodeStatisticsState, TimeStep]:
        env_state, time_step = self.env.step(state.env, action, key)
        going = ~time_step.first
        length, so_far, told = state.episode.length + 1, state.episode.info or {}, time_step.info or {}

        def kept(name):
            return jnp.where(going, episode_info.fold(name, so_far[name], told[name], length, jnp), 0.0)

        episode = Episode(
            returns=jnp.where(going, state.episode.returns + time_step.reward, 0.0),
            length=jnp.where(going, length, 0),
            info={name: kept(name) for name in told} or None,
        )
        return EpisodeStatisticsState(env_state, episode), time_step.replace(episode=episode)


class TimeLimitState(struct.PyTreeNode):
    """The environment's state, and how long the episode is so far."""

    env: PyTree
    steps: jax.Array  # int32, transitions of this episode so far


class TimeLimit(struct.PyTreeNode):
    """Truncates an episode at its `max_steps`-th transition, if it did not end by then.

    It goes under the auto-reset, which must see the truncation to begin the next episode.

    Args:
      env: an environment that does not reset itself.
      max_steps: transitions, at least 1.

    Raises:
      ConfigError: `env` resets itself, or `max_steps` is no whole number of at least 1.
    """

    env: Environment
    max_steps: Any

    name, resets = same("name"), same("resets")
    observation_space, action_space = same("observation_space"), same("action_space")

    def __post_init__(self):
        check_arguments(self, whole=True, max_steps={"low": 1})
        # JAX rebuilds pytrees with placeholders for `env`, which have no `resets`.
        if getattr(self.env, "resets", False) is True:
            raise ConfigError(
                "TimeLimit around an environment that resets itself would never begin the next episode; put it under "
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
