"""MPO's equations against numpy, and its update against both papers' formulas, written out once more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import (
    BATCH,
    BOX,
    MPO,
    SPEC,
    assert_stepped,
    counted,
    critic_values,
    initial,
    transitions,
    updated,
)
from scipy import optimize

from jaxrl.algos import acting, kl_limits, mpo, off_policy, q_learning
from jaxrl.algos.train_state import Variables
from jaxrl.core import keys, spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, TimeStep
from jaxrl.networks import Critic
from jaxrl.networks.distributions import DiagonalGaussian
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(7)
K = MPO.samples
CHOICES = EnvSpec("choices", SPEC.observation_space, spaces.Discrete(4), masked=True)


def random_values(seed=0):
    rng = np.random.default_rng(seed)
    prior = rng.dirichlet(np.ones(5), 3)
    return rng.normal(size=(3, 5)), prior


def as_jax(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


# --- the equations ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.3, 1.0, 20.0])
def test_the_improved_policy_and_its_dual_are_the_papers(temperature):
    values, prior = random_values()
    unnormalized = prior * np.exp(values / temperature)
    wanted = unnormalized / unnormalized.sum(axis=1, keepdims=True)
    arguments = *as_jax(values, np.log(prior)), jnp.float32(temperature)
    found = mpo.improved(*arguments)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    dual = temperature * (0.1 + np.log(unnormalized.sum(axis=1)))
    np.testing.assert_allclose(mpo.temperature_loss(*arguments, jnp.float32(0.1)), dual, rtol=1e-5, atol=1e-5)
    kl = (wanted * np.log(wanted / prior)).sum(axis=1)
    np.testing.assert_allclose(mpo.divergence(found, arguments[1]), kl, rtol=1e-4, atol=1e-6)
    # The dual's slope is what is left of the divergence that is allowed.
    slope = jax.vmap(jax.grad(lambda eta, q, p: mpo.temperature_loss(q, p, eta, 0.1)), in_axes=(None, 0, 0))
    np.testing.assert_allclose(slope(arguments[2], *arguments[:2]), 0.1 - kl, rtol=1e-3, atol=1e-5)


def test_the_best_temperature_spends_the_whole_divergence():
    (values, prior), epsilon = random_values(1), 0.2
    values, log_prior = as_jax(values, np.log(prior))
    loss = jax.jit(lambda eta: mpo.temperature_loss(values, log_prior, eta, epsilon)[0])
    best = optimize.minimize_scalar(lambda eta: float(loss(jnp.float32(eta))), bounds=(0.05, 20), method="bounded").x
    kl = mpo.divergence(mpo.improved(values, log_prior, jnp.float32(best)), log_prior)[0]
    assert float(kl) == pytest.approx(epsilon, rel=1e-2)


def test_sampled_actions_count_alike_before_they_are_weighed():
    values = jnp.asarray(random_values()[0], jnp.float32)
    uniform = jnp.full_like(values, -np.log(5))
    shifted = mpo.improved(values + 100.0, uniform, jnp.float32(2.0))
    np.testing.assert_allclose(shifted, jax.nn.softmax(values / 2.0, axis=-1), rtol=1e-4)
    cold = mpo.improved(values, uniform, jnp.float32(1e-8))
    np.testing.assert_array_equal(cold, jax.nn.one_hot(jnp.argmax(values, axis=-1), 5))
    assert np.isfinite(mpo.temperature_loss(values, uniform, jnp.float32(1e-8), 0.1)).all()


def test_the_divergence_is_split_by_mean_and_deviation():
    rng = np.random.default_rng(0)
    mean, new_mean, std, new_std = rng.normal(size=(2, 4, 3)).tolist() + np.exp(rng.normal(size=(2, 4, 3))).tolist()
    mean, new_mean, std, new_std = map(np.asarray, (mean, new_mean, std, new_std))
    old = DiagonalGaussian(*as_jax(mean, np.log(std)))
    new = DiagonalGaussian(*as_jax(new_mean, np.log(new_std)))
    by_mean, by_std = kl_limits.decoupled_kl(old, new)
    np.testing.assert_allclose(by_mean, (new_mean - mean) ** 2 / (2 * std**2), rtol=1e-4)
    np.testing.assert_allclose(by_std, np.log(new_std / std) + std**2 / (2 * new_std**2) - 0.5, rtol=1e-4, atol=1e-6)
    # Either alone is the whole divergence where nothing but it is new.
    moved = DiagonalGaussian(new.mean, old.log_std)
    np.testing.assert_allclose(jnp.sum(by_mean, axis=-1), old.kl(moved), rtol=1e-5)


def test_a_multiplier_rises_where_its_limit_is_passed():
    kl, alpha, epsilon = jnp.float32([0.3, 0.05]), jnp.float32([2.0, 3.0]), jnp.float32(0.1)
    np.testing.assert_allclose(kl_limits.lagrangian_loss(kl, alpha, epsilon), [0.2, 0.3], rtol=1e-6)
    by_kl, by_alpha = jax.grad(lambda *x: jnp.sum(kl_limits.lagrangian_loss(*x, epsilon)), argnums=(0, 1))(kl, alpha)
    np.testing.assert_allclose(by_kl, alpha, rtol=1e-6)
    np.testing.assert_allclose(by_alpha, [-0.2, 0.05], rtol=1e-5)


@pytest.mark.parametrize("x", [1e-6, 1e-2, 1.0, 30.0, 1e4])
def test_the_softplus_is_undone(x):
    assert float(jax.nn.softplus(kl_limits.inverse_softplus(x))) == pytest.approx(x, rel=1e-5)


# --- the update ------------------------------------------------------------------------------------------------------


def away(state):
    """With targets that are not the parameters, as between two target updates."""

    def other(learned, by):
        return learned.replace(target_params=jax.tree.map(lambda x: by * x, learned.params))

    return state.replace(policy=other(state.policy, 1.3), critic=other(state.critic, 1.5))


def sampled(algo, state, observation, key):
    """The target policy's mean and deviation [batch, n], its samples before the tanh and values [batch, K] of them."""
    distribution = off_policy.evaluate_policy(algo.policy, Variables(state.policy.target_params), observation, SPEC)
    mean, std = np.asarray(distribution.mean), np.exp(distribution.log_std)
    keys = q_learning.transition_keys(key, BATCH, SingleReplica())
    noise = [[jax.random.normal(k, (2,)) for k in jax.random.split(key, K)] for key in keys]
    x = mean[:, None] + std[:, None] * np.asarray(noise)
    action = jnp.asarray(BOX.low + (BOX.high - BOX.low) * (np.tanh(x) + 1) / 2)
    values = [critic_values(algo, state.critic.target_params, observation, action[:, k], SPEC) for k in range(K)]
    return mean, std, x, np.min(values, axis=1).T


