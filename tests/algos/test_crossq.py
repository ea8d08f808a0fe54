"""What is CrossQ's own beside its equations (tests/algos/test_oracles.py): no targets, a delay, runs that resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, CROSSQ, NORMED, QUICK, SPEC, initial, transitions, updated
from helpers.programs import resumed

import jaxrl
from jaxrl.algos.temperature import Temperature
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec
from jaxrl.networks import Actor, Critic

ENV = jaxrl.make("probe:ActionReward", continuous=True)
KEY = jax.random.key(7)


@pytest.mark.long
def test_policy_and_temperature_move_with_every_second_update_and_critics_always():
    state, metrics = initial(CROSSQ), []
    for number in (1, 2, 3, 4):
        new, info = updated(CROSSQ, state, transitions(seed=number), KEY)
        moved = [
            any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
            for pair in ((state.critic, new.critic), (state.policy, new.policy))
        ]
        assert moved == [True, number % 2 == 0]
        assert (float(new.log_temperature.params) != float(state.log_temperature.params)) == (number % 2 == 0)
        metrics.append(float(info.metrics["policy_loss"]))
        state = new
    assert metrics[0] == 0.0 and metrics[1] == metrics[2] != metrics[3], "between steps the last loss is reported"
    assert state.critic.target_params == () and state.critic.target_model_state == ()
    assert int(state.policy.model_state["hidden"]["norm_0"]["batches"]) == 2
    np.testing.assert_array_equal(state.critic.model_state["hidden"]["norm_0"]["batches"], [4, 4])


@pytest.mark.long
def test_discrete_actions_have_exact_expectations():
    """Of four actions whose values are alike, the target is the value and alpha times the entropy."""
    spec = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(4))
    algo = CROSSQ.replace(temperature=Temperature(initial=0.5, learned=False))
    state = algo.init(jax.random.key(0), spec)
    flat = lambda x: jax.tree.map(jnp.zeros_like, x)  # noqa: E731
    state = state.replace(
        policy=state.policy.replace(params=flat(state.policy.params)),
        critic=state.critic.replace(params=flat(state.critic.params)),
    )
    batch = transitions().replace(action=jnp.arange(BATCH, dtype=jnp.int32) % 4, rewards=jnp.ones((BATCH, 1)))
    _, info = updated(algo, state, batch, KEY, spec)
    counts, bootstrap = np.asarray(batch.weight), np.asarray(batch.bootstrap)
    target = 1.0 + 0.99 * np.where(bootstrap, 0.5 * np.log(4.0), 0.0)
    assert float(info.metrics["critic_loss"]) == pytest.approx(np.mean(target[counts] ** 2), rel=1e-5)


def test_it_learns_and_resumes_bit_for_bit(tmp_path):
    """Episodes have one step, worth 1 less the squared distance of the action from 0.5; random ones -0.6 on average."""
    algo = jaxrl.CrossQ(
        **QUICK,
        temperature=Temperature(initial=0.05, learned=False),
        policy=Actor(widths=(32,), **NORMED),
        critic=Critic(widths=(64,), **NORMED),
    )
    whole = resumed(tmp_path, algo, ENV, 4_096, topology=jaxrl.Anakin(num_envs=8, devices=1))
    assert whole.evaluation.return_mean > 0.9
