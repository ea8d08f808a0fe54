"""Random legal play in JAX environments that do not reset themselves."""

import functools

import jax
import jax.numpy as jnp

from jaxrl.core import spaces


def legal(space, mask, key):
    """A random action among those that a mask allows."""
    if mask is None:
        return space.sample(key)
    counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else (space.n,)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    parts = [
        jax.random.categorical(key, jnp.where(mask[end - n : end], 0.0, -jnp.inf))
        for end, n, key in zip(ends, counts, jax.random.split(key, len(counts)), strict=True)
    ]
    return (jnp.stack(parts) if space.shape else parts[0]).astype(space.dtype)


@functools.partial(jax.jit, static_argnames=("count", "steps"))
def play(env, key, count, steps):
    """The first time steps of `count` episodes, [count], what follows [steps, count], and the actions between."""

    def one(carry, key):
        state, now = carry
        keys = jax.random.split(key, (2, count))
        action = jax.vmap(lambda mask, key: legal(env.action_space, mask, key))(now.action_mask, keys[0])
        state, after = jax.vmap(env.step)(state, action, keys[1])
        return (state, after), (action, after)

    key_reset, key_steps = jax.random.split(key)
    state, first = jax.vmap(env.reset)(jax.random.split(key_reset, count))
    _, (actions, following) = jax.lax.scan(one, (state, first), jax.random.split(key_steps, steps))
    return first, following, actions


def outside(env, following):
    """The observations of `play` that leave their space, by path."""
    return [
        path
        for path, space, x in spaces.leaves_with_path(env.observation_space, following.observation)
        if not bool(jax.vmap(jax.vmap(space.contains))(x).all())
    ]