@pytest.mark.long
@pytest.mark.parametrize("per_dimension", [pytest.param(True, marks=pytest.mark.long), False])
def test_an_update_is_the_papers(per_dimension):
    algo = MPO.replace(
        gamma=0.9,
        temperature=0.5,
        alpha_mean=2.0,
        alpha_std=3.0,
        epsilon_mean=1e-2,
        epsilon_std=1e-3,
        per_dimension=per_dimension,
        critic=Critic(widths=(8,), ensemble=2),
    )
    state, batch = away(initial(algo)), transitions()
    new, info = updated(algo, state, batch, KEY)
    metrics = jax.tree.map(float, info.metrics)
    next_key, key = jax.random.split(KEY)

    value = sampled(algo, state, batch.next_observation, next_key)[3].mean(axis=1)
    target = np.asarray(batch.rewards[:, 0]) + 0.9 * np.where(batch.bootstrap, value, 0.0)

    def critic_loss(params):
        values = critic_values(algo, params, batch.observation, batch.action, SPEC)
        errors = jnp.square(jnp.asarray(target, jnp.float32)[None] - values)[:, : BATCH - 1]
        return 0.5 * jnp.sum(jnp.mean(errors, axis=1))

    assert metrics["critic_loss"] == pytest.approx(float(critic_loss(state.critic.params)), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, jax.grad(critic_loss)(state.critic.params), 3e-4)

    mean, std, x, values = sampled(algo, state, batch.observation, key)
    weights = np.exp(values / 0.5) / np.exp(values / 0.5).sum(axis=1, keepdims=True)
    assert metrics["kl_improved"] == pytest.approx(counted((weights * np.log(K * weights)).sum(axis=1)), rel=1e-3)

    def parts(params):
        """The loss of fitting, and the divergences by mean and by deviation [n]."""
        now = off_policy.evaluate_policy(algo.policy, Variables(params), batch.observation, SPEC)
        now_mean, now_std = now.mean, jnp.exp(now.log_std)
        logpdf = jax.scipy.stats.norm.logpdf
        by_mean = jnp.sum(logpdf(jnp.asarray(x), now_mean[:, None], jnp.asarray(std)[:, None]), axis=-1)
        by_std = jnp.sum(logpdf(jnp.asarray(x), jnp.asarray(mean)[:, None], now_std[:, None]), axis=-1)
        fit = -jnp.mean(jnp.sum(jnp.asarray(weights) * (by_mean + by_std), axis=1)[: BATCH - 1])
        kl_mean = jnp.square(now_mean - mean) / (2 * std**2)
        kl_std = jnp.log(now_std / std) + std**2 / (2 * jnp.square(now_std)) - 0.5
        return fit, jnp.mean(kl_mean[: BATCH - 1], axis=0), jnp.mean(kl_std[: BATCH - 1], axis=0)

    def policy_loss(params):
        fit, kl_mean, kl_std = parts(params)
        return fit + 2.0 * jnp.sum(kl_mean) + 3.0 * jnp.sum(kl_std)

    fit, kl_mean, kl_std = map(np.asarray, parts(state.policy.params))
    if not per_dimension:
        kl_mean, kl_std = kl_mean.sum(keepdims=True), kl_std.sum(keepdims=True)
    assert metrics["policy_loss"] == pytest.approx(float(fit), rel=1e-4)
    assert metrics["kl_mean"] == pytest.approx(kl_mean.mean(), rel=1e-3)
    assert metrics["kl_std"] == pytest.approx(kl_std.mean(), rel=1e-3)
    assert [metrics[name] for name in ("temperature", "alpha_mean", "alpha_std")] == pytest.approx([0.5, 2.0, 3.0])
    assert_stepped(state.policy.params, new.policy.params, jax.grad(policy_loss)(state.policy.params), 3e-4)

    def dual(eta):
        return eta * (0.1 + counted(np.log(np.exp(values / eta).mean(axis=1))))

    wanted = {"temperature": dual(0.5 + 1e-3) - dual(0.5 - 1e-3), "mean": 1e-2 - kl_mean, "std": 1e-3 - kl_std}
    assert {name: x.shape for name, x in new.duals.params.items()} == {name: np.shape(x) for name, x in wanted.items()}
    for name, gradient in wanted.items():
        change = new.duals.params[name] - state.duals.params[name]
        np.testing.assert_allclose(change, -1e-2 * np.sign(gradient), rtol=1e-2, err_msg=name)


