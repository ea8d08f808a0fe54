"""TD3's and DDPG's updates against their formulas, and what TD3 adds: the delay, and the noise of target actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, DDPG, SAC, SPEC, TD3, assert_stepped, critic_values, initial, transitions, updated

from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.train_state import Variables
from jaxrl.core.schedules import resolve_schedules
from jaxrl.networks import CategoricalValues, Critic
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
def test_the_target_of_distributions_is_that_of_the_critic_that_expects_least():
    """FastTD3 (arXiv:2505.22642): the loss is the cross-entropy with C51's projection, the policy ascends its mean."""
    critic = Critic(widths=(8,), ensemble=2, head=CategoricalValues(5))
    algo = TD3.replace(policy_delay=1, gamma=0.9, target_noise=0.0, critic=critic, v_min=-2.0, v_max=2.0)
    state, batch, support = initial(algo), transitions(), np.linspace(-2.0, 2.0, 5)
    new, info = updated(algo, state, batch, KEY)
    target_action = off_policy.evaluate_policy(
        algo.policy, Variables(state.policy.target_params), batch.next_observation, SPEC
    )

    def logits(params, observation, action):
        return off_policy.evaluate_critic(critic, Variables(params), observation, action, SPEC).logits[:, :, 0]

    following = np.asarray(jax.nn.softmax(logits(state.critic.target_params, batch.next_observation, target_action)))
    least = (following @ support).argmin(axis=0)
    assert set(least) == {0, 1}
    wanted = np.zeros((BATCH, 5))
    for row in range(BATCH):
        atoms = float(batch.rewards[row, 0]) + 0.9 * float(batch.bootstrap[row]) * support
        for place, mass in zip(np.clip(atoms, -2, 2) + 2.0, following[least[row], row], strict=True):
            lower = min(int(place), 3)
            wanted[row, lower : lower + 2] += mass * np.asarray([lower + 1 - place, place - lower])

    def critic_loss(params):
        losses = -jnp.sum(wanted[None] * jax.nn.log_softmax(logits(params, batch.observation, batch.action)), axis=-1)
        return jnp.sum(jnp.mean(losses[:, : BATCH - 1], axis=1))

    assert float(info.metrics["critic_loss"]) == pytest.approx(float(critic_loss(state.critic.params)), rel=1e-4)
    assert_stepped(state.critic.params, new.critic.params, jax.grad(critic_loss)(state.critic.params), 3e-4)

    def policy_loss(params):
        action = off_policy.evaluate_policy(algo.policy, Variables(params), batch.observation, SPEC)
        values = jax.nn.softmax(logits(new.critic.params, batch.observation, action)) @ jnp.asarray(support)
        return -jnp.mean(values[0, : BATCH - 1])

    assert float(info.metrics["policy_loss"]) == pytest.approx(float(policy_loss(state.policy.params)), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("algo", [TD3, SAC], ids=["td3", "sac"])
def test_where_a_reset_is_due_all_that_is_learned_begins_anew(algo):
    """The statistics, the counts and what was collected stay (Nikishin et al., 2022, arXiv:2205.07802)."""
    algo, batch = algo.replace(normalize_observation=True, reset_at=(2, 9)), transitions()
    state = updated(algo, initial(algo), batch, KEY)[0]
    usual, reset = (updated(one, state, batch, KEY)[0] for one in (algo.replace(reset_at=(1, 3)), algo))
    resolved = resolve_schedules(algo, jnp.float32(0))
    anew = resolved.init(jax.random.fold_in(KEY, 2**31 - 1), SPEC)
    kept = {name: getattr(usual, name) for name in ("statistics", "updates", "policy_loss") if hasattr(usual, name)}
    assert int(reset.updates) == 2 and same(reset, anew.replace(**kept))
    assert not same(reset.critic, usual.critic) and not same(reset.statistics, state.statistics)


@pytest.mark.parametrize("given", [(0,), (2**40,), (True,), (1.5,), 100, None])
def test_resets_are_at_updates(given):
    problems = TD3.replace(reset_at=given).validate(SPEC, 4, 4)
    assert any(f"reset_at={given!r} must be a tuple of update counts" in problem for problem in problems)


def test_the_least_noise_is_not_the_most():
    assert TD3.replace(least_noise=0.1, exploration_noise=0.1).validate(SPEC, 4, 4) == []
    (problem,) = TD3.replace(least_noise=0.5, exploration_noise=0.1).validate(SPEC, 4, 4)
    assert "least_noise=0.5 must be at most exploration_noise=0.1" in problem


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
