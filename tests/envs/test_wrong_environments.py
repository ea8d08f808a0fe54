"""Environments of a user's own that break the contract: refused before anything is compiled."""

import jax.numpy as jnp
import pytest
from flax import struct
from helpers.refused import refused

import jaxrl
from jaxrl.envs.episode import restart, transition


class Own(struct.PyTreeNode):
    """An environment of a user's, with a mistake."""

    mistake: str = struct.field(pytree_node=False)
    name = "own"
    resets = False

    @property
    def observation_space(self):
        return jaxrl.spaces.Box(-1.0, 1.0, (2,))

    @property
    def action_space(self):
        return jaxrl.spaces.Discrete(2)

    def reset(self, key):
        size, kind = (3 if self.mistake == "shape" else 2), jnp.int32 if self.mistake == "dtype" else jnp.float32
        return jnp.int32(0), restart(jnp.zeros((size,), kind))

    def step(self, state, action, key):
        if self.mistake == "branch" and action:
            state = state + 1
        observation = jnp.zeros((2,))
        reward = jnp.ones((2,)) if self.mistake == "rewards" else jnp.float32(1.0)
        return state, transition(observation, reward, terminated=jnp.bool_(False), truncated=jnp.bool_(False))


@pytest.mark.parametrize(
    ("mistake", "named"),
    [("shape", "float32[3]"), ("dtype", "int32[2]"), ("branch", "cannot be traced by jit"), ("rewards", "(2,)")],
)
def test_mistakes_of_an_own_environment(mistake, named):
    refused(lambda: jaxrl.train("ppo", Own(mistake), total_steps=1000), named)
