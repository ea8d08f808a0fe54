"""A wrapper that gives an environment discounts of its own."""

import jax.numpy as jnp
from flax import struct

from jaxrl.core.types import Environment
from jaxrl.envs.delegate import forward


class Discounted(struct.PyTreeNode):
    """Gives every time step but an episode's first the same discount."""

    env: Environment
    discount: float = 0.5

    name, resets = forward("name"), forward("resets")
    observation_space, action_space = forward("observation_space"), forward("action_space")

    def reset(self, key):
        state, timestep = self.env.reset(key)
        return state, timestep.replace(discount=jnp.ones((), jnp.float32))

    def step(self, state, action, key):
        state, timestep = self.env.step(state, action, key)
        discount = jnp.asarray(self.discount, jnp.float32)
        return state, timestep.replace(
            discount=jnp.where(timestep.terminated, 0.0, jnp.where(timestep.first, 1.0, discount))
        )
