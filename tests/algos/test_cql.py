"""CQL's update against the paper's equations: SAC's, and the gap between the soft maximum and the data's values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.continuous import BATCH, BOX, NETWORKS, SAC, SMALL, SPEC, assert_stepped, critic_values, transitions
from helpers.offline import (
    CHOICE,
    CQL,
    QUICK,
    assert_weights_count,
    choices,
    density,
    from_best,
    from_tanh,
    initial,
    learned,
    likelihood,
    policy_output,
    same,
    transition_keys,
    updated,
)
from scipy.special import logsumexp

import jaxrl
from jaxrl.algos import cql, off_policy
from jaxrl.algos.train_state import Variables
from jaxrl.core.schedules import resolve_schedules
from jaxrl.networks import Critic

KEY = jax.random.key(0)
ALGO = CQL.replace(gamma=0.9, coefficient=2.0, policy_learning_rate=1e-3)
# What is fixed above is learned here, and what is left out counted.
DISCRETE = CQL.replace(gamma=0.9, coefficient=2.0, entropy_in_target=True, lagrange_threshold=1.0)


def policy_draws(params, observation, keys):
    """Actions that the policy may take, [samples, batch, n], and their log-densities in [-1, 1]; keys alike."""
    policy = policy_output(ALGO, params, observation)
    mean, std = policy.mean[None], jnp.exp(policy.log_std)[None]
    x = mean + std * jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys)
    return from_tanh(x), density(x, mean, std)


def samples(params, batch, key):
    """The nine actions of each transition, and their log-densities: uniform, the policy's here, and its next."""

    def split(place):
        return jax.vmap(lambda k: jax.random.split(jax.random.fold_in(k, place), 3), out_axes=1)(transition_keys(key))

    uniform = jax.vmap(jax.vmap(BOX.sample))(split(0)), jnp.full((3, BATCH), -2 * np.log(2), jnp.float32)
    here = policy_draws(params, batch.observation, split(1))
    there = policy_draws(params, batch.next_observation, split(2))
    return tuple(jnp.concatenate(parts) for parts in zip(uniform, here, there, strict=True))


@jax.jit
def critic_losses(params, state, batch, key):
    """Half the squared errors and the gaps, each [ensemble, batch]."""
    # The target has no entropy in it, as in the authors' code.
    policy = state.policy.params
    following = policy_draws(policy, batch.next_observation, transition_keys(key)[None])[0][0]
    values = critic_values(ALGO, state.critic.target_params, batch.next_observation, following, SPEC).min(axis=0)
    target = batch.rewards[:, 0] + 0.9 * jnp.where(batch.bootstrap, values, 0.0)
    actions, log_densities = samples(policy, batch, key)
    taken = critic_values(ALGO, params, batch.observation, batch.action, SPEC)
    each = jax.vmap(lambda action: critic_values(ALGO, params, batch.observation, action, SPEC))(actions)
    gap = jnp.log(jnp.mean(jnp.exp(each) / jnp.exp(log_densities)[:, None], axis=0)) - taken
    return 0.5 * jnp.square(target[None] - taken), gap


@jax.jit
@jax.value_and_grad
def policy_loss(params, critic, batch, key):
    """SAC's."""
    action, log_prob = policy_draws(params, batch.observation, transition_keys(key)[None])
    value = critic_values(ALGO, critic, batch.observation, action[0], SPEC).min(axis=0)
    return jnp.mean((log_prob[0] - value)[: BATCH - 1])


