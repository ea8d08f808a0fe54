"""The two time steps an episodic environment makes: the first of an episode, and every other."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from jaxrl.core.errors import EnvironmentContractError
from jaxrl.core.types import PyTree, TimeStep


def restart(observation: PyTree, action_mask: PyTree | None = None, info: Iterable[str] = ()) -> TimeStep:
    """The first time step of an episode; `info` names the scalars of the others (`TimeStep.info`)."""
    return TimeStep(
        observation=observation,
        reward=jnp.zeros((), jnp.float32),
        terminated=jnp.zeros((), jnp.bool_),
        truncated=jnp.zeros((), jnp.bool_),
        first=jnp.ones((), jnp.bool_),
        action_mask=action_mask,
        info={name: jnp.zeros((), jnp.float32) for name in info} or None,
    )


def transition(
    observation: PyTree,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    action_mask: PyTree | None = None,
    info: Mapping[str, jax.Array] | None = None,
) -> TimeStep:
    """What followed an action. Where an episode both terminated and was cut off, it terminated.

    `info` is what else the environment reports, scalars by name, always the same ones; None or empty: nothing.

    Raises:
      EnvironmentContractError: `reward`, `terminated`, `truncated` or a value of `info` is more than one number.
    """
    terminated = _scalar("terminated", terminated, jnp.bool_)
    return TimeStep(
        observation=observation,
        reward=_scalar("reward", reward, jnp.float32),
        terminated=terminated,
        truncated=_scalar("truncated", truncated, jnp.bool_) & ~terminated,
        first=jnp.zeros((), jnp.bool_),
        action_mask=action_mask,
        info={name: _scalar(f"info[{name!r}]", x, jnp.float32) for name, x in (info or {}).items()} or None,
    )


def _scalar(name, value, dtype):
    array = jnp.asarray(value, dtype)
    if array.size != 1:
        raise EnvironmentContractError(f"{name} has shape {array.shape}; one number is required")
    return array.reshape(())
