"""Distributions against scipy, numpy integrals, frequencies and properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.networks import Categorical, DiagonalGaussian, Joint, MultiCategorical, TanhGaussian
from jaxrl.networks.distributions import FORBIDDEN, _inverse_cdf

RNG = np.random.default_rng(0)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def random_gaussian(shape=(5, 3), seed=0):
    rng = np.random.default_rng(seed)
    return f32(rng.normal(size=shape)), f32(rng.normal(size=shape) * 0.5)


def tanh_gaussian(seed=0, shape=(5, 3)):
    return TanhGaussian(*random_gaussian(shape, seed), (-1.0, 0.0, -2.0), (1.0, 3.0, -1.0))


# --- categorical ---------------------------------------------------------------------------------------------------


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_categorical_matches_numpy():
    logits = RNG.normal(size=(4, 6, 5)).astype(np.float32)
    other = RNG.normal(size=(4, 6, 5)).astype(np.float32)
    action = RNG.integers(0, 5, (4, 6))
    p, q = softmax(logits.astype(np.float64)), softmax(other.astype(np.float64))
    distribution = Categorical(f32(logits))
    log_prob = distribution.log_prob(jnp.asarray(action, jnp.int32))
    np.testing.assert_allclose(log_prob, np.log(np.take_along_axis(p, action[..., None], -1)[..., 0]), atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), scipy.stats.entropy(p, axis=-1), atol=1e-5)
    np.testing.assert_allclose(distribution.kl(Categorical(f32(other))), scipy.stats.entropy(p, q, axis=-1), atol=1e-5)
    np.testing.assert_array_equal(distribution.mode(), logits.argmax(-1))
    assert distribution.mode().dtype == jnp.int32


@pytest.mark.long
@pytest.mark.parametrize("classes", [3, 150])
def test_categorical_frequencies(classes):
    logits = np.random.default_rng(1).normal(size=classes).astype(np.float32)
    count = 20_000
    distribution = Categorical(jnp.broadcast_to(f32(logits), (count, classes)))
    drawn = np.asarray(distribution.sample(jax.random.split(jax.random.key(0), count)))
    assert drawn.dtype == np.int32
    frequencies = np.bincount(drawn, minlength=classes) / count
    p = softmax(logits)
    assert np.all(np.abs(frequencies - p) < 5 * np.sqrt(p * (1 - p) / count) + 1e-4)


@pytest.mark.long
def test_a_sample_depends_on_its_own_key_alone():
    keys = jax.random.split(jax.random.key(3), (2, 6))
    logits = f32(RNG.normal(size=(2, 6, 4)))
    mean, log_std = random_gaussian((2, 6, 3))
    whole = (
        Categorical(logits),
        MultiCategorical(logits, (3, 1)),
        DiagonalGaussian(mean, log_std),
        TanhGaussian(mean, log_std, (-1.0,) * 3, (1.0,) * 3),
        Joint({"b": Categorical(logits), "a": (Joint((DiagonalGaussian(mean, log_std), Categorical(logits))))}),
    )

    @jax.jit
    def draw(distributions, keys):
        return [distribution.sample(keys) for distribution in distributions]

    part = draw(jax.tree.map(lambda x: x[1, 2:4], whole), keys[1, 2:4])
    for together, alone in zip(draw(whole, keys), part, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1, 2:4], y), together, alone)


@jax.jit
def masked_facts(logits, mask, seed):
    distribution = Categorical.masked(logits, mask)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (64, *x.shape)), distribution)
    drawn = many.sample(jax.random.split(jax.random.key(seed), 64))
    return jnp.exp(distribution.log_probs()), distribution.entropy(), distribution.mode(), drawn


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=6, max_size=6),
    mask=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=50)
def test_masked_classes_do_not_exist(logits, mask, seed):
    logits, mask = np.asarray(logits, np.float32), np.asarray(mask)
    probabilities, entropy, mode, drawn = (np.asarray(x) for x in masked_facts(logits, mask, np.uint32(seed)))
    alone = softmax(logits[mask].astype(np.float64))
    assert np.all(probabilities[~mask] == 0.0)
    np.testing.assert_allclose(probabilities[mask], alone, rtol=1e-4, atol=1e-37)  # below, float32 has none
    np.testing.assert_allclose(entropy, scipy.stats.entropy(alone), rtol=1e-4, atol=1e-6)
    assert mask[mode] and np.all(mask[drawn])


inverse_cdf = jax.jit(_inverse_cdf)


@pytest.mark.parametrize("classes", [4, 130])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1.0 - 2.0**-23, 1.0 - 2.0**-24, 1.0])
def test_the_edges_of_the_uniform_never_give_a_forbidden_class(classes, uniform):
    """1.0 and more cannot be drawn; were it, the last allowed class is still the answer."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(200, classes)).astype(np.float32) * 5
    mask = rng.random((200, classes)) < 0.3
    mask[:, 1] = True
    masked = np.where(mask, logits, np.float32(FORBIDDEN))
    drawn = np.asarray(inverse_cdf(masked, jnp.full((200,), uniform, jnp.float32)))
    weights = np.exp(masked - masked.max(-1, keepdims=True))
    assert np.all(np.take_along_axis(weights, drawn[:, None], -1) > 0)
    assert np.all(np.take_along_axis(mask, drawn[:, None], -1))


