"""Policies act as in training, on one observation or many, and refuse what they were not trained on."""

import copy
import pickle
import random

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import ALGORITHMS, ENV, PPO, RECURRENT_PPO
from helpers.tiers import one_quick

from jaxrl import envs, networks
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, NetworkInputs, env_spec
from jaxrl.parallel.rollout import act, first_timestep, with_previous_action
from jaxrl.run.policies.policy import Policy, checked_batch


def policy_of(algo, env=ENV, noise=0.5):
    """An untrained policy whose parameters matter, with statistics that do too."""
    spec = env_spec(envs.prepared(env)) if not isinstance(env, EnvSpec) else env
    algo = resolve_schedules(algo, jnp.float32(1.0))
    learner = algo.init(jax.random.key(0), spec)
    actor = algo.actor(jax.tree.map(lambda x: x + jnp.asarray(0.3, x.dtype) if x.dtype.kind == "f" else x, learner))
    params = jax.tree.map(lambda x: x + noise * jax.random.normal(jax.random.key(0), x.shape), actor.params)
    return Policy(algo, actor.replace(params=params), spec)


OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize("name", one_quick(ALGORITHMS))
def test_one_many_numpy_or_jax(name):
    policy = policy_of(ALGORITHMS[name])
    actions, memory = policy(OBSERVATIONS)
    assert actions.shape == (6,) and actions.dtype == jnp.int32 and set(np.unique(actions)) == {0, 1}
    np.testing.assert_array_equal(policy(jnp.asarray(OBSERVATIONS))[0], actions)
    for observation, action in zip(OBSERVATIONS, actions, strict=True):
        one, carry = policy(observation)
        assert type(one) is int and one == action
        assert jax.tree.map(jnp.shape, carry) == jax.tree.map(lambda x: x.shape[1:], memory)
        assert policy(observation.tolist())[0] == action and policy(observation.astype(np.float64))[0] == action
    assert type(policy.algo).__name__ in repr(policy) and "CartPole" in repr(policy)


def test_what_is_not_an_observation_is_refused():
    policy = policy_of(PPO)
    for wrong, words in (
        (np.zeros(3, np.float32), r"shape \(3,\); it must be \(4,\)"),
        (np.zeros((2, 2, 4), np.float32), r"shape \(2, 2, 4\)"),
        (np.float32(0), r"shape \(\)"),
        (np.zeros(4, np.complex64), "dtype complex64, but the policy was trained on float32"),
        (np.asarray(["a"] * 4), "dtype <U1"),
    ):
        with pytest.raises(ConfigError, match=words):
            policy(wrong)


