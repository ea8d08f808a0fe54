"""CQL's estimate of an integral. Its update: `test_oracles.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BOX, NETWORKS, SMALL, SPEC, critic_values, transitions
from scipy.special import logsumexp

import jaxrl
from jaxrl.algos import cql, histories
from jaxrl.algos.train_state import Variables
from jaxrl.core.schedules import resolve_schedules
from jaxrl.networks import Critic


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
        replay = histories.transitions(batch)
        drawn = cql.proposals(algo.policy, policy, replay, keys, algo.samples, SPEC)
        return cql.soft_maximum(algo.critic, Variables(params), replay, *drawn, SPEC)

    unit = (np.arange(60) + 0.5) / 30 - 1
    grid = np.stack(np.meshgrid(unit, unit), axis=-1).reshape(-1, 1, 2)
    actions = jnp.asarray(np.broadcast_to(BOX.low + (BOX.high - BOX.low) * (grid + 1) / 2, (3600, 2, 2)), jnp.float32)
    values = jax.jit(jax.vmap(lambda action: critic_values(algo, params, batch.observation, action, SPEC)))(actions)
    assert float(values.max() - values.min()) > 2.0
    wanted = logsumexp(np.asarray(values), axis=0) + 2 * np.log(2 / 60)
    np.testing.assert_allclose(estimate(jax.random.key(1)), wanted, atol=0.05)
