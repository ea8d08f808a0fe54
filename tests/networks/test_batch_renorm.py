"""Batch renormalization against numpy in float64, written from the paper's equations (Ioffe, 2017, algorithm 1)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.oracle import gradient
from jax.sharding import PartitionSpec

from jaxrl.core import spaces
from jaxrl.core.shared_batch import shared_batch
from jaxrl.core.types import EnvSpec, NetworkInputs
from jaxrl.networks import MLP, Actor, Critic, MinAtarCNN, QNetwork
from jaxrl.networks.layers import BatchRenorm
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.replicas import MeshReplicas

FEATURES, WARM_UP = 3, 2
SCALE, BIAS = np.float64([0.5, 1.5, -2.0]), np.float64([0.1, 0.0, -1.0])
LAYER = functools.partial(BatchRenorm, FEATURES, momentum=0.9, epsilon=1e-2, r_max=1.5, d_max=0.5, warm_up=WARM_UP)


def batches(count=5):
    """Of means and deviations that differ by feature and batch, so that limits are met and are not."""
    rng = np.random.default_rng(0)
    means, deviations = rng.normal(0.0, 1.0, (count, 1, FEATURES)), rng.uniform(0.5, 3.0, (count, 1, FEATURES))
    return means + deviations * rng.normal(size=(count, 8, FEATURES))


def training(x, state):
    """The output in training, the ratio and the distance that were corrected, and the state after."""
    mean, var, seen = state
    batch_mean, batch_var = x.mean(axis=0), x.var(axis=0)
    deviation, running = np.sqrt(batch_var + 1e-2), np.sqrt(var + 1e-2)
    r, d = np.ones(FEATURES), np.zeros(FEATURES)
    if seen >= WARM_UP:
        r, d = np.clip(deviation / running, 1 / 1.5, 1.5), np.clip((batch_mean - mean) / running, -0.5, 0.5)
    after = 0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * batch_var, seen + 1
    return ((x - batch_mean) / deviation * r + d) * SCALE + BIAS, (r, d), after


def layer(**settings):
    made = LAYER(**settings)
    made.scale[...], made.bias[...] = jnp.asarray(SCALE, jnp.float32), jnp.asarray(BIAS, jnp.float32)
    return made


def test_outputs_and_running_statistics_are_the_papers():
    made, state, clipped, inside = layer(), (np.zeros(FEATURES), np.ones(FEATURES), 0), 0, 0
    for x in batches():
        # Time and batch are one; in evaluation the running statistics count, and stay.
        shaped = jnp.asarray(x, jnp.float32).reshape(2, 4, FEATURES)
        made.eval()
        expected = (x - state[0]) / np.sqrt(state[1] + 1e-2) * SCALE + BIAS
        np.testing.assert_allclose(made(shaped).reshape(8, FEATURES), expected, rtol=1e-4, atol=1e-5)
        made.train()
        expected, (r, d), state = training(x, state)
        np.testing.assert_allclose(made(shaped).reshape(8, FEATURES), expected, rtol=1e-4, atol=1e-5)
        for found, wanted in zip((made.mean, made.var, made.batches), state, strict=True):
            np.testing.assert_allclose(found[...], wanted, rtol=1e-5, atol=1e-6)
        if state[2] > WARM_UP:
            at_limit = np.concatenate([np.isin(r, (1 / 1.5, 1.5)), np.isin(d, (-0.5, 0.5))])
            clipped, inside = clipped + at_limit.sum(), inside + (~at_limit).sum()
    assert clipped and inside, "both sides of the limits are met"


@pytest.mark.long
@pytest.mark.parametrize("seen", [0, WARM_UP])
def test_no_gradient_passes_through_the_correction(seen):
    x, slope = batches(1)[0], np.random.default_rng(1).normal(size=(8, FEATURES))
    mean, var = np.float64([0.3, -0.2, 0.1]), np.float64([1.1, 0.9, 2.0])
    _, (r, d), _ = training(x, (mean, var, seen))

    def by_hand(x):
        """With the correction of before the change of x."""
        return np.sum(slope * (((x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-2) * r + d) * SCALE + BIAS))

    def ours(x):
        made = layer()
        made.mean[...], made.var[...] = jnp.asarray(mean, jnp.float32), jnp.asarray(var, jnp.float32)
        made.batches[...] = jnp.int32(seen)
        return jnp.sum(jnp.asarray(slope, jnp.float32) * made(x))

    found = jax.grad(ours)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, gradient(by_hand, x), rtol=1e-3, atol=1e-4)


def test_it_is_batch_normalization_where_running_statistics_are_the_batchs():
    x = batches(1)[0]
    made = layer(r_max=100.0, d_max=100.0)
    made.mean[...], made.var[...] = jnp.asarray(x.mean(axis=0), jnp.float32), jnp.asarray(x.var(axis=0), jnp.float32)
    made.batches[...] = jnp.int32(WARM_UP)
    expected = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-2) * SCALE + BIAS
    np.testing.assert_allclose(made(jnp.asarray(x, jnp.float32)), expected, rtol=1e-4, atol=1e-5)


def test_devices_that_share_a_batch_normalize_by_all_of_it():
    structure, *variables = nnx.split(layer(warm_up=0), nnx.Param, nnx.BatchStat)
    x, slope = (jnp.asarray(a, jnp.float32) for a in (batches(1)[0], batches(2)[1]))

    def gradient_and_state(variables, x, slope):
        def loss(x):
            made = nnx.merge(structure, *jax.tree.map(jnp.copy, variables))
            output = made(x)
            return jnp.mean(slope * output), (output, nnx.state(made, nnx.BatchStat))

        return jax.grad(loss, has_aux=True)(x)

    def on_a_device(variables, x, slope):
        with shared_batch(replicas := MeshReplicas("data")):
            slopes, (output, state) = gradient_and_state(variables, x, slope)
        return slopes / replicas.devices, (output, state)

    data, everywhere = PartitionSpec("data"), PartitionSpec()
    shared = jax.shard_map(
        on_a_device,
        mesh=meshes.data_mesh(4),
        in_specs=(everywhere, data, data),
        out_specs=(data, (data, everywhere)),
        check_vma=False,
    )
    found, expected = (jax.jit(f)(variables, x, slope) for f in (shared, gradient_and_state))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


SPEC = EnvSpec("box", spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)))
INPUTS = NetworkInputs(observation=jnp.asarray(np.random.default_rng(2).normal(size=(1, 16, 3)), jnp.float32))


@pytest.mark.long
def test_inputs_of_layers_and_head_are_normalized_in_place_of_what_precedes_activations():
    network = Critic(widths=(4, 5), ensemble=1, normalization="batch_renorm", normalize_inputs=True)
    params, state = network.init(jax.random.key(0), SPEC)
    action = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, (1, 16, 2)), jnp.float32)
    values, trained = network.apply(params, INPUTS, action, spec=SPEC, model_state=state, train=True)
    hidden, head = jax.tree.map(lambda x: np.asarray(x[0], np.float64), (params["hidden"], params["head"]))
    x = np.concatenate([INPUTS.observation[0], action[0]], axis=-1)
    for name in ("0", "1", "features"):
        x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-3)
        np.testing.assert_array_equal(trained["hidden"][f"norm_{name}"]["batches"], [1])
        if name != "features":
            x = np.maximum(x @ hidden[f"layer_{name}"]["kernel"] + hidden[f"layer_{name}"]["bias"], 0.0)
    output = head["advantage"]["output"]
    np.testing.assert_allclose(values[0, 0], x @ output["kernel"] + output["bias"], rtol=1e-3, atol=1e-4)
    plain = Critic(widths=(4, 5), ensemble=1, normalization="batch_renorm").init(jax.random.key(0), SPEC)[0]
    assert "norm_features" not in plain["hidden"] and plain["hidden"]["norm_0"]["scale"].shape == (1, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "network", [Actor(normalization="batch_renorm"), Actor(normalization="layer", normalize_inputs=True)], ids=str
)
def test_policies_have_it_too(network):
    params, state = network.init(jax.random.key(0), SPEC)
    norms = [name for name in params["hidden"] if name.startswith("norm")]
    assert len(norms) == 2 + network.normalize_inputs
    assert (state == ()) == (network.normalization == "layer")


@pytest.mark.long
@pytest.mark.parametrize("torso", [MLP((4,), normalization="batch_renorm"), MinAtarCNN(normalization="batch_renorm")])
def test_torsos_normalize_a_whole_batch(torso):
    shape = (10, 10, 2) if isinstance(torso, MinAtarCNN) else (3,)
    spec = EnvSpec("x", spaces.Box(0, 1, shape), spaces.Discrete(2))
    network = QNetwork(torso)
    params, state = network.init(jax.random.key(0), spec)
    inputs = NetworkInputs(observation=jnp.ones((2, 3, *shape), jnp.float32))
    _, _, trained = network.apply(params, inputs, (), spec=spec, model_state=state, train=True)
    counts = [x for x in jax.tree.leaves(trained) if x.dtype == jnp.int32]
    assert counts and all(int(x) == 1 for x in counts)
