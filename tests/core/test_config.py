"""Configurations survive being written as JSON and read back, and reading them makes nothing but registered classes."""

import dataclasses
import json
import math

import algorithms
import jax
import numpy as np
import optax
import pytest
from helpers.refused import raises, refused
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl import networks
from jaxrl.algos.base import field_group
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.optimizers import RAdam, RMSProp
from jaxrl.algos.temperature import Temperature
from jaxrl.core import schedules, spaces
from jaxrl.core.config import decode, encode
from jaxrl.core.errors import ConfigError


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


ALGORITHMS = algorithms.ALGORITHMS | {
    "defaults": jaxrl.PPO(),
    "schedules": jaxrl.PPO(
        learning_rate=schedules.Linear(1e-3, 0.0, 0.7),
        clip=schedules.Cosine(0.2, 0.1),
        entropy_cost=schedules.Exponential(0.01, 1e-4),
        gamma=schedules.PiecewiseConstant(values=(0.9, 0.99), boundaries=(0.5,)),
        value_learning_rate=schedules.Constant(1e-4),
    ),
    "optimizers": jaxrl.A2C(optimizer=RMSProp(decay=0.9), max_grad_norm=None),
    "memory": jaxrl.SAC(
        policy=networks.Actor(core=networks.MinGRU(8, layers=2, update_bias=-2.0)),
        critic=networks.Critic(core=networks.LRU(8, max_radius=0.99)),
    ),
    "steps": jaxrl.R2D2(network=networks.QNetwork(core=networks.GTrXL(8, heads=2, memory=5, mlp_width=6))),
    "image": jaxrl.DQN(
        optimizer=RAdam(),
        network=networks.QNetwork(torso=networks.MinAtarCNN(), head=networks.ActionValues(dueling=True)),
    ),
    "dictionary": jaxrl.PPO(
        network=networks.ActorCritic(
            torso=networks.DictEncoder({"image": networks.NatureCNN(), "speed": networks.MLP((8,)), "rest": None}),
            core=networks.LSTM(4),
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


def test_large_arrays_of_one_number_are_short_in_a_file():
    space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    assert there_and_back(space) == space and len(json.dumps(encode(space))) < 300


@dataclasses.dataclass(frozen=True)
class Mine:
    """A class of a user's own; its fields are named like the marks that configurations use."""

    array: int = 1
    items: int = 2
    opaque: int = 3


def scaled(learning_rate):
    return learning_rate


def test_what_a_user_registers_comes_back():
    refused(lambda: there_and_back(Mine()), "jaxrl.register")
    with nothing_registered_for_good():
        assert jaxrl.register(Mine) is Mine and jaxrl.register("my_rule", scaled) is scaled
        assert there_and_back((Mine(5), Mine(items=7))) == (Mine(5), Mine(items=7))
        assert there_and_back({"rule": scaled}) == {"rule": scaled}
        assert encode(Mine())["type"] == "user:Mine" and encode(scaled) == {"registered": "user:my_rule"}
        raises(ConfigError, "did you mean 'Mine'", decode, {"type": "user:Min"})
        raises(ConfigError, "not a dataclass", decode, {"type": "user:my_rule", "learning_rate": 1})
    refused(lambda: decode({"type": "user:Mine"}), "jaxrl.register")


def test_a_function_of_optax_is_an_optimizer_by_name():
    with nothing_registered_for_good():
        jaxrl.register("lion", optax.lion)
        algo = there_and_back(jaxrl.PPO(optimizer=optax.lion))
        assert algo == jaxrl.PPO(optimizer=optax.lion)


def test_files_name_no_modules():
    values = [*ALGORITHMS.values(), jaxrl.Sebulba(), jaxrl.Anakin(), jaxrl.Offline(), spaces.Discrete(2)]
    assert "jaxrl" not in json.dumps([encode(value) for value in values])


def test_what_a_file_names_is_not_imported():
    for name in ("os:system", "subprocess:Popen", "jaxrl.run.training:train", "jaxrl.networks.torsos:MLP", "mlp", ""):
        raises(ConfigError, "is not a registered name", decode, {"type": name})
        raises(ConfigError, "is not a registered name", decode, {"registered": name})
    refused(lambda: decode({"type": "torso:mpl"}), "'mpl'; did you mean 'mlp'")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "torso:mlp", "color": 1}, "has no field color"),
        ({"strange": 1}, "these keys: strange"),
        ({"float": "9"}, "these keys: float"),
        ({"type": 3}, "these keys: type"),
        ({"type": "torso:mlp", "widths": "wide"}, "torso:mlp has a value of the wrong type: widths='wide'"),
        ({"type": "torso:mlp", "widths": [1.5]}, "has a value of the wrong type: widths"),
        ({"type": "torso:mlp", "activation": 3}, "wrong type: activation=3"),
        ({"type": "algorithm:ppo", "network": 3}, "wrong type: network=3"),
        ({"type": "algorithm:ppo", "network": {"type": "torso:mlp"}}, "wrong type: network=MLP"),
        ({"type": "algorithm:ppo", "epochs": True}, "wrong type: epochs=True"),
        ({"type": "algorithm:ppo", "optimizer": "adam"}, "wrong type: optimizer='adam'"),
        ({"type": "schedule:linear", "start": 1.0}, "cannot be created"),
        ({"type": "space:discrete", "n": "many"}, "wrong type: n='many'"),
        ({"array": [1], "shape": [400_000_000, 400], "dtype": "float32"}, "1 values"),
        ({"array": [1, 2], "shape": [3], "dtype": "float32"}, "2 values"),
        ({"array": ["x"], "shape": [1], "dtype": "float32"}, "cannot be read"),
        ({"array": [1], "shape": "large", "dtype": "float32"}, "shape"),
        ({"array": ["x"], "shape": [1], "dtype": "U400000000"}, "cannot have the dtype 'U400000000'"),
        ({"dtype": "object"}, "cannot have the dtype 'object'"),
        ({"dtype": 3}, "cannot have the dtype 3"),
        ({"items": [[[1], 2], 3]}, "these keys: items"),
        ({"items": [[{"dict": {}}, 2]]}, "invalid dictionary"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_jaxrl_did_not_write_is_refused_in_a_line(value, words):
    with pytest.raises(ConfigError, match=words) as caught:
        decode(value)
    assert len(caught.value.problems) == 1 and len(str(caught.value)) < 300


def test_deep_nesting_is_refused():
    value = 1
    for _ in range(100_000):
        value = [value]
    refused(lambda: decode(value), "nested too deeply")


def test_what_cannot_be_written_says_so_when_it_is_read():
    assert " at 0x" not in json.dumps(encode(test_values)), "else a run could not be resumed by another process"
    raises(ConfigError, r"<function[\s\S]*algo=..., env=", there_and_back, test_values)


def test_fields_of_older_configurations_are_those_of_parts():
    with nothing_registered_for_good():

        @jaxrl.register
        @field_group
        class OwnMunchausen(Munchausen):
            """A user's part in place of jaxrl's."""

        own = jaxrl.DQN(munchausen=OwnMunchausen(scale=0.5))
        assert there_and_back(own) == own
    for fields in ({"cross_episodes": False}, {"memory": {"type": "part:memory", "cross_episodes": False}}):
        assert not decode(encode(jaxrl.DQN()) | {"priority_eta": 0.9} | fields).memory.cross_episodes
    written = encode(jaxrl.SAC()) | {"learn_temperature": False}
    for number in (0.1, {"array": [0.1], "shape": [], "dtype": "float64"}):
        assert decode(written | {"temperature": number}) == jaxrl.SAC(
            temperature=Temperature(initial=0.1, learned=False)
        )


def test_removed_fields_that_were_on_are_refused():
    refused(lambda: decode(encode(jaxrl.SAC()) | {"newest": 8}), "newest")
    refused(lambda: decode(encode(jaxrl.CrossQ()) | {"joint_batch": False}), "joint_batch")
