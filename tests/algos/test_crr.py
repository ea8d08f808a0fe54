"""CRR's update against the paper's equations, of every weighting and baseline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, SPEC, assert_stepped, critic_values, transitions
from helpers.offline import (
    BC,
    CHOICE,
    CRR,
    QUICK,
    assert_weights_count,
    choices,
    from_best,
    from_tanh,
    initial,
    learned,
    policy_output,
    same,
    transition_keys,
    updated,
)

from jaxrl.algos import off_policy, regression
from jaxrl.core.schedules import resolve_schedules

KEY = jax.random.key(0)
ALGO = CRR.replace(gamma=0.9, target_period=3, temperature=0.5, max_weight=1.5, policy_learning_rate=1e-3)


def away(state):
    """With targets that are not the parameters, as between two target updates."""

    def other(learned, by):
        return learned.replace(target_params=jax.tree.map(lambda x: by * x, learned.params))

    return state.replace(policy=other(state.policy, 1.3), critic=other(state.critic, 1.5))


@functools.partial(jax.jit, static_argnames="samples")
def sampled_values(policy, critic, observation, key, samples):
    """The critic's values [samples, batch] of actions that the policy may take."""
    output = policy_output(ALGO, policy, observation)
    keys = jax.vmap(lambda k: jax.random.split(k, samples), out_axes=1)(transition_keys(key))
    noise = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys)
    actions = from_tanh(output.mean[None] + jnp.exp(output.log_std)[None] * noise)
    return jnp.stack([critic_values(ALGO, critic, observation, action, SPEC)[0] for action in actions])


@pytest.mark.long
def test_an_update_is_the_papers():
    state, batch = away(initial(ALGO)), transitions()
    new, info = updated(ALGO, state, batch, KEY)
    next_key, key = jax.random.split(KEY)
    slow = state.policy.target_params, state.critic.target_params
    following = sampled_values(*slow, batch.next_observation, next_key, 1)[0]
    target = np.asarray(batch.rewards[:, 0]) + 0.9 * np.where(batch.bootstrap, following, 0.0)

    def critic_loss(params):
        values = critic_values(ALGO, params, batch.observation, batch.action, SPEC)[0]
        return 0.5 * jnp.mean(jnp.square(jnp.asarray(target, jnp.float32) - values)[: BATCH - 1])

    wanted, gradients = jax.jit(jax.value_and_grad(critic_loss))(state.critic.params)
    assert float(info.metrics["critic_loss"]) == pytest.approx(float(wanted), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, gradients, 3e-4)

    taken = jax.jit(lambda p: critic_values(ALGO, p, batch.observation, batch.action, SPEC)[0])(state.critic.params)
    baseline = sampled_values(state.policy.params, state.critic.params, batch.observation, key, 4).mean(axis=0)
    weights = np.minimum(np.exp((taken - baseline) / 0.5), 1.5)
    assert (weights == 1.5).any() and (weights < 1.5).any()

    def policy_loss(params):
        likelihood = regression.log_likelihood(policy_output(ALGO, params, batch.observation), batch.action)
        return -jnp.mean((jnp.asarray(weights, jnp.float32) * likelihood)[: BATCH - 1])

    wanted, gradients = jax.jit(jax.value_and_grad(policy_loss))(state.policy.params)
    assert float(info.metrics["policy_loss"]) == pytest.approx(float(wanted), rel=1e-3)
    assert_stepped(state.policy.params, new.policy.params, gradients, 1e-3)


@pytest.mark.long
def test_targets_are_copied_every_so_often():
    state, batch = initial(ALGO), transitions()
    for update in range(1, 7):
        new = updated(ALGO, state, batch, KEY)[0]
        for part in ("policy", "critic"):
            then, now = getattr(state, part), getattr(new, part)
            same(now.target_params, now.params if update % 3 == 0 else then.target_params)
        state = new


@pytest.mark.long
def test_a_constant_weight_is_cloning():
    algo, batch = ALGO.replace(weighting="constant", policy_learning_rate=1e-4), transitions()
    state, cloner = initial(algo), initial(BC)
    cloner = cloner.replace(policy=cloner.policy.replace(params=state.policy.params))
    same(updated(algo, state, batch, KEY)[0].policy.params, updated(BC, cloner, batch, KEY)[0].policy.params)


@pytest.mark.long
@pytest.mark.parametrize("baseline", ["mean", "max"])
def test_discrete_weights_are_exact(baseline):
    """Equations 2 to 4, with sums over the actions that are allowed."""
    state, batch = initial(ALGO, CHOICE), choices()
    mask, action, rows = np.asarray(batch.action_mask), np.asarray(batch.action), np.arange(BATCH)
    values = np.asarray(
        off_policy.evaluate_critic(ALGO.critic, state.critic.variables, batch.observation, None, CHOICE)[0]
    )
    policy = policy_output(ALGO, state.policy.params, batch.observation, CHOICE)
    probability = np.where(mask, np.exp(policy.logits), 0.0)
    probability /= probability.sum(axis=1, keepdims=True)
    mean, best = (probability * values).sum(axis=1), np.where(mask, values, -np.inf).max(axis=1)
    advantage = values[rows, action] - (mean if baseline == "mean" else best)

    def weights(weighting):
        algo = resolve_schedules(ALGO.replace(weighting=weighting, baseline=baseline), jnp.float32(0))
        found = jax.jit(
            lambda state: algo._weights(state.policy.variables, state.critic.variables, batch, None, CHOICE)
        )
        return np.asarray(found(state))

    np.testing.assert_allclose(weights("exp"), np.minimum(np.exp(advantage / 0.5), 1.5), rtol=1e-4)
    assert (np.abs(advantage) > 1e-4).any()
    clear = np.abs(advantage) > 1e-6
    np.testing.assert_array_equal(weights("indicator")[clear], (advantage > 0)[clear])
    np.testing.assert_array_equal(weights("constant"), 1.0)


BANDIT = QUICK | {"temperature": 0.05, "max_weight": 20.0, "target_period": 100}


@pytest.mark.long
def test_the_best_of_bad_data_is_found():
    assert from_best(ALGO.replace(**BANDIT)) < 0.05


@pytest.mark.long
def test_of_discrete_actions_too():
    assert (learned(ALGO.replace(**BANDIT), CHOICE) == 1).all()


@pytest.mark.long
def test_rows_of_no_weight_teach_nothing():
    assert_weights_count(ALGO)
