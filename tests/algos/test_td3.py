"""TD3's and DDPG's updates against their formulas, and what TD3 adds: the delay, and the noise of target actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, DDPG, SPEC, TD3, assert_stepped, critic_values, initial, transitions, updated

from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.train_state import Variables
from jaxrl.core.schedules import resolve_schedules
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(0)
ALGORITHMS = {"td3": TD3.replace(policy_delay=1), "ddpg": DDPG}


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_is_the_papers(name):
    algo = ALGORITHMS[name].replace(gamma=0.9, tau=0.1, policy_learning_rate=1e-3)
    if name == "td3":
        algo = algo.replace(target_noise=0.4)
    state, batch = initial(algo), transitions()
    new, info = updated(algo, state, batch, KEY)

    action = off_policy.evaluate_policy(
        algo.policy, Variables(state.policy.target_params), batch.next_observation, SPEC
    )
    if name == "td3":
        half = np.float32([2.0, 5.0])
        keys = q_learning.transition_keys(KEY, BATCH, SingleReplica())
        noise = 0.4 * np.stack([jax.random.normal(k, (2,)) for k in keys])
        assert (np.abs(noise) > 0.5).any(), "one that is limited"
        action = np.clip(action + half * np.clip(noise, -0.5, 0.5), SPEC.action_space.low, SPEC.action_space.high)
    values = critic_values(algo, state.critic.target_params, batch.next_observation, jnp.asarray(action), SPEC)
    assert values.shape[0] == (2 if name == "td3" else 1)
    target = np.asarray(batch.rewards[:, 0]) + 0.9 * np.where(batch.bootstrap, np.asarray(values).min(axis=0), 0.0)

    def critic_loss(params):
        values = critic_values(algo, params, batch.observation, batch.action, SPEC)
        errors = jnp.square(jnp.asarray(target, jnp.float32)[None] - values)[:, : BATCH - 1]
        return 0.5 * jnp.sum(jnp.mean(errors, axis=1))

    assert float(info.metrics["critic_loss"]) == pytest.approx(float(critic_loss(state.critic.params)), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, jax.grad(critic_loss)(state.critic.params), 3e-4)

    def policy_loss(params):  # by the first critic, after its step
        action = off_policy.evaluate_policy(algo.policy, Variables(params), batch.observation, SPEC)
        values = critic_values(algo, new.critic.params, batch.observation, action, SPEC)
        return -jnp.mean(values[0, : BATCH - 1])

    assert float(info.metrics["policy_loss"]) == pytest.approx(float(policy_loss(state.policy.params)), rel=1e-4)
    assert_stepped(state.policy.params, new.policy.params, jax.grad(policy_loss)(state.policy.params), 1e-3)
    for part, before in ((new.policy, state.policy), (new.critic, state.critic)):
        for old, now, slow in zip(
            *map(jax.tree.leaves, (before.target_params, part.params, part.target_params)), strict=True
        ):
            np.testing.assert_allclose(slow, 0.9 * old + 0.1 * now, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_policy_and_targets_move_at_every_other_update_only():
    state, batch = initial(TD3), transitions()
    for number in range(1, 5):
        new, info = updated(TD3, state, batch, KEY)
        assert not same(state.critic.params, new.critic.params)
        moves = number % 2 == 0
        assert same(state.policy, new.policy) != moves
        assert same(state.critic.target_params, new.critic.target_params) != moves
        assert float(info.metrics["policy_loss"]) == float(new.policy_loss)
        assert (float(new.policy_loss) != float(state.policy_loss)) == moves
        state = new


@pytest.mark.long
def test_runs_side_by_side_are_the_runs():
    batch = transitions()
    states = [initial(TD3), updated(TD3, initial(TD3), batch, KEY)[0]]  # one is due to move its policy, one is not
    algo = resolve_schedules(TD3, jnp.float32(0))

    def update(state):
        return algo.update(state, {"replay": batch}, spec=SPEC, key=KEY, replicas=SingleReplica())[0]

    together = jax.jit(jax.vmap(update))(jax.tree.map(lambda *x: jnp.stack(x), *states))
    for i, state in enumerate(states):
        alone = updated(TD3, state, batch, KEY)[0]
        for a, b in zip(
            jax.tree.leaves(jax.tree.map(lambda x, i=i: x[i], together)), jax.tree.leaves(alone), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_ddpgs_update_has_no_chance_in_it():
    state, batch = initial(DDPG), transitions()
    assert same(updated(DDPG, state, batch, KEY), updated(DDPG, state, batch, jax.random.key(1)))
    assert not same(updated(TD3, initial(TD3), batch, KEY)[0], updated(TD3, initial(TD3), batch, jax.random.key(1))[0])
