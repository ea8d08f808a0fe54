"""What curves are called: by what differs, the algorithm and the environment first."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.plots import labels
from jaxrl.plots.labels import Run

PPO = {"type": "algorithm:ppo", "learning_rate": 3e-4, "gamma": 0.99, "rollout_length": 128, "clip": 0.2}
PPO |= {"network": {"type": "network:actorcritic", "torso": {"type": "torso:mlp", "widths": [64, 64]}}}
A2C = {"type": "algorithm:a2c", "learning_rate": 7e-4, "gamma": 0.99}
BOX, WIDE = {"type": "space:box", "low": -1.0}, {"type": "space:box", "low": -2.0}


def run(algorithm=PPO, environment="CartPole-v1", seed=0, suite="gymnax", **settings):
    place = {"suite": suite, "name": environment, "parameters": {"gravity": 9.8}, "observation_space": BOX}
    config = {"algorithm": algorithm, "environment": place, "topology": {"type": "topology:anakin", "num_envs": 8}}
    config = copy.deepcopy(config)
    for name, value in settings.items():
        *parents, last = name.split("__")
        part = config
        for parent in parents or ["algorithm"]:
            part = part[parent]
        part[last] = value
    return Run(f"run{seed}", config, [], seed)


def found(*runs):
    return labels.labels(labels.grouped(runs))


def test_runs_that_differ_in_their_seed_alone_are_one_curve_of_the_algorithms_name():
    groups = labels.grouped([run(seed=0), run(A2C, seed=0), run(seed=1)])
    assert [[one.seed for one in group.runs] for group in groups] == [[0, 1], [0]]
    assert labels.labels(groups) == ["PPO", "A2C"]
    assert found(run(), run(seed=1)) == ["PPO"]


def test_algorithms_are_compared_with_themselves_alone():
    """What PPO has and A2C has not tells no curves apart."""
    runs = [run(), run(learning_rate=1e-3), run(A2C), run(A2C, environment="Acrobot-v1", gamma=0.9)]
    assert found(*runs) == ["PPO, learning_rate=0.0003", "PPO, learning_rate=0.001", "A2C", "A2C"]


def test_titles_are_what_all_runs_share():
    assert labels.title([run(), run(seed=1)]) == "PPO on gymnax:CartPole-v1"
    assert labels.title([run(), run(A2C)]) == "gymnax:CartPole-v1"
    assert labels.title([run(), run(environment="Acrobot-v1")]) == "PPO"
    assert labels.title([run(), run(A2C, environment="Acrobot-v1")]) == ""
    assert labels.title([Run("rows", {}, [])]) == ""
    mine = {"algorithm": {"type": "algorithm:of_mine"}}
    assert labels.title([Run("a", mine, [])]) == "OF_MINE" and found(Run("a", mine, []), Run("b", {}, [])) == [
        "OF_MINE",
        "b",
    ]


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ([{"clip": 0.1}, {"clip": 0.1000001}], ["clip=0.1", "clip=0.1000001"]),
        ([{"clip": 1}, {"clip": True}], ["clip=1", "clip=True"]),
        ([{"clip": None}, {"clip": {"float": "inf"}}], ["clip=None", "clip=inf"]),
        (
            [{"learning_rate": 1e-3}, {"learning_rate": {"type": "schedule:linear", "start": 1e-3, "end": 0.0}}],
            ["learning_rate=0.001", "learning_rate=linear(0.001, 0)"],
        ),
        (
            [{"network__torso": {"type": "torso:mlp", "widths": [64]}}, {"network__torso": {"type": "torso:cnn"}}],
            ["torso=mlp", "torso=cnn()"],
        ),
        # Fields of one name are told apart by what they are of.
        (
            [{"clip": 0.1, "topology__clip": 1}, {"clip": 0.3, "topology__clip": 2}],
            ["algorithm.clip=0.1, topology.clip=1", "algorithm.clip=0.3, topology.clip=2"],
        ),
        # Spaces follow from other settings, and are named where nothing else differs.
        (
            [{}, {"environment__observation_space": WIDE, "environment__parameters__gravity": 1.0}],
            ["gravity=9.8", "gravity=1"],
        ),
        ([{}, {"environment__observation_space": WIDE}], ["low=-1", "low=-2"]),
    ],
)
def test_settings_are_written_as_briefly_as_tells_them_apart(settings, texts):
    runs = [run(**{f"algorithm__{k}" if k.startswith("network") else k: v for k, v in one.items()}) for one in settings]
    assert found(*runs) == texts


VALUES = st.one_of(st.integers(-3, 3), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=3))
NAMES = st.sampled_from(["learning_rate", "gamma", "epochs", "value_learning_rate", "clip_value", "rollout_length"])


@pytest.mark.long
@given(st.lists(st.dictionaries(NAMES, VALUES | st.lists(VALUES, max_size=2), max_size=6), min_size=1, max_size=12))
def test_different_configurations_have_different_labels(configs):
    groups = labels.grouped([Run(str(i), {"algorithm": config}, []) for i, config in enumerate(configs)])
    with_all = [group for group in groups if set(group.runs[0].config["algorithm"]) == set(configs[0])]
    names = labels.labels(with_all)
    assert len(set(names)) == len(with_all)


JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=8)
PARTS = st.sampled_from(["algorithm", "environment", "topology", "type", "suite", "name"])


@pytest.mark.long
@given(st.lists(st.dictionaries(PARTS, JSON | st.dictionaries(PARTS, JSON)), min_size=1, max_size=5))
def test_whatever_a_configuration_holds_it_has_a_label(configs):
    runs = [Run(str(number), config, []) for number, config in enumerate(configs)]
    names = labels.labels(labels.grouped(runs))
    assert all(isinstance(name, str) for name in names) and isinstance(labels.title(runs), str)
