"""IQL's three steps against the paper's equations, and what its expectile means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, SPEC, assert_stepped, critic_values, transitions
from helpers.offline import (
    CHOICE,
    IQL,
    QUICK,
    assert_weights_count,
    choices,
    from_best,
    initial,
    learned,
    likelihood,
    policy_output,
    updated,
)
from scipy import optimize

from jaxrl.algos import iql, off_policy, regression
from jaxrl.algos.train_state import Variables
from jaxrl.networks import ActionValues, CategoricalValues, Critic

KEY = jax.random.key(0)
ALGO = IQL.replace(
    gamma=0.9, tau=0.1, policy_learning_rate=1e-3, expectile=0.8, inverse_temperature=2.0, max_weight=3.0
)


@pytest.mark.long
@pytest.mark.parametrize("spec", [SPEC, pytest.param(CHOICE, marks=pytest.mark.long)], ids=["box", "discrete"])
def test_an_update_is_the_papers(spec):
    state, batch = initial(ALGO, spec), transitions() if spec is SPEC else choices()
    # Between two updates the targets are not the parameters.
    slow = jax.tree.map(lambda x: 1.5 * x, state.critic.target_params)
    state = state.replace(critic=state.critic.replace(target_params=slow))
    new, info = updated(ALGO, state, batch, KEY, spec)
    metrics = jax.tree.map(float, info.metrics)

    def counted(x):
        return jnp.mean(x[: BATCH - 1])

    def values(params):  # [ensemble, batch], of what was taken
        if spec is SPEC:
            return critic_values(ALGO, params, batch.observation, batch.action, SPEC)
        output = off_policy.evaluate_critic(ALGO.critic, Variables(params), batch.observation, None, CHOICE)
        return output[:, jnp.arange(BATCH), batch.action]

    def value(params, observation):
        return iql.state_value(ALGO.value, Variables(params), observation, spec, train=False)[0]

    taken = jax.jit(values)(slow).min(axis=0)

    def value_loss(params):
        error = taken - value(params, batch.observation)
        return counted(jnp.where(error > 0, 0.8, 0.2) * error**2)

    wanted, gradients = jax.jit(jax.value_and_grad(value_loss))(state.value.params)
    assert metrics["value_loss"] == pytest.approx(float(wanted), rel=1e-4)
    assert_stepped(state.value.params, new.value.params, gradients, 3e-4)

    weights = jnp.minimum(jnp.exp(2.0 * (taken - value(new.value.params, batch.observation))), 3.0)
    assert (weights == 3.0).any() and (weights < 3.0).any()

    def policy_loss(params):
        policy = policy_output(ALGO, params, batch.observation, spec, batch.action_mask)
        return -counted(weights * regression.log_likelihood(policy, batch.action))

    wanted, gradients = jax.jit(jax.value_and_grad(policy_loss))(state.policy.params)
    assert metrics["policy_loss"] == pytest.approx(float(wanted), rel=1e-4)
    assert metrics["advantage_weight"] == pytest.approx(float(counted(weights)), rel=1e-4)
    assert_stepped(state.policy.params, new.policy.params, gradients, 1e-3)

    following = jnp.where(batch.bootstrap, value(new.value.params, batch.next_observation), 0.0)
    target = batch.rewards[:, 0] + 0.9 * following

    def critic_loss(params):
        return 0.5 * jnp.sum(jax.vmap(counted)(jnp.square(target[None] - values(params))))

    wanted, gradients = jax.jit(jax.value_and_grad(critic_loss))(state.critic.params)
    assert metrics["critic_loss"] == pytest.approx(float(wanted), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, gradients, 3e-4)
    for old, now, then in zip(*map(jax.tree.leaves, (slow, new.critic.params, new.critic.target_params)), strict=True):
        np.testing.assert_allclose(then, 0.9 * old + 0.1 * now, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_the_values_of_actions_that_were_not_taken_are_never_asked_for():
    state, batch = initial(ALGO, CHOICE), choices()
    # Forbidding all that was not taken is no news to it, but for the policy.
    only = jax.nn.one_hot(batch.action, 3) > 0
    one = updated(ALGO, state, batch, KEY, CHOICE)[1].metrics
    other = updated(ALGO, state, batch.replace(action_mask=only, next_action_mask=only), KEY, CHOICE)[1].metrics
    for name in ("critic_loss", "value_loss", "advantage_weight"):
        assert float(one[name]) == pytest.approx(float(other[name]), rel=1e-5)


# --- the expectile ---------------------------------------------------------------------------------------------------


def expectile(sample, tau):
    """Where the weighted deviations above and below are equal, by bisection."""
    excess = lambda m: tau * np.clip(sample - m, 0, None).mean() - (1 - tau) * np.clip(m - sample, 0, None).mean()  # noqa: E731
    return optimize.bisect(excess, sample.min(), sample.max())


def test_the_loss_is_least_at_the_expectile():
    sample = np.random.default_rng(0).gamma(2.0, size=200)
    slope = jax.jit(jax.grad(lambda m, tau: jnp.mean(iql.expectile_loss(jnp.asarray(sample, jnp.float32) - m, tau))))
    found = []
    for tau in (0.1, 0.5, 0.7, 0.9, 0.99):
        best = expectile(sample, tau)
        assert float(slope(jnp.float32(best), tau)) == pytest.approx(0.0, abs=1e-5)
        found.append(best)
    assert found[1] == pytest.approx(sample.mean()) and found == sorted(found)
    assert 0.5 * sample.max() < found[-1] < sample.max()


def test_an_expectile_of_a_half_is_half_the_squared_error():
    error = jnp.linspace(-3, 3, 13)
    np.testing.assert_allclose(iql.expectile_loss(error, 0.5), 0.5 * np.square(error), rtol=1e-6)
    np.testing.assert_allclose(iql.expectile_loss(error, 0.9), iql.expectile_loss(-error, 1 - 0.9)[...], rtol=1e-5)


@pytest.mark.long
def test_no_temperature_is_cloning():
    state, batch = initial(ALGO), transitions()
    info = updated(ALGO.replace(inverse_temperature=0.0), state, batch, KEY)[1]
    assert float(info.metrics["policy_loss"]) == pytest.approx(
        -float(likelihood(ALGO, state.policy.params, batch)), rel=1e-4
    )


def test_a_value_must_be_one_number():
    assert ALGO.validate(SPEC, 4, 4) == [] and ALGO.validate(CHOICE, 4, 4) == []
    for wrong in (
        Critic(),
        Critic(ensemble=1, head=CategoricalValues()),
        Critic(ensemble=1, head=ActionValues(noisy=True)),
    ):
        (problem,) = IQL.replace(value=wrong).validate(SPEC, 4, 4)
        assert "IQL.value" in problem and "ensemble=1" in problem
    assert "expectile=1" in IQL.replace(expectile=1.0).validate(SPEC, 4, 4)[0]


BANDIT = QUICK | {"inverse_temperature": 20.0, "expectile": 0.9, "max_weight": 100.0}


@pytest.mark.long
def test_the_best_of_bad_data_is_found():
    assert from_best(ALGO.replace(**BANDIT)) < 0.05


@pytest.mark.long
def test_of_discrete_actions_too():
    assert (learned(ALGO.replace(**BANDIT), CHOICE) == 1).all()


@pytest.mark.long
def test_rows_of_no_weight_teach_nothing():
    assert_weights_count(ALGO)
