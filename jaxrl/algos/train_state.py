"""Training state of a network: parameters, optimizer state, gradient steps over all replicas, and targets."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos.optimizers import global_norm
from jaxrl.core.types import ModelState, Params, PyTree, Replicas
from jaxrl.networks.unit import project


class Variables(struct.PyTreeNode):
    """A network's variables: parameters and model state (see `types.Network`)."""

    params: Params
    model_state: ModelState = ()


class TrainState(struct.PyTreeNode):
    """Parameters and model state of a network, its optimizer state, and optionally a target network."""

    params: Params
    model_state: ModelState
    optimizer_state: PyTree
    target_params: Params = ()  # () without a target network
    target_model_state: ModelState = ()

    @property
    def variables(self) -> Variables:
        """Return the variables of the network."""
        return Variables(self.params, self.model_state)

    @property
    def target_variables(self) -> Variables:
        """Return the variables of the target network."""
        return Variables(self.target_params, self.target_model_state)


def create(
    params: Params,
    model_state: ModelState,
    transformation: optax.GradientTransformation,
    *,
    target: bool = False,
) -> TrainState:
    """Return the training state before the first step, optionally with a target network.

    Args:
      params, model_state: the network's initial variables, as returned by `Network.init`; `()`: no model state.
      transformation: the optimizer, as for `apply_gradients`; its learning rate does not matter here.
      target: whether to add a target network, as a copy of the variables.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax mixes weak and strong types
        optimizer_state = transformation.init(params)
    targets = jax.tree.map(jnp.copy, (params, model_state)) if target else ((), ())
    return TrainState(params, model_state, optimizer_state, *targets)


type Loss[Aux] = Callable[..., tuple[jax.Array, tuple[Aux, ModelState]]]


class Gradient[Aux](NamedTuple):
    """Gradient of a loss on this device, with the loss's auxiliary outputs and new model state."""

    state: TrainState
    gradients: Params
    aux: Aux
    model_state: ModelState

    def step(
        self, transformation: optax.GradientTransformation, replicas: Replicas
    ) -> tuple[TrainState, jax.Array, Aux]:
        """Take a step with `apply_gradients`; return the state, the gradient's norm and the auxiliary outputs."""
        state, norm = apply_gradients(self.state, self.gradients, transformation, replicas, self.model_state)
        return state, norm, self.aux


def gradient[Aux](loss: Loss[Aux], state: TrainState, *inputs: Any) -> Gradient[Aux]:
    """Return the gradient of a loss with respect to a network's parameters.

    Args:
      loss: a function `loss(variables, *inputs) -> (loss, (aux, model_state))`. It returns this device's loss, made of
        `weighted_mean`s, auxiliary outputs such as metrics, and the new model state.
      state: the network's current state.
      inputs: further arguments of `loss`, which are not differentiated.
    """

    def of_params(params):
        return loss(Variables(params, state.model_state), *inputs)

    gradients, (aux, model_state) = jax.grad(of_params, has_aux=True)(state.params)
    return Gradient(state, gradients, aux, model_state)


def apply_gradients(
    state: TrainState,
    gradients: Params,
    transformation: optax.GradientTransformation,
    replicas: Replicas,
    model_state: ModelState | None = None,
) -> tuple[TrainState, jax.Array]:
    """Take a step down the gradient, averaged over replicas.

    Args:
      state: the current state.
      gradients: this device's gradients of a loss made of `weighted_mean`s, with the structure of `state.params`.
      transformation: the optimizer with its current learning rate, including any clipping.
      replicas: as passed to `update`; gradients, not losses, are averaged over them.
      model_state: this device's model state after the loss's forward pass, also averaged over replicas; None:
        unchanged.

    Returns:
      The state after the step, and the global norm of the averaged gradient before clipping.
    """
    gradients = replicas.mean(gradients)
    return apply_averaged(state, gradients, transformation, replicas, model_state), global_norm(gradients)


def apply_averaged(
    state: TrainState,
    gradients: Params,
    transformation: optax.GradientTransformation,
    replicas: Replicas,
    model_state: ModelState | None = None,
) -> TrainState:
    """Take a step down gradients that are already averaged over replicas; arrays of unit norm keep their norm."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes weak and strong types
        updates, optimizer_state = transformation.update(gradients, state.optimizer_state, state.params)
        params = project(optax.apply_updates(state.params, updates))
        state = state.replace(params=params, optimizer_state=optimizer_state)
        if model_state is not None:
            state = state.replace(model_state=jax.tree.map(lambda x: _mean_of_floats(x, replicas), model_state))
        return state


def polyak_update(state: TrainState, tau: float | jax.Array) -> TrainState:
    """Move the target network by the fraction `tau` towards the current parameters and model state."""

    def moved(new, old):
        return optax.incremental_update(new, old, tau) if jnp.issubdtype(new.dtype, jnp.inexact) else new

    return state.replace(
        target_params=optax.incremental_update(state.params, state.target_params, tau),
        target_model_state=jax.tree.map(moved, state.model_state, state.target_model_state),
    )


def _mean_of_floats(x: jax.Array, replicas: Replicas) -> jax.Array:
    """Average floats over replicas; return counters unchanged, as they are equal on all replicas."""
    return replicas.mean(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def weighted_mean(x: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """Return the mean of `x` over the entries that count, as this device's share of the mean over all replicas.

    The denominator is averaged over replicas. The average of the shares' gradients is therefore the gradient of the
    global mean, even if devices hold different numbers of rows that count.

    Args:
      x: values, any shape.
      weight: bool or float, the same shape.
      replicas: as passed to `update`.
    """
    # `where`, not just the product: excluded entries may be infinite, such as the error of a forbidden action.
    weight = weight.astype(x.dtype)
    return jnp.sum(jnp.where(weight != 0.0, x * weight, 0.0)) / jnp.maximum(replicas.mean(jnp.sum(weight)), 1e-8)


def weighted_means[Name](
    values: Mapping[Name, jax.Array], weight: jax.Array, replicas: Replicas
) -> dict[Name, jax.Array]:
    """Return the `weighted_mean` of several arrays of the same shape.

    On accelerators, the arrays are stacked and summed together, to start fewer kernels. On a CPU, stacking would slow
    down a vmapped sweep by a tenth.
    """
    if replicas.platform == "cpu":
        return {name: weighted_mean(x, weight, replicas) for name, x in values.items()}
    means = jax.vmap(lambda x: weighted_mean(x, weight, replicas))(jnp.stack(list(values.values())))
    return dict(zip(values, means, strict=True))
