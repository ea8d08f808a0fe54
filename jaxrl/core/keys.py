"""Derivation of a run's random keys from a single root key.

Keys are derived with `jax.random.fold_in` from the number of a random stream, the global index of an environment (never
its device), and the tick, which is the number of steps of each environment so far. The same seed therefore gives the
same run on any number of devices and in any topology.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import threefry
from jaxrl.core.limits import checked_seed

_INIT, _ENVIRONMENT, _POLICY, _UPDATE, _SAMPLE, _EVALUATE, _HELD_OUT, _POPULATION = range(8)


def root_key(seed: int) -> jax.Array:
    """Return a run's root key, which generates random numbers without a loop (`jaxrl.core.threefry`).

    The key equals `jax.random.key(seed)` with 64-bit integers enabled, bit for bit, even if they are disabled: its
    words are `(seed >> 32, seed mod 2^32)`. By default, JAX itself would ignore the first word.

    Raises:
      ConfigError: the seed is not a whole number from 0 to 2^63 - 1.
    """
    high, low = divmod(checked_seed("seed", seed), 1 << 32)
    key = jax.random.key(low)
    if high:  # keys of every PRNG algorithm consist of these two words, once or twice
        words = jax.random.key_data(key).reshape(-1, 2).at[:, 0].set(np.uint32(high))
        key = jax.random.wrap_key_data(words.reshape(-1), impl=jax.random.key_impl(key))
    return unrolled(key)


def unrolled(key: jax.Array) -> jax.Array:
    """Return keys that generate the same numbers as `key` without a loop; keys of other PRNG algorithms are unchanged.

    The returned keys have a different dtype: for example, JAX rejects `jnp.where` of these keys and keys from
    `jax.random.key`.
    """
    default = kind(key) == threefry.NAME and jax.config.jax_threefry_partitionable
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=threefry.KEYS) if default else key


def kind(key: Any) -> Any:
    """Return the PRNG implementation of typed keys, as in `jax.random.key_impl`; `key` may be a `ShapeDtypeStruct`."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def algorithm(key: Any) -> str:
    """Return the name of the PRNG algorithm of typed keys, as stored in files; `key` may be a `ShapeDtypeStruct`."""
    found = kind(key)
    return threefry.NAME if found == threefry.KEYS else str(found)


def initial_key(key: jax.Array) -> jax.Array:
    """Return the key for initializing parameters."""
    return jax.random.fold_in(key, _INIT)


def environment_keys(key: jax.Array, env_index: jax.Array) -> jax.Array:
    """Return the root keys [B] of the environments with these global indices [B]."""
    return _per_environment(jax.random.fold_in(key, _ENVIRONMENT), env_index)


def policy_keys(key: jax.Array, env_index: jax.Array) -> jax.Array:
    """Return the root keys [B] for sampling actions in the environments with these global indices [B]."""
    return _per_environment(jax.random.fold_in(key, _POLICY), env_index)


def _per_environment(key, env_index):
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(env_index)


def reset_keys(roots: jax.Array) -> jax.Array:
    """Return the keys [B] for each environment's first reset."""
    return jax.vmap(lambda root: jax.random.fold_in(root, 0))(roots)


def episode_keys(env_keys: jax.Array) -> jax.Array:
    """Return the keys [B] for explicit resets, derived from the environments' step keys [B] at the same tick."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(env_keys)


def tick_keys(roots: jax.Array, first_tick: jax.Array, length: int) -> jax.Array:
    """Return the keys [length, B] for the `length` ticks after `first_tick` (uint32)."""
    steps_per_env = first_tick + jnp.arange(1, length + 1, dtype=jnp.uint32)  # tick 0 is used by the first reset
    return jax.vmap(lambda tick: jax.vmap(lambda root: jax.random.fold_in(root, tick))(roots))(steps_per_env)


def update_key(key: jax.Array, tick: jax.Array) -> jax.Array:
    """Return the key for the updates of the iteration that begins at `tick`."""
    return jax.random.fold_in(jax.random.fold_in(key, _UPDATE), tick)


def sample_key(key: jax.Array, tick: jax.Array) -> jax.Array:
    """Return the key for replay sampling in the iteration that begins at `tick`."""
    return jax.random.fold_in(jax.random.fold_in(key, _SAMPLE), tick)


def evaluation_key(key: jax.Array) -> jax.Array:
    """Return the key for evaluations, independent of training."""
    return jax.random.fold_in(key, _EVALUATE)


def population_key(key: jax.Array, point: int) -> jax.Array:
    """Return the key for evaluation and selection number `point` of a population, whose root key is `key`."""
    return jax.random.fold_in(jax.random.fold_in(key, _POPULATION), point)


def member_seed(seed: int, member: int) -> int:
    """Return the seed, in [0, 2^31), of member number `member` of a population whose seed is `seed`."""
    return _derived_seed(seed, _POPULATION, member)


def evaluation_seed(seed: int) -> int:
    """Return the seed, in [0, 2^31), for host environments in evaluations; it differs from the training seed."""
    return _derived_seed(seed, _EVALUATE)


def held_out_seed(seed: int) -> int:
    """Return the seed, in [0, 2^31), for a final evaluation on episodes that a run's evaluations do not use."""
    return _derived_seed(seed, _HELD_OUT)


def _derived_seed(seed, *stream):
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=stream)
    return int(sequence.generate_state(1)[0] >> np.uint32(1))
