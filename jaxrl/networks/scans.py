"""MinGRU and LRU: recurrent cores with a linear recurrence, unrolled over time by a parallel scan.

The recurrence is h_t = a_t h_{t-1} + b_t, element by element; neither a nor b depends on h. Such steps are affine maps,
whose composition is associative, so `jax.lax.associative_scan` computes the states of all T time steps in log T rounds
(Blelloch, 1990). At the beginning of an episode, a_t is set to 0, which resets the state. A single time step is
computed directly.

CPUs have few threads for the rounds, so a loop over the time steps is used, which takes a fifth of the time: a step is
only a multiplication and an addition, because the expensive products are computed before the scan.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry
from jaxrl.networks.cores import Product, entry, gates
from jaxrl.networks.layers import check_finite, check_positive, dense


def linear_scan(decay: jax.Array, update: jax.Array, first: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unroll h_t = decay_t h_{t-1} + update_t over time, resetting h to 0 at the beginning of each episode.

    Args:
      decay, update: coefficients of the recurrence, real or complex, `[T, B, N]`.
      first: bool, `[T, B]`; where it is True, h is reset before the step.
      carry: h before the first time step, `[B, N]`.

    Returns:
      h at every time step, `[T, B, N]`, and h at the last time step, `[B, N]`.
    """
    before = decay[0] * jnp.where(first[0, :, None], jnp.zeros_like(carry), carry)
    if decay.shape[0] == 1:  # acting
        hidden = before + update[0]
        return hidden[None], hidden
    decay = jnp.where(first[..., None], jnp.zeros_like(decay), decay)
    hidden = _states(decay, update.at[0].add(before))
    return hidden, hidden[-1]


@jax.custom_vjp
def _states(decay: jax.Array, update: jax.Array) -> jax.Array:
    """Return h_t = decay_t h_{t-1} + update_t for all t, `[T, ...]`, starting from h = 0."""
    return _scan(decay, update)


def _states_forward(decay, update):
    hidden = _scan(decay, update)
    return hidden, (decay, hidden)


def _states_backward(saved, gradient):
    # The gradient with respect to h_t is the same recurrence backwards in time, so it is computed by another scan.
    # Differentiating the scan itself would store the results of all its rounds.
    decay, hidden = saved
    zero = jnp.zeros_like(hidden[:1])
    gradient = _scan(jnp.concatenate([decay[1:], zero]), gradient, reverse=True)
    return gradient * jnp.concatenate([zero, hidden[:-1]]), gradient


_states.defvjp(_states_forward, _states_backward)


def _scan(decay, update, *, reverse=False):
    forms = {"cpu": partial(_in_turn, reverse=reverse), "default": partial(_in_parallel, reverse=reverse)}
    return jax.lax.platform_dependent(decay, update, **forms)


def _in_parallel(decay, update, *, reverse):
    def compose(earlier, later):
        (decay, update), (next_decay, next_update) = earlier, later
        return next_decay * decay, next_decay * update + next_update

    return jax.lax.associative_scan(compose, (decay, update), reverse=reverse)[1]


def _in_turn(decay, update, *, reverse):
    def step(hidden, time_step):
        hidden = time_step[0] * hidden + time_step[1]
        return hidden, hidden

    return jax.lax.scan(step, jnp.zeros_like(update[0]), (decay, update), reverse=reverse)[1]


# --- MinGRU --------------------------------------------------------------------------------------------------------


