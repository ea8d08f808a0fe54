"""Properties of spaces over every dtype and edge: what is sampled is contained, what is written is read back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl.core import config, keys, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")  # that JAX has without 64-bit types
FLOATS = ("float16", "float32")
WIDE = ("int64", "uint64", "float64")
SHAPES = st.sampled_from([(), (3,), (2, 2), (0,)])


@st.composite
def boxes(draw, dtypes=("bool", *INTEGERS, *FLOATS, *WIDE)):
    """Boxes of any dtype: the full range, one value, huge, tiny, negative, one-sided infinite."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    if dtype.kind == "b":
        numbers = st.booleans()
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        numbers = st.one_of(st.integers(limits.min, limits.max), st.sampled_from([limits.min, 0, 1, limits.max]))
    else:
        limits = np.finfo(dtype)
        edges = [0.0, float(limits.tiny), -float(limits.tiny), float(limits.max), -float(limits.max), 1.0, -1.0]
        plain = st.floats(width=8 * dtype.itemsize, allow_nan=False, allow_infinity=False, allow_subnormal=False)
        numbers = st.one_of(plain, st.sampled_from(edges))
    shape = draw(SHAPES)
    one, other = (draw(hnp.arrays(dtype, shape, elements=numbers, fill=st.nothing())) for _ in range(2))
    low, high = np.minimum(one, other), np.maximum(one, other)
    if dtype.kind == "f":
        low = np.where(draw(hnp.arrays(bool, shape)), -np.inf, low).astype(dtype)
        high = np.where(draw(hnp.arrays(bool, shape)), np.inf, high).astype(dtype)
    return Box(low, high, shape, dtype)


counts = st.one_of(st.integers(1, 10), st.sampled_from([1, 127, 128, 256, 2**16, 2**31 - 1]))


@st.composite
def counted(draw):
    """`Discrete` and `MultiDiscrete` of any dtype."""
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    those = counts.filter(lambda n: n - 1 <= np.iinfo(dtype).max)
    if draw(st.booleans()):
        return Discrete(draw(those), dtype)
    return MultiDiscrete(draw(st.lists(those, max_size=3)), dtype)


ARRAYS = st.one_of(boxes(), counted())
NAMES = st.text("abc", min_size=1, max_size=2)
SPACES = st.recursive(
    ARRAYS,
    lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=2).map(Dict), st.lists(inner).map(Tuple)),
    max_leaves=3,
)


KEY = jax.random.key(1)


def many(box, count):
    """Samples [count, ...] of a box, drawn as one of a larger box: few programs for many boxes."""
    low, high = (np.broadcast_to(bound, (count, *box.shape)) for bound in (box.low, box.high))
    return np.asarray(Box(low, high, low.shape, box.dtype).sample(KEY))


def sampled(space):
    """A sample; None where JAX has no number within."""
    try:
        return space.sample(KEY)
    except ConfigError as error:
        assert "without jax_enable_x64" in str(error)
        assert any(leaf.dtype.itemsize == 8 for leaf in spaces.leaves(space)), "for nothing else"
        return None


@pytest.mark.long
@given(SPACES)
@settings(max_examples=60)
def test_what_is_sampled_is_contained_as_jax_and_as_numpy_arrays(space):
    one = sampled(space)
    if one is not None:
        assert bool(space.contains(one)) and bool(space.contains(jax.tree.map(np.asarray, one)))
        types = jax.tree.map(lambda x: (x.shape, x.dtype), spaces.zeros(space))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == types
        jax.tree.map(np.testing.assert_array_equal, spaces.clip(one, space), one)


@pytest.mark.long
@given(SPACES)
@settings(max_examples=150)
def test_files_give_back_the_space_that_was_written(space):
    again = config.decode(json.loads(json.dumps(config.encode(space))))
    assert again == space and hash(again) == hash(space) and repr(again) == repr(space)
    assert spaces.form(again) == spaces.form(space) and spaces.size(again) == spaces.size(space)


