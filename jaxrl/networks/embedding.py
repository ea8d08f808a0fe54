"""Embeddings of observations: a torso, dense layers and an affine output."""

import dataclasses
import functools

import jax
from flax import nnx

from jaxrl.core.presentation import finish
from jaxrl.core.types import EnvSpec, ModelState, NetworkInputs, Params
from jaxrl.networks.body import Body, init_variables, run_module
from jaxrl.networks.layers import DenseStack, dense
from jaxrl.networks.torsos import Torso


@functools.partial(finish, kind="network")
@dataclasses.dataclass(frozen=True)
class Embedding:
    """Feed-forward network from observations to vectors.

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

    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
        """Initialize and return parameters and model state.

        Raises:
          ConfigError: the network does not fit the observation space.
        """
        return init_variables(self, key, spec)

    def apply(
        self, params: Params, inputs: NetworkInputs, *, spec: EnvSpec, model_state: ModelState, train: bool
    ) -> tuple[jax.Array, ModelState]:
        """Return vectors `[..., size]` of the observations `[..., *shape]`, and the next model state."""
        return run_module(self, params, model_state, spec, lambda module: module(inputs), train=train)


class _Embedding(nnx.Module):
    def __init__(self, network: Embedding, spec: EnvSpec, rngs: nnx.Rngs):
        self.body = Body(network.torso, spec, rngs)
        self.hidden = DenseStack(self.body.features, network.widths, "relu", None, rngs)
        self.output = dense(self.hidden.features, network.size, 1.0, rngs)

    def __call__(self, inputs: NetworkInputs) -> jax.Array:
        return self.output(self.hidden(self.body(inputs, ())[0]))