def test_checked_batch():
    image = spaces.Box(0, 255, (2, 3), np.uint8)
    assert checked_batch(np.zeros((2, 3), np.uint8), image) is None
    assert checked_batch(np.zeros((7, 2, 3), np.uint8), image) == 7
    with pytest.raises(ConfigError, match="float32, .* trained on uint8"):
        checked_batch(np.zeros((2, 3), np.float32), image)
    both = spaces.Dict({"image": image, "speed": spaces.Box(-1.0, 1.0, ())})
    assert checked_batch({"image": np.zeros((2, 3), np.uint8), "speed": np.float32(0)}, both) is None
    assert checked_batch({"image": np.zeros((5, 2, 3), np.uint8), "speed": np.zeros(5, np.float32)}, both) == 5
    for wrong, words in (
        ({"image": np.zeros((5, 2, 3), np.uint8), "speed": np.float32(0)}, "has parts of batch sizes"),
        ({"image": np.zeros((2, 3), np.uint8)}, r"parts \['image', 'speed'\], as in training; found \['image'\]"),
        (np.zeros(3), "found ndarray"),
        ({"image": np.zeros((2, 2), np.uint8), "speed": np.float32(0)}, r"observation\['image'\] has shape \(2, 2\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            checked_batch(wrong, both)


@pytest.mark.long
def test_dictionaries():
    spec = EnvSpec(
        "test:Dict",
        spaces.Dict({"image": spaces.Box(0, 255, (3, 3), np.uint8), "speed": spaces.Box(-1.0, 1.0, (2,))}),
        spaces.Discrete(3),
    )
    encoders = {"image": networks.MLP((8,)), "speed": networks.MLP((8,))}
    policy = policy_of(PPO.replace(network=networks.ActorCritic(torso=networks.DictEncoder(encoders))), spec)
    rng = np.random.default_rng(1)
    batch = {
        "image": rng.integers(0, 255, (5, 3, 3), dtype=np.uint8),
        "speed": rng.normal(size=(5, 2)).astype(np.float32),
    }
    actions, _ = policy(batch)
    assert actions.shape == (5,)
    for i, action in enumerate(actions):
        assert policy({name: x[i] for name, x in batch.items()})[0] == action


def episodes(policy, num_envs, steps_per_env, explore=False):
    """Moments of a few environments, and what the algorithm itself does there as in training."""
    env = envs.prepared(ENV)
    keys = jax.random.split(jax.random.key(5), (steps_per_env, num_envs))
    state, timestep = jax.vmap(env.reset)(keys[0])
    timestep = first_timestep(timestep, policy.spec)
    carry = jax.vmap(lambda i: policy.algo.initial_carry(policy.spec, i, num_envs))(jnp.arange(num_envs))
    act = jax.jit(
        lambda timestep, carry, keys: policy.algo.act(
            policy.actor, timestep, carry, keys, spec=policy.spec, explore=explore
        )
    )
    for tick in range(steps_per_env):
        output = act(timestep, carry, jax.random.split(jax.random.key(tick), num_envs))
        yield timestep, output.action
        state, following = jax.vmap(env.step)(state, output.action, keys[tick])
        timestep, carry = with_previous_action(following, output.action), output.carry


@pytest.mark.long
@pytest.mark.parametrize("explore", [False, True])
def test_memory_is_that_of_training(explore):
    """Recurrent state, previous action and previous reward, over several episodes, for one and for many."""
    policy = policy_of(RECURRENT_PPO, noise=2.0)
    memory, single, forgot, otherwise = None, None, 0, 0
    for tick, (timestep, action) in enumerate(episodes(policy, 3, 30, explore)):
        told = {"first": timestep.first, "reward": timestep.reward}
        key = jax.random.key(tick) if explore else None
        mine, memory = policy(timestep.observation, memory, key=key, **told)
        np.testing.assert_array_equal(mine, action)
        if explore:
            continue
        told = {name: value[1] for name, value in told.items()}
        if single is not None:
            wrong = single.replace(previous_action=1 - single.previous_action)
            otherwise += int(policy(timestep.observation[1], wrong, **told)[0] != action[1])
        one, single = policy(timestep.observation[1], single, **told)
        assert one == action[1]
        forgot += int((policy(timestep.observation)[0] != action).sum())
    if not explore:
        assert forgot > 0 and otherwise > 0, "memory or previous action makes no difference, so this shows nothing"


@pytest.mark.long
def test_an_episode_begins_where_there_is_no_memory():
    policy = policy_of(RECURRENT_PPO)
    _, memory = policy(OBSERVATIONS)
    _, later = policy(OBSERVATIONS, memory)
    again, fresh = policy(OBSERVATIONS, later, first=True)
    np.testing.assert_array_equal(again, policy(OBSERVATIONS)[0])
    jax.tree.map(np.testing.assert_array_equal, fresh, memory)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(later), jax.tree.leaves(memory), strict=True))
    begun = policy.initial_carry(6)
    jax.tree.map(np.testing.assert_array_equal, policy(OBSERVATIONS, begun, first=True)[1], memory)
    single = jax.tree.map(jnp.shape, policy.initial_carry())
    assert single == jax.tree.map(lambda x: x.shape[1:], begun)