@pytest.mark.long
def test_an_update_is_the_papers():
    state, batch = initial(ALGO), transitions()
    new, info = updated(ALGO, state, batch, KEY)
    metrics = jax.tree.map(float, info.metrics)
    next_key, key = jax.random.split(KEY)

    def critic_loss(params):
        squared, gap = (x[:, : BATCH - 1] for x in critic_losses(params, state, batch, next_key))
        # The authors': the squared error, not half of it, and twice the gap; Adam knows no factor of the whole.
        return jnp.sum(jnp.mean(2.0 * squared + 2.0 * gap, axis=1)), (squared, gap)

    gradients, (squared, gap) = jax.jit(jax.grad(critic_loss, has_aux=True))(state.critic.params)
    assert metrics["critic_loss"] == pytest.approx(float(jnp.sum(jnp.mean(squared, axis=1))), rel=1e-4)
    assert metrics["conservative_gap"] == pytest.approx(float(jnp.mean(gap)), rel=1e-4)
    assert metrics["coefficient"] == pytest.approx(2.0)
    assert_stepped(state.critic.params, new.critic.params, gradients, 3e-4)

    wanted, gradients = policy_loss(state.policy.params, new.critic.params, batch, key)
    assert metrics["policy_loss"] == pytest.approx(float(wanted), rel=1e-3, abs=1e-4)
    assert_stepped(state.policy.params, new.policy.params, gradients, 1e-3)


@pytest.mark.long
def test_the_penalty_counts_once():
    """Adam's first moment is 0.1 of the gradient of the authors' loss halved, parameter by parameter."""
    state, batch = initial(ALGO), transitions()
    new, _ = updated(ALGO, state, batch, KEY)
    next_key, _ = jax.random.split(KEY)

    @jax.jit
    @jax.grad
    def authors(params):
        squared, gap = (x[:, : BATCH - 1] for x in critic_losses(params, state, batch, next_key))
        return jnp.sum(jnp.mean(2.0 * squared + 2.0 * gap, axis=1))

    moment = optax.tree.get(new.critic.optimizer_state, "mu")
    same(jax.tree.map(lambda x: 2.0 * x / 0.1, moment), authors(state.critic.params), 1e-4)


@pytest.mark.long
def test_the_first_updates_clone_if_asked():
    algo, batch = ALGO.replace(cloning_updates=2.0), transitions()
    state = initial(algo)
    plain = updated(ALGO, state, batch, KEY)
    for update in range(3):
        new, info = updated(algo, state, batch, KEY)
        if update == 0:
            same(new.critic, plain[0].critic)
            # Its temperature is 1.
            loss = -float(info.metrics["entropy"]) - float(likelihood(algo, state.policy.params, batch))
            assert float(info.metrics["policy_loss"]) == pytest.approx(loss, rel=1e-3)
        usual = updated(ALGO, state, batch, KEY)[0].policy.params
        moved = max(
            float(jnp.max(jnp.abs(a - b)))
            for a, b in zip(*map(jax.tree.leaves, (new.policy.params, usual)), strict=True)
        )
        assert (moved > 1e-5) == (update < 2)
        state = new


# --- discrete actions ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_discrete_soft_maxima_are_exact_and_without_a_coefficient_it_is_sac():
    state, batch = initial(DISCRETE, CHOICE), choices()
    new, info = updated(DISCRETE, state, batch, KEY, CHOICE)
    values = np.asarray(
        off_policy.evaluate_critic(DISCRETE.critic, Variables(state.critic.params), batch.observation, None, CHOICE)
    )
    allowed = np.where(np.asarray(batch.action_mask)[None], values, -np.inf)
    taken = values[:, np.arange(BATCH), np.asarray(batch.action)]
    gap = (logsumexp(allowed, axis=-1) - taken)[:, : BATCH - 1]
    assert float(info.metrics["conservative_gap"]) == pytest.approx(gap.mean(), rel=1e-4)

    sac = SAC.replace(gamma=0.9, policy_learning_rate=DISCRETE.policy_learning_rate)
    none = DISCRETE.replace(coefficient=1e-30)  # of which there is a logarithm
    free, told = updated(none, initial(none, CHOICE), batch, KEY, CHOICE)
    plain, metrics = updated(sac, initial(sac, CHOICE), batch, KEY, CHOICE)
    same((free.policy, free.critic, free.log_temperature), (plain.policy, plain.critic, plain.log_temperature))
    same({name: told.metrics[name] for name in metrics.metrics}, metrics.metrics)

    def conservative(params):
        values = off_policy.evaluate_critic(DISCRETE.critic, Variables(params), batch.observation, None, CHOICE)
        values = jnp.where(batch.action_mask[None], values, -jnp.inf)
        gaps = jax.nn.logsumexp(values, axis=-1) - values[:, jnp.arange(BATCH), batch.action]
        return jnp.sum(jnp.mean(gaps[:, : BATCH - 1], axis=1))

    # After one step of Adam its first moment is the gradient: what the coefficient adds is that of the gaps.
    moments = (optax.tree.get(learned.critic.optimizer_state, "mu") for learned in (new, free))
    added = jax.tree.map(lambda a, b: (a - b) / 0.1 / (0.5 * 2.0), *moments)
    same(added, jax.jit(jax.grad(conservative))(state.critic.params), 1e-5)


