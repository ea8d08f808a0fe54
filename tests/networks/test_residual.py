"""Torsos of residual and normalized layers against numpy, and weights that keep their unit norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.oracle import affine, exact
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


def normed(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def layer_normed(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * layer["scale"] + layer["bias"]


def test_bronet():
    """Figure 2 of its paper: a layer normalization after each dense layer, also at the end of what a block adds."""
    module, params = built(BroNet(8, 1))

    def layer(i, x):
        return layer_normed(params[f"norm_{i}"], affine(params[f"layer_{i}"], x))

    x = np.maximum(layer(0, X), 0.0)
    np.testing.assert_allclose(module(jnp.asarray(X, jnp.float32)), x + layer(2, np.maximum(layer(1, x), 0.0)), 1e-4)


def test_simba():
    """Figure 4 of its paper: x + W2 ReLU(W1 norm(x)), and a normalization at the end."""
    module, params = built(SimBa(4, 2, 3))
    x = affine(params["inputs"], X)
    for i in range(2):
        wide = np.maximum(affine(params[f"wide_{i}"], layer_normed(params[f"norm_{i}"], x)), 0.0)
        assert wide.shape == (6, 12)
        x = x + affine(params[f"back_{i}"], wide)
    np.testing.assert_allclose(
        module(jnp.asarray(X, jnp.float32)), layer_normed(params["norm_features"], x), rtol=1e-4, atol=1e-5
    )


def test_simba_v2():
    """Its section 4: to the sphere with a constant of 3, and from there towards the sphere's points of each block."""
    module, params = built(SimBaV2(4, 2, 3))
    x = normed(np.concatenate([X, np.full((6, 1), 3.0)], axis=-1)) @ params["inputs"]["unit_kernel"]
    x = normed(params["scale_inputs"]["factor"] * x)
    for i in range(2):
        wide = np.maximum(params[f"scale_{i}"]["factor"] * (x @ params[f"wide_{i}"]["unit_kernel"]), 0.0)
        goal = normed(wide @ params[f"back_{i}"]["unit_kernel"])
        step = params[f"step_{i}"]["factor"] * np.sqrt(4) / 3  # 1 / 3 at first, of a parameter of 1 / sqrt(4)
        x = normed(x + step * (goal - x))
    x = params["scale_outputs"]["factor"] * (x @ params["outputs"]["unit_kernel"])
    np.testing.assert_allclose(module(jnp.asarray(X, jnp.float32)), x, rtol=1e-4, atol=1e-5)


def test_scales_of_simba_v2_begin_where_its_paper_says():
    module = SimBaV2(8, 3, 4).build(SPACE, nnx.Rngs(params=jax.random.key(0))).dense
    ones = jnp.ones((1, 8))
    np.testing.assert_allclose(module.scale_inputs(ones), np.sqrt(2 / 8), rtol=1e-6)
    np.testing.assert_allclose(module.scale_0(jnp.ones((1, 32))), np.sqrt(2 / 32), rtol=1e-6)
    np.testing.assert_allclose(module.step_2(ones), 1 / 4, rtol=1e-6)
    assert float(module.step_2.factor[0]) == pytest.approx(1 / np.sqrt(8))


def test_unit_mlp():
    """XQC, figure 2: batch normalization of the inputs, and of each layer before its ReLU."""
    module, params = built(UnitMLP((4, 5)))

    def batch_normed(layer, x):
        return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) * layer["scale"] + layer["bias"]

    x = batch_normed(params["norm_inputs"], X)
    for i in range(2):
        x = np.maximum(batch_normed(params[f"norm_{i}"], x @ params[f"layer_{i}"]["unit_kernel"]), 0.0)
    np.testing.assert_allclose(module(jnp.asarray(X, jnp.float32)), x, rtol=1e-4, atol=1e-5)


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
    with pytest.raises(ConfigError, match=f"{type(torso).__name__}"):
        torso.build(spaces.Dict({"a": SPACE}), nnx.Rngs(params=jax.random.key(0)))
