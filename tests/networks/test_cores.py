"""Recurrent cores: an unroll is its steps, and starts again wherever an episode does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.core.errors import ConfigError
from jaxrl.networks import GRU, LSTM

T, B, INPUTS, WIDTH = 7, 3, 2, 4
CORES = [GRU(WIDTH), LSTM(WIDTH)]


def batched(carry):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), carry)


@pytest.fixture(params=CORES, ids=["gru", "lstm"], scope="module")
def unroll(request):
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: request.param.build(INPUTS, nnx.Rngs(params=0))))
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.5, x.dtype), state)
    module = nnx.merge(graph, state)
    call = jax.jit(lambda x, first, carry: nnx.merge(graph, state)(x, first, carry))
    return request.param, module, call


def inputs():
    x = jax.random.normal(jax.random.key(1), (T, B, INPUTS))
    carry_noise = jax.random.normal(jax.random.key(2), (B, WIDTH))
    return x, carry_noise


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_step(core, module, x, carry):
    """The equations of the papers, with the module's own parameters, in float64."""
    w, b = (np.asarray(p[...], np.float64) for p in (module.input.kernel, module.input.bias))
    u = np.asarray(module.recurrent.kernel[...], np.float64)
    wx = np.split(np.asarray(x) @ w + b, w.shape[1] // WIDTH, axis=-1)
    if isinstance(core, GRU):
        uh = np.split(carry @ u, 3, axis=-1)
        reset, update = sigmoid(wx[0] + uh[0]), sigmoid(wx[1] + uh[1])
        candidate = np.tanh(wx[2] + reset * (uh[2] + np.asarray(module.candidate_bias[...])))
        hidden = (1 - update) * candidate + update * carry
        return hidden, hidden
    uh = np.split(carry["hidden"] @ u, 4, axis=-1)
    write, output = sigmoid(wx[0] + uh[0]), sigmoid(wx[1] + uh[1])
    keep, candidate = sigmoid(wx[2] + uh[2] + 1.0), np.tanh(wx[3] + uh[3])
    cell = keep * carry["cell"] + write * candidate
    hidden = output * np.tanh(cell)
    return {"cell": cell, "hidden": hidden}, hidden


def test_unroll_follows_the_equations_and_restarts_by_hand(unroll):
    core, module, call = unroll
    x, noise = inputs()
    first = np.zeros((T, B), bool)
    first[0, 1] = first[3, 0] = first[3, 2] = first[6, 0] = True
    carry = jax.tree.map(lambda c: c + noise, batched(core.initial_carry()))
    got, got_carry = call(x, jnp.asarray(first), carry)
    assert got.shape == (T, B, WIDTH)
    now = jax.tree.map(lambda c: np.asarray(c, np.float64), carry)
    for t in range(T):
        now = jax.tree.map(lambda c, t=t: np.where(first[t][:, None], 0.0, c), now)
        now, expected = numpy_step(core, module, x[t], now)
        np.testing.assert_allclose(got[t], expected, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got_carry, now)


def test_unroll_is_its_single_steps(unroll):
    core, _, call = unroll
    x, noise = inputs()
    first = jnp.zeros((T, B), bool).at[2, 1].set(True)
    carry = jax.tree.map(lambda c: c + noise, batched(core.initial_carry()))
    whole, whole_carry = call(x, first, carry)
    for t in range(T):
        step, carry = call(x[t : t + 1], first[t : t + 1], carry)
        np.testing.assert_allclose(step[0], whole[t], rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), carry, whole_carry)


@pytest.mark.long
def test_nothing_leaks_over_a_reset(unroll):
    core, _, call = unroll
    x, noise = inputs()
    first = jnp.zeros((T, B), bool).at[4].set(True)
    start = jax.tree.map(lambda c: c + noise, batched(core.initial_carry()))
    gradient = jax.grad(lambda x, c: jnp.sum(call(x, first, c)[0][4:] ** 2), argnums=(0, 1))(x, start)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient[1]))
    assert np.all(np.asarray(gradient[0][:4]) == 0) and np.all(np.any(np.asarray(gradient[0][4:]) != 0, axis=-1))


def test_one_step_is_no_loop(unroll):
    core, module, _ = unroll
    carry = batched(core.initial_carry())
    one, many = (str(jax.make_jaxpr(module)(jnp.zeros((t, B, INPUTS)), jnp.zeros((t, B), bool), carry)) for t in (1, 2))
    assert "scan" not in one and "scan" in many


def test_carries_are_separate_buffers():
    carry = LSTM(2).initial_carry()
    assert carry["cell"].unsafe_buffer_pointer() != carry["hidden"].unsafe_buffer_pointer()


def test_gates_are_orthogonal_each():
    kernel = np.asarray(GRU(WIDTH).build(INPUTS, nnx.Rngs(params=0)).recurrent.kernel[...])
    for gate in np.split(kernel, 3, axis=1):
        np.testing.assert_allclose(gate @ gate.T, np.eye(WIDTH), atol=1e-5)


@pytest.mark.parametrize("core", [GRU(0), LSTM(-1)])
def test_width_is_checked(core):
    with pytest.raises(ConfigError, match=r"width=.*at least 1"):
        core.build(2, nnx.Rngs(params=0))