class _Stacked(nnx.Module):
    """Stacked layers with linear recurrences, after a linear layer if the size of the inputs is not `width`."""

    def __init__(self, core: "MinGRU | LRU", inputs: int, rngs: nnx.Rngs):
        for name in ("width", "layers"):
            check_positive(f"{type(core).__name__}.{name}", getattr(core, name))
        self.core = core
        self.entry = entry(inputs, core.width, rngs)

    def __call__(self, x: jax.Array, first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        x, carries = x if self.entry is None else self.entry(x), []
        for i in range(self.core.layers):
            x, last = self.layer(i, x, first, carry[:, i])
            carries.append(last)
        return x, jnp.stack(carries, axis=1)

    def layer(self, i: int, x: jax.Array, first: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the outputs `[T, B, width]` of layer `i`, and its carry `[B, ...]` after the last time step."""
        raise NotImplementedError


class _MinGRUModule(_Stacked):
    def __init__(self, core: "MinGRU", inputs: int, rngs: nnx.Rngs):
        super().__init__(core, inputs, rngs)
        check_finite("MinGRU.update_bias", core.update_bias or 0.0)
        self.biased = core.update_bias is not None
        for i in range(core.layers):
            setattr(self, f"layer_{i}", Product(core.width, 3 * core.width, gates(3), rngs))
            if core.update_bias is not None:
                bias = nnx.Param(jnp.full((core.width,), core.update_bias, jnp.float32))
                setattr(self, f"update_bias_{i}", bias)

    def layer(self, i: int, x: jax.Array, first: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        candidate, update, highway = jnp.split(getattr(self, f"layer_{i}")(x), 3, axis=-1)
        candidate = jnp.where(candidate >= 0.0, candidate + 0.5, jax.nn.sigmoid(candidate))
        if self.biased:
            update = update + getattr(self, f"update_bias_{i}")[...][None, None]
        update = jax.nn.sigmoid(update)
        hidden, last = linear_scan(1.0 - update, update * candidate, first, carry)
        return x + jax.nn.sigmoid(highway) * (hidden - x), last


@dataclasses.dataclass(frozen=True)
class MinGRU:
    """Minimal gated recurrent unit (Feng et al., 2024, arXiv:2410.01201), in layers with highway connections.

    z, s = sigmoid(W x);  n = g(W x);  h' = (1 - z) h + z n;  y = s h' + (1 - s) x

    Each W is a separate kernel. The function g(v), which is v + 0.5 for positive v and sigmoid(v) otherwise, keeps h
    positive (appendix B.3 of the paper). As in PufferLib since version 4, layers have highway connections (Srivastava
    et al., 2015, arXiv:1505.00387), which allow stacking layers, and no biases except the bias of z. The gates do not
    read h, because the parallel scan requires a linear recurrence.

    Args:
      width: size of the hidden state of each layer, and of the output.
      layers: number of stacked layers. A linear layer before them maps inputs of another size to `width`.
      update_bias: initial value of the learned bias of z; None: no bias, as in PufferLib. Initially, a state decays to
        half in 38 steps with a bias of -4, and in one step with a bias of 0 or none.
    """

    width: int = 128
    layers: int = 1
    update_bias: float | None = -4.0

    def initial_carry(self) -> Carry:
        return jnp.zeros((self.layers, self.width), jnp.float32)

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _MinGRUModule(self, inputs, rngs)


# --- LRU -----------------------------------------------------------------------------------------------------------


class _LRULayer(nnx.Module):
    def __init__(self, core: "LRU", rngs: nnx.Rngs):
        width = core.width
        low, high = core.min_radius**2, core.max_radius**2
        # Above 0, because the logarithm is taken.
        radius, phase = jax.random.uniform(rngs.params(), (2, width), jnp.float32, 1e-6)
        radius_squared = low + radius * (high - low)
        self.log_nu = nnx.Param(jnp.log(-0.5 * jnp.log(radius_squared)))
        self.log_theta = nnx.Param(jnp.log(core.max_phase * phase))
        self.log_gamma = nnx.Param(0.5 * jnp.log(1.0 - radius_squared))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        # The kernels of the real and the imaginary parts are concatenated.
        self.input = Product(width, 2 * width, nnx.initializers.normal(math.sqrt(0.5 / width)), rngs)
        self.output = Product(2 * width, width, nnx.initializers.normal(math.sqrt(1.0 / width)), rngs)
        self.skip = nnx.Param(jax.random.normal(rngs.params(), (width,), jnp.float32))
        self.glu = dense(width, 2 * width, 1.0, rngs)

    def __call__(self, x: jax.Array, first: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        normalized = self.norm(x)
        radius, phase = jnp.exp(-jnp.exp(self.log_nu[...])), jnp.exp(self.log_theta[...])
        decay = [jnp.broadcast_to(radius * wave(phase), x.shape) for wave in (jnp.cos, jnp.sin)]
        gamma = jnp.exp(self.log_gamma[...])[None, None]
        update = [gamma * part for part in jnp.split(self.input(normalized), 2, axis=-1)]
        (real, imaginary), last = _complex_scan(decay, update, first, [carry[:, 0], carry[:, 1]])
        output = self.output(jnp.concatenate([real, -imaginary], axis=-1)) + self.skip[...][None, None] * normalized
        value, gate = jnp.split(self.glu(jax.nn.gelu(output)), 2, axis=-1)
        return x + value * jax.nn.sigmoid(gate), jnp.stack(last, axis=1)


def _complex_scan(decay, update, first, carry):
    """Apply `linear_scan` to complex numbers, which are passed and returned as pairs (real part, imaginary part)."""
    if len(update[0]) > 1:
        hidden, last = linear_scan(jax.lax.complex(*decay), jax.lax.complex(*update), first, jax.lax.complex(*carry))
        return [hidden.real, hidden.imag], [last.real, last.imag]
    # A single step (acting) is computed without complex numbers, which ONNX does not support.
    real, imaginary = (jnp.where(first[..., None], jnp.zeros_like(part)[None], part[None]) for part in carry)
    hidden = [
        decay[0] * real - decay[1] * imaginary + update[0],
        decay[0] * imaginary + decay[1] * real + update[1],
    ]
    return hidden, [part[0] for part in hidden]


class _LRUModule(_Stacked):
    def __init__(self, core: "LRU", inputs: int, rngs: nnx.Rngs):
        if not 0.0 <= core.min_radius < core.max_radius <= 1.0:
            raise ConfigError(
                f"LRU.min_radius={core.min_radius!r} and LRU.max_radius={core.max_radius!r}: eigenvalues start "
                "in a ring within the unit circle; use 0 <= min_radius < max_radius <= 1, such as 0.9 and 0.999"
            )
        if not 0.0 < core.max_phase <= 2.0 * math.pi:
            raise ConfigError(f"LRU.max_phase={core.max_phase!r} must be above 0 and at most 2 pi (6.283)")
        super().__init__(core, inputs, rngs)
        for i in range(core.layers):
            setattr(self, f"layer_{i}", _LRULayer(core, rngs))

    def layer(self, i: int, x: jax.Array, first: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        return getattr(self, f"layer_{i}")(x, first, carry)


@dataclasses.dataclass(frozen=True)
class LRU:
    """Linear recurrent unit (Orvieto et al., 2023, arXiv:2303.06349): complex diagonal recurrences in residual layers.

    u = layer_norm(x);  h' = lambda h + gamma B u;  v = gelu(Re(C h') + D u);  y = x + (W v + b) sigmoid(V v + c)

    For all parameters, lambda = exp(-exp(nu) + i exp(theta)) is within the unit circle, so h stays bounded. Initially,
    gamma is sqrt(1 - |lambda|^2), which gives h the scale of the inputs for any memory length. nu, theta and the
    logarithm of gamma are learned.

    Args:
      width: size of the output, and number of complex states of each layer.
      layers: number of stacked layers. A linear layer before them maps inputs of another size to `width`.
      min_radius, max_radius: range of the initial |lambda|. With |lambda| = r, a state decays to half in
        log(0.5) / log(r) steps: 7 steps for 0.9, 693 for 0.999. The paper's first experiments use 0 and 1.
      max_phase: maximum initial angle of lambda, in radians. States with small angles accumulate sums; states with
        large angles oscillate.
    """

    width: int = 128
    layers: int = 1
    min_radius: float = 0.9
    max_radius: float = 0.999
    max_phase: float = math.pi / 10.0

    def initial_carry(self) -> Carry:
        return jnp.zeros((self.layers, 2, self.width), jnp.float32)

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _LRUModule(self, inputs, rngs)
