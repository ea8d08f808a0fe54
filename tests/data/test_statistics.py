"""Statistics of a dataset against NumPy's over all of it at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.made import episodes, made
from helpers.refused import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.dataset_statistics import Moments, statistics


def everything(found):
    """All that the steps hold, as NumPy would be given it; the meaningless last ones left out."""
    cuts = {"observation": 0, "action": 1, "reward": 1, "discount": 1, "value": 0}
    steps = [
        {name: jax.tree.map(lambda x, cut=cut: x[: len(x) - cut], one.steps[name]) for name, cut in cuts.items()}
        for one in found
    ]
    return jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64), *steps)


def assert_moments(moments, x, axis=0):
    assert moments.count == np.prod([x.shape[i] for i in np.atleast_1d(axis)])
    np.testing.assert_allclose(moments.mean, x.mean(axis=axis), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.std, x.std(axis=axis), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(moments.min, x.min(axis=axis))
    np.testing.assert_array_equal(moments.max, x.max(axis=axis))


@settings(max_examples=40)
@given(st.lists(episodes(), min_size=1, max_size=6))
def test_moments_are_those_of_all_steps_together(found):
    of, whole = statistics(iter(found)), everything(found)
    assert set(of.fields) == set(whole)
    picture, pictures = of["observation"].pop("picture"), whole["observation"].pop("picture")
    assert picture.mean.shape == (2,)
    assert_moments(picture, pictures, axis=(0, 1, 2))
    jax.tree.map(assert_moments, of.fields, whole)


def shifted(episode, offset, scale):
    return dataclasses.replace(episode, reward=(episode.reward.astype(np.float64) * scale + offset))


def test_digits_are_not_lost_to_a_large_mean_or_to_many_episodes():
    found = [shifted(made(7, "truncated", seed), 1e6, 1e-3) for seed in range(50)]
    reward = statistics(found)["reward"]
    exact = np.concatenate([one.reward[:-1] for one in found]).astype(np.longdouble)
    assert float(reward.std) == pytest.approx(float(exact.std()), rel=1e-6)
    naive = np.mean(np.square(exact.astype(np.float64))) - np.square(np.mean(exact.astype(np.float64)))
    assert abs(naive - float(exact.var())) > 1e-3 * float(exact.var())  # the formula that would lose them


def test_normalized_values_have_mean_zero_and_deviation_one_and_come_back():
    found = [made(9, "terminated", seed) for seed in range(5)]
    of = statistics(found)
    observation = jax.tree.map(lambda *x: np.concatenate(x), *(one.observation for one in found))
    normal = of.normalize("observation", observation)
    assert {leaf.dtype for leaf in jax.tree.leaves(normal)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(normal["vector"].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(normal["vector"].std(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(normal["picture"].std(axis=(0, 1, 2)), 1, atol=1e-5)
    back = of.denormalize("observation", normal)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), back, observation)
    action = {"which": found[0].action["which"], "how": found[0].action["how"]}
    assert of.normalize("action", action)["how"].dtype == np.float64


def test_they_act_on_jax_arrays_in_a_compiled_program():
    of = statistics([made(9, "terminated", seed) for seed in range(5)])
    vector = np.float32([[1, 2], [3, 4]])
    compiled = jax.jit(lambda x: of.normalize("observation", {"number": x[:, 0], "vector": x, "picture": x})["vector"])
    np.testing.assert_allclose(compiled(jnp.asarray(vector)), of["observation"]["vector"].normalize(vector), rtol=1e-6)


def test_what_never_varies_is_zero():
    found = [dataclasses.replace(made(6, "truncated", seed), reward=np.full(7, np.float32(0.1))) for seed in range(9)]
    moments = statistics(found)["reward"]
    assert moments.std == 0.0 and moments.mean == np.float32(0.1)


@given(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1e-12, 1e-7]), st.floats(-10, 10))
def test_what_hardly_varies_is_normalized_to_zero_and_comes_back_as_its_mean(constant, jitter, value):
    of = _moments_of(constant * (1 + jitter * np.random.default_rng(0).normal(size=50)))
    assert not of.normalize(np.asarray([constant, 1.001 * constant, value])).any()
    np.testing.assert_allclose(of.denormalize(np.asarray([0.0, value])), of.mean)


@given(st.sampled_from([1e-5, 1.0, 1e6]), st.floats(-100, 100), st.floats(-10, 10))
def test_units_and_origins_of_what_varies_do_not_matter(scale, origin, value):
    x = scale * (np.random.default_rng(0).normal(size=50) + origin)
    of, new = _moments_of(x), np.asarray([scale * (value + origin)])
    np.testing.assert_allclose(of.normalize(new), (new - x.mean()) / x.std(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(of.denormalize(of.normalize(new)), new, rtol=1e-9, atol=1e-9 * scale)


def _moments_of(x):
    return Moments(len(x), x.mean(), x.std(), x.min(), x.max())


def test_text_and_images_to_skip_have_none_and_stay_as_they_are():
    one = made(4, "truncated")
    one = dataclasses.replace(one, extras={"instruction": np.asarray(["go"] * 5)})
    of = statistics([one], images="skip")
    assert of["instruction"] is None and of["observation"]["picture"] is None
    assert isinstance(of["observation"]["vector"], Moments)
    same = of.normalize("observation", one.observation)
    assert same["picture"] is one.observation["picture"]
    assert of.normalize("instruction", one.extras["instruction"]) is one.extras["instruction"]


def test_what_is_asked_wrongly():
    refused(lambda: statistics([]), "there are no episodes")
    refused(lambda: statistics([made(2, "truncated")], images="pixel"), "images='pixel'")
    refused(lambda: statistics([made(2, "truncated")])["observations"], "did you mean 'observation'")
