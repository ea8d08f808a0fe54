"""Wrappers that change actions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.delegate import Wrapper, check_arguments


class StickyActionsState(struct.PyTreeNode):
    """The environment's state, and the action that may be repeated."""

    env: PyTree
    action: PyTree  # the last action that was executed
    fresh: jax.Array  # bool: no action has been executed in this episode yet


class StickyActions(Wrapper):
    """A wrapper that repeats the previous action with a given probability (Machado et al., 2018, arXiv:1709.06009).

    The first action of an episode is always executed.

    Args:
      env: the environment.
      probability: the probability of repeating, in [0, 1]; 0.25 in the paper.

    Raises:
      ConfigError: `probability` is not a number in [0, 1].
    """

    probability: Any = 0.25

    def __post_init__(self):
        check_arguments(self, probability={"low": 0, "high": 1})

    def reset(self, key: jax.Array) -> tuple[StickyActionsState, TimeStep]:
        state, time_step = self.env.reset(key)
        return StickyActionsState(state, spaces.zeros(self.action_space), time_step.first), time_step

    def step(self, state: StickyActionsState, action: PyTree, key: jax.Array) -> tuple[StickyActionsState, TimeStep]:
        key_env, key_sticky = jax.random.split(key)
        stick = jax.random.bernoulli(key_sticky, self.probability) & ~state.fresh
        done = jax.tree.map(lambda old, new: jnp.where(stick, old, new.astype(old.dtype)), state.action, action)
        env_state, time_step = self.env.step(state.env, done, key_env)
        return StickyActionsState(env_state, done, time_step.first), time_step


class ActionRepeat(Wrapper):
    """A wrapper that repeats every action `times` times, or until the episode ends, and sums the rewards.

    Args:
      env: the environment.
      times: number of steps per action, at least 1; static.

    Raises:
      ConfigError: `times` is not a whole number of at least 1.
    """

    times: int = struct.field(pytree_node=False, default=4)

    of_all_agents = True

    def __post_init__(self):
        check_arguments(self, whole=True, times={"low": 1})

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        keys = jax.random.split(key, self.times)
        now = self.env.step(state, action, keys[0])

        def again(now, key):
            state, time_step = now
            next_state, next_step = self.env.step(state, action, key)
            before = time_step.discount  # the product of the environment's discounts so far
            if before is None:
                next_step = next_step.replace(reward=time_step.reward + next_step.reward)
            else:
                reward, discount = time_step.reward + before * next_step.reward, before * next_step.discount
                next_step = next_step.replace(reward=reward, discount=discount)
            # Also stop at `first`: an environment that resets itself has begun an episode and ignored the action.
            stop = jnp.all(time_step.last | time_step.first)  # of all agents
            return jax.tree.map(lambda a, b: jnp.where(stop, a, b), now, (next_state, next_step)), None

        return jax.lax.scan(again, now, keys[1:])[0]


class ClipAction(Wrapper):
    """A wrapper that accepts unbounded real actions, and clips them to the bounds of `env`'s action space, a `Box`."""

    @property
    def action_space(self) -> spaces.Space:
        space = _real_box(self.env, "ClipAction")
        return spaces.Box(-np.inf, np.inf, space.shape, space.dtype)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        space = _real_box(self.env, "ClipAction")
        return self.env.step(state, jnp.clip(action, space.low, space.high), key)


class RescaleAction(Wrapper):
    """A wrapper that maps actions in [low, high] to the bounds of `env`'s action space, a bounded `Box`.

    Args:
      env: the environment.
      low, high: bounds of the wrapper's action space; static. Actions outside these bounds are clipped.
    """

    low: float = struct.field(pytree_node=False, default=-1.0)
    high: float = struct.field(pytree_node=False, default=1.0)

    def __post_init__(self):
        check_arguments(self, low={}, high={})
        if not self.low < self.high:
            raise ConfigError(f"RescaleAction(low={self.low}, high={self.high}): low must be below high")

    @property
    def action_space(self) -> spaces.Space:
        space = _real_box(self.env, "RescaleAction")
        if not space.bounded:
            raise ConfigError(
                f"RescaleAction({self.low}, {self.high}): the environment's bounds must be finite, not {space}"
            )
        return spaces.Box(self.low, self.high, space.shape, space.dtype)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        space = _real_box(self.env, "RescaleAction")
        share = (action - self.low) / (self.high - self.low)
        # Clipping also corrects rounding errors at the bounds.
        inner = jnp.clip(space.low + share * (space.high - space.low), space.low, space.high)
        return self.env.step(state, inner, key)


def _real_box(env: Environment, wrapper: str) -> spaces.Box:
    space = env.action_space
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        raise ConfigError(f"{wrapper} needs an action space of real numbers, but {env.name} has {space}")
    return space