@pytest.mark.parametrize("algo", [PPO, RECURRENT_PPO], ids=["feedforward", "recurrent"])
def test_predict_of_stable_baselines3(algo):
    policy, state, carry = policy_of(algo, noise=2.0), None, None
    for start in (True, False, np.arange(6) == 2):
        actions, state = policy.predict(jnp.asarray(OBSERVATIONS), state, episode_start=start)
        expected, carry = policy(OBSERVATIONS, carry, first=start)
        np.testing.assert_array_equal(actions, expected)
        jax.tree.map(np.testing.assert_array_equal, state, carry)
        assert {type(leaf) for leaf in jax.tree.leaves((actions, state))} == {np.ndarray}
    action, single = policy.predict(OBSERVATIONS[0])
    assert action == policy(OBSERVATIONS[0])[0] and type(action) is int
    assert policy.predict(OBSERVATIONS[1], single)[0] == policy(OBSERVATIONS[1], policy(OBSERVATIONS[0])[1])[0]
    sampled = []
    for seed in (1, 1, 2):
        random.seed(seed)
        sampled.append(policy.predict(np.repeat(OBSERVATIONS, 50, axis=0), deterministic=False)[0].tolist())
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.long
def test_a_key_samples():
    policy = policy_of(PPO)
    same = np.broadcast_to(OBSERVATIONS[0], (2000, 4))
    sampled, _ = policy(same, key=jax.random.key(1))
    np.testing.assert_array_equal(sampled, policy(same, key=jax.random.key(1))[0])
    spec = policy.spec
    timestep = first_timestep(jax.vmap(envs.prepared(ENV).reset)(jax.random.split(jax.random.key(0), 1))[1], spec)
    seen = jax.tree.map(lambda x: x[None], timestep.replace(observation=OBSERVATIONS[:1]))
    inputs = NetworkInputs.of_timesteps(seen)
    output, _, _ = policy.algo.network.apply(policy.actor.params, inputs, (), spec=spec, model_state=(), train=False)
    share = jnp.exp(output.distribution.log_prob(jnp.ones((1, 1), jnp.int32)))
    assert abs(float(sampled.mean()) - float(share[0, 0])) < 4 * 0.5 / 2000**0.5
    assert len(np.unique(policy(same)[0])) == 1


def test_action_masks():
    policy = policy_of(PPO)
    free, _ = policy(OBSERVATIONS)
    mask = np.ones((6, 2), bool)
    mask[np.arange(6), np.asarray(free)] = False
    np.testing.assert_array_equal(policy(OBSERVATIONS, action_mask=mask)[0], 1 - free)
    assert policy(OBSERVATIONS[0], action_mask=mask[0])[0] == 1 - free[0]


def test_numpy_gives_what_environments_take():
    """What came in as numpy goes out as such: Gymnasium's own check refuses JAX's arrays."""
    env = gymnasium.make("CartPole-v1")
    policy, memory = policy_of(PPO), None
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        action, memory = policy(observation, memory)
        assert type(action) is int
        observation, *_ = env.step(action)
    actions, _ = policy(OBSERVATIONS)
    assert type(actions) is np.ndarray and actions.dtype == np.int32
    in_jax, _ = policy(jnp.asarray(OBSERVATIONS))
    assert isinstance(in_jax, jax.Array)
    assert isinstance(policy(jnp.asarray(OBSERVATIONS[0]))[0], jax.Array)


def test_boxes_as_environments_take_them():
    env = gymnasium.make("Pendulum-v1")
    policy = policy_of(PPO, envs.make("gymnax:Pendulum-v1"))
    observation, _ = env.reset(seed=0)
    action, _ = policy(observation)
    assert type(action) is np.ndarray and action.dtype == np.float32 and env.action_space.contains(action)
    action *= 0.5  # the caller's own
    env.step(action)


def test_a_step_is_traced_once(monkeypatch):
    """A second policy of the same settings, as `result.policy` is each time, takes what the first compiled."""
    traced = []

    def counted(*arguments, **options):
        traced.append(1)
        return act(*arguments, **options)

    monkeypatch.setattr("jaxrl.run.policies.policy.act", counted)
    algo = PPO.replace(entropy_cost=0.0123)
    first, second = policy_of(algo), policy_of(algo)
    _, memory = first(OBSERVATIONS[0])
    for observation in OBSERVATIONS:
        _, memory = first(observation, memory, reward=1.0, first=False)
        second(observation.astype(np.float64), reward=2)
    assert len(traced) <= 1  # none, where an earlier test has compiled it