def test_masked_gradients_are_finite_and_zero_where_forbidden():
    mask = jnp.asarray([[True, False, True], [False, False, True], [False, False, False]])

    def total(logits):
        d = Categorical.masked(logits, mask)
        other = Categorical.masked(2.0 * logits, mask)
        return jnp.sum(d.entropy() + d.kl(other) + d.log_prob(jnp.asarray([0, 2, 1], jnp.int32)))

    gradient = np.asarray(jax.grad(total)(f32(RNG.normal(size=(3, 3)))))
    assert np.all(np.isfinite(gradient))
    assert np.all(gradient[~np.asarray(mask)] == 0.0)
    everything_forbidden = Categorical.masked(f32([3.0, 1.0, 0.0]), mask[2])
    np.testing.assert_allclose(everything_forbidden.log_probs(), np.log(1 / 3), rtol=1e-5)


@pytest.mark.long
def test_multi_categorical_is_the_sum_of_its_components():
    nvec = (3, 1, 4)
    logits, other = f32(RNG.normal(size=(5, 8))), f32(RNG.normal(size=(5, 8)))
    mask = jnp.asarray(RNG.random((5, 8)) < 0.5).at[:, jnp.asarray([1, 3, 6])].set(True)
    slices = (slice(0, 3), slice(3, 4), slice(4, 8))
    whole, against = (MultiCategorical.masked(x, nvec, mask) for x in (logits, other))

    @jax.jit
    def both_ways(whole, against, key):
        action = whole.sample(jax.random.split(key, 5))
        parts, others = ([Categorical(d.logits[:, i]) for i in slices] for d in (whole, against))
        mode = jnp.stack([part.mode() for part in parts], -1)
        log_prob = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts))
        kl = sum(one.kl(two) for one, two in zip(parts, others, strict=True))
        together = whole.mode(), whole.log_prob(action), whole.entropy(), whole.kl(against)
        return action, together, (mode, log_prob, sum(part.entropy() for part in parts), kl)

    action, together, apart = both_ways(whole, against, jax.random.key(0))
    assert action.shape == (5, 3) and action.dtype == jnp.int32
    for one, two in zip(together, apart, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
    repeated = whole.replace(logits=jnp.repeat(whole.logits, 100, axis=0))
    drawn = np.asarray(jax.jit(repeated.sample)(jax.random.split(jax.random.key(1), 500)))
    for i, part in enumerate(slices):
        allowed = np.repeat(np.asarray(mask)[:, part], 100, axis=0)
        assert np.all(np.take_along_axis(allowed, drawn[:, i : i + 1], -1))


# --- gaussians -----------------------------------------------------------------------------------------------------


def test_gaussian_matches_scipy():
    mean, log_std = random_gaussian()
    distribution = DiagonalGaussian(mean, log_std)
    action = f32(RNG.normal(size=(5, 3)) * 3)
    oracle = scipy.stats.norm(np.asarray(mean, np.float64), np.exp(np.asarray(log_std, np.float64)))
    np.testing.assert_allclose(distribution.log_prob(action), oracle.logpdf(action).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), oracle.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(distribution.mode(), mean)


def test_gaussian_kl_matches_an_integral():
    one, two = DiagonalGaussian(*random_gaussian()), DiagonalGaussian(*random_gaussian(seed=1))
    expected = np.zeros(5)
    for i in range(5):
        for j in range(3):
            p, q = (scipy.stats.norm(float(d.mean[i, j]), float(np.exp(d.log_std[i, j]))) for d in (one, two))
            x = np.linspace(p.mean() - 10 * p.std(), p.mean() + 10 * p.std(), 4001)
            expected[i] += np.trapezoid(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x)
    np.testing.assert_allclose(one.kl(two), expected, rtol=1e-4)
    np.testing.assert_allclose(one.kl(one), 0.0, atol=1e-6)


def test_gaussian_moments():
    mean, log_std = f32([1.0, -2.0]), f32([0.0, -1.0])
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (20_000, 2)), DiagonalGaussian(mean, log_std))
    drawn = np.asarray(many.sample(jax.random.split(jax.random.key(0), 20_000)))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(drawn.std(0), np.exp(log_std), rtol=0.02)


