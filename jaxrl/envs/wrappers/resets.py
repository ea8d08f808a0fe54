"""Wrappers: environments around an environment. Each is a frozen pytree of its own; they compose, in any order but
where said, and none is another's subclass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.types import Environment, Episode, PyTree, TimeStep


@struct.dataclass
class AutoResetState:
    env: PyTree
    last: jax.Array  # bool: the time step shown last was its episode's last


@struct.dataclass
class AutoReset:
    """Begins the next episode on the step after an episode's last time step.

    That step ignores its action and shows the first observation of the new episode (`first`, reward 0, no ending), as
    made by `env.reset` with the step's key. So the last observation of every episode is seen.
    """

    env: Environment

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def observation_space(self) -> spaces.Space:
        return self.env.observation_space

    @property
    def action_space(self) -> spaces.Space:
        return self.env.action_space

    @property
    def resets(self) -> bool:
        return True

    def reset(self, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        state, time_step = self.env.reset(key)
        return AutoResetState(state, time_step.last), time_step

    def step(self, state: AutoResetState, action: PyTree, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        # Both are computed, since `vmap` would make a `cond` do so too; only one is used, hence one key is enough.
        fresh = self.env.reset(key)
        moved = self.env.step(state.env, action, key)
        env_state, time_step = jax.tree.map(lambda a, b: jnp.where(state.last, a, b), fresh, moved)
        return AutoResetState(env_state, time_step.last), time_step


@struct.dataclass
class EpisodeStatisticsState:
    env: PyTree
    episode: Episode


@struct.dataclass
class EpisodeStatistics:
    """Fills `TimeStep.episode` with the return and the length so far, of the rewards as `env` gives them."""

    env: Environment

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def observation_space(self) -> spaces.Space:
        return self.env.observation_space

    @property
    def action_space(self) -> spaces.Space:
        return self.env.action_space

    @property
    def resets(self) -> bool:
        return self.env.resets

    def reset(self, key: jax.Array) -> tuple[EpisodeStatisticsState, TimeStep]:
        state, time_step = self.env.reset(key)
        episode = Episode(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
        return EpisodeStatisticsState(state, episode), time_step.replace(episode=episode)

    def step(self, state: Any, action: PyTree, key: jax.Array) -> tuple[EpisodeStatisticsState, TimeStep]:
        env_state, time_step = self.env.step(state.env, action, key)
        going = ~time_step.first
        episode = Episode(
            returns=jnp.where(going, state.episode.returns + time_step.reward, 0.0),
            length=jnp.where(going, state.episode.length + 1, 0),
        )
        return EpisodeStatisticsState(env_state, episode), time_step.replace(episode=episode)


def with_auto_reset(env: Environment) -> Environment:
    """`env` if it begins new episodes by itself, else `AutoReset(env)`."""
    return env if env.resets else AutoReset(env)