@pytest.mark.long
def test_a_coefficient_that_is_learnt_rises_where_the_gap_is_above_the_threshold():
    state, batch = initial(DISCRETE, CHOICE), choices()
    gap = float(updated(DISCRETE, state, batch, KEY, CHOICE)[1].metrics["conservative_gap"])
    for threshold, sign in ((gap - 0.1, 1), (gap + 0.1, -1)):
        new = updated(DISCRETE.replace(lagrange_threshold=threshold), state, batch, KEY, CHOICE)[0]
        change = float(new.log_coefficient.params - state.log_coefficient.params)
        assert change == pytest.approx(sign * 3e-4, rel=1e-2)
    assert initial(CQL).log_coefficient.params == ()


@pytest.mark.long
def test_where_only_the_datas_action_is_allowed_there_is_no_gap():
    state, batch = initial(DISCRETE, CHOICE), choices()
    only = jax.nn.one_hot(batch.action, 3) > 0
    info = updated(DISCRETE, state, batch.replace(action_mask=only), KEY, CHOICE)[1]
    assert float(info.metrics["conservative_gap"]) == pytest.approx(0.0, abs=1e-6)


# --- the estimate ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_estimate_over_a_box_is_the_integral():
    """Against a sum over a fine grid, for a critic that varies over the box."""
    algo = resolve_schedules(
        jaxrl.CQL(**(NETWORKS | {"critic": Critic(widths=(8,), ensemble=2)}), **SMALL, samples=4000), jnp.float32(0)
    )
    state, batch = algo.init(jax.random.key(0), SPEC), jax.tree.map(lambda x: x[:2], transitions())
    params = jax.tree.map(lambda x: 3 * x, state.critic.params)

    @jax.jit
    def estimate(key):
        keys, policy = jax.random.split(key, 2), state.policy.variables
        drawn = cql.proposals(algo.policy, policy, batch, keys, algo.samples, SPEC)
        return cql.soft_maximum(algo.critic, Variables(params), batch, *drawn, SPEC)

    unit = (np.arange(60) + 0.5) / 30 - 1
    grid = np.stack(np.meshgrid(unit, unit), axis=-1).reshape(-1, 1, 2)
    actions = jnp.asarray(np.broadcast_to(BOX.low + (BOX.high - BOX.low) * (grid + 1) / 2, (3600, 2, 2)), jnp.float32)
    values = jax.jit(jax.vmap(lambda action: critic_values(algo, params, batch.observation, action, SPEC)))(actions)
    assert float(values.max() - values.min()) > 2.0
    wanted = logsumexp(np.asarray(values), axis=0) + 2 * np.log(2 / 60)
    np.testing.assert_allclose(estimate(jax.random.key(1)), wanted, atol=0.05)


BANDIT = QUICK | {"coefficient": 0.4, "temperature": 0.05, "temperature_learning_rate": 1e-9, "tau": 0.1}


@pytest.mark.long
def test_the_best_of_bad_data_is_found():
    assert from_best(ALGO.replace(**BANDIT)) < 0.45


@pytest.mark.long
def test_of_discrete_actions_too():
    assert (learned(CQL.replace(**BANDIT), CHOICE) == 1).all()


@pytest.mark.long
def test_rows_of_no_weight_teach_nothing():
    assert_weights_count(ALGO)