@pytest.mark.long
@given(boxes(dtypes=(*INTEGERS, *FLOATS)))
@settings(max_examples=40)
def test_bounded_dimensions_are_drawn_in_both_halves(box):
    if not box.bounded or not box.low.size:
        return
    found = many(box, 64).astype(np.float64)
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    middle = low / 2 + high / 2
    several = high > low if box.dtype.kind == "f" else high > low + 0.5
    # Within the gap between two floats one half may hold no number.
    several &= np.abs(high - low) > 1e-2 * np.maximum(np.abs(high), np.abs(low))
    assert ((found <= middle).any(0) | ~several).all() and ((found > middle).any(0) | ~several).all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_uniform_over_their_whole_range(dtype):
    limits = np.iinfo(dtype)
    found = many(Box(limits.min, limits.max, (), dtype), 20_000).astype(np.float64)
    steps = limits.max - limits.min
    places = (found - limits.min) / steps
    assert abs(places.mean() - 0.5) < 0.01 and abs(places.std() - 12**-0.5) < 0.01
    assert abs((found % 2).mean() - 0.5) < 0.02, "odd ones too"
    if steps == 255:
        assert len(np.unique(found)) == 256


@pytest.mark.long
def test_both_ends_are_drawn():
    for low, high, dtype in ((-100, 100, "int8"), (2**31 - 3, 2**31 - 1, "int32"), (0, 2**16 - 1, "uint16")):
        found = many(Box(low, high, (), dtype), 1 << 20 if dtype == "uint16" else 4000)
        assert (found.min(), found.max()) == (low, high)
    found = jax.vmap(Discrete(128, "int8").sample)(jax.random.split(KEY, 4000))
    assert (found.min(), found.max()) == (0, 127)


@pytest.mark.long
def test_with_64_bit_types_wide_integers_are_uniform_too():
    with jax.enable_x64(True):
        for dtype in ("int64", "uint64"):
            limits = np.iinfo(dtype)
            found = many(Box(limits.min, limits.max, (), dtype), 2000).astype(np.float64)
            assert abs((found / 2**64).mean() - (limits.min + limits.max) / 2 / 2**64) < 0.03
        found = many(Box(-1.7e308, 1.7e308, (), "float64"), 500)
        assert np.isfinite(found).all() and found.dtype == np.float64


@pytest.mark.long
def test_samples_of_boxes_with_a_finite_range_are_those_of_earlier_versions():
    """What random actions of existing seeds are."""
    key = keys.root_key(3)
    low, high = np.float32([-1.0, 0.1, -5.0]), np.float32([1.0, 0.7, 100.0])
    expected = low + (high - low) * jax.random.uniform(key, (3,), np.float32)
    np.testing.assert_array_equal(Box(low, high, (3,)).sample(key), expected)
    expected = jnp.floor(jax.random.uniform(key, (5,)) * np.float32(256)).astype(np.uint8)
    np.testing.assert_array_equal(Box(0, 255, (5,), np.uint8).sample(key), expected)
    np.testing.assert_array_equal(Discrete(7).sample(key), jax.random.randint(key, (), 0, 7, np.int32))
    half = Box(np.float32([2.0, -np.inf]), np.float32([np.inf, 3.0]), (2,))
    normal = jnp.abs(jax.random.normal(key, (2,), np.float32))
    np.testing.assert_array_equal(half.sample(key), jnp.asarray([2.0 + normal[0], 3.0 - normal[1]]))


@pytest.mark.long
@given(ARRAYS, st.data())
@settings(max_examples=200)
def test_containing_is_comparing_exactly(space, data):
    """Against Python's own comparisons, which have no dtypes."""
    low, high = (space.low, space.high) if isinstance(space, Box) else (0, np.asarray(_nvec(space), np.int64) - 1)
    near = [np.broadcast_to(bound, space.shape).ravel().tolist() for bound in (low, high)]
    number = st.one_of(st.sampled_from([x for side in near for x in side] or [0]), st.integers(-300, 300))
    x = data.draw(st.lists(number, min_size=spaces.size(space), max_size=spaces.size(space)))
    steps = data.draw(st.lists(st.sampled_from([0, 0, 1, -1, 0.5]), min_size=len(x), max_size=len(x)))
    x = [a + b for a, b in zip(x, steps, strict=True)]
    kinds = [(np.float64, False), (np.int64, False), (np.int32, True), (np.float32, True)]
    kind, in_jax = data.draw(st.sampled_from(kinds))
    try:
        made = [np.asarray(x, kind).reshape(space.shape)]
    except OverflowError:
        return
    made += [jnp.asarray(made[0])] if in_jax else []
    whole = space.dtype.kind != "f"
    values = made[0].ravel().tolist()
    expected = all(a <= v <= b and (not whole or v == int(v)) for v, a, b in zip(values, *near, strict=True))
    assert [bool(space.contains(array)) for array in made] == [expected] * len(made)