@pytest.mark.long
def test_targets_are_copied_once_a_period():
    algo = MPO.replace(target_period=3)
    state = initial(algo)
    first = state
    for i in range(1, 5):
        before, (state, _) = state, updated(algo, state, transitions(seed=i), KEY)
        for old, now in ((before.policy, state.policy), (before.critic, state.critic)):
            for old_target, target, params in zip(
                *map(jax.tree.leaves, (old.target_params, now.target_params, now.params)), strict=True
            ):
                np.testing.assert_allclose(target, params if i == 3 else old_target, rtol=1e-6, atol=1e-7)
    assert not np.allclose(jax.tree.leaves(first.policy.target_params)[0], jax.tree.leaves(state.policy.params)[0])


@pytest.mark.long
def test_duals_settle_where_the_limits_are_kept():
    """One batch, again and again: what the fit gives up for its divergence ends at the limits, from either side."""
    algo = MPO.replace(
        epsilon_mean=1e-2, epsilon_std=1e-3, target_period=10**6, learning_rate=1e-9, policy_learning_rate=3e-3
    )
    for start in (1e-2, 10.0):
        chosen = algo.replace(temperature=start, alpha_mean=start, alpha_std=start, dual_learning_rate=3e-2)
        state, batch = initial(chosen), transitions()
        # Values far apart, so that every limit is felt.
        critic = state.critic
        state = state.replace(critic=critic.replace(target_params=jax.tree.map(lambda x: 2 * x, critic.target_params)))

        def run(state, chosen=chosen, batch=batch):
            def body(state, _):
                new, info = resolve_schedules(chosen, jnp.float32(0)).update(
                    state, {"replay": batch}, spec=SPEC, key=KEY, replicas=SingleReplica()
                )
                return new, info.metrics

            return jax.lax.scan(body, state, None, length=4000)

        metrics = jax.tree.map(lambda x: float(x[-500:].mean()), jax.jit(run)(state)[1])
        assert metrics["kl_improved"] == pytest.approx(0.1, rel=0.1)
        assert metrics["kl_mean"] == pytest.approx(1e-2, rel=0.2)
        assert metrics["kl_std"] == pytest.approx(1e-3, rel=0.3)


