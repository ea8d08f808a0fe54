"""PQN trains, also with a core, and its default network suits the observations. Its update: `test_whole_updates.py`."""

import jax
import numpy as np
import pytest
from helpers.programs import ENV, SMALL

import jaxrl
from jaxrl.algos.q_learning import Ladder
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec
from jaxrl.networks import GRU, MLP, MinAtarCNN, NatureCNN, QNetwork


@pytest.mark.long
@pytest.mark.parametrize("core", [None, GRU(4)])
def test_pqn_trains_and_stays_finite(core):
    algo = jaxrl.PQN(rollout_length=8, epochs=2, minibatches=2, ladder=Ladder(), network=QNetwork(SMALL, core=core))
    result = jaxrl.train(algo, ENV, total_steps=512, num_envs=8, evaluate_every=0, progress=False)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.learner.network.params))
    assert result.state.learner.updates == 8


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
