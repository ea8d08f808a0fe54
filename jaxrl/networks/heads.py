"""Heads that map features to a distribution over actions, or to values; for action values, see `q_heads`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import PyTree
from jaxrl.networks.distributions import (
    Categorical,
    DiagonalGaussian,
    Distribution,
    Joint,
    MultiCategorical,
    TanhGaussian,
)
from jaxrl.networks.layers import dense

CONTINUOUS = ("gaussian", "tanh", "tanh_mean")
_LOG_STD_RANGE = (-20.0, 2.0)  # for state-dependent standard deviations, as in Haarnoja et al.'s code


# --- policies ------------------------------------------------------------------------------------------------------


def action_size(space: spaces.Space, continuous: str = "gaussian") -> int:
    """Return the number of logits or means of a distribution over `space`, summed over all parts.

    Args:
      space: the action space.
      continuous: the distribution over a `Box`: "gaussian", "tanh" or "tanh_mean".

    Raises:
      ConfigError: there is no such distribution over `space`.
    """
    if continuous not in CONTINUOUS:
        raise unknown("continuous policy", str(continuous), CONTINUOUS)
    if isinstance(space, spaces.Composite) and (parts := spaces.leaves(space)):
        return sum(action_size(part, continuous) for part in parts)
    if isinstance(space, spaces.Discrete):
        return space.n
    if isinstance(space, spaces.MultiDiscrete):
        return sum(space.nvec)
    if not (isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0] and space.dtype.kind == "f"):
        raise ConfigError(
            f"there is no policy for the action space {space}; flatten it with a wrapper to a supported one: Discrete, "
            "MultiDiscrete, Box of floats of shape (n,), and Dict and Tuple of these"
        )
    if continuous != "gaussian" and not (space.bounded and np.all(space.low < space.high)):
        raise ConfigError(
            f"continuous={continuous!r} needs bounds with low < high, not {space}; use continuous='gaussian'"
        )
    return space.shape[0]


def to_distribution(
    space: spaces.Space,
    location: PyTree,
    log_std: PyTree | None = None,
    mask: PyTree | None = None,
    continuous: str = "gaussian",
) -> Distribution:
    """Create the distribution over `space` that the outputs of a policy parametrize.

    For a `Dict` or `Tuple` space, `location`, `log_std` and `mask` contain one entry for each part.

    Args:
      space: an action space that `action_size` accepts.
      location: logits or means, `[..., action_size(space)]`.
      log_std: for boxes, the log standard deviations, `[..., n]` or `[n]`.
      mask: for discrete actions, the mask of allowed actions, bool `[..., action_size(space)]`, or None; None or a
        missing dictionary entry allows all actions.
      continuous: the distribution over a `Box`: "gaussian" (unbounded), "tanh" (squashed into the bounds) or
        "tanh_mean" (a Gaussian whose mean is squashed into the bounds; samples may exceed them).

    Raises:
      ConfigError: the mask does not have the action's structure, or `log_std` is missing for a box.
    """
    if isinstance(space, spaces.Composite):
        log_stds, masks = spaces.optional_parts(space, log_std), masks_of_parts(space, mask)
        return joint(
            space, lambda key, child: to_distribution(child, location[key], log_stds[key], masks[key], continuous)
        )
    if mask is not None and (isinstance(space, spaces.Box) or getattr(mask, "shape", ())[-1:] != location.shape[-1:]):
        allowed = "None" if isinstance(space, spaces.Box) else f"[..., {location.shape[-1]}], or None"
        shape = jax.tree.map(jnp.shape, mask)
        raise ConfigError(f"the action mask of {space} has the shape {shape}; it must be {allowed}")
    if isinstance(space, spaces.Discrete):
        return Categorical.masked(location, mask)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical.masked(location, space.nvec, mask)
    if log_std is None:
        raise ConfigError(f"a policy over {space} needs log standard deviations; pass log_std")
    # Every leaf of a distribution has the leading axes, so that it can be indexed and stored as a whole.
    log_std = jnp.broadcast_to(jnp.expand_dims(log_std, range(location.ndim - log_std.ndim)), location.shape)
    if continuous == "tanh":
        box = spaces.expect(space, spaces.Box)
        return TanhGaussian(location, log_std, tuple(box.low.tolist()), tuple(box.high.tolist()))
    if continuous == "tanh_mean":
        box = spaces.expect(space, spaces.Box)
        low, high = (jnp.expand_dims(jnp.asarray(x), range(location.ndim - 1)) for x in (box.low, box.high))
        location = low + (high - low) * (0.5 * (jnp.tanh(location) + 1.0))
    return DiagonalGaussian(location, log_std)


def joint(space: spaces.Composite, of_part: Callable[[Any, spaces.Space], Distribution]) -> Joint:
    """Return the joint distribution over a composite space, in which parts have distributions `of_part(key, child)`."""
    parts = {key: of_part(key, child) for key, child in space.items}
    return Joint(parts if isinstance(space, spaces.Dict) else tuple(parts.values()))


def masks_of_parts(space: spaces.Composite, mask: PyTree | None) -> dict[Any, PyTree | None]:
    """Return the mask of each part of a composite space; None allows all actions of a part.

    Raises:
      ConfigError: the mask does not have the action's structure.
    """
    try:
        return spaces.optional_parts(space, mask)
    except ConfigError as error:
        raise ConfigError(f"the action mask has {error}") from None


class PolicyHead(nnx.Module):
    """Module that maps features `[..., inputs]` and a mask to a distribution over the action space.

    For boxes, the log standard deviation is one parameter per dimension, or an additional output. Each part of a `Dict`
    or `Tuple` space has its own head.
    """

    def __init__(
        self,
        inputs: int,
        space: spaces.Space,
        rngs: nnx.Rngs,
        *,
        gain: float | None,
        continuous: str,
        initial_log_std: float,
        state_dependent_std: bool,
        log_std_range: tuple[float, float] | None = None,
    ):
        size = action_size(space, continuous)
        self.space = space
        if isinstance(space, spaces.Composite):
            for key, child in space.items:
                head = PolicyHead(
                    inputs,
                    child,
                    rngs,
                    gain=gain,
                    continuous=continuous,
                    initial_log_std=initial_log_std,
                    state_dependent_std=state_dependent_std,
                    log_std_range=log_std_range,
                )
                setattr(self, f"part_{key}", head)
            return
        self.continuous = continuous
        self.initial_log_std, self.log_std_range = initial_log_std, log_std_range
        self.output = dense(inputs, size, gain, rngs)
        self.std = "none"
        if isinstance(space, spaces.Box):
            self.std = "output" if state_dependent_std else "parameter"
        if self.std == "output":
            self.log_std_output = dense(inputs, size, gain, rngs)
        elif self.std == "parameter":
            self.log_std = nnx.Param(jnp.full((size,), initial_log_std, jnp.float32))

    def __call__(self, features: jax.Array, mask: PyTree | None) -> Distribution:
        if isinstance(self.space, spaces.Composite):
            masks = masks_of_parts(self.space, mask)
            return joint(self.space, lambda key, _: getattr(self, f"part_{key}")(features, masks[key]))
        log_std = None
        if self.std == "output":
            log_std = self.initial_log_std + self.log_std_output(features)
            if self.log_std_range is None:
                log_std = jnp.clip(log_std, *_LOG_STD_RANGE)
            else:
                low, high = self.log_std_range
                log_std = low + 0.5 * (high - low) * (1.0 + jnp.tanh(log_std))
        elif self.std == "parameter":
            log_std = self.log_std[...]
        return to_distribution(self.space, self.output(features), log_std, mask, self.continuous)


class ValueHead(nnx.Module):
    """Module that maps features `[..., inputs]` to values `[...]`."""

    def __init__(self, inputs: int, gain: float, rngs: nnx.Rngs):
        self.output = dense(inputs, 1, gain, rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        return self.output(features)[..., 0]


def mask_values(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Replace values by the most negative finite number where `mask` is False."""
    return values if mask is None else jnp.where(mask, values, jnp.finfo(values.dtype).min)