@pytest.mark.long
def test_duals_stay_above_their_least():
    algo = MPO.replace(dual_learning_rate=1e3, epsilon=100.0, epsilon_mean=100.0, epsilon_std=100.0)
    new = updated(algo, initial(algo), transitions(), KEY)[0]
    for x in jax.tree.leaves(new.duals.params):
        np.testing.assert_array_equal(x, kl_limits.LEAST_DUAL)
    again, info = updated(algo, new, transitions(), KEY)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((again, info)))
    assert float(info.metrics["temperature"]) > 0


@pytest.mark.long
def test_the_units_of_actions_make_no_difference():
    wide = EnvSpec("wide", SPEC.observation_space, spaces.Box(BOX.low * 8, BOX.high * 8, (2,)))
    batch, state = transitions(), away(initial(MPO))
    one = updated(MPO, state, batch, KEY)
    other = updated(MPO, state, batch.replace(action=8 * batch.action), KEY, wide)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- discrete actions ------------------------------------------------------------------------------------------------


def choices():
    """The same transitions with actions of `CHOICES`; the last, which does not count, leads where none is allowed."""
    rng = np.random.default_rng(3)
    masks = rng.random((2, BATCH, 4)) < 0.6
    masks[:, :, 0] = True
    masks[1, -1] = False
    return transitions().replace(
        action=jnp.zeros(BATCH, jnp.int32), action_mask=jnp.asarray(masks[0]), next_action_mask=jnp.asarray(masks[1])
    )


def choosing(algo=MPO):
    algo = algo.replace(gamma=0.9, temperature=0.5, alpha_mean=2.0, epsilon_mean=1e-2)
    state = resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(0), CHOICES)
    return algo, away(state)


def whole(algo, state, observation, mask):
    """The target policy's probabilities and the target critic's values [batch, 4], from networks without a mask."""
    logits = off_policy.evaluate_policy(algo.policy, Variables(state.policy.target_params), observation, CHOICES).logits
    chances = np.where(mask, np.exp(logits), 0.0)
    values = off_policy.evaluate_critic(algo.critic, Variables(state.critic.target_params), observation, None, CHOICES)
    return chances / np.maximum(chances.sum(axis=1, keepdims=True), 1e-30), np.min(values, axis=0)


