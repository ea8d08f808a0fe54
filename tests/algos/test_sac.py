"""SAC's update against its formulas, written out once more from the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from continuous import BATCH, BOX, SAC, SPEC, assert_stepped, counted, critic_values, initial, transitions, updated

import jaxrl
from jaxrl import spaces
from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.sac import log_half_range
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.schedules import at
from jaxrl.types import EnvSpec

KEY = jax.random.key(7)


def samples(algo, params, observation, key):
    """Actions, and log-densities of actions in [-1, 1], from the density's definition by a change of variables."""
    distribution = off_policy.evaluate_policy(algo, params, observation, SPEC)
    keys = q_learning.transition_keys(key, BATCH, SingleReplica())
    x = distribution.base.sample(keys)
    squashed = jnp.tanh(x)
    density = jax.scipy.stats.norm.logpdf(x, distribution.mean, jnp.exp(distribution.log_std))
    log_prob = jnp.sum(density - jnp.log(1 - jnp.square(squashed)), axis=-1)
    low, high = jnp.asarray(BOX.low)[None], jnp.asarray(BOX.high)[None]
    return low + (high - low) * (squashed + 1) / 2, log_prob


@pytest.mark.parametrize("learnt", [True, False])
def test_an_update_is_the_papers(learnt):
    algo = SAC.replace(temperature=0.3, learn_temperature=learnt, gamma=0.9, tau=0.1)
    state, batch = initial(algo), transitions()
    new, info = updated(algo, state, batch, KEY)
    metrics = jax.tree.map(float, info.metrics)
    next_key, key = jax.random.split(KEY)

    action, log_prob = samples(algo, state.policy.params, batch.next_observation, next_key)
    values = critic_values(algo, state.critic.target_params, batch.next_observation, action, SPEC)
    soft = np.asarray(values).min(axis=0) - 0.3 * np.asarray(log_prob)
    target = np.asarray(batch.rewards[:, 0]) + 0.9 * np.where(batch.bootstrap, soft, 0.0)

    def critic_loss(params):
        values = critic_values(algo, params, batch.observation, batch.action, SPEC)
        errors = jnp.square(jnp.asarray(target)[None] - values)[:, : BATCH - 1]
        return 0.5 * jnp.sum(jnp.mean(errors, axis=1))

    assert metrics["critic_loss"] == pytest.approx(float(critic_loss(state.critic.params)), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, jax.grad(critic_loss)(state.critic.params), 3e-4)
    for old, now, slow in zip(
        *map(jax.tree.leaves, (state.critic.target_params, new.critic.params, new.critic.target_params)), strict=True
    ):
        np.testing.assert_allclose(slow, 0.9 * old + 0.1 * now, rtol=1e-5, atol=1e-7)

    def policy_loss(params):  # by the critics after their step
        action, log_prob = samples(algo, params, batch.observation, key)
        values = critic_values(algo, new.critic.params, batch.observation, action, SPEC)
        return jnp.mean((0.3 * log_prob - jnp.min(values, axis=0))[: BATCH - 1])

    assert metrics["policy_loss"] == pytest.approx(float(policy_loss(state.policy.params)), rel=1e-3, abs=1e-4)
    assert_stepped(state.policy.params, new.policy.params, jax.grad(policy_loss)(state.policy.params), 3e-4)
    entropy = -counted(samples(algo, state.policy.params, batch.observation, key)[1])
    assert metrics["entropy"] == pytest.approx(float(entropy), rel=1e-3, abs=1e-4)
    assert metrics["temperature"] == pytest.approx(0.3)


def test_the_temperature_moves_towards_the_target_entropy():
    batch = transitions()
    state = initial(SAC)
    entropy = float(updated(SAC, state, batch, KEY)[1].metrics["entropy"])
    for target, sign in ((entropy / 2 + 0.1, 1), (entropy / 2 - 0.1, -1)):  # for each of two dimensions
        new = updated(SAC.replace(target_entropy=target), state, batch, KEY)[0]
        change = float(new.log_temperature.params - state.log_temperature.params)
        assert change == pytest.approx(sign * 3e-4, rel=1e-2)


def test_a_fixed_temperature_is_no_parameter_and_follows_its_schedule():
    algo = SAC.replace(learn_temperature=False, temperature=jaxrl.schedules.Linear(1.0, 0.0))
    assert initial(algo).log_temperature.params == ()
    assert algo.validate(SPEC, 4, 1) == []
    later = at(algo, jnp.float32(0.75))
    info = updated(later, initial(algo), transitions(), KEY)[1]
    assert float(info.metrics["temperature"]) == pytest.approx(0.25)


def test_the_units_of_actions_make_no_difference():
    wide = EnvSpec("wide", SPEC.observation_space, spaces.Box(BOX.low * 8, BOX.high * 8, (2,)))
    batch, state = transitions(), initial(SAC)
    one = updated(SAC, state, batch, KEY)
    other = updated(SAC, state, batch.replace(action=8 * batch.action), KEY, wide)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert log_half_range(BOX) == pytest.approx(np.log(2) + np.log(5))
