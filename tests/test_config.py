"""Configurations survive being written as JSON and read back, and reading them runs no code that a file names."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import jaxrl
from jaxrl import config, envs, networks, schedules, spaces
from jaxrl.algos.optimisers import Adam, RAdam, RMSProp
from jaxrl.config import decode, encode
from jaxrl.envs import wrappers
from jaxrl.errors import ConfigError


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


ALGORITHMS = {
    "defaults_ppo": jaxrl.PPO(),
    "defaults_a2c": jaxrl.A2C(),
    "defaults_dqn": jaxrl.DQN(),
    "schedules": jaxrl.PPO(
        learning_rate=schedules.Linear(1e-3, 0.0, 0.7),
        clip=schedules.Cosine(0.2, 0.1),
        entropy_cost=schedules.Exponential(0.01, 1e-4),
        gamma=schedules.PiecewiseConstant(values=(0.9, 0.99), boundaries=(0.5,)),
        value_learning_rate=schedules.Constant(1e-4),
    ),
    "optimisers": jaxrl.A2C(optimiser=RMSProp(decay=0.9), max_grad_norm=None),
    "recurrent": jaxrl.PPO(
        optimiser=Adam(b1=0.8),
        network=networks.ActorCritic(
            torso=networks.MLP((32, 16)), core=networks.LSTM(8), shared=True, previous_action=True
        ),
    ),
    "image": jaxrl.DQN(
        optimiser=RAdam(),
        network=networks.QNetwork(torso=networks.MinAtarCNN(), head=networks.ActionValues(dueling=True)),
    ),
    "dictionary": jaxrl.PPO(
        network=networks.ActorCritic(
            torso=networks.DictEncoder({"image": networks.NatureCNN(), "speed": networks.MLP((8,)), "rest": None}),
            core=networks.GRU(4),
        )
    ),
    "impala": jaxrl.PPO(network=networks.ActorCritic(torso=networks.ImpalaResNet(), continuous="tanh")),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms(name):
    algo = ALGORITHMS[name]
    back = there_and_back(algo)
    assert back == algo and type(back) is type(algo)
    assert jax.tree.structure(back) == jax.tree.structure(algo), "the same program, from the same cache"


ENVIRONMENTS = {
    "cartpole": lambda: jaxrl.make("gymnax:CartPole-v1"),
    "parameters": lambda: jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=7, gravity=3.5),
    "constructor": lambda: jaxrl.make("gymnax:DeepSea-bsuite", size=4),
    "minatar": lambda: jaxrl.make("gymnax:Breakout-MinAtar"),
    "pooled": lambda: jaxrl.make("gymnax:MountainCar-v0", auto_reset="pooled"),
    "wrapped": lambda: jaxrl.make(
        "gymnax:Pendulum-v1",
        wrappers=(
            lambda env: wrappers.TimeLimit(env, 9),
            lambda env: wrappers.ActionRepeat(env, 2),
            lambda env: wrappers.FrameStack(env, 3),
        ),
    ),
    "probe": lambda: jaxrl.make("probe:Truncated", continuous=True),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name):
    """What comes back is the same environment: the same program, name and spaces, and the same episodes."""
    env = ENVIRONMENTS[name]()
    back = there_and_back(env)
    assert jax.tree.structure(back) == jax.tree.structure(env)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(env), strict=True):
        np.testing.assert_array_equal(one, other)
    assert back.name == env.name
    assert back.observation_space == env.observation_space and back.action_space == env.action_space

    @jax.jit
    def play(env):
        state, first = env.reset(jax.random.key(0))
        action = env.action_space.sample(jax.random.key(1))
        return first, jax.lax.scan(
            lambda s, key: env.step(s, action, key), state, jax.random.split(jax.random.key(2), 12)
        )[1]

    jax.tree.map(np.testing.assert_array_equal, play(env), play(back))
    assert envs.prepared(back) is not None


@pytest.mark.parametrize(
    "topology", [jaxrl.Anakin(num_envs=12, devices=2), jaxrl.Anakin(shards=None), jaxrl.Sebulba(num_envs=3)], ids=repr
)
def test_topologies(topology):
    assert there_and_back(topology) == topology


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, -1e-30, math.inf, -math.inf, "x", (1, (2.5, None)), {"a": 1, 2: (3,)}, np.dtype("uint8")],
    ids=repr,
)
def test_values(value):
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_nan_and_arrays():
    assert math.isnan(there_and_back(math.nan))
    for array in (
        np.asarray([[1.5, -np.inf], [np.nan, 0.1]], np.float32),
        np.arange(3, dtype=np.uint8),
        np.asarray(True),
        np.zeros((0, 2), np.int32),
    ):
        back = there_and_back(array)
        assert back.dtype == array.dtype and back.shape == array.shape
        np.testing.assert_array_equal(back, array)
    assert there_and_back(np.float32(0.1)) == np.float32(0.1)
    assert there_and_back(jax.numpy.float32(0.1)) == np.float32(0.1)
    assert there_and_back([1, 2]) == (1, 2), "a list comes back as a tuple, which is hashable"


def test_infinite_spaces():
    space = spaces.Box(-np.inf, np.inf, (2,))
    assert there_and_back(space) == space and "Infinity" not in json.dumps(encode(space))


@dataclasses.dataclass(frozen=True)
class Mine:
    """A class of a user's own; its fields are named like the marks that configurations use."""

    array: int = 1
    items: int = 2
    opaque: int = 3


def test_classes_of_a_user_must_be_registered():
    with pytest.raises(ConfigError, match="register_class"):
        there_and_back(Mine())
    try:
        assert config.register_class(Mine) is Mine
        assert there_and_back((Mine(5), Mine(items=7))) == (Mine(5), Mine(items=7))
    finally:
        config._REGISTERED.clear()


def test_what_a_file_names_is_not_run():
    for name, words in (
        ("os:system", "not one that jaxrl knows"),
        ("subprocess:Popen", "not one that jaxrl knows"),
        ("jaxrl.training:train", "is not a dataclass"),
        ("jaxrl.loop:np.load", "is not a dataclass"),
        ("jaxrl.nothing:Here", "another version of jaxrl"),
        ("jaxrl.algos.ppo:Nothing", "another version of jaxrl"),
    ):
        with pytest.raises(ConfigError, match=words):
            decode({"type": name})
    with pytest.raises(ConfigError, match="has no field colour"):
        decode({"type": "jaxrl.networks.torsos:MLP", "colour": 1})
    with pytest.raises(ConfigError, match="has the keys strange"):
        decode({"strange": 1})


def test_what_cannot_be_written_says_so_when_it_is_read():
    with pytest.raises(ConfigError, match=r"<function.*could not be written[\s\S]*algo=..., env=..."):
        there_and_back(test_values)