def tanh_density(x, mean, std, low, high):
    """float64 log-density of the action that x is squashed to."""
    slope = np.log(0.5 * (high - low)) + 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
    return scipy.stats.norm(mean, std).logpdf(x) - slope


def test_tanh_log_prob_matches_float64():
    distribution = tanh_gaussian()
    low, high = np.asarray(distribution.low), np.asarray(distribution.high)
    mean, std = np.asarray(distribution.mean, np.float64), np.exp(np.asarray(distribution.log_std, np.float64))
    x = RNG.uniform(-2.5, 2.5, (5, 3))
    action = low + (high - low) * 0.5 * (np.tanh(x) + 1)
    expected = tanh_density(x, mean, std, low, high).sum(-1)
    np.testing.assert_allclose(distribution.log_prob(f32(action)), expected, rtol=1e-4, atol=1e-4)


@jax.jit
def far_out(mean, log_std, keys):
    """Noise, action, log-density and its gradients; the same of the action alone, and of the bound."""

    def sampled(mean, log_std):
        action, log_prob = TanhGaussian(mean, log_std, (-2.0,), (2.0,)).sample_and_log_prob(keys)
        return jnp.sum(log_prob), (action, log_prob)

    def of(action):
        return jax.grad(lambda m, s: jnp.sum(TanhGaussian(m, s, (-2.0,), (2.0,)).log_prob(action)), (0, 1))

    gradients, (action, log_prob) = jax.grad(sampled, argnums=(0, 1), has_aux=True)(mean, log_std)
    noise = DiagonalGaussian(jnp.zeros_like(mean), jnp.zeros_like(mean)).sample(keys)
    given = of(action)(mean, log_std), of(jnp.full_like(action, 2.0))(mean, log_std)
    return noise, action, log_prob, gradients, given


@pytest.mark.parametrize("x", [-20.0, -9.0, 0.0, 9.0, 20.0])
def test_tanh_is_stable_far_out(x):
    mean, log_std = jnp.full((4, 1), x, jnp.float32), jnp.full((4, 1), -1.0, jnp.float32)
    noise, action, log_prob, gradients, given = far_out(mean, log_std, jax.random.split(jax.random.key(0), 4))
    drawn = x + np.exp(-1) * np.asarray(noise, np.float64)
    np.testing.assert_allclose(log_prob, tanh_density(drawn, x, np.exp(-1), -2.0, 2.0)[:, 0], rtol=1e-4, atol=1e-5)
    assert np.all(np.abs(action) <= 2.0)
    # d/dx of -log(1 - tanh^2 x) is 2 tanh x: the sample's own Gaussian density does not move with the mean.
    np.testing.assert_allclose(gradients[0], 2 * np.tanh(drawn), rtol=1e-4, atol=1e-4)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((gradients, given)))


def test_tanh_sample_mode_and_its_log_prob_agree():
    distribution = tanh_gaussian()
    keys = jax.random.split(jax.random.key(0), 5)
    action, log_prob = distribution.sample_and_log_prob(keys)
    np.testing.assert_array_equal(action, distribution.sample(keys))
    np.testing.assert_allclose(distribution.log_prob(action), log_prob, rtol=1e-3, atol=1e-3)
    low, high = np.asarray(distribution.low), np.asarray(distribution.high)
    np.testing.assert_allclose(
        distribution.mode(), low + (high - low) * (np.tanh(distribution.mean) + 1) / 2, rtol=1e-5, atol=1e-6
    )


