"""MPO: where temperature and multipliers settle, targets and masks. Its update: `test_oracles.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import (
    MPO,
    SPEC,
    initial,
    transitions,
    updated,
)
from scipy import optimize

from jaxrl.algos import acting, kl_limits, mpo
from jaxrl.core import keys, spaces
from jaxrl.core.types import EnvSpec, TimeStep

KEY = jax.random.key(7)
CHOICES = EnvSpec("choices", SPEC.observation_space, spaces.Discrete(4), masked=True)


def random_values(seed=0):
    rng = np.random.default_rng(seed)
    prior = rng.dirichlet(np.ones(5), 3)
    return rng.normal(size=(3, 5)), prior


# --- the equations ---------------------------------------------------------------------------------------------------


def test_the_best_temperature_spends_the_whole_divergence():
    (values, prior), epsilon = random_values(1), 0.2
    values, log_prior = (jnp.asarray(x, jnp.float32) for x in (values, np.log(prior)))
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


@pytest.mark.parametrize("x", [1e-6, 1e-2, 1.0, 30.0, 1e4])
def test_the_softplus_is_undone(x):
    assert float(jax.nn.softplus(kl_limits.inverse_softplus(x))) == pytest.approx(x, rel=1e-5)


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_duals_settle_where_the_limits_are_kept():
    """One batch, again and again: what the fit gives up for its divergence ends at the limits, from either side."""
    algo = MPO.replace(target_period=10**6, learning_rate=1e-9, policy_learning_rate=3e-3)
    for start in (1e-2, 10.0):
        multipliers = {"temperature": start, "alpha_mean": start, "alpha_std": start, "learning_rate": 3e-2}
        chosen = algo.replace(kl_limits=kl_limits.MPOLimits(epsilon_mean=1e-2, epsilon_std=1e-3, **multipliers))
        state, batch = initial(chosen), transitions()
        # Values far apart, so that every limit is felt.
        critic = state.critic
        state = state.replace(critic=critic.replace(target_params=jax.tree.map(lambda x: 2 * x, critic.target_params)))

        def run(state, chosen=chosen, batch=batch):
            def body(state, _):
                new, info = updated(chosen, state, batch, KEY)
                return new, info.metrics

            return jax.lax.scan(body, state, None, length=4000)

        metrics = jax.tree.map(lambda x: float(x[-500:].mean()), jax.jit(run)(state)[1])
        assert metrics["kl_improved"] == pytest.approx(0.1, rel=0.1)
        assert metrics["kl_mean"] == pytest.approx(1e-2, rel=0.2)
        assert metrics["kl_std"] == pytest.approx(1e-3, rel=0.3)


@pytest.mark.long
def test_duals_stay_above_their_least():
    limits = kl_limits.MPOLimits(learning_rate=1e3, epsilon=100.0, epsilon_mean=100.0, epsilon_std=100.0)
    algo = MPO.replace(kl_limits=limits)
    new = updated(algo, initial(algo), transitions(), KEY)[0]
    for x in jax.tree.leaves(new.duals.params):
        np.testing.assert_array_equal(x, kl_limits.LEAST_DUAL)
    again, info = updated(algo, new, transitions(), KEY)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((again, info)))
    assert float(info.metrics["temperature"]) > 0


# --- discrete actions ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("updates", [0, 1])
def test_forbidden_actions_are_never_taken(updates):
    actor = MPO.actor(initial(MPO, CHOICES).replace(updates=jnp.int32(updates)))
    flags = jnp.zeros(512, bool)
    mask = jnp.arange(4)[None] // 2 == jnp.arange(512)[:, None] % 2  # actions 0 and 1, or 2 and 3
    moments = TimeStep(jnp.ones((512, 3)), jnp.zeros(512), flags, flags, flags, action_mask=mask)
    each = keys.unrolled(jax.random.split(KEY, 512))
    act = jax.jit(MPO.act, static_argnames=("spec", "explore"))
    for explore in (True, False):
        action = np.asarray(act(actor, moments, acting.ActingCarry((), ()), each, spec=CHOICES, explore=explore).action)
        assert np.take_along_axis(np.asarray(mask), action[:, None], axis=1).all()
        assert len(np.unique(action)) == (4 if explore else 2)
