"""Torsos: shapes, what is done to observations, the choice by space, and errors before any compile."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.refused import refused
from helpers.tiers import one_quick

from jaxrl.core import spaces
from jaxrl.networks import (
    MLP,
    Actor,
    Critic,
    DictEncoder,
    ImpalaCNN,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    default_torso,
)
from jaxrl.networks.q_heads import ActionValues
from jaxrl.networks.torsos import flatten, stretched

VECTOR = spaces.Box(-np.inf, np.inf, (3,))
MINATAR = spaces.Box(0, 1, (10, 10, 4), np.bool_)
ATARI = spaces.Box(0, 255, (4, 84, 84), np.uint8)
NESTED = spaces.Dict({"camera": MINATAR, "room": spaces.Discrete(5), "arm": spaces.Dict({"angle": VECTOR})})


def build(torso, space):
    return torso.build(space, nnx.Rngs(params=0))


def shapes(torso, space):
    """Of every parameter, without computing any."""
    module = nnx.eval_shape(lambda: build(torso, space))
    return jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def zeros(space, leading):
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), spaces.zeros(space))


@pytest.mark.parametrize(
    ("torso", "space", "features"),
    [
        (MLP((5, 7)), VECTOR, 7),
        (MLP(()), VECTOR, 3),
        (MLP((6,), "relu", "layer"), MINATAR, 6),
        (MLP((6,)), spaces.Box(0, 1, ()), 6),
        (MLP((6,)), spaces.Discrete(4), 6),
        (MLP((6,)), spaces.MultiDiscrete((2, 3)), 6),
        (MinAtarCNN(), MINATAR, 128),
        (NatureCNN(), ATARI, 512),
        (NatureCNN(), spaces.Box(0, 255, (84, 84, 4), np.uint8), 512),
        (ImpalaResNet(), spaces.Box(0, 255, (84, 84, 3), np.uint8), 256),
        (ImpalaResNet(), ATARI, 256),
        (ImpalaCNN(), ATARI, 256),
        (default_torso(NESTED), NESTED, 128 + 64 + 64),
        (DictEncoder({"camera": None, "room": MLP((2,)), "arm": default_torso(NESTED.spaces["arm"])}), NESTED, 66),
    ],
)
def test_features_and_leading_axes(torso, space, features):
    for leading in ((), (2,), (3, 2)):
        out = nnx.eval_shape(lambda lead=leading: build(torso, space)(zeros(space, lead)))
        assert out.shape == (*leading, features) and out.dtype == jnp.float32
    assert hash(torso) == hash(dataclasses.replace(torso) if not isinstance(torso, DictEncoder) else torso)


@pytest.mark.long
@pytest.mark.parametrize(
    ("torso", "space"),
    one_quick(
        [
            (MinAtarCNN(2, 3, 4, normalization="layer"), MINATAR),
            (NatureCNN((2, 2, 2), 4, normalization="layer"), spaces.Box(0, 255, (3, 36, 40), np.uint8)),
            (ImpalaCNN((2, 2), 4, normalization="layer"), spaces.Box(0, 255, (36, 40, 3), np.uint8)),
            (ImpalaResNet((2, 3), 4, normalization="layer"), spaces.Box(0, 255, (9, 8, 3), np.uint8)),
        ]
    ),
    ids=lambda value: type(value).__name__,
)
def test_layer_normalization_stands_before_every_activation(torso, space):
    """So that the scale of a kernel before it does not matter; before, no convolutional torso had any."""
    observation = jax.random.uniform(jax.random.key(0), (5, *space.shape)) * 255.0
    if isinstance(torso, MinAtarCNN):
        observation = (observation > 100.0).astype(jnp.float32)
    module, plain = build(torso, space), build(dataclasses.replace(torso, normalization=None), space)
    count = len([path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param)) if path[-1] == "scale"])
    convolutions = len([path for path, _ in nnx.to_flat_state(nnx.state(plain, nnx.Param)) if path[-1] == "kernel"])
    # Of a residual network the first convolutions of sections have no activation of their own, but the whole has one.
    wanted = convolutions - len(torso.channels) + 1 if isinstance(torso, ImpalaResNet) else convolutions
    assert count == wanted
    # Within a residual block: what it adds to is not normalized.
    layer = "block_0_a0" if isinstance(torso, ImpalaResNet) else "conv_0"
    outputs = []
    for torso_module in (module, plain):
        kernel = getattr(torso_module.trunk, layer).kernel
        before = torso_module(observation)
        kernel[...] = kernel[...] * 64.0
        outputs.append(np.abs(torso_module(observation) - before).max())
    assert outputs[0] < 0.05 and outputs[1] > 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("torso", "space"),
    [
        (MinAtarCNN(2, 3, 4), MINATAR),
        (NatureCNN([2, 2, 2], 4), spaces.Box(0, 255, (3, 36, 40), np.uint8)),
        (ImpalaResNet((2, 3), 4), spaces.Box(0, 255, (9, 8, 3), np.uint8)),
    ],
)
def test_leading_axes_are_a_batch(torso, space):
    """A batch of two axes gives what each image alone gives."""
    images = np.random.default_rng(0).integers(0, int(space.high.max()) + 1, (2, 2, *space.shape)).astype(space.dtype)

    @jax.jit
    def run(key, images):
        module = torso.build(space, nnx.Rngs(params=key))
        return module(images), module(images[1, 0])

    whole, one = run(jax.random.key(0), images)
    np.testing.assert_allclose(whole[1, 0], one, rtol=1e-4, atol=1e-5)
    assert np.std(whole) > 0.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("torso", "space", "products"),
    one_quick(
        [
            (MLP((16, 16), normalization="layer"), VECTOR, 2),
            (MinAtarCNN(2, 3, 4), MINATAR, 2),
            (NatureCNN((2, 2, 2), 4, normalization="layer"), spaces.Box(0, 255, (3, 36, 40), np.uint8), 4),
            (ImpalaCNN((2, 2), 4), spaces.Box(0, 255, (36, 40, 3), np.uint8), 3),
            (ImpalaResNet((2, 3), 4), spaces.Box(0, 255, (9, 8, 3), np.uint8), 11),
        ],
        (MLP((16, 16), normalization="layer"), VECTOR, 2),
        (MinAtarCNN(2, 3, 4), MINATAR, 2),
    ),
    ids=lambda value: type(value).__name__,
)
def test_bfloat16_is_what_layers_compute_in(torso, space, products):
    """Every product, forwards and backwards; parameters, their gradients and features stay float32."""
    observation = jax.random.uniform(jax.random.key(0), (5, *space.shape))
    structure, params = nnx.split(build(dataclasses.replace(torso, dtype="bfloat16"), space), nnx.Param)

    def loss(params):
        features = nnx.merge(structure, params)(observation)
        return jnp.square(features).sum(), features

    (_, features), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    assert {x.dtype for x in jax.tree.leaves((params, gradients, features))} == {jnp.dtype("float32")}
    close = build(torso, space)(observation)
    np.testing.assert_allclose(features, close, atol=0.02 * float(jnp.abs(close).max()))
    assert np.any(features != close)
    forward = str(jax.make_jaxpr(lambda p: loss(p)[1])(params))
    assert len(re.findall(r":bf16\[[\d,]*\] = (?:dot_general|conv_general_dilated)", forward)) == products
    both = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params))
    assert not re.search(r":f32\[[\d,]*\] = (?:dot_general|conv_general_dilated)", both)


def test_published_sizes():
    assert shapes(MinAtarCNN(), MINATAR)["trunk"]["conv_0"]["kernel"] == (3, 3, 4, 16)
    assert shapes(MinAtarCNN(), MINATAR)["dense"]["layer_0"]["kernel"] == (8 * 8 * 16, 128)
    assert shapes(NatureCNN(), ATARI)["dense"]["layer_0"]["kernel"] == (7 * 7 * 64, 512)
    assert shapes(ImpalaResNet(), ATARI)["dense"]["layer_0"]["kernel"] == (11 * 11 * 32, 256)
    assert len(jax.tree.leaves(shapes(ImpalaResNet(), ATARI), is_leaf=lambda x: isinstance(x, tuple))) == 2 * 16


def test_observations_become_floats():
    pixels = jnp.asarray([[0, 255]], jnp.uint8)
    np.testing.assert_allclose(flatten(pixels, spaces.Box(0, 255, (2,), np.uint8)), [[0.0, 1.0]])
    np.testing.assert_allclose(flatten(pixels * 0 + 3, spaces.Box(0, 6, (2,), np.uint8)), [[0.5, 0.5]])
    already = jnp.asarray([[2.0, -3.0]], jnp.float32)  # normalized by the algorithm: no longer uint8
    np.testing.assert_array_equal(flatten(already, spaces.Box(0, 255, (2,), np.uint8)), already)
    np.testing.assert_array_equal(flatten(jnp.asarray([True, False]), spaces.Box(0, 1, (), np.bool_)), [[1.0], [0.0]])
    np.testing.assert_array_equal(flatten(jnp.asarray([7, -7], jnp.int32), spaces.Box(-9, 9, (2,), np.int32)), [7, -7])
    np.testing.assert_array_equal(flatten(jnp.int32(1), spaces.Discrete(3)), [0, 1, 0])
    two = flatten(jnp.asarray([[1, 0]], jnp.int32), spaces.MultiDiscrete((2, 3)))
    np.testing.assert_array_equal(two, [[0, 1, 1, 0, 0]])


LARGEST = np.finfo(np.float32).max


def test_small_numbers_are_stretched():
    low, high = np.asarray([-1.2, -0.07, 0.0, 0.0, 0.1, -8.0]), np.asarray([0.6, 0.07, 1.0, 0.5, 0.2, 8.0])
    space = spaces.Box(low, high, (6,))
    given = np.stack([low, high])
    expected = np.asarray([[-1.2, -1, 0, 0, 0.5, -8], [0.6, 1, 1, 1, 1, 8]])
    np.testing.assert_allclose(stretched(jnp.asarray(given, jnp.float32), space), expected, atol=1e-6)
    module = build(MLP((), stretch=True), space)
    np.testing.assert_allclose(module(jnp.asarray(given, jnp.float32)), expected, atol=1e-6)
    x = jnp.asarray([[0.3, 0.01]], jnp.float32)
    for same in (
        spaces.Box(np.asarray([-0.4, -np.inf]), np.asarray([0.4, np.inf]), (2,)),  # as CartPole's
        spaces.Box(np.float32([-0.4, -LARGEST]), np.float32([0.4, LARGEST]), (2,)),
        spaces.Box(0, 1, (2,), np.int32),
        spaces.Box(0.0, 0.0, (2,)),
    ):
        np.testing.assert_array_equal(stretched(x, same), x)
    half = stretched(x.astype(jnp.float16), spaces.Box(-0.4, 0.4, (2,), np.float16))
    np.testing.assert_allclose(half, x / 0.4, rtol=1e-3)


def test_large_numbers_are_their_symmetric_logarithm():
    torso, x = MLP((), symlog=True), np.asarray([[-3e4, -0.5, 0.0], [1e-3, 7.0, 1e30]])
    module = build(torso, VECTOR)
    np.testing.assert_allclose(module(jnp.asarray(x, jnp.float32)), np.sign(x) * np.log1p(np.abs(x)), rtol=1e-5)
    # The derivative is 1 / (1 + |x|), at 0 too.
    gradient = jax.grad(lambda x: jnp.sum(module(x)))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(gradient, 1.0 / (1.0 + np.abs(x)), rtol=1e-5)
    # After `stretch`, and after integers have become categories.
    both = build(MLP((), stretch=True, symlog=True), spaces.Box(-0.5, 0.5, (1,)))
    np.testing.assert_allclose(both(jnp.asarray([[0.25]], jnp.float32)), [[np.log(1.5)]], rtol=1e-5)
    np.testing.assert_allclose(build(torso, spaces.Discrete(2))(jnp.int32(1)), [0.0, np.log(2.0)], rtol=1e-5)
    assert shapes(MLP((4,), symlog=True), VECTOR) == shapes(MLP((4,)), VECTOR)
    arm = build(default_torso(NESTED, torso), NESTED).encode_arm
    np.testing.assert_allclose(arm({"angle": jnp.asarray([1e3, 0.0, -1.0])}), [np.log(1001), 0, -np.log(2)], rtol=1e-5)


def test_channels_first_is_channels_last_transposed():
    torso, key = NatureCNN((2, 2, 2), 3), jax.random.key(1)
    first, last = spaces.Box(0, 255, (2, 36, 37), np.uint8), spaces.Box(0, 255, (36, 37, 2), np.uint8)
    image = np.random.default_rng(0).integers(0, 256, first.shape).astype(np.uint8)

    @jax.jit
    def run(key, image):
        one, other = (torso.build(space, nnx.Rngs(params=key)) for space in (first, last))
        return one(image), other(jnp.moveaxis(image, 0, 2))

    np.testing.assert_allclose(*run(key, image), rtol=1e-5, atol=1e-6)


def test_orthogonal_kernels_and_zero_biases():
    dense = build(MLP((4, 4)), VECTOR).dense
    kernel = dense.layer_1.kernel[...]
    np.testing.assert_allclose(kernel @ kernel.T, 2.0 * np.eye(4), atol=1e-5)
    np.testing.assert_array_equal(dense.layer_1.bias[...], np.zeros(4))


@pytest.mark.long
def test_dictionaries_read_every_key():
    space = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)})
    base = {"a": jnp.ones((2, 3)), "b": jnp.asarray([0, 1], jnp.int32)}
    other_a, other_b = {**base, "a": 2 * base["a"]}, {**base, "b": base["b"] + 1}

    def run(torso):
        module = torso.build(space, nnx.Rngs(params=jax.random.key(0)))
        return module(base), module(other_a), module(other_b)

    out, with_a, with_b = jax.jit(run, static_argnums=0)(default_torso(space))
    assert not np.allclose(out, with_a) and not np.allclose(out, with_b)
    out, with_a, with_b = jax.jit(run, static_argnums=0)(DictEncoder({"a": MLP((2,)), "b": None}))
    assert not np.allclose(out, with_a)
    np.testing.assert_array_equal(out, with_b)


def test_the_choice_by_space():
    assert default_torso(VECTOR) == MLP()
    assert default_torso(spaces.Discrete(3)) == MLP()
    assert default_torso(MINATAR) == MinAtarCNN()
    assert default_torso(ATARI) == NatureCNN()
    assert default_torso(spaces.Box(0, 1, (2, 2, 2))) == MLP()
    mixed = spaces.Dict({"image": MINATAR, "x": VECTOR, "nothing": spaces.Box(0, 1, (0,))})
    assert default_torso(mixed) == DictEncoder({"x": MLP(), "image": MinAtarCNN(), "nothing": None})


@pytest.mark.parametrize("encoders", [{"arm": 3}, {"arm": MLP}, MLP(), 3])
def test_encoders_of_a_dictionary_are_torsos_by_key(encoders):
    refused(lambda: DictEncoder(encoders), "for each key")


@pytest.mark.parametrize(
    ("torso", "space", "changes"),
    [
        (
            MLP((4, 4)),
            spaces.Box(0, 0.5, (3,)),
            {
                "widths": (4,),
                "activation": "relu",
                "normalization": "layer",
                "dtype": "bfloat16",
                "stretch": True,
                "symlog": True,
            },
        ),
        (
            MinAtarCNN(2, 3, 4),
            MINATAR,
            {
                "filters": 3,
                "kernel": 4,
                "width": 5,
                "activation": "tanh",
                "normalization": "layer",
                "dtype": "bfloat16",
            },
        ),
        (
            NatureCNN((2, 2, 2), 4),
            spaces.Box(0, 255, (36, 36, 1), np.uint8),
            {"filters": (2, 3, 2), "width": 5, "activation": "tanh", "normalization": "layer", "dtype": "bfloat16"},
        ),
        (
            ImpalaResNet((2,), 4),
            spaces.Box(0, 255, (8, 8, 1), np.uint8),
            {
                "channels": (2, 2),
                "width": 5,
                "normalization": "layer",
                "dtype": "bfloat16",
                "spectral": True,
                "pool": 3,
            },
        ),
    ],
)
def test_every_field_changes_the_program(torso, space, changes):
    assert set(changes) == {field.name for field in dataclasses.fields(torso)}

    def program(torso):
        return str(jax.make_jaxpr(lambda: build(torso, space)(zeros(space, (2,))))())

    for field, value in changes.items():
        changed = dataclasses.replace(torso, **{field: value})
        assert changed != torso
        assert program(changed) != program(torso), field


@pytest.mark.parametrize("widths", [[8, 4], (8, 4), np.asarray([8, 4]), (np.int64(8), 4), range(8, 3, -4)], ids=repr)
def test_sizes_are_taken_as_tuples_lists_and_arrays(widths):
    for made in (MLP(widths), Actor(widths=widths), Critic(widths=widths), ActionValues(widths=widths)):
        assert made.widths == (8, 4) and hash(made) == hash(dataclasses.replace(made, widths=(8, 4)))
        assert all(type(width) is int for width in made.widths)
    assert ImpalaCNN(filters=widths).filters == ImpalaResNet(channels=widths).channels == (8, 4)