def _nvec(space):
    return space.n if isinstance(space, Discrete) else space.nvec


@pytest.mark.parametrize(
    ("space", "outside"),
    [
        (Box(-1.0, 1.0, (2,)), 0.0),  # another shape
        (Box(-1.0, 1.0, (2,)), np.asarray([0.0, 1.5])),
        (Box(-1.0, 1.0, (2,)), [[0.0, 0.0]]),
        (Box(-1.0, 1.0, (2,)), [0.0, [0.0]]),
        (Box(-1.0, 1.0, ()), "0"),
        (Box(-1.0, 1.0, ()), None),
        (Box(-1.0, 1.0, ()), 0j),
        (Box(0, 1, (), bool), 2),
        (Box(0, 255, (), np.uint8), -1),
        (Box(0, 255, (), np.uint8), 0.5),
        (Box(0, 255, (), np.uint8), jnp.float32(0.5)),
        (Box(0, 2**31 - 1, (), np.int32), jnp.float32(2**31)),
        (Box(0, 0.3, (), np.float64), np.float32(0.3)),
        (Box(0, 0.3, (), np.float64), jnp.float32(0.3)),
        (Box(-np.inf, np.inf, ()), np.nan),
        (Box(-(2**31), 2**31 - 1, (), np.int32), 2**40),
        (Box(-(2**31), 2**31 - 1, (), np.int32), 2**70),
        (Discrete(3), 3),
        (Discrete(3), -1),
        (Discrete(3), 1.5),
        (Discrete(3), np.inf),
        (Discrete(3), [1]),
        (Discrete(200, np.uint8), jnp.int8(-1)),
        (Discrete(3), 2**32),
        (MultiDiscrete((256, 2), np.uint8), [256, 0]),
        (MultiDiscrete((2, 2)), [1]),
        (MultiDiscrete((2, 3)), np.asarray([1, 3])),
        (Dict({"a": Discrete(2)}), 1),
        (Dict({"a": Discrete(2)}), {"a": 2}),
        (Dict({"a": Discrete(2)}), {"a": 1, "b": 0}),
        (Dict({"a": Discrete(2)}), {}),
        (Dict({"a": Discrete(2)}), ["a"]),
        (Tuple((Discrete(2),)), 1),
        (Tuple((Discrete(2), Discrete(3))), (1, 3)),
        (Tuple((Discrete(2), Discrete(3))), (1,)),
        (Tuple((Discrete(2),)), {"0": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_what_lies_outside_whatever_its_type(space, outside):
    assert not bool(space.contains(outside))


def test_what_lies_within_whatever_its_type():
    for x in (1, 1.0, np.int64(1), np.uint8(1), True, jnp.int8(1), jnp.bfloat16(1), jnp.asarray(True), np.float16(1)):
        for space in (Discrete(2), Box(0, 1, (), np.uint8), Box(0, 1, (), bool), Box(-1.0, 1.0, ())):
            assert bool(space.contains(x)), (space, x)
    assert bool(Dict({}).contains({})) and bool(Tuple(()).contains(())) and not bool(Dict({}).contains({"a": 1}))
    assert bool(MultiDiscrete((256, 2), np.uint8).contains(np.uint8([255, 1])))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Discrete(0), "n=0"),
        (lambda: Discrete(-1), "n=-1"),
        (lambda: Discrete(2.5), "n=2.5"),
        (lambda: Discrete(np.inf), "n=inf"),
        (lambda: Discrete("3"), "n='3'"),
        (lambda: Discrete(True), "n=True"),
        (lambda: Discrete(2**31), "n=2147483648"),
        (lambda: Discrete(200, np.int8), "n=200; with dtype int8, it must be from 1 to 128"),
        (lambda: Discrete(2, np.float32), "dtype 'float32'; it must be an integer type"),
        (lambda: Discrete(2, bool), "dtype 'bool'"),
        (lambda: MultiDiscrete((2, 0)), "nvec=0"),
        (lambda: MultiDiscrete([[2, 3], [4, 5]]), "nvec=.*use a vector"),
        (lambda: MultiDiscrete([[2], [4, 5]]), "nvec=.*use a vector"),
        (lambda: Box(0, np.inf, (2,), np.int32), "high=inf"),
        (lambda: Box(np.nan, 1, ()), "low=nan"),
        (lambda: Box(0, np.nan, (), np.int8), "high=nan"),
        (lambda: Box(np.inf, np.inf, ()), "low=inf"),
        (lambda: Box(-np.inf, -np.inf, ()), "high=-inf"),
        (lambda: Box(1, -1, ()), "low=1.0 above high=-1.0"),
        (lambda: Box(0, [1, -1], (2,)), "low=0.0 above high=-1.0"),
        (lambda: Box(0, 256, (), np.uint8), "high=256; allowed values: 0 to 255"),
        (lambda: Box(-1, 1, (), np.uint8), "low=-1"),
        (lambda: Box(-1, 1, (), bool), "low=-1; allowed values: 0 and 1"),
        (lambda: Box(0, 0.5, (), np.int32), "high=0.5"),
        (lambda: Box(0, np.asarray([3, 2**40]), (2,), np.int32), "high=1099511627776"),
        (lambda: Box(0, 2**70, (), np.int64), "high=1180591620717411303424"),
        (lambda: Box(-1e39, 1, ()), r"low=-1e\+39"),
        (lambda: Box(0, 1e5, (), np.float16), "high=100000.0"),
        (lambda: Box(0, 1e-60, ()), "high=1e-60"),
        (lambda: Box(0, 1e-40, ()), "high=1e-40"),
        (lambda: Box(0, 1j, ()), "high=1j"),
        (lambda: Box("0", 1, ()), "low='0'"),
        (lambda: Box(None, 1, ()), "low=None"),
        (lambda: Box(0, [1, 2, 3], (2,)), r"shape \(2,\) has high of shape \(3,\)"),
        (lambda: Box(0, 1, (-1,)), r"shape \(-1,\)"),
        (lambda: Box(0, 1, (2.5,)), r"shape \(2.5,\)"),
        (lambda: Box(0, 1, "ab"), "shape 'ab'"),
        (lambda: Box(0, 1, (2**20, 2**20)), "more than"),
        (lambda: Box(0, 1, (), "text"), "dtype 'text'"),
        (lambda: Box(0, 1, (), complex), "dtype 'complex128'"),
        (lambda: Box(0, 1, (), jnp.bfloat16), "dtype 'bfloat16'"),
        (lambda: Box(0, 1, (), np.dtype([("a", int)])), "dtype 'void64'"),
        (lambda: Dict({"a": 3}), "part 'a' of a Dict is 3"),
        (lambda: Dict(3), r"Dict\(3\)"),
        (lambda: Dict({"a": Discrete(2), 1: Discrete(2)}), "pass a mapping of names"),
        (lambda: Tuple((Discrete(2), "b")), "part 1 of a Tuple is 'b'"),
        (lambda: Tuple(Discrete(2)), "pass a sequence"),
        (lambda: Box(2**40, 2**41, (), np.int64).sample(jax.random.key(0)), "no number of type int32"),
        (lambda: Box(0.1, 0.1, (), np.float64).sample(jax.random.key(0)), "no number of type float32"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(made, said):
    raises(ConfigError, said, made)


def test_spaces_hold_their_own_copy_of_the_bounds():
    low = np.zeros(2, np.float32)
    box = Box(low, 1, (2,))
    low[:] = -7
    assert box == Box(0, 1, (2,)) == Box(-0.0, 1.0, [np.int64(2)]) == Box(0, 1, 2) == Box(0, 1, (2.0,), ">f4")


def test_a_range_beyond_float32_is_sampled_and_is_not_bounded():
    box = Box(-3e38, 3e38, (50,))
    found = np.asarray(box.sample(jax.random.key(0)))
    assert np.isfinite(found).all() and (found < -1e38).any() and (found > 1e38).any() and not box.bounded
