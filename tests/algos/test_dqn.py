"""The equations of the DQN family against numpy written from the papers, and what their fields do."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from helpers.programs import ENV, SMALL
from helpers.updates import projected
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl import networks
from jaxrl.algos import q_learning
from jaxrl.algos.fields import PrioritizedReplay
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.q_learning import Ladder, Returns
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import FrameStack as Stacked
from jaxrl.core.types import EnvSpec
from jaxrl.envs import FrameStack
from jaxrl.networks import (
    ActionValues,
    CategoricalReturns,
    CategoricalValues,
    QNetwork,
    QuantileReturns,
    QuantileValues,
)
from jaxrl.parallel.replicas import SingleReplica

ONE = SingleReplica(1)
SPEC = EnvSpec("test", spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4))


# Compiled: in one program what would be one for each operation.
huber_loss = jax.jit(q_learning.quantile_huber_loss)
munchausen_bonus, soft_returns = jax.jit(Munchausen.bonus), jax.jit(Munchausen.soft_returns)
td_loss, support_metrics = jax.jit(q_learning.td_loss), jax.jit(q_learning.support_metrics, static_argnums=(2, 3, 5))
projection = jax.jit(q_learning.categorical_projection, static_argnums=3)
nearby = jax.jit(q_learning._nearby, static_argnums=2)


def random(*shape, seed=0, scale=1.0):
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scale, np.float32)


softmax = functools.partial(scipy.special.softmax, axis=-1)


# --- equations -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(st.integers(0, 1000), st.floats(-5, 0, width=32), st.floats(1, 5, width=32), st.integers(2, 12))
def test_categorical_projection_is_the_papers(seed, low, high, count):
    atoms, probabilities = random(3, 7, seed=seed, scale=4.0), softmax(random(3, 7, seed=seed + 1))
    got = projection(Returns(jnp.asarray(atoms), jnp.asarray(probabilities)), low, high, count)
    expected = projected(atoms, probabilities, np.linspace(low, high, count))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    on_accelerators = nearby(
        jnp.asarray((np.clip(atoms, low, high) - low) / (high - low) * (count - 1)), probabilities, count
    )
    np.testing.assert_allclose(on_accelerators, expected, atol=2e-5)


def test_what_is_not_a_number_stays_one_in_a_projection():
    """A learner that diverged must show it."""
    assert np.isnan(projection(Returns(jnp.asarray([[np.nan, 1.0]]), jnp.full((1, 2), 0.5)), -2.0, 2.0, 5)).any()


def test_a_projection_keeps_the_mean_within_the_support():
    atoms, probabilities = np.clip(random(5, 9), -2, 2), softmax(random(5, 9, seed=1))
    got = projection(Returns(jnp.asarray(atoms), jnp.asarray(probabilities)), -2.0, 2.0, 21)
    np.testing.assert_allclose(got.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(
        got @ np.linspace(-2, 2, 21, dtype=np.float32), (atoms * probabilities).sum(-1), atol=1e-5
    )


@given(st.integers(0, 1000), st.floats(0.125, 2, width=32))
def test_quantile_huber_loss_is_equation_10(seed, kappa):
    quantiles, targets = random(2, 5, seed=seed), random(2, 3, seed=seed + 1, scale=2.0)
    expected = np.zeros(2)
    for b in range(2):
        for i in range(5):
            for j in range(3):
                u = float(targets[b, j]) - float(quantiles[b, i])
                huber = 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
                expected[b] += abs((i + 0.5) / 5 - (u < 0)) * huber / kappa / 3
    got = huber_loss(jnp.asarray(quantiles), jnp.asarray(targets), kappa)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


def test_the_quantile_loss_is_least_at_the_quantiles():
    draws = np.sort(random(1, 4000))
    quantiles = jnp.asarray(np.quantile(draws[0], (np.arange(4) + 0.5) / 4), jnp.float32)[None]
    gradient = jax.grad(lambda q: huber_loss(q, jnp.asarray(draws), 1e-3)[0])(quantiles)
    np.testing.assert_allclose(gradient, 0.0, atol=2e-3)


@pytest.mark.parametrize("tau", [0.03, 1.0])
def test_munchausen_is_equation_5(tau):
    values, following = random(6, 4), random(6, 4, seed=1)
    action = np.arange(6) % 4
    log_policy = np.log(np.maximum(softmax(np.float64(values) / tau), 1e-300))
    expected = 0.9 * np.clip(tau * log_policy[np.arange(6), action], -1.0, 0.0)
    part = Munchausen(temperature=tau)
    got = munchausen_bonus(part, jnp.asarray(values), jnp.asarray(action))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    policy = softmax(np.float64(following) / tau)
    entropy = -np.sum(policy * np.log(np.maximum(policy, 1e-300)), -1)
    soft = (policy * following).sum(-1) + tau * entropy
    got = soft_returns(part, jnp.asarray(following), jnp.asarray(following))
    np.testing.assert_allclose(got.atoms[:, 0], soft, rtol=1e-4, atol=1e-5)
    quantiles = random(6, 4, 3, seed=2)
    got = soft_returns(part, QuantileReturns(jnp.asarray(quantiles)), jnp.asarray(following))
    expected = np.einsum("ba,ban->bn", policy, quantiles) + tau * entropy[:, None]
    np.testing.assert_allclose(got.atoms, expected, rtol=1e-4, atol=1e-5)


def test_munchausen_is_finite_where_actions_are_forbidden():
    values = networks.heads.mask_values(jnp.ones((2, 3)), jnp.asarray([[True, False, True], [False, False, True]]))
    soft = soft_returns(Munchausen(), values, values).atoms[:, 0]
    np.testing.assert_allclose(soft, [1.0 + 0.03 * np.log(2), 1.0], rtol=1e-5)
    assert np.isfinite(munchausen_bonus(Munchausen(), values, jnp.asarray([0, 2]))).all()


def test_the_ladder_is_horgans():
    begin = jax.vmap(jaxrl.DQN().initial_carry, (None, 0, None))
    found = Ladder().epsilons(0.4, begin(None, jnp.arange(8), 8).ladder_position)
    np.testing.assert_allclose(found, 0.4 ** (1 + 7 * np.arange(8) / 7), rtol=1e-5)
    assert begin(None, jnp.arange(1), 1).ladder_position == 0.0


@pytest.mark.long
def test_values_may_have_a_huber_loss():
    action, values = jnp.asarray([0, 2]), random(2, 3)
    target = Returns(jnp.asarray(random(2, 1, seed=3)), jnp.ones((2, 1)))
    wrong = np.abs(np.asarray(target.atoms)[:, 0] - values[[0, 1], [0, 2]])
    for huber in (0.5 * wrong.min(), wrong.mean(), 2.0 * wrong.max()):
        loss, error = td_loss(jnp.asarray(values), action, target, -2.0, 2.0, 1.0, float(huber))
        linear = huber * (wrong - 0.5 * huber)
        np.testing.assert_allclose(loss, np.where(wrong <= huber, 0.5 * wrong**2, linear), rtol=1e-5)
        np.testing.assert_allclose(error, wrong, rtol=1e-5)


def test_what_the_ends_of_a_support_hold_is_told():
    """A support of -2 to 2 with 5 atoms; the last transition does not count."""
    output = CategoricalReturns(jnp.zeros((4, 3, 5)))
    atoms = jnp.asarray([[-2.0, 2.0], [0.5, 1.5], [3.0, 2.001], [9.0, 9.0]], jnp.float32)
    probabilities = jnp.asarray([[0.25, 0.75], [0.5, 0.5], [0.4, 0.6], [0.5, 0.5]], jnp.float32)
    weight = jnp.asarray([True, True, True, False])
    target = Returns(atoms, probabilities)
    found = support_metrics(output, target, -2.0, 2.0, weight, ONE)
    # 1.5 is halfway between the last two atoms; 2.001 is rounding.
    np.testing.assert_allclose(found["support_edge_mass"], np.mean([1.0, 0.25, 1.0]), rtol=1e-5)
    np.testing.assert_allclose(found["support_clipped_mass"], np.mean([0.0, 0.0, 0.4]), rtol=1e-5)
    assert support_metrics(jnp.zeros((4, 3)), target, -2.0, 2.0, weight, ONE) == {}


def test_every_atom_moves_by_the_n_step_target():
    following = Returns(jnp.asarray(random(3, 5)), jnp.asarray(softmax(random(3, 5, seed=1))))
    rewards, steps = jnp.asarray(random(3, 2)), jnp.asarray([1, 2, 2])
    bootstrap = jnp.asarray([True, True, False])
    got = q_learning.n_step_returns(rewards, steps, bootstrap, following, 0.9)
    for k in range(5):
        expected = q_learning.n_step_target(rewards, steps, bootstrap, following.atoms[:, k], 0.9)
        np.testing.assert_allclose(got.atoms[:, k], expected, rtol=1e-6)
    np.testing.assert_array_equal(got.probabilities, following.probabilities)


# --- runs ----------------------------------------------------------------------------------------------------------


def test_the_noise_of_a_transition_is_its_own_whatever_the_devices():
    together = q_learning.transition_keys(jax.random.key(0), 8, SingleReplica(4))
    second = SimpleNamespace(shards=2, first_shard=2)
    apart = [q_learning.transition_keys(jax.random.key(0), 4, r) for r in (SingleReplica(2), second)]
    np.testing.assert_array_equal(*map(jax.random.key_data, (together, jnp.concatenate(apart))))
    assert len(np.unique(jax.random.key_data(together), axis=0)) == 8


VARIANTS = {
    "noisy": {
        "network": QNetwork(SMALL, head=ActionValues(dueling=True, noisy=True)),
        "epsilon": 0.0,
        "prioritized": PrioritizedReplay(),
    },
    "categorical": {
        "network": QNetwork(SMALL, head=CategoricalValues(5)),
        "prioritized": PrioritizedReplay(),
        "n_step": 3,
        "double": False,
    },
    "quantile": {"network": QNetwork(SMALL, head=QuantileValues(5)), "munchausen": Munchausen(), "ladder": Ladder()},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.long
def test_variants_train_and_stay_finite(fields):
    algo = jaxrl.DQN(capacity=512, min_size=64, batch_size=32, **fields)
    result = jaxrl.train(algo, ENV, total_steps=1024, num_envs=8, evaluate_every=0, progress=False)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.learner.network.params))
    assert result.state.learner.updates > 10


@pytest.mark.long
def test_a_frame_of_stacked_observations_is_kept_once():
    env = jaxrl.make("gymnax:CartPole-v1", wrappers=[lambda env: FrameStack(env, 3)])
    algo = jaxrl.DQN(
        capacity=512,
        min_size=64,
        batch_size=32,
        rollout_length=8,
        frame_stack=Stacked(3),
        network=QNetwork(SMALL),
        replay_ratio=1 / 64,
    )
    result = jaxrl.train(
        algo, env, total_steps=256, num_envs=8, evaluate_every=0, evaluation_episodes=4, progress=False
    )
    stored = [x.shape[2:] for x in jax.tree.leaves(result.state.buffers["replay"].ring.rows.observation)]
    assert stored == [(4,)] and env.observation_space.shape == (12,)
    assert result.state.learner.updates == 4


# --- defaults ------------------------------------------------------------------------------------------------------


def test_what_is_left_open_goes_with_the_rest():
    """The shortest commands of Munchausen and of flashbax's replay need transitions of one step."""
    asked = {}, {"munchausen": Munchausen()}, {"n_step": 2}
    assert [jaxrl.DQN(**fields).resolve(SPEC, 1).n_step for fields in asked] == [3, 1, 2]
    for fields in ({"munchausen": Munchausen()}, {"storage": "flashbax"}):
        assert jaxrl.DQN(**fields).validate(SPEC, 1, 1) == []
        assert jaxrl.DQN(**fields).experience["replay"].n_step == 1
    image = EnvSpec("images", spaces.Box(0, 1, (10, 10, 4)), spaces.Discrete(4))
    resolved = jaxrl.DQN().resolve(image, 1)
    assert resolved.learning_rate == 2.5e-4 and resolved.n_step == 1
    assert jaxrl.DQN().resolve(SPEC, 1).learning_rate == jaxrl.schedules.Linear(1e-3, 0.0)
    with pytest.raises(ConfigError, match=r"DQN.learning_rate is not set"):
        jaxrl.DQN().init(jax.random.key(0), SPEC)
