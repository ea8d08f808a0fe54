"""Recurrent cores, unrolled over time with the carry reset inside the unroll wherever an episode begins.

A core is a frozen, hashable description; `build(inputs, rngs)` makes a `flax.nnx` module that maps inputs
`[T, B, inputs]`, first flags `[T, B]` and a carry `[B, ...]` to features `[T, B, width]` and the carry after the last.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.errors import ConfigError
from jaxrl.types import Carry, where_first


class Core(Protocol):
    """A recurrent core; frozen and hashable."""

    @property
    def width(self) -> int: ...

    def initial_carry(self) -> Carry:
        """The carry at the start of an episode, no batch axis."""
        ...

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module: ...


def _gates(count: int, gain: float = 1.0):
    """Kernels of `count` gates side by side, each orthogonal by itself."""
    orthogonal = nnx.initializers.orthogonal(gain)

    def init(key, shape, dtype=jnp.float32):
        inputs, outputs = shape
        keys = jax.random.split(key, count)
        return jnp.concatenate([orthogonal(k, (inputs, outputs // count), dtype) for k in keys], axis=1)

    return init


def _unroll(step, carry, inputs, first, initial):
    """`step(carry, x) -> carry, y` over the first axis of `inputs`, resetting `carry` before each step."""

    def reset_and_step(carry, moment):
        x, is_first = moment
        return step(where_first(is_first, initial, carry), x)

    if first.shape[0] == 1:  # acting: a scan of one step would only cost
        carry, y = reset_and_step(carry, (inputs[0], first[0]))
        return y[None], carry
    carry, ys = jax.lax.scan(reset_and_step, carry, (inputs, first))
    return ys, carry


def _checked_width(core) -> int:
    if core.width < 1:
        raise ConfigError(f"{type(core).__name__}.width={core.width} must be at least 1")
    return core.width


class _GRUModule(nnx.Module):
    def __init__(self, core: "GRU", inputs: int, rngs: nnx.Rngs):
        width = _checked_width(core)
        self.core = core
        self.features = width
        self.input = nnx.Linear(inputs, 3 * width, kernel_init=_gates(3), rngs=rngs)
        self.recurrent = nnx.Linear(width, 3 * width, kernel_init=_gates(3), use_bias=False, rngs=rngs)
        self.candidate_bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: jax.Array, first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        width = self.features
        recurrent, bias = self.recurrent.kernel[...], self.candidate_bias[...]

        def step(hidden, projected):
            from_hidden = hidden @ recurrent
            gates = jax.nn.sigmoid(projected[:, : 2 * width] + from_hidden[:, : 2 * width])
            reset, update = gates[:, :width], gates[:, width:]
            remembered = from_hidden[:, 2 * width :] + bias[None]
            candidate = jnp.tanh(projected[:, 2 * width :] + reset * remembered)
            hidden = candidate + update * (hidden - candidate)
            return hidden, hidden

        # The projection of the inputs needs no carry: one product for all moments instead of one inside the scan.
        return _unroll(step, carry, self.input(x), first, self.core.initial_carry())


@dataclasses.dataclass(frozen=True)
class GRU:
    """Gated recurrent unit (Cho et al., 2014), with the reset gate after the recurrent product as in cuDNN.

    r, z = sigmoid(W x + U h + b);  n = tanh(W x + b + r (U h + c));  h' = (1 - z) n + z h

    Args:
      width: of the hidden state, which is also the output.
    """

    width: int = 128

    def initial_carry(self) -> Carry:
        return jnp.zeros((self.width,), jnp.float32)

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _GRUModule(self, inputs, rngs)


class _LSTMModule(nnx.Module):
    def __init__(self, core: "LSTM", inputs: int, rngs: nnx.Rngs):
        width = _checked_width(core)
        self.core = core
        self.features = width
        self.input = nnx.Linear(inputs, 4 * width, kernel_init=_gates(4), rngs=rngs)
        self.recurrent = nnx.Linear(width, 4 * width, kernel_init=_gates(4), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        width = self.features
        recurrent = self.recurrent.kernel[...]

        def step(carry, projected):
            total = projected + carry["hidden"] @ recurrent
            write, output = jnp.split(jax.nn.sigmoid(total[:, : 2 * width]), 2, axis=1)
            keep = jax.nn.sigmoid(total[:, 2 * width : 3 * width] + 1.0)
            cell = keep * carry["cell"] + write * jnp.tanh(total[:, 3 * width :])
            hidden = output * jnp.tanh(cell)
            return {"cell": cell, "hidden": hidden}, hidden

        return _unroll(step, carry, self.input(x), first, self.core.initial_carry())


@dataclasses.dataclass(frozen=True)
class LSTM:
    """Long short-term memory (Hochreiter and Schmidhuber, 1997), forget gate with bias 1 (Jozefowicz et al., 2015).

    i, o, f = sigmoid(W x + U h + b);  c' = f c + i tanh(W x + U h + b);  h' = o tanh(c')

    Args:
      width: of the hidden state and the cell; the hidden state is the output.
    """

    width: int = 128

    def initial_carry(self) -> Carry:
        # Two arrays, not one twice: a carry is donated, and a buffer cannot be donated twice.
        return {name: jnp.zeros((self.width,), jnp.float32) for name in ("cell", "hidden")}

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _LSTMModule(self, inputs, rngs)
