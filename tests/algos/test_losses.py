"""The algorithms' own equations against numpy written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.refused import raises
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.algos import train_state
from jaxrl.algos.kl_limits import step_log
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.on_policy import explained_variance, standardized
from jaxrl.algos.ppo import clipped_surrogate, squared_value_error
from jaxrl.algos.q_learning import epsilon_greedy, n_step_target
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.replicas import SingleReplica

ONE = SingleReplica(1)
floats = st.floats(-3, 3, width=32)


@given(floats, floats, st.floats(0.0625, 0.5, width=32))
def test_clipped_surrogate_is_equation_7(log_ratio, advantage, clip):
    ratio = np.exp(np.float64(log_ratio))
    expected = -min(ratio * advantage, np.clip(ratio, 1 - clip, 1 + clip) * advantage)
    got = clipped_surrogate(jnp.float32(log_ratio), jnp.float32(advantage), jnp.float32(clip))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_clipped_surrogate_has_no_gradient_where_the_clip_binds():
    gradient = jax.grad(lambda x, a: clipped_surrogate(x, a, 0.2))
    assert gradient(jnp.log(1.3), 1.0) == 0.0  # too far up, and the advantage asks for more
    assert gradient(jnp.log(0.7), -1.0) == 0.0
    assert gradient(jnp.log(0.7), 1.0) == pytest.approx(-0.7)  # moving back is always allowed
    assert gradient(jnp.log(1.3), -1.0) == pytest.approx(1.3)


@given(floats, floats, floats, st.one_of(st.none(), st.floats(0.0625, 0.5, width=32)))
def test_squared_value_error_takes_the_larger_of_clipped_and_not(value, old, target, clip):
    expected = (value - target) ** 2
    if clip is not None:
        expected = max(expected, (old + np.clip(value - old, -clip, clip) - target) ** 2)
    got = squared_value_error(jnp.float32(value), jnp.float32(old), jnp.float32(target), clip)
    np.testing.assert_allclose(got, 0.5 * expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kl", "expected"), [(0.01, 0.02), (0.02, 0.04), (0.03, 0.06 + 1000 * 0.01**2)])
def test_kl_penalty_has_a_hinge_at_twice_the_target(kl, expected):
    loss = KLPenalty().loss(jnp.float32(2.0), jnp.float32(kl), SingleReplica())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0131, 1.5), (0.0129, 1.0), (0.01, 1.0), (0.0071, 1.0), (0.0069, 1 / 1.5)]
)
def test_the_penalty_adapts_at_the_published_cutoffs(kl, factor):
    np.testing.assert_allclose(KLPenalty().adapted(jnp.float32(3.0), jnp.float32(kl)), 3.0 * factor, rtol=1e-6)


@pytest.mark.parametrize("initial", [1e-3, 1.0])
def test_the_penalty_comes_back_within_twenty_batches(initial):
    """1.5^-216 is 0 in float32, and 0 times 1.5 is 0; 1.5^300 is infinite."""

    @jax.jit
    def after(batches, divergence, penalty):
        step = lambda _, penalty: KLPenalty(initial=initial).adapted(penalty, divergence)  # noqa: E731
        return jax.lax.fori_loop(0, batches, step, jnp.float32(penalty))

    quiet, loud = after(300, 0.001, initial), after(300, 1.0, initial)
    assert quiet < 0.01 * initial and after(20, 1.0, quiet) >= initial
    assert after(20, 1.0, 0.0) >= initial, "of a checkpoint"
    assert 100 * initial < loud < jnp.inf and after(20, 0.001, loud) <= initial


@pytest.mark.parametrize("gradient", [-1.0, 1.0])
def test_logarithms_of_multipliers_stay_where_they_matter(gradient):
    """Without an end, 87 below 0 the multiplier would be 0, and 89 above it infinite."""
    optimizer = optax.sgd(50.0)
    log = train_state.create(jnp.float32(0.0), (), optimizer)
    for slope in (gradient, gradient, -gradient):
        log = step_log(log, jnp.float32(slope), optimizer, ONE)
        assert 1e-9 < jnp.exp(log.params) < 1e9


def test_standardized_counts_only_what_counts():
    x, weight = np.asarray([[1.0, 5.0, 100.0], [3.0, 7.0, -50.0]], np.float32), np.ones((2, 3), bool)
    weight[:, 2] = False
    got = np.asarray(standardized(jnp.asarray(x), jnp.asarray(weight), ONE))
    kept = x[weight]
    np.testing.assert_allclose(got[weight], (kept - kept.mean()) / kept.std(), rtol=1e-5)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    targets = jnp.asarray([[1.0, 2.0, 3.0]])
    weight = jnp.ones((1, 3), bool)
    assert explained_variance(targets, targets, weight, ONE) == pytest.approx(1.0)
    assert explained_variance(targets, jnp.full((1, 3), 7.0), weight, ONE) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.long
@given(st.floats(-1e6, 1e6, width=32))
def test_advantages_and_targets_that_hardly_vary_are_zero_and_unexplained(constant):
    """Their deviation is what rounding leaves: to divide by it gives rounding the size of a good advantage."""
    x = jnp.asarray(np.full((7, 3), constant, np.float32) * (1 + 1e-7 * np.arange(21).reshape(7, 3) % 2))
    weight = jnp.ones(x.shape, bool)
    assert not np.any(standardized(x, weight, ONE))
    assert explained_variance(x, jnp.zeros_like(x), weight, ONE) == 0.0


@given(st.sampled_from([1e-5, 1e-2, 1.0, 1e4]), st.floats(-100, 100, width=32))
def test_units_of_advantages_and_targets_do_not_matter(scale, origin):
    x = (scale * (np.random.default_rng(0).normal(size=(9, 4)) + origin)).astype(np.float32)
    values = (x + scale * np.random.default_rng(1).normal(size=x.shape)).astype(np.float32)
    weight, truth = jnp.ones(x.shape, bool), x.astype(np.float64)
    ours = standardized(jnp.asarray(x), weight, ONE)
    np.testing.assert_allclose(ours, (truth - truth.mean()) / truth.std(), rtol=2e-3, atol=2e-3)
    explained = explained_variance(jnp.asarray(x), jnp.asarray(values), weight, ONE)
    np.testing.assert_allclose(explained, 1 - (truth - values).var() / truth.var(), atol=2e-3)


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_n_step_target(bootstrap, steps):
    rewards = np.asarray([[1.0, 2.0, 3.0]], np.float32) * (np.arange(3) < steps)
    expected = sum(0.9**k * rewards[0, k] for k in range(3)) + (0.9**steps * 10.0 if bootstrap else 0.0)
    got = n_step_target(
        jnp.asarray(rewards, jnp.float32), jnp.asarray([steps]), jnp.asarray([bootstrap]), jnp.asarray([10.0]), 0.9
    )
    np.testing.assert_allclose(got, [expected], rtol=1e-5)


def test_epsilon_greedy_explores_uniformly_among_allowed_actions():
    n = 6000
    keys = jax.random.split(jax.random.key(0), n)
    mask = jnp.broadcast_to(jnp.asarray([True, False, True, True]), (n, 4))
    actions = np.asarray(epsilon_greedy(keys, jnp.zeros(n, jnp.int32), mask, jnp.float32(0.6), 4))
    counts = np.bincount(actions, minlength=4) / n
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3]], [0.4 + 0.2, 0.2, 0.2], atol=0.02)
    greedy = epsilon_greedy(keys, jnp.full(n, 2, jnp.int32), None, jnp.float32(0.0), 4)
    assert (np.asarray(greedy) == 2).all()


def test_a_policy_loss_of_ones_own_must_be_one_of_every_entry():
    algo = jaxrl.PPO(policy_loss=lambda ratio, advantage, clip: ratio.mean(), rollout_length=4)
    raises(
        ConfigError,
        r"shape \(\).* \(1, 8\)",
        jaxrl.train,
        algo,
        "probe:Constant",
        total_steps=64,
        num_envs=8,
        progress=False,
    )