@pytest.mark.long
def test_within_compiled_functions():
    policy = policy_of(RECURRENT_PPO)

    @jax.jit
    def twice(observation):
        action, memory = policy(observation)
        return policy(observation, memory)[0], action

    for compiled, plain in zip(twice(OBSERVATIONS), twice.__wrapped__(OBSERVATIONS), strict=True):
        np.testing.assert_array_equal(compiled, plain)
    policy(OBSERVATIONS)  # what it keeps is not of that function


@pytest.mark.long
def test_a_batch_of_nothing_is_a_batch():
    for policy in (policy_of(PPO), policy_of(RECURRENT_PPO)):
        action, carry = policy(OBSERVATIONS[:0])
        assert action.shape == (0,) and action.dtype == np.int32 and type(action) is np.ndarray
        again, _ = policy(jnp.asarray(OBSERVATIONS[:0]), carry)
        assert again.shape == (0,) and isinstance(again, jax.Array)
        assert jax.tree.map(jnp.shape, carry) == jax.tree.map(jnp.shape, policy.initial_carry(0))


def test_keys_and_masks_of_any_kind():
    policy = policy_of(PPO)
    expected = policy(OBSERVATIONS, key=jax.random.key(0))[0]
    np.testing.assert_array_equal(policy(OBSERVATIONS, key=jax.random.PRNGKey(0))[0], expected)
    for mask in ([False, True], (False, True), np.asarray([False, True]), jnp.asarray([False, True])):
        assert policy(OBSERVATIONS[0], action_mask=mask)[0] == 1
    assert jax.jit(lambda x, key: policy(x, key=key)[0])(OBSERVATIONS, jax.random.key(0)).shape == (6,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"key": 0}, "key=0 must be a single key"),
        ({"key": np.zeros(2, np.uint32)}, "must be a single key"),
        ({"key": jax.random.split(jax.random.key(0))}, "must be a single key"),
        ({"action_mask": [True]}, "action mask .* has the shape"),
        ({"action_mask": [[True, True]]}, r"action_mask is bool\[1, 2\]; it must be bool of shape \(actions,\)"),
        ({"action_mask": [1.0, 0.0]}, "action_mask is float64"),
        ({"action_mask": {"a": [True, True]}}, "action_mask is object"),
        ({"first": [True, False]}, r"first has shape \(2,\)"),
        ({"reward": np.zeros(3)}, r"reward has shape \(3,\)"),
        ({"reward": "high"}, "reward='high' must be a number"),
        ({"carry": 3}, "carry=3 does not belong to this policy"),
        ({"carry": ()}, "does not belong to this policy"),
        ({"carry": "two"}, "the carry does not belong to a single observation"),
        ({"carry": "recurrent"}, "does not belong to this policy"),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(settings, said):
    policy = policy_of(PPO)
    if settings.get("carry") == "two":
        settings = {"carry": policy.initial_carry(2)}
    elif settings.get("carry") == "recurrent":
        settings = {"carry": policy_of(RECURRENT_PPO).initial_carry()}
    with pytest.raises(ConfigError, match=said):
        policy(OBSERVATIONS[0], **settings)


@pytest.mark.parametrize("batch", [-1, 1.5, "2", True])
def test_a_memory_of_no_batch_is_refused(batch):
    with pytest.raises(ConfigError, match="batch="):
        policy_of(PPO).initial_carry(batch)


def test_a_policy_goes_to_another_process_by_pickle():
    policy = policy_of(RECURRENT_PPO)
    for found in (pickle.loads(pickle.dumps(policy)), copy.copy(policy), copy.deepcopy(policy)):
        np.testing.assert_array_equal(found(OBSERVATIONS)[0], policy(OBSERVATIONS)[0])
        assert repr(found) == repr(policy) and found.spec == policy.spec
    unknown = policy_of(PPO.replace(policy_loss=lambda log_ratio, advantage, clip: -advantage))
    with pytest.raises(ConfigError, match="cannot be pickled.*jaxrl.load"):
        pickle.dumps(unknown)
