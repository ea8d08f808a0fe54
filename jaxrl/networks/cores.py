"""Recurrent cores, unrolled over time; the carry is reset within the unroll at the beginning of each episode.

A core is a frozen, hashable configuration. `build(inputs, rngs)` creates a `flax.nnx` module that maps inputs
`[T, B, inputs]`, `first` flags `[T, B]` and a carry `[B, ...]` to features `[T, B, width]` and the carry after the last
time step.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core.types import Carry, PyTree, where_first
from jaxrl.networks.layers import check_positive, dense


class Core(Protocol):
    """Frozen, hashable configuration of a recurrent core."""

    @property
    def width(self) -> int: ...

    def initial_carry(self) -> Carry:
        """Return the carry at the start of an episode, without a batch axis."""
        ...

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module: ...


def gates(count: int) -> nnx.Initializer:
    """Return an initializer of `count` orthogonal kernels, concatenated along the last axis, one for each gate."""
    orthogonal = nnx.initializers.orthogonal()

    def init(key, shape, dtype=jnp.float32):
        inputs, outputs = shape
        # vmap instead of a loop takes a third of the compile time.
        draw = jax.vmap(lambda k: orthogonal(k, (inputs, outputs // count), dtype), out_axes=1)
        return draw(jax.random.split(key, count)).reshape(shape)

    return init


def entry(inputs: int, width: int, rngs: nnx.Rngs) -> nnx.Module | None:
    """Return a dense layer that maps `inputs` features to `width`, or None if the sizes are equal."""
    return None if inputs == width else dense(inputs, width, 1.0, rngs)


class Product(nnx.Module):
    """Linear layer without a bias, from `[..., inputs]` to `[..., outputs]`."""

    def __init__(self, inputs: int, outputs: int, kernel_init: nnx.Initializer, rngs: nnx.Rngs):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (inputs, outputs), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.reshape((-1, x.shape[-1])) @ self.kernel[...]).reshape((*x.shape[:-1], -1))


def unroll(
    step: Callable[[Carry, PyTree], tuple[Carry, PyTree]],
    carry: Carry,
    inputs: PyTree,
    first: jax.Array,
    initial: Carry,
) -> tuple[PyTree, Carry]:
    """Scan a core over time, resetting the carry at the beginning of each episode.

    Args:
      step: function `step(carry, inputs) -> (next_carry, outputs)` of one time step, all `[B, ...]`.
      carry: carry before the first time step, `[B, ...]`.
      inputs: inputs of all time steps, `[T, B, ...]`.
      first: bool, `[T, B]`; where it is True, the carry is reset before the step.
      initial: carry at the beginning of an episode, without a batch axis.

    Returns:
      The outputs `[T, B, ...]` and the carry after the last time step.
    """

    def reset_and_step(carry, time_step):
        x, is_first = time_step
        return step(where_first(is_first, initial, carry), x)

    return scan_time(reset_and_step, carry, (inputs, first))


def scan_time[State](
    step: Callable[[State, PyTree], tuple[State, PyTree]], carried: State, inputs: PyTree
) -> tuple[PyTree, State]:
    """Scan `step` over inputs `[T, ...]` and return the outputs `[T, ...]` and the last carry, in this order."""
    if jax.tree.leaves(inputs)[0].shape[0] == 1:  # acting: a scan of one step is only slower
        carried, output = step(carried, jax.tree.map(lambda x: x[0], inputs))
        return jax.tree.map(lambda x: x[None], output), carried
    carried, outputs = jax.lax.scan(step, carried, inputs)
    return outputs, carried


class _Gated(nnx.Module):
    """Core with `count` gates, which all read the inputs and the hidden state."""

    def __init__(self, core: "GRU | LSTM", inputs: int, rngs: nnx.Rngs, count: int):
        check_positive(f"{type(core).__name__}.width", core.width)
        self.core, outputs = core, count * core.width
        self.input = nnx.Linear(inputs, outputs, kernel_init=gates(count), rngs=rngs)
        self.recurrent = nnx.Linear(core.width, outputs, kernel_init=gates(count), use_bias=False, rngs=rngs)


class _GRUModule(_Gated):
    def __init__(self, core: "GRU", inputs: int, rngs: nnx.Rngs):
        super().__init__(core, inputs, rngs, count=3)
        self.candidate_bias = nnx.Param(jnp.zeros((core.width,), jnp.float32))

    def __call__(self, x: jax.Array, first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        width = self.core.width
        recurrent, bias = self.recurrent.kernel[...], self.candidate_bias[...]

        def step(hidden, projected):
            from_hidden = hidden @ recurrent
            gates = jax.nn.sigmoid(projected[:, : 2 * width] + from_hidden[:, : 2 * width])
            reset, update = gates[:, :width], gates[:, width:]
            remembered = from_hidden[:, 2 * width :] + bias[None]
            candidate = jnp.tanh(projected[:, 2 * width :] + reset * remembered)
            hidden = candidate + update * (hidden - candidate)
            return hidden, hidden

        # The projection of the inputs does not depend on the carry, so one product computes it for all time steps.
        return unroll(step, carry, self.input(x), first, self.core.initial_carry())


@dataclasses.dataclass(frozen=True)
class GRU:
    """Gated recurrent unit (Cho et al., 2014), with the reset gate applied after the recurrent product, as in cuDNN.

    r, z = sigmoid(W x + U h + b);  n = tanh(W x + b + r (U h + c));  h' = (1 - z) n + z h

    Args:
      width: size of the hidden state, which is also the output.
    """

    width: int = 128

    def initial_carry(self) -> Carry:
        return jnp.zeros((self.width,), jnp.float32)

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _GRUModule(self, inputs, rngs)


class _LSTMModule(_Gated):
    def __call__(self, x: jax.Array, first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        width = self.core.width
        recurrent = self.recurrent.kernel[...]

        def step(carry, projected):
            total = projected + carry["hidden"] @ recurrent
            write, output = jnp.split(jax.nn.sigmoid(total[:, : 2 * width]), 2, axis=1)
            keep = jax.nn.sigmoid(total[:, 2 * width : 3 * width] + 1.0)
            cell = keep * carry["cell"] + write * jnp.tanh(total[:, 3 * width :])
            hidden = output * jnp.tanh(cell)
            return {"cell": cell, "hidden": hidden}, hidden

        return unroll(step, carry, self.input(x), first, self.core.initial_carry())


@dataclasses.dataclass(frozen=True)
class LSTM:
    """Long short-term memory (Hochreiter and Schmidhuber, 1997); forget bias 1 (Jozefowicz et al., 2015).

    i, o, f = sigmoid(W x + U h + b);  c' = f c + i tanh(W x + U h + b);  h' = o tanh(c')

    Args:
      width: size of the hidden state and of the cell; the hidden state is the output.
    """

    width: int = 128

    def initial_carry(self) -> Carry:
        # Two separate arrays, because the carry is donated and a buffer cannot be donated twice.
        return {name: jnp.zeros((self.width,), jnp.float32) for name in ("cell", "hidden")}

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _LSTMModule(self, inputs, rngs, count=4)
