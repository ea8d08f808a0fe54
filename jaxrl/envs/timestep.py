"""The two time steps an episodic environment makes: the first of an episode, and every other."""

import jax
import jax.numpy as jnp

from jaxrl.types import PyTree, TimeStep


def restart(observation: PyTree, action_mask: PyTree | None = None) -> TimeStep:
    """The first time step of an episode."""
    return TimeStep(
        observation=observation,
        reward=jnp.zeros((), jnp.float32),
        terminated=jnp.zeros((), jnp.bool_),
        truncated=jnp.zeros((), jnp.bool_),
        first=jnp.ones((), jnp.bool_),
        action_mask=action_mask,
    )


def transition(
    observation: PyTree,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    action_mask: PyTree | None = None,
) -> TimeStep:
    """What followed an action. Where an episode both terminated and was cut off, it terminated."""
    terminated = jnp.asarray(terminated, jnp.bool_).reshape(())
    return TimeStep(
        observation=observation,
        reward=jnp.asarray(reward, jnp.float32).reshape(()),
        terminated=terminated,
        truncated=jnp.asarray(truncated, jnp.bool_).reshape(()) & ~terminated,
        first=jnp.zeros((), jnp.bool_),
        action_mask=action_mask,
    )
