"""Wrappers that change observations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs.delegate import Wrapper, check_arguments


class FrameStackState(struct.PyTreeNode):
    """The environment's state and its last frames."""

    env: PyTree
    frames: PyTree  # the stacked observation


class FrameStack(Wrapper):
    """A wrapper that concatenates the last `frames` observations along the last axis, with the newest at the end.

    In an episode's first time step, all frames are copies of the first observation.

    Args:
      env: an environment whose observation space is a `Box`, or a `Dict` of boxes.
      frames: number of frames, at least 1; static.

    Raises:
      ConfigError: `frames` is not a whole number of at least 1; or, when the observation space is read, an observation
        is not a `Box`.
    """

    frames: int = struct.field(pytree_node=False, default=4)

    def __post_init__(self):
        check_arguments(self, whole=True, frames={"low": 1})

    @property
    def observation_space(self) -> spaces.Space:
        return self._stacked(self.env.observation_space)

    def _stacked(self, space: spaces.Space) -> spaces.Space:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({name: self._stacked(child) for name, child in space.items})
        if not isinstance(space, spaces.Box):
            raise ConfigError(f"FrameStack(frames={self.frames}) cannot stack {space}; every observation must be a Box")
        shape = space.shape or (1,)
        low, high = (np.tile(b.reshape(shape), self.frames) for b in (space.low, space.high))
        return spaces.Box(low, high, low.shape, space.dtype)

    def reset(self, key: jax.Array) -> tuple[FrameStackState, TimeStep]:
        state, time_step = self.env.reset(key)
        frames = self._fill(time_step.observation)
        return FrameStackState(state, frames), time_step.replace(observation=frames)

    def step(self, state: FrameStackState, action: PyTree, key: jax.Array) -> tuple[FrameStackState, TimeStep]:
        env_state, time_step = self.env.step(state.env, action, key)

        def push(old, filled):
            width = filled.shape[-1] // self.frames
            pushed = jnp.concatenate([old[..., width:], filled[..., :width]], axis=-1)
            return jnp.where(time_step.first, filled, pushed)

        frames = jax.tree.map(push, state.frames, self._fill(time_step.observation))
        return FrameStackState(env_state, frames), time_step.replace(observation=frames)

    def _fill(self, observation: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.concatenate([x.reshape(x.shape or (1,))] * self.frames, axis=-1), observation)


class _ObservationWrapper(Wrapper):
    """The base class of wrappers that convert each observation of `env` with `_seen`."""

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self._of(*self.env.reset(key))

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self._of(*self.env.step(state, action, key))

    def _of(self, state: PyTree, time_step: TimeStep) -> tuple[PyTree, TimeStep]:
        return state, time_step.replace(observation=self._seen(time_step.observation))

    def _seen(self, observation: PyTree) -> PyTree:
        raise NotImplementedError


class Hide(_ObservationWrapper):
    """A wrapper that hides entries of a vector observation, so that an agent must infer them from the history.

    Args:
      env: an environment whose observation space is a `Box` of shape (n,).
      entries: indices of the hidden entries; negative ones count from the end; static.

    Raises:
      ConfigError: `entries` is not a tuple of whole numbers; or, when the space is read, an entry does not exist or is
        repeated, no entry is left, or the space is not a `Box` of shape (n,).
    """

    entries: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def __post_init__(self):
        if not isinstance(self.entries, tuple) or not all(type(entry) is int for entry in self.entries):
            raise ConfigError(
                f"Hide(entries={self.entries!r:.80}): entries must be a tuple of whole numbers, such as (2,)"
            )

    @property
    def observation_space(self) -> spaces.Space:
        indices, space = self._indices, spaces.expect(self.env.observation_space, spaces.Box)
        return spaces.Box(space.low[indices], space.high[indices], (len(indices),), space.dtype)

    @property
    def _indices(self):
        space = self.env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"Hide(entries={self.entries}) needs observations in a Box of shape (n,), not {space}")
        size = space.shape[0]
        hidden = {entry % size for entry in self.entries if -size <= entry < size}
        if len(hidden) < len(self.entries) or len(hidden) == size:
            raise ConfigError(
                f"Hide(entries={self.entries}) does not fit an observation of {size} entries; use distinct indices "
                f"from 0 to {size - 1}, but not all of them"
            )
        return [entry for entry in range(size) if entry not in hidden]

    def _seen(self, observation: PyTree) -> PyTree:
        return observation[jnp.asarray(self._indices, jnp.int32)]


class Flatten(_ObservationWrapper):
    """A wrapper that flattens observations to a float32 vector: boxes in row-major order, integers as one-hot vectors.

    Args:
      env: an environment.
    """

    @property
    def observation_space(self) -> spaces.Space:
        low, high = _flat_bounds(self.env.observation_space)
        return spaces.Box(low, high, low.shape)

    def _seen(self, observation: PyTree) -> PyTree:
        return _flat(self.env.observation_space, observation)


def _flat(space: spaces.Space, x: Any) -> jax.Array:
    if isinstance(space, spaces.Composite):
        return jnp.concatenate([_flat(child, x[name]) for name, child in space.items])
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(x, space.n, dtype=jnp.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(x[i], n, dtype=jnp.float32) for i, n in enumerate(space.nvec)])
    return x.astype(jnp.float32).reshape(-1)


def _flat_bounds(space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(space, spaces.Composite):
        lows, highs = zip(*(_flat_bounds(child) for _, child in space.items), strict=True)
        return np.concatenate(lows), np.concatenate(highs)
    if isinstance(space, spaces.Box):
        return space.low.astype(np.float32).reshape(-1), space.high.astype(np.float32).reshape(-1)
    n = space.n if isinstance(space, spaces.Discrete) else sum(space.nvec)
    return np.zeros(n, np.float32), np.ones(n, np.float32)
