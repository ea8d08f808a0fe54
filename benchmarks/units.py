"""Gymnax's classic control with observations in practical units, such as degrees and millimeters.

Used in rows of `zoo.toml` on inputs with large and different scales: `--import benchmarks.units --env units:CartPole`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import jaxrl
from jaxrl import spaces
from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.delegate import forward

_MILLIMETERS, _DEGREES = 1e3, 180.0 / np.pi


@jaxrl.register
class InUnits(struct.PyTreeNode):
    """A wrapper that multiplies each element of a vector observation by its entry in `scales`."""

    env: Environment
    scales: tuple[float, ...] = struct.field(pytree_node=False)

    name, action_space, resets = forward("name"), forward("action_space"), forward("resets")

    @property
    def observation_space(self) -> spaces.Space:
        space = spaces.expect(self.env.observation_space, spaces.Box)
        scales = np.asarray(self.scales, np.float32)
        largest = np.finfo(np.float32).max / scales  # CartPole's velocities are bounded by the largest number
        low, high = (np.clip(bound, -largest, largest) * scales for bound in (space.low, space.high))
        return spaces.Box(low, high, space.shape)

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self._scaled(*self.env.reset(key))

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self._scaled(*self.env.step(state, action, key))

    def _scaled(self, state: PyTree, timestep: TimeStep) -> tuple[PyTree, TimeStep]:
        return state, timestep.replace(observation=timestep.observation * jnp.asarray(self.scales, jnp.float32))


def _of_gymnax(name: str, scales: tuple[float, ...]) -> Environment:
    return InUnits(jaxrl.make(f"gymnax:{name}", auto_reset=None), scales)


ALL = {
    "CartPole": ("CartPole-v1", (_MILLIMETERS, _MILLIMETERS, _DEGREES, _DEGREES)),
    "Acrobot": ("Acrobot-v1", (1.0, 1.0, 1.0, 1.0, _DEGREES, _DEGREES)),
}
for _name, _of in ALL.items():
    jaxrl.register(f"units:{_name}", partial(_of_gymnax, *_of))
