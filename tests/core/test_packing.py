"""Scalars packed into few arrays, and back, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import assert_equal
from helpers.refused import raises

from jaxrl.core.errors import ConfigError
from jaxrl.core.packing import Packing

B = 3
DTYPES = ("float32", "int32", "uint32", "bool", "uint8", "int8", "bfloat16", "float16", "int16", "int4")


def tree(lead=()):
    """Leaves of many types and shapes; among the floats NaN, infinity and a negative zero."""
    random = np.random.default_rng(0)
    leaves = {
        f"{dtype} {shape}": jnp.asarray(random.integers(0, 7, (*lead, B, *shape)), jnp.uint8).astype(dtype)
        for dtype in DTYPES
        for shape in [(), (2,), (0,), (5, 8)]
    }
    return leaves | {"odd": jnp.tile(jnp.float32([jnp.nan, -0.0, jnp.inf]), (*lead, 1)), "none": None}


def assert_bits_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_every_leaf_comes_back_bit_for_bit():
    given = tree()
    packing = Packing.of(given, B)
    packed = packing.pack(given)
    assert {(x.shape, str(x.dtype)) for x in packed[:2]} == {((4, B), "uint32"), ((3, B), "uint8")}
    assert_bits_equal(jax.jit(lambda x: packing.unpack(packing.pack(x)))(given), given)


def test_what_a_loop_stored_comes_back_with_its_leading_axis():
    given = tree(lead=(4,))
    packing = Packing.of(jax.tree.map(lambda x: x[0], given), B)
    _, rows = jax.lax.scan(lambda _, x: (None, packing.pack(x)), None, given)
    assert_bits_equal(packing.unpack(rows), given)


def test_what_is_no_scalar_of_a_batch_entry_stays_as_it_is():
    given = {
        "key": jax.random.split(jax.random.key(0), B),
        "no batch": jnp.float32(1.0),
        "other batch": jnp.ones(B + 1),
        "image": jnp.zeros((B, 5, 5)),
        "number": 1.0,
        "weak": jnp.full(B, 2.0),
        "x": jnp.ones(B, jnp.float32),
    }
    packing = Packing.of(given, B)
    packed = packing.pack(given)
    assert given["weak"].weak_type and packed[0].shape == (1, B)
    assert packing.unpack(packed)["number"] is given["number"]
    assert_equal(packing.unpack(packed), given)


@pytest.mark.parametrize("given", [(), {"a": None}], ids=["nothing", "none"])
def test_nothing_is_nothing(given):
    packing = Packing.of(given, B)
    assert packing.pack(given) == [] and packing.unpack([]) == given


@pytest.mark.parametrize("now", [jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), jnp.zeros((B, 1), jnp.float32)])
def test_bits_of_another_type_are_not_taken_for_those_of_the_first(now):
    packing = Packing.of({"state": {"x": jnp.zeros(B, jnp.float32)}, "y": jnp.zeros(B, bool)}, B)
    raises(ConfigError, r"\['x'\] was float32\[3\]", packing.pack, {"state": {"x": now}, "y": jnp.zeros(B, bool)})
