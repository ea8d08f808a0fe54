"""PQN: its targets are Q(lambda) of the network that acted, its minibatches every row; recurrent by its network."""

import jax
import numpy as np
import pytest
from helpers.programs import ENV, SMALL
from helpers.tiers import few

import jaxrl
from jaxrl import networks
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec
from jaxrl.networks import GRU, MLP, ActionValues, CategoricalValues, MinAtarCNN, NatureCNN, QNetwork

SPEC = EnvSpec("test", spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4))


@pytest.mark.long
@pytest.mark.parametrize("core", few([None, GRU(4)], None))
def test_pqn_trains_and_stays_finite(core):
    algo = jaxrl.PQN(rollout_length=8, epochs=2, minibatches=2, ladder=True, network=QNetwork(SMALL, core=core))
    result = jaxrl.train(algo, ENV, total_steps=512, num_envs=8, evaluate_every=0, progress=False)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.learner.network.params))
    assert result.state.learner.updates == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"network": QNetwork(head=CategoricalValues())}, ["expected values", "or DQN"]),
        ({"network": QNetwork(head=ActionValues(noisy=True))}, ["noise", "or DQN"]),
        ({"minibatches": 3}, ["minibatches=3"]),
    ],
)
def test_settings_that_do_not_go_together(fields, words):
    said = "\n".join(jaxrl.PQN(**fields).validate(SPEC, 8, 1))
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("space", "torso"),
    [
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), NatureCNN(normalization="layer")),
        (spaces.Box(0, 1, (10, 10, 4), np.bool_), MinAtarCNN(normalization="layer")),
        (spaces.Box(-1.0, 1.0, (3,)), MLP((128, 128), "relu", "layer")),
    ],
    ids=["atari", "minatar", "vector"],
)
def test_the_default_network_suits_the_observations_and_has_layer_normalization(space, torso):
    """Before, of every space it was an MLP, on Atari one over 28,224 pixels."""
    resolved = jaxrl.PQN().resolve(EnvSpec("test", space, spaces.Discrete(4)), 8)
    assert resolved.network == QNetwork(torso)
    with_core = jaxrl.PQN(network=QNetwork(core=GRU(4))).resolve(EnvSpec("test", space, spaces.Discrete(4)), 8)
    assert with_core.network == QNetwork(torso, core=GRU(4))
    own = QNetwork(MLP((4,)))
    assert jaxrl.PQN(network=own).resolve(EnvSpec("test", space, spaces.Discrete(4)), 8).network == own


def test_continuous_actions_are_refused():
    spec = EnvSpec("test", spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-1.0, 1.0, (2,)))
    assert "Discrete action space" in "\n".join(jaxrl.PQN(network=QNetwork(networks.MLP((4,)))).validate(spec, 8, 1))
