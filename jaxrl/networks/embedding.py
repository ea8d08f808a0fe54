"""Networks that map observations to embeddings: a torso, dense layers and an affine output layer."""

import dataclasses
import functools

import jax
from flax import nnx

from jaxrl.core.presentation import finish
from jaxrl.core.types import Carry, EnvSpec, NetworkInputs
from jaxrl.networks.body import Network
from jaxrl.networks.layers import DenseStack, check_positive, dense
from jaxrl.networks.torsos import Torso


@functools.partial(finish, kind="network")
@dataclasses.dataclass(frozen=True)
class Embedding(Network):
    """Feed-forward network from observations to vectors `[..., size]`.

    Args:
      torso: module that maps observations to features; None: the default for the observation space.
      widths: widths of the ReLU layers after the torso.
      size: size of the output vectors.
    """

    torso: Torso | None = None
    widths: tuple[int, ...] = ()
    size: int = 512

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _Embedding(self, spec, rngs)


class _Embedding(nnx.Module):
    def __init__(self, network: Embedding, spec: EnvSpec, rngs: nnx.Rngs):
        check_positive("size", network.size)
        self.body = network.body(network.torso, spec, rngs)
        self.hidden = DenseStack(self.body.features, network.widths, "relu", None, rngs)
        self.output = dense(self.hidden.features, network.size, 1.0, rngs)

    def __call__(self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None) -> tuple[jax.Array, Carry]:
        features, carry = self.body(inputs, carry)
        return self.output(self.hidden(features)), carry
