"""What differs from what storage was built for is named, leaf by leaf."""

import jax
import jax.numpy as jnp

from jaxrl.buffers import signature


def test_signatures_name_what_is_missing_and_what_is_too_much():
    shape = jax.ShapeDtypeStruct
    expected = {"a": shape((2,), jnp.float32), "b": {"c": shape((), jnp.uint8)}}
    given = {"a": shape((3,), jnp.float32), "b": {"d": shape((), jnp.uint8)}}
    assert signature.problems(expected, given) == [
        "['a'] is float32[3]; expected float32[2]",
        "['b']['c'] is missing; expected uint8[]",
        "['b']['d'] is uint8[]; expected nothing",
    ]
    assert signature.problems(expected, expected) == []
