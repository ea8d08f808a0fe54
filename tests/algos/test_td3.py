"""TD3 and DDPG: resets, the delay, runs side by side. Their updates: `test_oracles.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import DDPG, SAC, SPEC, TD3, initial, transitions, updated

from jaxrl.algos.resets import Resets
from jaxrl.core.schedules import resolve_schedules
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(0)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("algo", [TD3, SAC], ids=["td3", "sac"])
def test_where_a_reset_is_due_all_that_is_learned_begins_anew(algo):
    """The statistics, the counts and what was collected stay (Nikishin et al., 2022, arXiv:2205.07802)."""
    algo, batch = algo.replace(normalize_observation=True, resets=Resets(at=(2, 9))), transitions()
    state = updated(algo, initial(algo), batch, KEY)[0]
    usual, reset = (updated(one, state, batch, KEY)[0] for one in (algo.replace(resets=Resets(at=(1, 3))), algo))
    resolved = resolve_schedules(algo, jnp.float32(0))
    anew = resolved.init(jax.random.fold_in(KEY, 2**31 - 1), SPEC)
    kept = {name: getattr(usual, name) for name in ("statistics", "updates", "policy_loss") if hasattr(usual, name)}
    assert int(reset.updates) == 2 and same(reset, anew.replace(**kept))
    assert not same(reset.critic, usual.critic) and not same(reset.statistics, state.statistics)


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
