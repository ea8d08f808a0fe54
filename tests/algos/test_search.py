"""What a search says a root is worth, against numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.algos.search import Expansion, TreeSearch

PRIOR, NETWORK, SIMULATIONS = np.array([0.5, 0.3, 0.2]), 0.2, 4
REWARDS = np.array([1.0, -1.0, 0.5])  # of each action, and nothing follows


def plan(kind):
    """Search where an action's reward is all there is; of three actions, Gumbel search visits the likeliest two."""
    algo = jaxrl.MuZero(tree_search=TreeSearch(simulations=SIMULATIONS, kind=kind, considered_actions=2))

    def expand(node, action, key):
        return Expansion(jnp.zeros(3), jnp.float32(0.0), node, jnp.asarray(REWARDS, jnp.float32)[action], 0.0)

    logits = jnp.asarray(np.log(PRIOR), jnp.float32)[None]
    root = Expansion(logits, jnp.asarray([NETWORK], jnp.float32), jnp.zeros((1, 1)))
    keys = jax.random.split(jax.random.key(0), 1)
    found = jax.jit(lambda root, keys: algo.tree_search.plan(root, expand, keys, mask=None, explore=False))(root, keys)
    return jax.tree.map(lambda x: np.asarray(x)[0], found)


@pytest.mark.long
def test_gumbel_search_is_worth_what_its_policy_is():
    found = plan("gumbel")
    seen = (PRIOR * REWARDS)[:2].sum() / PRIOR[:2].sum()
    worth = np.array([*REWARDS[:2], (NETWORK + SIMULATIONS * seen) / (SIMULATIONS + 1)])  # the last was not visited
    scale = 0.1 * (50 + SIMULATIONS / 2)  # mctx's, with the visits of the action that was visited most
    weights = PRIOR * np.exp(scale * (worth - worth.min()) / (worth.max() - worth.min()))
    policy = weights / weights.sum()
    np.testing.assert_allclose(found.policy, policy, rtol=1e-5)
    np.testing.assert_allclose(found.value, policy @ worth, rtol=1e-5)
    mean_over_visits = (NETWORK + SIMULATIONS / 2 * REWARDS[:2].sum()) / (SIMULATIONS + 1)
    assert found.value > 0.8 and mean_over_visits < 0.1, "which is why it is not the mean"


@pytest.mark.long
def test_puct_is_worth_the_mean_over_its_visits():
    found = plan("puct")
    np.testing.assert_allclose(found.policy * SIMULATIONS, np.round(found.policy * SIMULATIONS), atol=1e-6)
    np.testing.assert_allclose(found.value, found.policy @ REWARDS, rtol=1e-5)
