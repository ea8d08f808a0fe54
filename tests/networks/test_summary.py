"""What a run prints of its networks is what they are: layers in order, and every parameter counted."""

import math

import jax
import pytest
from helpers.registered import OWN_ALGORITHMS

import jaxrl
from jaxrl import networks
from jaxrl.core.types import EnvSpec
from jaxrl.networks.network_summary import summary

VECTORS = jaxrl.spaces.Box(-1.0, 1.0, (4,))
IMAGES = jaxrl.spaces.Box(0.0, 1.0, (10, 10, 4))
BOTH = jaxrl.spaces.Dict({"image": IMAGES, "vector": VECTORS})
MANY = jaxrl.spaces.Discrete(6)
BOX = jaxrl.spaces.Box(-1.0, 1.0, (2,))
CASES = [
    (networks.ActorCritic(), VECTORS, MANY, "policy 64, 64, 6; value 64, 64, 1"),
    (networks.ActorCritic(shared=True), VECTORS, MANY, "64, 64; policy 6; value 1"),
    (networks.ActorCritic(core=networks.GRU(8)), VECTORS, MANY, "policy 64, 64, GRU 8, 6; value 64, 64, GRU 8, 1"),
    (networks.ActorCritic(core=networks.LSTM(8), shared=True), IMAGES, BOX, "conv 16, 128, LSTM 8; policy 2; value 1"),
    (
        networks.ActorCritic(core=networks.MinGRU(8, layers=3), shared=True),
        VECTORS,
        MANY,
        "64, 64, 3 x MinGRU 8; policy 6; value 1",
    ),
    (
        networks.ActorCritic(shared=True, head_widths=(5, 7)),
        VECTORS,
        MANY,
        "64, 64; policy 5, 7, 6; value 5, 7, 1",
    ),
    (networks.Actor(), VECTORS, BOX, "256, 256, 2 + 2"),
    (networks.Actor(stochastic=False, widths=(8,)), VECTORS, BOX, "8, 2"),
    (networks.Critic(ensemble=3, widths=(8,)), VECTORS, BOX, "3 x 8, 1"),
    (
        networks.QNetwork(head=networks.ActionValues(dueling=True, widths=(5,), noisy=True)),
        VECTORS,
        MANY,
        "64, 64; advantage 5, 6; state_value 5, 1",
    ),
    (networks.ActorCritic(networks.MLP((7, 7, 7)), shared=True), VECTORS, MANY, "3 x 7; policy 6; value 1"),
]


@pytest.mark.parametrize(("network", "observations", "actions", "layers"), CASES)
def test_layers_are_in_order_and_parameters_are_counted(network, observations, actions, layers):
    spec = EnvSpec("test", observations, actions)
    network = networks.resolve_network(network, spec)
    params, _ = jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert summary(network, spec) == f"{type(network).__name__}, layers {layers}; {count:,} parameters"


@pytest.mark.long
@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_every_network_of_every_algorithm_has_a_line(name):
    for actions in (MANY, BOX):
        for observations in (VECTORS, BOTH):
            spec = EnvSpec("test", observations, actions)
            algo = OWN_ALGORITHMS[name]().resolve(spec, 8)
            if algo.validate(spec, 8, 1):
                continue
            for network in (x for x in vars(algo).values() if hasattr(x, "torso")):
                line = summary(network, spec)
                assert "layers" in line and "()" not in line and line.endswith(" parameters")
