"""Torsos of residual and normalized layers against numpy, and weights that keep their unit norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import torso_equations
from helpers.oracle import exact
from helpers.refused import raises
from jax.sharding import PartitionSpec

from jaxrl.algos import train_state
from jaxrl.algos.optimizers import Adam
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.shared_batch import shared_batch, weighted_rows
from jaxrl.core.types import EnvSpec, NetworkInputs
from jaxrl.networks import (
    Actor,
    ActorCritic,
    BroNet,
    Critic,
    InvertedResidual,
    SimBa,
    SimBaV2,
    UnitMLP,
)
from jaxrl.networks.layers import BatchNorm
from jaxrl.networks.unit import project
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

SPACE = spaces.Box(-np.inf, np.inf, (3,))
X = np.random.default_rng(0).normal(size=(6, 3))
TORSOS = [InvertedResidual(8, 1, 2), UnitMLP((8, 8)), SimBa(8, 1, 2), SimBaV2(8, 1, 2), BroNet(8, 1)]
KERNELS = {InvertedResidual: 5, UnitMLP: 4, SimBa: 2, SimBaV2: 6, BroNet: 2}  # of unit norm, two of them of the outputs


def built(torso):
    """Its module, of random parameters, as a function of the parameters in float64."""
    module = torso.build(SPACE, nnx.Rngs(params=jax.random.key(0)))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(x + rng.normal(0.0, 0.1, x.shape), jnp.float32), params)
    nnx.update(module, params)
    return module, exact(params)["dense"]


PAPERS = {
    "InvertedResidual": (InvertedResidual(4, 1, 2), torso_equations.inverted_residual),
    "UnitMLP": (UnitMLP((4, 5)), torso_equations.unit_mlp),
    "SimBa": (SimBa(4, 2, 3), torso_equations.simba),
    "SimBaV2": (SimBaV2(4, 2, 3), torso_equations.simba_v2),
    "BroNet": (BroNet(8, 1), torso_equations.bronet),
}


@pytest.mark.parametrize("name", PAPERS)
def test_features_are_those_of_the_papers(name):
    torso, equations = PAPERS[name]
    module, params = built(torso)
    found = module(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(found, equations(params, None, X, slice(None)), rtol=1e-4, atol=1e-5)


def test_scales_of_simba_v2_begin_where_its_paper_says():
    module = SimBaV2(8, 3, 4).build(SPACE, nnx.Rngs(params=jax.random.key(0))).dense
    ones = jnp.ones((1, 8))
    np.testing.assert_allclose(module.scale_inputs(ones), np.sqrt(2 / 8), rtol=1e-6)
    np.testing.assert_allclose(module.scale_0(jnp.ones((1, 32))), np.sqrt(2 / 32), rtol=1e-6)
    np.testing.assert_allclose(module.step_2(ones), 1 / 4, rtol=1e-6)
    assert float(module.step_2.factor[0]) == pytest.approx(1 / np.sqrt(8))


@pytest.mark.parametrize("torso", TORSOS, ids=str)
def test_weights_have_unit_norm_at_first_and_after_steps(torso):
    """Of an on-policy network as well: whatever takes a step need not know."""
    spec = EnvSpec("x", SPACE, spaces.Box(-1, 1, (2,)))
    network, optimizer = Actor(torso=torso, widths=(), gain=None), Adam()(0.1)
    state = train_state.create(*network.init(jax.random.key(0), spec), optimizer)
    gradients = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), jnp.float32), state.params
    )
    after, _ = train_state.apply_gradients(state, gradients, optimizer, SingleReplica())
    for params in (state.params, after.params):
        kernels = 0
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if "unit_kernel" in jax.tree_util.keystr(path):
                kernels += 1
                np.testing.assert_allclose(np.linalg.norm(x, axis=0), 1.0, rtol=1e-5)
        assert kernels == KERNELS[type(torso)]
    biases = [
        x["bias"] for x in (after.params["distribution"]["output"], after.params["distribution"]["log_std_output"])
    ]
    assert all(np.abs(x).min() > 0.05 for x in biases), "they are free"


def test_scale_and_offset_of_a_normalization_share_a_norm():
    params = {
        "norm": {"unit_scale": jnp.float32([[3.0, 0.0]]), "unit_bias": jnp.float32([[0.0, 4.0]])},
        "free": jnp.ones(2),
    }
    found = project(params)
    np.testing.assert_allclose(found["norm"]["unit_scale"], [[0.6 * np.sqrt(2), 0.0]], rtol=1e-6)
    np.testing.assert_allclose(found["norm"]["unit_bias"], [[0.0, 0.8 * np.sqrt(2)]], rtol=1e-6)
    assert found["free"] is params["free"]
    np.testing.assert_allclose(project({"unit_scale": jnp.full(4, 0.5)})["unit_scale"], 1.0, rtol=1e-6)


def test_batch_normalization_leaves_out_what_does_not_count_and_shares_a_batch():
    """Running statistics move by a hundredth; four devices are as one."""
    layer = BatchNorm(3, epsilon=1e-5)
    x, weight = jnp.asarray(X, jnp.float32), jnp.arange(6) < 4
    with weighted_rows(weight):
        found = layer(x)
    mean, var = X[:4].mean(0), X[:4].var(0)
    np.testing.assert_allclose(found, (X - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.mean[...], 0.01 * mean, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(layer.var[...], 0.99 + 0.01 * var, rtol=1e-5)
    layer.eval()
    np.testing.assert_allclose(layer(x), (X - 0.01 * mean) / np.sqrt(0.99 + 0.01 * var + 1e-5), rtol=1e-4, atol=1e-5)
    structure, *variables = nnx.split(BatchNorm(3, epsilon=1e-5), nnx.Param, nnx.BatchStat)

    def on_a_device(x):
        with shared_batch(MeshReplicas("data")):
            return nnx.merge(structure, *jax.tree.map(jnp.copy, variables))(x)

    data = PartitionSpec("data")
    rows = np.random.default_rng(1).normal(size=(8, 3))
    shared = jax.shard_map(on_a_device, mesh=meshes.data_mesh(4), in_specs=data, out_specs=data, check_vma=False)
    whole = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    np.testing.assert_allclose(shared(jnp.asarray(rows, jnp.float32)), whole, rtol=1e-4, atol=1e-5)


def test_the_trunk_reads_observations_and_actions_together():
    spec = EnvSpec("x", SPACE, spaces.Box(-2, 2, (2,)))
    params, state = Critic(trunk=SimBa(8, 1), widths=(), ensemble=2).init(jax.random.key(0), spec)
    assert params["trunk"]["dense"]["inputs"]["kernel"].shape == (2, 5, 8) and state == ()
    assert params["head"]["advantage"]["output"]["kernel"].shape == (2, 8, 1)
    discrete = EnvSpec("x", SPACE, spaces.Discrete(4))
    network = Critic(trunk=SimBa(8, 1), widths=(), ensemble=2)
    params, _ = network.init(jax.random.key(0), discrete)
    inputs = NetworkInputs(observation=jnp.asarray(X, jnp.float32)[None])
    values, _ = network.apply(params, inputs, None, spec=discrete, model_state=(), train=False)
    assert values.shape == (2, 1, 6, 4)


@pytest.mark.parametrize("torso", TORSOS, ids=str)
def test_they_are_torsos_of_any_network_and_refuse_what_they_cannot_read(torso):
    network = ActorCritic(torso)
    params, _ = network.init(jax.random.key(0), EnvSpec("x", spaces.Discrete(4), spaces.Discrete(2)))
    assert params
    raises(
        ConfigError,
        f"{type(torso).__name__}",
        torso.build,
        spaces.Dict({"a": SPACE}),
        nnx.Rngs(params=jax.random.key(0)),
    )
