"""Episodes of JAX environments, by one function, so that environments of one kind share a compiled program."""

import functools

import jax
import jax.numpy as jnp

from jaxrl.core import spaces


@functools.partial(jax.jit, static_argnames=("steps", "batch"))
def played(env, actions, key, steps, batch=None):
    """Time steps [steps + 1, ...] from a reset on; with a batch [batch, steps + 1, ...].

    Args:
      env: the environment.
      actions: an action for all steps, or actions [steps, ...]; None: random ones.
      key: of the reset, the steps and the random actions.
    """

    def one(key):
        key_reset, key_steps, key_actions = jax.random.split(key, 3)
        state, first = env.reset(key_reset)
        if actions is None:
            taken = jax.vmap(env.action_space.sample)(jax.random.split(key_actions, steps))
        else:
            taken = spaces.tree_map(lambda s, x: jnp.broadcast_to(x, (steps, *s.shape)), env.action_space, actions)
        rest = jax.lax.scan(lambda state, x: env.step(state, *x), state, (taken, jax.random.split(key_steps, steps)))[1]
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)

    return one(key) if batch is None else jax.vmap(one)(jax.random.split(key, batch))
