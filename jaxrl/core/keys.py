"""How a run's randomness is derived from its one root key.

Streams are told apart by what the root is folded with, environments by their global index and never by device, and
moments by their tick. So the same seed is the same run on any number of devices and in any topology.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import threefry
from jaxrl.core.limits import checked_seed

_INIT, _ENVIRONMENT, _POLICY, _UPDATE, _SAMPLE, _EVALUATE, _HELD_OUT = range(7)


def root_key(seed: int) -> jax.Array:
    """Return a run's root key, of the kind whose numbers are drawn without a loop.

    It is `jax.random.key(seed)` with 64-bit integers enabled, bit for bit, whether they are or not: its words are
    `(seed >> 32, seed mod 2^32)`. JAX's default would ignore the first.

    Raises:
      ConfigError: the seed is not a whole number from 0 to 2^63 - 1.
    """
    high, low = divmod(checked_seed("seed", seed), 1 << 32)
    key = jax.random.key(low)
    if high:  # every algorithm's key is these two words, or has them twice
        words = jax.random.key_data(key).reshape(-1, 2).at[:, 0].set(np.uint32(high))
        key = jax.random.wrap_key_data(words.reshape(-1), impl=jax.random.key_impl(key))
    return unrolled(key)


def unrolled(key: jax.Array) -> jax.Array:
    """Keys whose numbers are drawn without a loop, bit for bit those of `key`; keys of another algorithm stay.

    They are a type of their own: JAX refuses, say, a `where` between them and keys of `jax.random.key`.
    """
    default = kind(key) == threefry.NAME and jax.config.jax_threefry_partitionable
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=threefry.KEYS) if default else key


def kind(key: Any) -> Any:
    """What draws the numbers of typed keys, as `impl` of `jax.random.wrap_key_data` takes it; `key` may be a shape."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def algorithm(key: Any) -> str:
    """The name of the algorithm by which typed keys draw, as files have it; `key` may be a shape."""
    found = kind(key)
    return threefry.NAME if found == threefry.KEYS else str(found)


def initial_key(key: jax.Array) -> jax.Array:
    """For the first parameters."""
    return jax.random.fold_in(key, _INIT)


def environment_keys(key: jax.Array, env_index: jax.Array) -> jax.Array:
    """The root key [B] of each environment, by its global index [B]."""
    return _per_environment(jax.random.fold_in(key, _ENVIRONMENT), env_index)


def policy_keys(key: jax.Array, env_index: jax.Array) -> jax.Array:
    """The root key [B] of each environment's action sampling, by its global index [B]."""
    return _per_environment(jax.random.fold_in(key, _POLICY), env_index)


def _per_environment(key, env_index):
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(env_index)


def reset_keys(roots: jax.Array) -> jax.Array:
    """Keys [B] of each environment's first reset."""
    return jax.vmap(lambda root: jax.random.fold_in(root, 0))(roots)


def episode_keys(env_keys: jax.Array) -> jax.Array:
    """Keys [B] of episodes that begin at will, from those of the environments' steps at the same tick [B]."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(env_keys)


def tick_keys(roots: jax.Array, first_tick: jax.Array, length: int) -> jax.Array:
    """Keys [length, B] of the ticks that follow `first_tick` (uint32), all in one call."""
    steps_per_env = first_tick + jnp.arange(1, length + 1, dtype=jnp.uint32)  # tick 0 is the first reset's
    return jax.vmap(lambda tick: jax.vmap(lambda root: jax.random.fold_in(root, tick))(roots))(steps_per_env)


def update_key(key: jax.Array, tick: jax.Array) -> jax.Array:
    """For the updates of the iteration that begins at `tick`."""
    return jax.random.fold_in(jax.random.fold_in(key, _UPDATE), tick)


def sample_key(key: jax.Array, tick: jax.Array) -> jax.Array:
    """For the replay draws of the iteration that begins at `tick`."""
    return jax.random.fold_in(jax.random.fold_in(key, _SAMPLE), tick)


def evaluation_key(key: jax.Array) -> jax.Array:
    """For evaluations, which never disturb training."""
    return jax.random.fold_in(key, _EVALUATE)


def evaluation_seed(seed: int) -> int:
    """In [0, 2^31), for the host environments of evaluations: else they would begin with the episodes of training."""
    return _derived_seed(seed, _EVALUATE)


def held_out_seed(seed: int) -> int:
    """In [0, 2^31), for judging what a run's evaluations chose, on episodes that they did not play."""
    return _derived_seed(seed, _HELD_OUT)


def _derived_seed(seed, stream):
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(stream,))
    return int(sequence.generate_state(1)[0] >> np.uint32(1))
