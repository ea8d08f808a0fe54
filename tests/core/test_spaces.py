"""Spaces: samples lie within, equality and hashing go by value."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.refused import raises

from jaxrl.core import config, keys, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

SPACES = [
    Box(-1.0, 2.0, (3,)),
    Box(np.asarray([0.0, -np.inf, -np.inf, 1.0]), np.asarray([1.0, 0.0, np.inf, np.inf]), (4,)),
    Box(0, 255, (2, 2), np.uint8),
    Box(-3, 3, (), np.int32),
    Box(0, 1, (5,), np.bool_),
    Box(0.0, 1.0, (0,)),
    Discrete(4),
    MultiDiscrete((2, 5, 1)),
    Dict({"b": Discrete(2), "a": Box(0.0, 1.0, (2,)), "c": Dict({"d": Discrete(3)})}),
    Tuple((Discrete(2), Dict({"b": MultiDiscrete((2, 3)), "a": Tuple((Box(0.0, 1.0, (2,)),))}))),
]


def test_samples_reach_all_of_a_finite_space():
    many = keys.unrolled(jax.random.split(jax.random.key(0), 4000))
    finite = (Discrete(4), Box(0, 255, (), np.uint8), Box(-1, 1, (), np.int32))
    *found, box = jax.jit(lambda many: [jax.vmap(x.sample)(many) for x in (*finite, Box(-1.0, 3.0, ()))])(many)
    assert [set(np.unique(x)) for x in found] == [{0, 1, 2, 3}, set(range(256)), {-1, 0, 1}]
    assert abs(box.mean() - 1.0) < 0.1 and box.min() < -0.98 and box.max() > 2.98


def test_equality_and_hash_go_by_value():
    assert Box(-1.0, 1.0, (2,)) == Box(np.full(2, -1.0), np.full(2, 1.0), [2])
    assert hash(Box(-1.0, 1.0, (2,))) == hash(Box(np.full(2, -1.0), 1.0, (2,)))
    assert len({*SPACES, *SPACES}) == len(SPACES)
    assert Box(-1.0, 1.0, (2,)) != Box(-1.0, 1.0, (2,), np.float16)
    assert Dict({"b": Discrete(2), "a": Discrete(3)}) == Dict({"a": Discrete(3), "b": Discrete(2)})


def test_trees_of_spaces():
    space = SPACES[-1]
    assert spaces.leaves(space) == [Discrete(2), Box(0.0, 1.0, (2,)), MultiDiscrete((2, 3))]
    sample = space.sample(jax.random.key(0))
    assert jax.tree.structure(spaces.zeros(space)) == jax.tree.structure(sample)
    assert len(spaces.leaves(space)) == len(jax.tree.leaves(sample)), "in one order"
    paths = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(sample)]
    found = list(spaces.leaves_with_path(space, sample))
    assert [kind for _, kind, _ in found] == spaces.leaves(space)
    assert all(path == at and part is x for (path, _, part), (at, x) in zip(found, paths, strict=True))
    twice = spaces.tree_map(lambda part, x, y: (part, x is y), space, sample, sample)
    assert twice == ((Discrete(2), True), {"a": ((Box(0.0, 1.0, (2,)), True),), "b": (MultiDiscrete((2, 3)), True)})
    assert spaces.named((1, {"b": 2, "a": (3,)})) == {"0": 1, "1": {"b": 2, "a": {"0": 3}}}
    wider = Tuple((Discrete(2), Dict({"b": MultiDiscrete((2, 3)), "a": Tuple((Box(-9.0, 1.0, (2,)),))})))
    other = Tuple((Discrete(2), Dict({"b": MultiDiscrete((3, 3)), "a": Tuple((Box(0.0, 1.0, (2,)),))})))
    assert spaces.form(space) == spaces.form(wider) != spaces.form(other)
    assert config.decode(config.encode(space)) == space


def test_bounded():
    assert Box(-1.0, 1.0, (2,)).bounded and Box(0, 255, (), np.uint8).bounded
    assert not Box(-1.0, np.inf, (2,)).bounded
    assert not Box(-np.finfo(np.float32).max, 1.0, ()).bounded


def test_spaces_are_static_arguments():
    double = jax.jit(lambda x, space: x * space.shape[0], static_argnums=1)
    assert double(jnp.float32(2), Box(0.0, 1.0, (3,))) == double(jnp.float32(2), Box(0.0, 1.0, (3,)))
    assert double._cache_size() == 1


def test_one_kind_of_space_is_expected():
    box = Box(-1.0, 1.0, (2,))
    assert spaces.expect(box, Box) is box
    raises(ConfigError, r"Box.* not Discrete\(n=4", spaces.expect, Discrete(4), Box)


def test_clip_puts_elements_within():
    for space in (Box(-1.0, 2.0, (3,)), SPACES[1], Box(0, 1, (3,), np.float16)):
        clipped = spaces.clip(jnp.asarray([[-30.0] * space.shape[0], [60.0] * space.shape[0]], space.dtype), space)
        assert clipped.dtype == space.dtype and bool(jax.vmap(space.contains)(clipped).all())
