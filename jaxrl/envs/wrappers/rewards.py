"""Wrappers that change rewards. `TimeStep.episode` uses the unmodified rewards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs.delegate import Wrapper, check_arguments


class ClipReward(Wrapper):
    """A wrapper that clips rewards to [low, high]; the reward of an episode's first time step stays 0.

    Args:
      env: the environment.
      low, high: the bounds; -inf or inf for no bound.

    Raises:
      ConfigError: a bound is not a number, or `low` is above `high`.
    """

    low: Any = -1.0
    high: Any = 1.0

    def __post_init__(self):
        check_arguments(self, finite=False, low={}, high={})
        known = all(isinstance(bound, int | float | np.ndarray | np.generic) for bound in (self.low, self.high))
        if known and np.any(np.asarray(self.low) > np.asarray(self.high)):
            raise ConfigError(f"ClipReward(low={self.low!r:.80}, high={self.high!r:.80}): low must be at most high")

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        state, time_step = self.env.step(state, action, key)
        clipped = jnp.where(time_step.first, 0.0, jnp.clip(time_step.reward, self.low, self.high))
        return state, time_step.replace(reward=clipped)


class ScaleReward(Wrapper):
    """A wrapper that multiplies rewards by `scale`.

    Args:
      env: the environment.
      scale: a finite number.

    Raises:
      ConfigError: `scale` is not a finite number.
    """

    scale: Any = 1.0

    def __post_init__(self):
        check_arguments(self, scale={})

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        state, time_step = self.env.step(state, action, key)
        return state, time_step.replace(reward=time_step.reward * self.scale)
