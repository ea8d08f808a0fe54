"""Recurrent cores: an unroll is its steps, and starts again wherever an episode does."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import core_equations
from helpers.refused import raises

from jaxrl.core.errors import ConfigError
from jaxrl.networks import GRU, LRU, LSTM, GTrXL, MinGRU, scans

T, B, INPUTS, WIDTH = 7, 3, 2, 4
MEMORY = 3  # the unroll is of three blocks of GTrXL's attention, the last not full
CORES = {
    "gru": GRU(WIDTH),
    "lstm": LSTM(WIDTH),
    "mingru": MinGRU(WIDTH, layers=2),
    "mingru_without_bias": MinGRU(WIDTH, update_bias=None),
    "lru": LRU(WIDTH, layers=2),
    "gtrxl": GTrXL(WIDTH, layers=2, heads=2, memory=MEMORY, mlp_width=6),
}


def batched(carry):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), carry)


def some_carry(core):
    """Return a carry `[B, ...]` in the middle of an episode; of GTrXL with 2, 0 and 3 steps in the memory."""
    rng = np.random.default_rng(2)
    draw = {"f": lambda x: rng.normal(size=x.shape), "i": lambda x: np.resize([2, 0, MEMORY], x.shape)}
    return jax.tree.map(lambda x: jnp.asarray(draw[x.dtype.kind](x), x.dtype), batched(core.initial_carry()))


def close(actual, expected):
    """Hold arrays to be equal to 1e-5, of the largest number where that is above 1."""
    largest = max(1.0, float(np.max(np.abs(expected))))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * largest)


@pytest.fixture(params=CORES, scope="module")
def unroll(request):
    core, rng = CORES[request.param], np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: core.build(INPUTS, nnx.Rngs(params=0))))
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.5, x.dtype), state)
    module = nnx.merge(graph, state)
    call = jax.jit(lambda x, first, carry: nnx.merge(graph, state)(x, first, carry))
    return core, module, call


def inputs():
    return jax.random.normal(jax.random.key(1), (T, B, INPUTS))


def test_unroll_follows_the_equations_and_restarts_by_hand(unroll):
    core, module, call = unroll
    x, carry = inputs(), some_carry(core)
    first = np.zeros((T, B), bool)
    first[0, 1] = first[3, 0] = first[3, 2] = first[6, 0] = True
    got, got_carry = call(x, jnp.asarray(first), carry)
    assert got.shape == (T, B, WIDTH)
    now = jax.tree.map(lambda c: np.asarray(c, np.float64), carry)
    for t in range(T):
        now = jax.tree.map(lambda c, t=t: np.where(first[t].reshape(B, *[1] * (c.ndim - 1)), 0.0, c), now)
        now, expected = core_equations.step(core, module, np.asarray(x[t], np.float64), now)
        close(got[t], expected)
    jax.tree.map(close, core_equations.known(core, got_carry), core_equations.known(core, now))


def test_unroll_is_its_single_steps(unroll):
    core, _, call = unroll
    x, carry = inputs(), some_carry(core)
    first = jnp.zeros((T, B), bool).at[2, 1].set(True)
    whole, whole_carry = call(x, first, carry)
    for t in range(T):
        step, carry = call(x[t : t + 1], first[t : t + 1], carry)
        close(step[0], whole[t])
    jax.tree.map(close, carry, whole_carry)


@pytest.mark.long
def test_a_sequence_may_be_cut_anywhere(unroll):
    core, _, call = unroll
    x, carry = inputs(), some_carry(core)
    first = jnp.zeros((T, B), bool).at[0, 2].set(True).at[2, 1].set(True).at[5, 0].set(True)
    whole, whole_carry = call(x, first, carry)
    for cut in (1, 3):
        one, between = call(x[:cut], first[:cut], carry)
        other, last = call(x[cut:], first[cut:], between)
        close(jnp.concatenate([one, other]), whole)
        jax.tree.map(close, last, whole_carry)


@pytest.mark.long
def test_gradients_are_those_of_single_steps(unroll):
    """GTrXL has none through its memory, so its single steps have fewer."""
    core, module, _ = unroll
    if isinstance(core, GTrXL):
        pytest.skip("no gradient goes through the memory")
    graph, state = nnx.split(module)
    first = jnp.zeros((T, B), bool).at[2, 1].set(True).at[5, 0].set(True)
    weights = jax.random.normal(jax.random.key(3), (T, B, WIDTH))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(length, state, x, carry):
        def loss(state, x, carry):
            module, outputs = nnx.merge(graph, state), []
            for t in range(0, T, length):
                output, carry = module(x[t : t + length], first[t : t + length], carry)
                outputs.append(output)
            return jnp.sum(jnp.concatenate(outputs) * weights) + sum(jnp.sum(c) for c in jax.tree.leaves(carry))

        return jax.grad(loss, argnums=(0, 1, 2))(state, x, carry)

    whole, steps = (gradient(length, state, inputs(), some_carry(core)) for length in (T, 1))
    jax.tree.map(close, whole, steps)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(whole))


@pytest.mark.parametrize("core", [MinGRU(8), LRU(8), GTrXL(8, layers=1, heads=2)])
def test_at_their_defaults_an_impulse_is_seen_thirty_steps_later(core):
    """Of the cores for long sequences; MinGRU without a bias has 2^-30 of it."""
    module = core.build(INPUTS, nnx.Rngs(params=0))
    x = jnp.zeros((31, B, INPUTS)).at[0, 1].set(1.0)
    out, _ = jax.jit(module)(x, jnp.zeros((31, B), bool), batched(core.initial_carry()))
    seen = np.ptp(out, axis=1).max(axis=-1)
    assert seen[30] > 1e-3 * seen[0]


@pytest.mark.parametrize("kind", [np.float32, np.complex64])
@pytest.mark.parametrize("reverse", [False, True])
def test_both_forms_of_the_scan_are_the_recurrence(kind, reverse):
    rng = np.random.default_rng(0)
    decay, update = rng.normal(size=(2, 9, B, WIDTH)).astype(kind) * kind(0.5 + 0.5j if kind is np.complex64 else 0.7)
    decay[4, 1] = 0  # where an episode begins
    hidden, expected = np.zeros((B, WIDTH), kind), np.zeros_like(update)
    for t in reversed(range(9)) if reverse else range(9):
        expected[t] = hidden = decay[t] * hidden + update[t]
    for form in (scans._in_parallel, scans._in_turn):
        np.testing.assert_allclose(form(decay, update, reverse=reverse), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("core", [MinGRU(WIDTH), LRU(WIDTH)])
def test_on_accelerators_the_unroll_is_no_loop(core):
    graph, state = nnx.split(core.build(INPUTS, nnx.Rngs(params=0)))

    def loss(state, x, first, carry):
        return jnp.sum(nnx.merge(graph, state)(x, first, carry)[0])

    arguments = (state, inputs(), jnp.zeros((T, B), bool), batched(core.initial_carry()))
    for platform, loops in (("cpu", 2), ("cuda", 0), ("tpu", 0)):  # forwards and backwards
        text = jax.export.export(jax.jit(jax.grad(loss)), platforms=[platform])(*arguments).mlir_module()
        assert text.count("stablehlo.while") == loops, platform


@pytest.mark.long
def test_no_gradient_goes_through_the_memory():
    core = CORES["gtrxl"]
    graph, state = nnx.split(core.build(INPUTS, nnx.Rngs(params=0)))
    carry, first = some_carry(core), jnp.zeros((T, B), bool)

    @jax.jit
    def loss(memory, x):
        return jnp.sum(nnx.merge(graph, state)(x, first, carry | {"memory": memory})[0][0] ** 2)

    of_memory, of_inputs = jax.jit(jax.grad(loss, argnums=(0, 1)))(carry["memory"], inputs())
    assert np.all(np.asarray(of_memory) == 0) and np.all(np.any(np.asarray(of_inputs[0]) != 0, axis=-1))
    assert loss(carry["memory"], inputs()) != loss(-carry["memory"], inputs())  # it reads it


@pytest.mark.long
def test_nothing_leaks_over_a_reset(unroll):
    core, _, call = unroll
    x, start = inputs(), some_carry(core)
    first = jnp.zeros((T, B), bool).at[4].set(True)
    after, last = call(x, first, start)
    other = call(x.at[:4].add(1.0), first, jax.tree.map(lambda c: c + 1, start))
    np.testing.assert_array_equal(after[4:], other[0][4:])
    jax.tree.map(np.testing.assert_array_equal, core_equations.known(core, last), core_equations.known(core, other[1]))
    gradient = jax.grad(lambda x, c: jnp.sum(call(x, first, c)[0][4:] ** 2), argnums=(0, 1), allow_int=True)(x, start)
    floats = [leaf for leaf in jax.tree.leaves(gradient[1]) if leaf.dtype == jnp.float32]
    assert floats and all(np.all(np.asarray(leaf) == 0) for leaf in floats)
    assert np.all(np.asarray(gradient[0][:4]) == 0) and np.all(np.any(np.asarray(gradient[0][4:]) != 0, axis=-1))


def test_one_step_is_no_loop(unroll):
    core, module, _ = unroll
    carry = batched(core.initial_carry())
    one, many = (str(jax.make_jaxpr(module)(jnp.zeros((t, B, INPUTS)), jnp.zeros((t, B), bool), carry)) for t in (1, 2))
    loop = {GRU: "scan", LSTM: "scan", MinGRU: "custom_vjp", LRU: "custom_vjp"}.get(type(core))
    assert loop is None or (loop not in one and loop in many)


def test_carries_are_separate_buffers():
    carry = LSTM(2).initial_carry()
    assert carry["cell"].unsafe_buffer_pointer() != carry["hidden"].unsafe_buffer_pointer()


def test_gates_are_orthogonal_each():
    kernel = np.asarray(GRU(WIDTH).build(INPUTS, nnx.Rngs(params=0)).recurrent.kernel[...])
    for gate in np.split(kernel, 3, axis=1):
        np.testing.assert_allclose(gate @ gate.T, np.eye(WIDTH), atol=1e-5)


@pytest.mark.parametrize("radii", [(0.0, 1.0), (0.9, 0.999)])
def test_eigenvalues_of_the_lru_begin_in_their_ring_and_cannot_leave_the_circle(radii):
    core = LRU(512, min_radius=radii[0], max_radius=radii[1], max_phase=1.0)
    layer = core.build(512, nnx.Rngs(params=0)).layer_0
    radius, phase = np.exp(-np.exp(layer.log_nu[...])), np.exp(layer.log_theta[...])
    assert radii[0] <= radius.min() and radius.max() <= radii[1] and 0.0 <= phase.min() and phase.max() <= 1.0
    # Uniform on the ring: the squares of the radii are (lemma 3.2 of the paper).
    assert np.mean(radius**2) == pytest.approx(np.mean(np.square(radii)), abs=0.05)
    np.testing.assert_allclose(np.exp(2 * np.asarray(layer.log_gamma[...])) + radius**2, 1.0, atol=1e-4)
    for nu in (-20.0, 0.0, 5.0):
        assert np.exp(-np.exp(np.float32(nu))) <= 1.0


@pytest.mark.long
def test_a_layer_of_gtrxl_begins_close_to_the_identity():
    x = jax.random.normal(jax.random.key(0), (5, B, 32))
    far = []
    for bias in (0.0, 2.0, 20.0):
        core = GTrXL(32, layers=1, memory=4, gate_bias=bias)
        output, _ = core.build(32, nnx.Rngs(params=0))(x, jnp.zeros((5, B), bool), batched(core.initial_carry()))
        far.append(float(jnp.linalg.norm(output - x) / jnp.linalg.norm(x)))
    assert far[0] > 2 * far[1] and far[2] < 1e-6


@pytest.mark.parametrize(
    ("core", "problem"),
    [
        (GRU(0), r"width=.*at least 1"),
        (LSTM(-1), r"width=.*at least 1"),
        (MinGRU(0), r"MinGRU.width=.*at least 1"),
        (MinGRU(4, layers=0), r"MinGRU.layers=.*at least 1"),
        (LRU(4, layers=0), r"LRU.layers=.*at least 1"),
        (LRU(4, min_radius=0.9, max_radius=0.5), r"min_radius=0.9 and LRU.max_radius=0.5.*use 0 <= min_radius"),
        (LRU(4, max_phase=7.0), r"max_phase=7.0 must be above 0 and at most 2 pi"),
        (GTrXL(9, heads=2), r"width=9 must be even and divisible by heads=2.*such as 8"),
        (GTrXL(8, memory=0), r"GTrXL.memory=.*at least 1"),
        (MinGRU(4, update_bias=float("nan")), r"MinGRU.update_bias=nan must be a finite number"),
        (GTrXL(8, gate_bias=float("inf")), r"GTrXL.gate_bias=inf must be a finite number"),
        (GTrXL(8, mlp_width=0), r"GTrXL.mlp_width=.*at least 1"),
    ],
)
def test_settings_are_checked(core, problem):
    raises(ConfigError, problem, core.build, 2, nnx.Rngs(params=0))
