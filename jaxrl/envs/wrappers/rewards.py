"""Wrappers of rewards. `TimeStep.episode` keeps the true ones."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.wrappers.delegate import same


class ClipReward(struct.PyTreeNode):
    """Clips rewards to [low, high]; that of a first time step, which nothing earned, stays 0.

    Args:
      env: an environment.
      low, high: the least and the largest reward.
    """

    env: Environment
    low: Any = -1.0
    high: Any = 1.0

    name, resets = same("name"), same("resets")
    observation_space, action_space = same("observation_space"), same("action_space")

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self.env.reset(key)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        state, time_step = self.env.step(state, action, key)
        clipped = jnp.where(time_step.first, 0.0, jnp.clip(time_step.reward, self.low, self.high))
        return state, time_step.replace(reward=clipped)


class ScaleReward(struct.PyTreeNode):
    """Multiplies rewards by `scale`.

    Args:
      env: an environment.
      scale: the factor.
    """

    env: Environment
    scale: Any = 1.0

    name, resets = same("name"), same("resets")
    observation_space, action_space = same("observation_space"), same("action_space")

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self.env.reset(key)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        state, time_step = self.env.step(state, action, key)
        return state, time_step.replace(reward=time_step.reward * self.scale)