@pytest.mark.long
def test_an_update_of_discrete_actions_is_exact():
    (algo, state), batch = choosing(), choices()
    new, info = updated(algo, state, batch, KEY, CHOICES)
    metrics = jax.tree.map(float, info.metrics)
    assert all(np.isfinite(list(metrics.values())))

    chances, values = whole(algo, state, batch.next_observation, np.asarray(batch.next_action_mask))
    target = np.asarray(batch.rewards[:, 0]) + 0.9 * np.where(batch.bootstrap, (chances * values).sum(axis=1), 0.0)
    output = off_policy.evaluate_critic(algo.critic, Variables(state.critic.params), batch.observation, None, CHOICES)
    errors = np.square(target - np.asarray(output)[..., 0])
    assert metrics["critic_loss"] == pytest.approx(0.5 * counted(errors).sum(), rel=1e-4)

    chances, values = whole(algo, state, batch.observation, np.asarray(batch.action_mask))
    unnormalized = (chances * np.exp(values / 0.5))[: BATCH - 1]
    weights, chances = unnormalized / unnormalized.sum(axis=1, keepdims=True), chances[: BATCH - 1]
    divergence = np.where(weights > 0, weights * np.log(np.maximum(weights, 1e-30) / np.maximum(chances, 1e-30)), 0)
    assert metrics["kl_improved"] == pytest.approx(divergence.sum(axis=1).mean(), rel=1e-3)

    def parts(params):
        logits = off_policy.evaluate_policy(algo.policy, Variables(params), batch.observation, CHOICES).logits[
            : BATCH - 1
        ]
        allowed = jnp.asarray(chances > 0)
        log_probs = logits - jnp.log(jnp.sum(jnp.where(allowed, jnp.exp(logits), 0.0), axis=1, keepdims=True))
        fit = -jnp.mean(jnp.sum(jnp.where(allowed, jnp.asarray(weights) * log_probs, 0.0), axis=1))
        kl = jnp.where(allowed, jnp.asarray(chances) * (jnp.log(jnp.maximum(chances, 1e-30)) - log_probs), 0.0)
        return fit, jnp.mean(jnp.sum(kl, axis=1))

    fit, kl = map(float, parts(state.policy.params))
    assert metrics["policy_loss"] == pytest.approx(fit, rel=1e-4)
    assert metrics["kl_mean"] == pytest.approx(kl, rel=1e-3)
    gradients = jax.grad(lambda params: parts(params)[0] + 2.0 * parts(params)[1])(state.policy.params)
    assert_stepped(state.policy.params, new.policy.params, gradients, 3e-4)
    slope = 0.1 - divergence.sum(axis=1).mean()
    change = {name: float(jnp.sum(x - state.duals.params[name])) for name, x in new.duals.params.items()}
    wanted = {"temperature": -1e-2 * np.sign(slope), "mean": -1e-2 * np.sign(1e-2 - kl)}
    assert change == pytest.approx(wanted, rel=1e-2)


@pytest.mark.long
def test_what_critics_say_of_forbidden_actions_makes_no_difference():
    (algo, state), batch = choosing(), choices()
    forbidden = batch.replace(action_mask=batch.action_mask.at[:, 2].set(False))
    forbidden = forbidden.replace(next_action_mask=forbidden.next_action_mask.at[:, 2].set(False))
    # The last layer's bias [ensemble, actions] of the third action.
    target = jax.tree.map(lambda x: x.at[:, 2].add(1e3) if x.shape[1:] == (4,) else x, state.critic.target_params)
    raised = state.replace(critic=state.critic.replace(target_params=target))
    same, other = (updated(algo, s, forbidden, KEY, CHOICES) for s in (state, raised))
    for a, b in zip(
        jax.tree.leaves((same[0].policy.params, same[1])),
        jax.tree.leaves((other[0].policy.params, other[1])),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    felt = updated(algo, raised, batch, KEY, CHOICES)[1].metrics["kl_improved"]
    assert float(felt) > 2 * float(same[1].metrics["kl_improved"])


@pytest.mark.long
@pytest.mark.parametrize("updates", [0, 1])
def test_forbidden_actions_are_never_taken(updates):
    algo, state = choosing()
    actor = resolve_schedules(algo, jnp.float32(0)).actor(state.replace(updates=jnp.int32(updates)))
    flags = jnp.zeros(512, bool)
    mask = jnp.arange(4)[None] // 2 == jnp.arange(512)[:, None] % 2  # actions 0 and 1, or 2 and 3
    moments = TimeStep(jnp.ones((512, 3)), jnp.zeros(512), flags, flags, flags, action_mask=mask)
    each = keys.unrolled(jax.random.split(KEY, 512))
    act = jax.jit(algo.act, static_argnames=("spec", "explore"))
    for explore in (True, False):
        action = np.asarray(act(actor, moments, acting.ActingCarry((), ()), each, spec=CHOICES, explore=explore).action)
        assert np.take_along_axis(np.asarray(mask), action[:, None], axis=1).all()
        assert len(np.unique(action)) == (4 if explore else 2)


# --- what is refused -------------------------------------------------------------------------------------------------
