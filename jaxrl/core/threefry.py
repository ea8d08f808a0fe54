"""An implementation of Threefry-2x32 without a loop, whose random numbers equal JAX's bit for bit.

On CPU, JAX generates random numbers in a rolled loop of five iterations, each of which starts 17 kernels of a few
numbers each. In small programs, these are most of the kernels: 170 of 248 in a PPO step in four CartPole environments.
Without the loop, XLA fuses the generation of numbers into their consumers and compiles the program faster, and the
numbers are the same. On GPU and TPU, JAX itself uses no loop.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and JAX's partitionable counters.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random as jax_random

NAME = "threefry2x32"
"""Name of the generator in JAX and in jaxrl's files; keys of both implementations have the same words."""

_PARITY = np.uint32(0x1BD11BDA)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_DTYPES = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _hash(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the hash, as two words, of each 64-bit counter with words `high` and `low`, under the key [2]."""
    # Without the barrier, XLA would recompute the key, and recursively the key's inputs, in each of the many places
    # that use it. If the key is itself the result of random numbers, compilation would never end.
    key = jax.lax.optimization_barrier(key)
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = high + schedule[0], low + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            second = (second << np.uint32(distance)) | (second >> np.uint32(32 - distance))
            second = first ^ second
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def _counted(key, shape):
    """Return the hashes of the counters 0, 1, ..., arranged in `shape`."""
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"{size} random numbers are too many for one call: the maximum is 2^32 - 1; use several calls")
    low = jax.lax.iota(jnp.uint32, size).reshape(shape)
    return _hash(key, jnp.zeros(shape, jnp.uint32), low)


def _seed(seed: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl=NAME))


@partial(jax.jit, static_argnums=1)
def _split(key, shape):
    return jnp.stack(_counted(key, shape), axis=-1)


@jax.jit
def _fold_in(key, data):
    first, second = _hash(key, *_seed(data))
    return jnp.stack([first, second])


@partial(jax.jit, static_argnums=(1, 2))
def _random_bits(key, bit_width, shape):
    first, second = _counted(key, shape)
    if bit_width == 64:
        return first.astype(jnp.uint64) << np.uint64(32) | second.astype(jnp.uint64)
    return (first ^ second).astype(_DTYPES[bit_width])


KEYS = jax_random.define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=lambda key, shape: _split(key, tuple(shape)),
    random_bits=lambda key, bit_width, shape: _random_bits(key, bit_width, tuple(shape)),
    fold_in=lambda key, data: _fold_in(key, jnp.asarray(data, jnp.uint32)),
    name=f"{NAME}_unrolled",
    tag="fry",
)
"""PRNG implementation without a loop, for the argument `impl` of `jax.random.key`."""
