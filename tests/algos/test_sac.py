"""SAC's update against its formulas, written out once more from the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import (
    BATCH,
    BOX,
    SAC,
    SPEC,
    assert_stepped,
    counted,
    critic_values,
    initial,
    transitions,
    updated,
)
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos import acting, off_policy, q_learning
from jaxrl.algos.soft_policies import log_half_range
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, TimeStep
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(7)


def samples(algo, params, observation, key):
    """Actions, and log-densities of actions in [-1, 1], from the density's definition by a change of variables."""
    distribution = off_policy.evaluate_policy(algo.policy, Variables(params), observation, SPEC)
    keys = q_learning.transition_keys(key, BATCH, SingleReplica())
    x = distribution.base.sample(keys)
    squashed = jnp.tanh(x)
    density = jax.scipy.stats.norm.logpdf(x, distribution.mean, jnp.exp(distribution.log_std))
    log_prob = jnp.sum(density - jnp.log(1 - jnp.square(squashed)), axis=-1)
    low, high = jnp.asarray(BOX.low)[None], jnp.asarray(BOX.high)[None]
    return low + (high - low) * (squashed + 1) / 2, log_prob


@pytest.mark.long
@pytest.mark.parametrize("learned", one_quick([True, False]))
def test_an_update_is_the_papers(learned):
    algo = SAC.replace(temperature=0.3, learn_temperature=learned, gamma=0.9, tau=0.1)
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


@pytest.mark.long
def test_the_temperature_moves_towards_the_target_entropy():
    batch = transitions()
    state = initial(SAC)
    entropy = float(updated(SAC, state, batch, KEY)[1].metrics["entropy"])
    for target, sign in ((entropy / 2 + 0.1, 1), (entropy / 2 - 0.1, -1)):  # for each of two dimensions
        new = updated(SAC.replace(target_entropy=target), state, batch, KEY)[0]
        change = float(new.log_temperature.params - state.log_temperature.params)
        assert change == pytest.approx(sign * 3e-4, rel=1e-2)


@pytest.mark.long
def test_a_fixed_temperature_is_no_parameter_and_follows_its_schedule():
    algo = SAC.replace(learn_temperature=False, temperature=jaxrl.schedules.Linear(1.0, 0.0))
    assert initial(algo).log_temperature.params == ()
    assert algo.validate(SPEC, 4, 1) == []
    later = resolve_schedules(algo, jnp.float32(0.75))
    info = updated(later, initial(algo), transitions(), KEY)[1]
    assert float(info.metrics["temperature"]) == pytest.approx(0.25)


@pytest.mark.long
def test_the_units_of_actions_make_no_difference():
    wide = EnvSpec("wide", SPEC.observation_space, spaces.Box(BOX.low * 8, BOX.high * 8, (2,)))
    batch, state = transitions(), initial(SAC)
    one = updated(SAC, state, batch, KEY)
    other = updated(SAC, state, batch.replace(action=8 * batch.action), KEY, wide)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert log_half_range(BOX) == pytest.approx(np.log(2) + np.log(5))


# --- discrete actions ----------------------------------------------------------------------------------------------

CHOICE = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(3))


def choices(masked):
    rng = np.random.default_rng(3)
    mask = jnp.asarray(rng.random((BATCH, 3)) < 0.6).at[:, 0].set(True) if masked else None
    return transitions().replace(
        action=jnp.zeros(BATCH, jnp.int32), action_mask=mask, next_action_mask=None if mask is None else mask[::-1]
    )


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
def test_discrete_expectations_are_exact(masked):
    """Christodoulou (2019), equations 10 to 12, with sums over the actions that are allowed."""
    algo = SAC.replace(temperature=0.3, gamma=0.9, target_entropy_fraction=0.5)
    state, batch = resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(0), CHOICE), choices(masked)
    new, info = updated(algo, state, batch, KEY, CHOICE)
    metrics = jax.tree.map(float, info.metrics)
    everything = np.ones((BATCH, 3), bool)
    now, later = (everything if x is None else np.asarray(x) for x in (batch.action_mask, batch.next_action_mask))

    def followed(policy, critic, observation, mask):
        probability = jnp.exp(
            off_policy.evaluate_policy(algo.policy, Variables(policy), observation, CHOICE, mask).log_probs()
        )
        values = off_policy.evaluate_critic(algo.critic, Variables(critic), observation, None, CHOICE).min(axis=0)
        value, entropy = jnp.zeros(BATCH), jnp.zeros(BATCH)
        for action in range(3):
            p = jnp.where(mask[:, action], probability[:, action], 1.0)
            value += jnp.where(mask[:, action], p * values[:, action], 0.0)
            entropy -= p * jnp.log(p)
        return value, entropy

    value, entropy = followed(state.policy.params, state.critic.target_params, batch.next_observation, later)
    target = np.asarray(batch.rewards[:, 0]) + 0.9 * np.where(batch.bootstrap, value + 0.3 * entropy, 0.0)

    def critic_loss(params):
        values = off_policy.evaluate_critic(algo.critic, Variables(params), batch.observation, None, CHOICE)[..., 0]
        return 0.5 * jnp.sum(jnp.mean(jnp.square(jnp.asarray(target)[None] - values)[:, : BATCH - 1], axis=1))

    assert metrics["critic_loss"] == pytest.approx(float(critic_loss(state.critic.params)), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, jax.grad(critic_loss)(state.critic.params), 3e-4)

    def policy_loss(params):
        value, entropy = followed(params, new.critic.params, batch.observation, now)
        return jnp.mean((-value - 0.3 * entropy)[: BATCH - 1])

    assert metrics["policy_loss"] == pytest.approx(float(policy_loss(state.policy.params)), rel=1e-3, abs=1e-4)
    assert_stepped(state.policy.params, new.policy.params, jax.grad(policy_loss)(state.policy.params), 3e-4)
    _, entropy = followed(state.policy.params, new.critic.params, batch.observation, now)
    assert metrics["entropy"] == pytest.approx(counted(entropy), rel=1e-3)
    # More entropy than half of the largest: the temperature falls.
    assert counted(entropy) > counted(0.5 * np.log(now.sum(axis=1)))
    change = float(new.log_temperature.params - state.log_temperature.params)
    assert change == pytest.approx(-3e-4, rel=1e-2)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((new, info)))


@pytest.mark.long
def test_until_the_first_update_discrete_actions_are_uniform_over_what_is_allowed():
    algo = resolve_schedules(SAC, jnp.float32(0))
    state, keys = algo.init(jax.random.key(0), CHOICE), jax.random.split(jax.random.key(1), 4096)
    flags = jnp.zeros(4096, bool)
    mask = jnp.broadcast_to(jnp.asarray([True, False, True]), (4096, 3))
    moments = TimeStep(jnp.ones((4096, 3)), jnp.zeros(4096), flags, flags, flags, action_mask=mask)
    action = algo.act(algo.actor(state), moments, acting.ActingCarry((), ()), keys, spec=CHOICE, explore=True).action
    assert np.bincount(action, minlength=3)[1] == 0 and np.mean(np.asarray(action) == 0) == pytest.approx(0.5, abs=0.03)
    greedy = algo.act(algo.actor(state), moments, acting.ActingCarry((), ()), keys, spec=CHOICE, explore=False).action
    assert len(np.unique(greedy)) == 1
