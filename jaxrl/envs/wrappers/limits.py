"""The wrapper that limits the length of episodes."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.delegate import check_arguments, forward


class TimeLimitState(struct.PyTreeNode):
    """The environment's state and the episode's length so far."""

    env: PyTree
    steps: jax.Array  # int32, transitions of this episode so far


class TimeLimit(struct.PyTreeNode):
    """A wrapper that truncates an episode at its `max_steps`-th transition, if it did not end by then.

    It goes under the auto-reset, which must see the truncation to begin the next episode.

    Args:
      env: an environment that does not reset itself.
      max_steps: transitions, at least 1.

    Raises:
      ConfigError: `env` resets itself, or `max_steps` is not a whole number of at least 1.
    """

    env: Environment
    max_steps: Any

    of_all_agents: ClassVar[bool] = True
    name, resets = forward("name"), forward("resets")
    observation_space, action_space = forward("observation_space"), forward("action_space")

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
