"""A user's own NNX, Linen and Equinox networks: shapes, a gradient step that helps, unrolling, and errors."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.tiers import one_quick

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import EnvSpec, NetworkInputs
from jaxrl.networks import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    TanhGaussian,
    from_equinox,
    from_linen,
    from_nnx,
)

T, B, WIDTH = 4, 3, 5
DISCRETE = EnvSpec("discrete", spaces.Box(-1, 1, (2,)), spaces.Discrete(3))
BOX = EnvSpec("box", spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,)))


def inputs(first=()):
    rng = np.random.default_rng(0)
    begins = jnp.zeros((T, B), bool)
    for index in first:
        begins = begins.at[index].set(True)
    observation = jnp.asarray(rng.normal(size=(T, B, 2)), jnp.float32)
    return NetworkInputs(observation, begins)


def evaluate(network, params, read, carry, spec=DISCRETE, model_state=()):
    """Outputs and the next carry, not as in training."""
    return network.apply(params, read, carry, spec=spec, model_state=model_state, train=False)[:2]


def hidden():
    return jnp.zeros((WIDTH,), jnp.float32)


class NNXModule(nnx.Module):
    """Policy and value on one layer held in a list; with `carried`, added to the carry."""

    def __init__(self, spec, rngs, carried=False):
        self.layers = nnx.List([nnx.Linear(2, WIDTH, rngs=rngs)])
        self.policy = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.value = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.carried = carried

    def __call__(self, x, carry=None):
        x = nnx.tanh(self.layers[0](x) + (carry if self.carried else 0))
        output = self.policy(x), self.value(x)
        return (output, x) if self.carried else output


class LinenModule(nn.Module):
    carried: bool = False

    @nn.compact
    def __call__(self, x, carry=None):
        x = nn.tanh(nn.Dense(WIDTH)(x) + (carry if self.carried else 0))
        output = nn.Dense(3)(x), nn.Dense(1)(x)
        return (output, x) if self.carried else output


class EquinoxModule(eqx.Module):
    body: eqx.nn.Linear
    policy: eqx.nn.Linear
    value: eqx.nn.Linear
    scale: np.ndarray
    carried: bool = eqx.field(static=True)

    def __init__(self, spec, key, carried=False):
        a, b, c = jax.random.split(key, 3)
        self.body, self.policy = eqx.nn.Linear(2, WIDTH, key=a), eqx.nn.Linear(WIDTH, 3, key=b)
        self.value = eqx.nn.Linear(WIDTH, "scalar", key=c)
        self.scale = np.arange(1, 2)  # integers: not a parameter
        self.carried = carried

    def __call__(self, x, carry=None):
        x = jnp.tanh(self.body(x) * self.scale + (carry if self.carried else 0))
        output = self.policy(x), self.value(x)
        return (output, x) if self.carried else output


def networks(carried):
    options = {"carry": hidden} if carried else {}
    return {
        "nnx": from_nnx(lambda spec, rngs: NNXModule(spec, rngs, carried), **options),
        "linen": from_linen(LinenModule(carried), **options),
        "equinox": from_equinox(lambda spec, key: EquinoxModule(spec, key, carried), **options),
    }


@pytest.mark.long
@pytest.mark.parametrize("carried", one_quick([False, True], True))
@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_a_gradient_step_helps_and_time_is_unrolled(library, carried):
    network = networks(carried)[library]
    read = inputs(first=[(2, 1)])
    params, state = jax.jit(lambda key: network.init(key, DISCRETE))(jax.random.key(0))
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), network.initial_carry(DISCRETE))
    assert set(params) == {"policy"} and state == () and network.recurrent is carried
    optimizer = optax.sgd(0.05)

    @jax.jit
    def step(params):
        def loss(params):
            output, after, _ = network.apply(params, read, carry, spec=DISCRETE, model_state=(), train=True)
            log_prob = output.distribution.log_prob(jnp.ones((T, B), jnp.int32))
            return jnp.mean(jnp.square(output.value - 1.0)) - jnp.mean(log_prob), (output, after)

        (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, _ = optimizer.update(gradient, optimizer.init(params))
        return optax.apply_updates(params, updates), value, aux, gradient

    new, before, (output, after), gradient = step(params)
    assert step(new)[1] < before
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(gradient))
    assert type(output.distribution) is Categorical and output.value.shape == (T, B)
    assert jax.tree.structure(after) == jax.tree.structure(carry)
    if carried:
        apply = jax.jit(lambda t, c: evaluate(network, params, t, c))
        half, middle = apply(jax.tree.map(lambda x: x[:2], read), carry)
        rest, _ = apply(jax.tree.map(lambda x: x[2:], read), middle)
        np.testing.assert_allclose(jnp.concatenate([half.value, rest.value]), output.value, rtol=1e-5, atol=1e-6)
        afresh, _ = apply(jax.tree.map(lambda x: x[2:], read), carry)
        np.testing.assert_allclose(afresh.value[:, 1], output.value[2:, 1], rtol=1e-5, atol=1e-6)
        assert not np.allclose(afresh.value[:, 0], output.value[2:, 0])
    else:
        last = jax.tree.map(lambda x: x[3:], read)
        alone = jax.jit(lambda p: network.value(p, last, (), spec=DISCRETE, model_state=()))(params)
        np.testing.assert_allclose(alone[0], output.value[3], rtol=1e-5, atol=1e-6)


class GaussianModule(nn.Module):
    state_dependent: bool = False

    @nn.compact
    def __call__(self, x):
        log_std = nn.Dense(2)(x) if self.state_dependent else self.param("log_std", nn.initializers.zeros, (2,))
        return (nn.Dense(2)(x), log_std), nn.Dense(1)(x)


@pytest.mark.parametrize("state_dependent", [False, True])
@pytest.mark.parametrize(("continuous", "kind"), [("gaussian", DiagonalGaussian), ("tanh", TanhGaussian)])
def test_boxes(state_dependent, continuous, kind):
    network = from_linen(GaussianModule(state_dependent), continuous=continuous)
    output, _ = jax.eval_shape(
        lambda key: evaluate(network, network.init(key, BOX)[0], inputs(), (), BOX), jax.random.key(0)
    )
    assert type(output.distribution) is kind
    assert output.distribution.log_std.shape == output.distribution.mean.shape == (T, B, 2)


class PartsModule(nn.Module):
    """What a dictionary with a tuple needs; `parts` of the tuple."""

    parts: int = 2

    @nn.compact
    def __call__(self, x):
        choice = tuple(nn.Dense(size)(x) for size in (3, 5)[: self.parts])
        return {"choice": choice, "amount": (nn.Dense(1)(x), jnp.zeros(1))}, nn.Dense(1)(x)


PARTS = EnvSpec(
    "parts",
    spaces.Box(-1, 1, (2,)),
    spaces.Dict(
        {
            "amount": spaces.Box(-1, 1, (1,)),
            "choice": spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete((2, 3)))),
        }
    ),
)


@pytest.mark.long
def test_actions_of_several_parts():
    network = from_linen(PartsModule())
    params, _ = network.init(jax.random.key(0), PARTS)
    mask = {"choice": (jnp.zeros((T, B, 3), bool).at[..., 1].set(True), None)}
    output, _ = evaluate(network, params, inputs().replace(action_mask=mask), (), PARTS)
    kinds = [type(part) for part in output.distribution.leaves]
    assert kinds == [DiagonalGaussian, Categorical, MultiCategorical] and output.value.shape == (T, B)
    action = output.distribution.mode()
    assert jax.tree.structure(action) == jax.tree.structure(spaces.zeros(PARTS.action_space))
    np.testing.assert_array_equal(action["choice"][0], 1)


def test_action_values_and_masks():
    network = from_linen(nn.Dense(3), outputs="q")
    params, _ = network.init(jax.random.key(0), DISCRETE)
    mask = jnp.zeros((T, B, 3), bool).at[..., 1].set(True)
    values, _ = evaluate(network, params, inputs().replace(action_mask=mask), ())
    np.testing.assert_array_equal(values == np.finfo(np.float32).min, ~mask)
    free, _ = evaluate(network, params, inputs(), ())
    np.testing.assert_allclose(values[..., 1], free[..., 1])


# --- state besides parameters --------------------------------------------------------------------------------------


class NormedNNX(nnx.Module):
    def __init__(self, spec, rngs, carried=False):
        self.norm, self.policy = nnx.BatchNorm(2, momentum=0.5, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)
        self.carried = carried

    def __call__(self, x, carry=None):
        x = self.norm(x)
        output = self.policy(x), x[:, 0]
        return (output, carry + 1.0) if self.carried else output


class NormedLinen(nn.Module):
    carried: bool = False

    @nn.compact
    def __call__(self, x, carry=None, *, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        output = nn.Dense(3)(x), x[:, 0]
        return (output, carry + 1.0) if self.carried else output


class NormedEquinox(eqx.Module):
    norm: eqx.nn.BatchNorm
    policy: eqx.nn.Linear
    carried: bool = eqx.field(static=True)

    def __init__(self, key, carried):
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", momentum=0.5, mode="batch")
        self.policy, self.carried = eqx.nn.Linear(2, 3, key=key), carried

    def __call__(self, x, *others):
        *carry, state = others
        x, state = self.norm(x, state)
        output = self.policy(x), x[0]
        return ((output, carry[0] + 1.0) if self.carried else output), state


def normed(carried):
    options = {"carry": hidden} if carried else {}
    return {
        "nnx": from_nnx(lambda spec, rngs: NormedNNX(spec, rngs, carried), **options),
        "linen": from_linen(NormedLinen(carried), **options),
        "equinox": from_equinox(lambda spec, key: eqx.nn.make_with_state(NormedEquinox)(key, carried), **options),
    }


@pytest.mark.long
@pytest.mark.parametrize("carried", one_quick([False, True]))
@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_batch_statistics_are_model_state(library, carried):
    """In training a batch is normalized by itself and moves the statistics; else they normalize, and stay."""
    network = normed(carried)[library]
    params, state = network.init(jax.random.key(0), DISCRETE)
    assert state != () and not any(x.weak_type for x in jax.tree.leaves(state))
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), network.initial_carry(DISCRETE))
    read = inputs()
    read = read.replace(observation=3.0 * read.observation + 5.0)

    @functools.partial(jax.jit, static_argnums=2)
    def apply(read, state, train):
        return network.apply(params, read, carry, spec=DISCRETE, model_state=state, train=train)

    one = jax.tree.map(lambda x: x[:1], read)
    output, _, trained = apply(one, state, True)
    x = np.asarray(one.observation[0])
    wanted = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(output.value[0], wanted[:, 0], rtol=2e-3, atol=2e-3)
    assert jax.tree.structure(trained) == jax.tree.structure(state)
    frozen, _, kept = apply(one, trained, False)
    jax.tree.map(np.testing.assert_array_equal, kept, trained)
    assert np.abs(np.asarray(frozen.value) - np.asarray(output.value)).max() > 1e-2
    state = trained
    for _ in range(30):
        _, after, state = apply(read, state, True)
    # Statistics of all time steps if feed-forward; of the last ones above all if the module is called step by step.
    frozen, _, _ = apply(read, state, False)
    x = np.asarray(read.observation)
    if not carried:
        wanted = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)))
        np.testing.assert_allclose(frozen.value, wanted[..., 0], rtol=0.1, atol=0.1)
    else:
        np.testing.assert_array_equal(after, np.full((B, WIDTH), T, np.float32))


class Counting(nnx.Module):
    def __init__(self, spec, rngs):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls.value += 1
        return x, x[:, 0]


@pytest.mark.parametrize(
    ("network", "spec", "words"),
    [
        (from_linen(nn.Dense(4), outputs="q"), DISCRETE, ["(batch, 3)", "(1, 4)"]),
        (from_linen(nn.Dense(4), outputs="q"), BOX, ["outputs='q'", "Discrete"]),
        (from_linen(nn.Dense(3), outputs="value"), DISCRETE, ["'value'", "actor_critic"]),
        (from_linen(nn.Dense(3)), DISCRETE, ["pair"]),
        (from_linen(LinenModule()), BOX, ["pair", "mean"]),
        (from_nnx(Counting), DISCRETE, ["besides parameters", "calls", "dropout"]),
        (from_linen(GaussianModule(), continuous="tan"), BOX, ["'tan'", "'tanh'"]),
        (from_linen(PartsModule(1)), PARTS, ["the policy's output['choice']", "a tuple with [0, 1], not ((1, 3),)"]),
        (from_linen(LinenModule()), PARTS, ["must be a dict with ['amount', 'choice'], not (1, 3)"]),
    ],
)
def test_what_does_not_fit_is_said(network, spec, words):
    with pytest.raises(ConfigError) as raised:
        jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    for word in words:
        assert word in str(raised.value)
