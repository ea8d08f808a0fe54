"""GTrXL, the gated Transformer-XL: attention to previous time steps, with a memory of fixed size as the carry."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Carry
from jaxrl.networks.cores import Product, entry
from jaxrl.networks.layers import HIDDEN_GAIN, check_finite, check_positive, dense

_KERNEL = nnx.initializers.lecun_normal()


def _positions(memory: int, width: int) -> np.ndarray:
    """Return sinusoidal embeddings `[memory + 1, width]` of the distances `memory`, ..., 1, 0 in time steps."""
    distance = np.arange(memory, -1, -1, dtype=np.float64)[:, None]
    frequency = 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(distance * frequency), np.cos(distance * frequency)], axis=-1).astype(np.float32)


def _filled(x: jax.Array, rows: int) -> jax.Array:
    """Append `rows` rows of zeros."""
    return jnp.concatenate([x, jnp.zeros((rows, *x.shape[1:]), x.dtype)]) if rows else x


class _Attention(nnx.Module):
    """Attention of each time step to itself and to the previous `memory` time steps of the same episode."""

    def __init__(self, core: "GTrXL", rngs: nnx.Rngs):
        width = core.width
        self.core = core
        self.query = Product(width, width, _KERNEL, rngs)
        self.key_value = Product(width, 2 * width, _KERNEL, rngs)
        self.position = Product(width, width, _KERNEL, rngs)
        self.output = Product(width, width, _KERNEL, rngs)
        self.content_bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.position_bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, context: jax.Array, earliest: jax.Array) -> jax.Array:
        """Return the outputs `[T, B, width]`.

        Args:
          context: the memory, followed by the T time steps, `[memory + T, B, width]`.
          earliest: the first row of the context that each time step may attend to, int32, `[T, B]`.
        """
        memory, (length, batch) = self.core.memory, earliest.shape
        query = self.query(context[memory:])
        positions = self._heads(self.position(jnp.asarray(_positions(memory, self.core.width))))
        key, value = jnp.split(self.key_value(context), 2, axis=-1)
        # A long sequence is divided into blocks of `memory` steps, which attend to themselves and the previous block.
        # So scores are computed for 2 * memory rows per step instead of all T. The last block is padded, and its
        # padding is removed from the outputs.
        block = min(length, memory)
        blocks = -(-length // block)
        query, key, value, earliest = (_filled(x, blocks * block - length) for x in (query, key, value, earliest))
        query, earliest = query.reshape((blocks, block, batch, -1)), earliest.reshape((blocks, block, batch))
        key, value = (self._heads(self._windows(x, blocks)) for x in (key, value))
        first_row = block * jnp.arange(blocks, dtype=jnp.int32)
        attend = jax.vmap(self._attend, in_axes=(0, 0, 0, None, 0, 0))
        output = attend(query, key, value, positions, earliest, first_row)
        return self.output(output.reshape((blocks * block, batch, -1))[:length])

    def _heads(self, x):
        return x.reshape((*x.shape[:-1], self.core.heads, -1))

    def _windows(self, x, blocks):
        """Return the rows of the context that each block attends to, `[blocks, memory + block, B, width]`."""
        if blocks == 1:
            return x[None]
        x = x.reshape((blocks + 1, self.core.memory, *x.shape[1:]))
        return jnp.concatenate([x[:-1], x[1:]], axis=1)

    def _attend(self, query, key, value, positions, earliest, first_row):
        """Attend from a block's S steps to the K = memory + S rows of its window; return `[S, B, heads, size]`."""
        steps, width, rows = query.shape[0], query.shape[-1], key.shape[0]
        content, position = (
            self._heads(query + bias[...][None, None]) for bias in (self.content_bias, self.position_bias)
        )
        scores = jnp.einsum("sbhd,kbhd->bhsk", content, key)
        by_distance = jnp.einsum("sbhd,mhd->bhsm", position, positions)
        # Convert distances to rows: step s is at row s + memory, so its scores are shifted to the right by s.
        shape = by_distance.shape[:2]
        filled = jnp.concatenate([by_distance, jnp.zeros((*shape, steps, steps), by_distance.dtype)], axis=-1)
        # A slice, because indexing becomes a gather if the batch size is symbolic.
        by_row = jax.lax.slice_in_dim(filled.reshape((*shape, -1)), 0, steps * rows, axis=2)
        by_row = by_row.reshape((*shape, steps, rows))
        row, step = jnp.arange(rows, dtype=jnp.int32)[None], jnp.arange(steps, dtype=jnp.int32)[:, None]
        within = (row >= step) & (row <= step + self.core.memory)
        seen = within[:, None] & ((row + first_row)[:, None] >= earliest[..., None])  # [S, B, K]
        scores = (scores + by_row) * (width // self.core.heads) ** -0.5
        scores = jnp.where(jnp.moveaxis(seen, 0, 1)[:, None], scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bhsk,kbhd->sbhd", jax.nn.softmax(scores), value)


class _Gate(nnx.Module):
    """GRU-like gate of a residual connection; initially, it is almost closed and returns approximately x."""

    def __init__(self, core: "GTrXL", rngs: nnx.Rngs):
        width = core.width
        self.of_update = Product(width, 3 * width, _KERNEL, rngs)
        self.of_input = Product(width, 2 * width, _KERNEL, rngs)
        self.of_reset = Product(width, width, _KERNEL, rngs)
        self.bias = nnx.Param(jnp.full((width,), core.gate_bias, jnp.float32))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        reset, update, candidate = jnp.split(self.of_update(y), 3, axis=-1)
        input_reset, input_update = jnp.split(self.of_input(x), 2, axis=-1)
        reset = jax.nn.sigmoid(reset + input_reset)
        update = jax.nn.sigmoid(update + input_update - self.bias[...][None, None])
        candidate = jnp.tanh(candidate + self.of_reset(reset * x))
        return x + update * (candidate - x)


class _Layer(nnx.Module):
    def __init__(self, core: "GTrXL", rngs: nnx.Rngs):
        hidden = core.mlp_width or core.width
        self.memory = core.memory
        self.attention_norm = nnx.LayerNorm(core.width, rngs=rngs)
        self.attention = _Attention(core, rngs)
        self.attention_gate = _Gate(core, rngs)
        self.mlp_norm = nnx.LayerNorm(core.width, rngs=rngs)
        self.hidden = dense(core.width, hidden, HIDDEN_GAIN, rngs)
        self.output = dense(hidden, core.width, HIDDEN_GAIN, rngs)
        self.mlp_gate = _Gate(core, rngs)

    def __call__(self, x: jax.Array, memory: jax.Array, earliest: jax.Array) -> tuple[jax.Array, jax.Array]:
        context = jnp.concatenate([memory, x])
        read = self.attention(self.attention_norm(context), earliest)
        x = self.attention_gate(x, jax.nn.relu(read))
        output = self.output(jax.nn.relu(self.hidden(self.mlp_norm(x))))
        return self.mlp_gate(x, jax.nn.relu(output)), context[-self.memory :]


class _GTrXLModule(nnx.Module):
    def __init__(self, core: "GTrXL", inputs: int, rngs: nnx.Rngs):
        for name in ("width", "layers", "heads", "memory"):
            check_positive(f"GTrXL.{name}", getattr(core, name))
        if core.mlp_width is not None:
            check_positive("GTrXL.mlp_width", core.mlp_width)
        check_finite("GTrXL.gate_bias", core.gate_bias)
        if core.width % core.heads or core.width % 2:
            raise ConfigError(
                f"GTrXL.width={core.width} must be even and divisible by heads={core.heads}; use a multiple, such as "
                f"{2 * core.heads * max(round(core.width / (2 * core.heads)), 1)}"
            )
        self.core = core
        self.entry = entry(inputs, core.width, rngs)
        for i in range(core.layers):
            setattr(self, f"layer_{i}", _Layer(core, rngs))

    def __call__(self, x: jax.Array, first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        size, memories = self.core.memory, []
        stored = jnp.moveaxis(jax.lax.stop_gradient(carry["memory"]), 0, 2)  # [layers, memory, B, width]
        # Rows of the context are the memory, then the time steps. Rows before the beginning of an episode are masked.
        row = size + jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        begins = jnp.where(first, row, 0)
        begins = begins if x.shape[0] == 1 else jax.lax.cummax(begins, axis=0)
        earliest = jnp.maximum(begins, (size - carry["length"])[None])
        x = x if self.entry is None else self.entry(x)
        for i in range(self.core.layers):
            x, memory = getattr(self, f"layer_{i}")(x, stored[i], earliest)
            memories.append(memory)
        length = jnp.minimum(size + x.shape[0] - earliest[-1], size)
        return x, {"length": length, "memory": jnp.moveaxis(jnp.stack(memories), 2, 0)}


@dataclasses.dataclass(frozen=True)
class GTrXL:
    """Gated Transformer-XL (Parisotto et al., 2020, arXiv:1910.06764) with attention to the episode's last steps.

    y = gate(x, relu(attention(layer_norm([memory, x]))));  x' = gate(y, relu(mlp(layer_norm(y))))
    gate(x, y) = (1 - z) x + z tanh(W y + U (r x));  r = sigmoid(W y + U x);  z = sigmoid(W y + U x - bias)

    Attention uses the relative positions of Transformer-XL (Dai et al., 2019, arXiv:1901.02860). The carry is the
    memory: the inputs of each layer at the last `memory` steps, and the number of these steps that belong to the
    episode. No gradient passes through the carry. Within an unroll, gradients reach as far back as attention: `memory`
    steps per layer. The mlp has two dense layers with a ReLU between them.

    Args:
      width: width of every layer and of the output; must be even and a multiple of `heads`.
      layers: number of stacked layers. A linear layer before them maps inputs of another size to `width`.
      heads: number of attention heads, each of size width / heads.
      memory: number of previous steps that a step attends to.
      mlp_width: width of the hidden layer of the mlp; None: `width`.
      gate_bias: initial bias of the gates; above 0, layers are initially close to the identity.
    """

    width: int = 128
    layers: int = 2
    heads: int = 4
    memory: int = 64
    mlp_width: int | None = None
    gate_bias: float = 2.0

    def initial_carry(self) -> Carry:
        memory = jnp.zeros((self.layers, self.memory, self.width), jnp.float32)
        return {"length": jnp.zeros((), jnp.int32), "memory": memory}

    def build(self, inputs: int, rngs: nnx.Rngs) -> nnx.Module:
        return _GTrXLModule(self, inputs, rngs)
