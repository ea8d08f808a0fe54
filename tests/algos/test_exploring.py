"""How Q-learning explores: the share of random steps, how long random actions go on, and where they end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.algos import q_learning
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.spaces import Box, Discrete
from jaxrl.core.types import EnvSpec
from jaxrl.networks import MLP, QNetwork

ENVS, STEPS, ACTIONS = 512, 300, 5


@jax.jit
def scanned(epsilon, persistence, length, masks):
    keys = jax.random.split(jax.random.key(0), (STEPS, ENVS))

    def step(previous, inputs):
        key, number = inputs
        mask = None if masks is None else jnp.broadcast_to(masks[number % len(masks)], (ENVS, ACTIONS))
        action, random = q_learning.persistent_epsilon_greedy(
            key,
            jnp.zeros(ENVS, jnp.int32),
            mask,
            epsilon,
            ACTIONS,
            previous=previous,
            first=jnp.full(ENVS, number % length == 0),
            persistence=persistence,
        )
        return random, (action, random)

    return jax.lax.scan(step, jnp.full(ENVS, -1), (keys, jnp.arange(STEPS)))[1]


def played(epsilon, persistence, length=STEPS, masks=None):
    """Actions, and the random ones, -1 where they are greedy, [STEPS, ENVS]; the greedy action is 0.

    Episodes have `length` steps; `masks` [n, ACTIONS] take turns.
    """
    return jax.tree.map(np.asarray, scanned(epsilon, persistence, length, masks))


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [0.1, 0.6])
@pytest.mark.parametrize("persistence", [0.5, 0.9])
def test_the_share_of_random_steps_is_epsilon(epsilon, persistence):
    action, random = played(epsilon, persistence)
    assert (random >= 0).mean() == pytest.approx(epsilon, abs=0.03)
    np.testing.assert_array_equal(action, np.where(random >= 0, random, 0))
    drawn = np.bincount(random[random >= 0], minlength=ACTIONS)
    np.testing.assert_allclose(drawn / drawn.sum(), 1 / ACTIONS, atol=0.05)


@pytest.mark.parametrize("length", [1, 5])
def test_it_is_epsilon_in_short_episodes_too(length):
    assert (played(0.1, 0.95, length)[1] >= 0).mean() == pytest.approx(0.1, abs=0.01)


def test_it_is_epsilon_where_masks_change():
    masks = jnp.asarray([[True, True, False, False, False], [True, False, True, True, True]])
    action, random = played(0.1, 0.95, masks=masks)
    assert (random >= 0).mean() == pytest.approx(0.1, abs=0.03)
    assert masks[np.arange(STEPS)[:, None] % 2, action].all()


@pytest.mark.parametrize("persistence", [0.5, 0.9])
def test_a_random_action_goes_on_as_often_as_it_should(persistence):
    _, random = played(0.5, persistence)
    before, after = random[:-1], random[1:]
    same = (after == before)[before >= 0].mean()
    # It goes on, or another begins and happens to be the same.
    begins = 0.5 * (1 - persistence) / (1 - 0.5 * persistence)
    assert same == pytest.approx(persistence + (1 - persistence) * begins / ACTIONS, abs=0.02)


def test_epsilon_decides_whatever_the_persistence():
    assert (played(1.0, 0.9)[1] >= 0).all()
    assert (played(0.0, 0.9)[1] == -1).all()


def test_another_random_action_replaces_a_forbidden_one():
    mask = jnp.asarray([[True, True, False], [False, False, True]] * 2)
    keys = jax.random.split(jax.random.key(0), 4)
    action, random = q_learning.persistent_epsilon_greedy(
        keys,
        jnp.zeros(4, jnp.int32),
        mask,
        0.0,
        3,
        previous=jnp.asarray([1, 1, 1, 1]),
        first=jnp.zeros(4, bool),
        persistence=0.999999,
    )
    np.testing.assert_array_equal(action, [1, 2, 1, 2])
    np.testing.assert_array_equal(random, action)


@pytest.mark.long
def test_random_actions_end_with_their_episode():
    spec = EnvSpec("probe", Box(-1.0, 1.0, (4,)), Discrete(3))
    algo = jaxrl.PQN(epsilon=0.0, random_persistence=0.999999, network=QNetwork(MLP((4,)))).resolve(spec, 2)
    carry = jax.vmap(lambda i: algo.initial_carry(spec, i, 2))(jnp.arange(2))
    carry = carry.replace(random_action=jnp.asarray([2, 2]))
    env = jaxrl.make("gymnax:CartPole-v1")
    _, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    timestep = timestep.replace(first=jnp.asarray([True, False]))
    actor = algo.actor(resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(0), spec))
    keys = jax.random.split(jax.random.key(1), 2)
    greedy = algo.act(actor, timestep, carry, keys, spec=spec, explore=False).action
    acted = algo.act(actor, timestep, carry, keys, spec=spec, explore=True)
    np.testing.assert_array_equal(acted.action, [greedy[0], 2])
    np.testing.assert_array_equal(acted.carry.random_action, [-1, 2])


@pytest.mark.parametrize("algo", [jaxrl.DQN, jaxrl.PQN])
def test_without_persistence_nothing_is_carried(algo):
    spec = EnvSpec("probe", Box(-1.0, 1.0, (2,)), Discrete(3))
    carried = algo(random_persistence=0.0).initial_carry(spec, jnp.int32(0), 4)
    assert carried.random_action == ()
    assert algo(random_persistence=0.5).initial_carry(spec, jnp.int32(0), 4).random_action == -1
