"""Random numbers that are drawn without a loop are JAX's own, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core import keys
from jaxrl.run.directory import manifest

DRAWS = {
    "split": lambda key: jax.random.key_data(jax.random.split(key, (3, 2))),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 2**32 - 1)),
    "words": lambda key: jax.random.bits(key, (5, 3)),
    "bytes": lambda key: jax.random.bits(key, (7,), jnp.uint8),
    "half words": lambda key: jax.random.bits(key, (7,), jnp.uint16),
    "one number": jax.random.normal,
    "none": lambda key: jax.random.uniform(key, (0,)),
    "a permutation": lambda key: jax.random.permutation(key, 17),
    "a choice": lambda key: jax.random.categorical(key, jnp.zeros(4)),
    "with a loop of its own": lambda key: jax.random.gamma(key, 0.5, (3,)),
    "in a vmap": lambda key: jax.vmap(lambda key: jax.random.uniform(key, (3,)))(jax.random.split(key, 4)),
}


@pytest.mark.long
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_are_those_of_jax(draw):
    drawn = jax.jit(lambda key: (draw(key), draw(keys.unrolled(key))))
    for seed in (0, 1, 2**31 - 1):
        expected, found = drawn(jax.random.key(seed))
        np.testing.assert_array_equal(expected, found, strict=True)
    np.testing.assert_array_equal(draw(jax.random.key(3)), draw(keys.root_key(3)), strict=True)  # not compiled as one


def test_there_is_no_loop_in_it():
    program = jax.jit(lambda key: jax.random.uniform(key, (8,))).lower(keys.root_key(0)).as_text()
    assert "while" not in program and "uniform" in program


def test_keys_of_another_algorithm_stay_themselves():
    key = jax.random.key(0, impl="rbg")
    assert keys.unrolled(key) is key
    assert keys.unrolled(keys.root_key(5)).dtype == keys.root_key(5).dtype


def test_on_disk_both_kinds_are_one():
    """Runs that were saved before there were two go on, and what is saved now is read by what was there before."""
    old, new = jax.random.key(7), keys.root_key(7)
    assert manifest.leaf_entry("key", old) == manifest.leaf_entry("key", new)
    back = manifest.put(manifest.take("key", old), new)
    assert back.dtype == new.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(new))