def test_tanh_entropy_and_kl_match_integrals():
    one = TanhGaussian(f32([[0.5, -1.0]]), f32([[-0.5, 0.0]]), (-1.0, 0.0), (1.0, 4.0))
    two = TanhGaussian(f32([[0.0, 0.3]]), f32([[0.2, -0.3]]), (-1.0, 0.0), (1.0, 4.0))
    entropy, kl = 0.0, 0.0
    for j in range(2):
        bounds = one.low[j], one.high[j]
        p, q = ((float(d.mean[0, j]), float(np.exp(d.log_std[0, j]))) for d in (one, two))
        x = np.linspace(p[0] - 10 * p[1], p[0] + 10 * p[1], 20_001)
        density = scipy.stats.norm(*p).pdf(x)
        entropy -= np.trapezoid(density * tanh_density(x, *p, *bounds), x)
        kl += np.trapezoid(density * (tanh_density(x, *p, *bounds) - tanh_density(x, *q, *bounds)), x)
    np.testing.assert_allclose(one.entropy(), entropy, atol=2e-3)
    np.testing.assert_allclose(one.kl(two), kl, rtol=1e-4)
    gradient = jax.grad(lambda s: jnp.sum(one.replace(log_std=s).entropy()))(one.log_std)
    assert np.all(np.isfinite(gradient)) and np.any(np.abs(gradient) > 0.1)


@pytest.mark.long
def test_distributions_are_trees_that_compare_by_structure():
    a, b = tanh_gaussian(0), tanh_gaussian(1)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    stacked = jax.tree.map(lambda x, y: jnp.stack([x, y]), a, b)
    np.testing.assert_allclose(stacked.entropy()[1], b.entropy(), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda d: d.entropy())(stacked), stacked.entropy(), rtol=1e-6)


# --- several parts -------------------------------------------------------------------------------------------------


def product(seed):
    """A `Joint` over one number and three classes, and its density in numpy on a grid of numbers and all classes."""
    rng = np.random.default_rng(seed)
    mean, log_std, two, pair = rng.normal(), 0.3 * rng.normal(), rng.normal(size=2), rng.normal(size=5)
    joint = Joint(
        {
            "number": DiagonalGaussian(f32([mean]), f32([log_std])),
            "classes": Joint((Categorical(f32(two)), MultiCategorical(f32(pair), (2, 3)))),
        }
    )
    normal = scipy.stats.norm(mean, np.exp(log_std)).pdf(GRID)
    classes = [softmax(x) for x in (two, pair[:2], pair[2:])]
    return joint, np.einsum("x,i,j,k->xijk", normal, *classes)


GRID = np.linspace(-12.0, 12.0, 4001)


def test_a_joint_is_the_product_of_its_parts():
    """Log-probability, entropy and KL of the whole density, by numpy over all classes and a grid of the number."""
    (joint, density), (other, other_density) = product(0), product(1)
    step = GRID[1] - GRID[0]
    assert abs(density.sum() * step - 1.0) < 1e-6
    at = [(1700, 1, 0, 2), (2100, 0, 1, 1)]
    for x, i, j, k in at:
        action = {"number": f32([GRID[x]]), "classes": (jnp.int32(i), jnp.asarray([j, k], jnp.int32))}
        np.testing.assert_allclose(joint.log_prob(action), np.log(density[x, i, j, k]), rtol=1e-5, atol=1e-5)
    inside = density > 0
    entropy = -np.sum(density[inside] * np.log(density[inside])) * step
    np.testing.assert_allclose(joint.entropy(), entropy, atol=1e-4)
    both = inside & (other_density > 0)
    divergence = np.sum(density[both] * np.log(density[both] / other_density[both])) * step
    np.testing.assert_allclose(joint.kl(other), divergence, atol=1e-4)
    assert joint.kl(joint) == 0.0
    most = np.unravel_index(density.argmax(), density.shape)
    mode = joint.mode()
    np.testing.assert_allclose(mode["number"], GRID[most[0]], atol=step)
    assert (mode["classes"][0], *mode["classes"][1]) == most[1:]
    assert [type(leaf) for leaf in joint.leaves] == [Categorical, MultiCategorical, DiagonalGaussian]


@pytest.mark.long
def test_the_parts_of_a_joint_are_drawn_independently():
    count = 4000
    even = Categorical(jnp.zeros((count, 2)))
    number = DiagonalGaussian(jnp.zeros((count, 1)), jnp.zeros((count, 1)))
    joint = Joint({"a": even, "b": Joint((even, even)), "c": number, "d": number})
    drawn = joint.sample(jax.random.split(jax.random.key(0), count))
    choices = np.stack([drawn["a"], *drawn["b"]])
    frequencies = np.bincount(choices[0] * 4 + choices[1] * 2 + choices[2], minlength=8) / count
    assert np.all(np.abs(frequencies - 1 / 8) < 5 * np.sqrt(1 / 8 * 7 / 8 / count))
    assert abs(np.corrcoef(drawn["c"][:, 0], drawn["d"][:, 0])[0, 1]) < 0.08
