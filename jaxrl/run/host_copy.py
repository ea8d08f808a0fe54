"""Copies of the arrays of a training state to host memory, and back to their devices."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.core import keys
from jaxrl.core.errors import CheckpointError
from jaxrl.run.manifest import is_key


def take(name: str, leaf: Any) -> Any:
    """Return an unshared host copy: on CPU a numpy view of a donated array would change under the writer.

    With several processes, an array that no process holds whole is copied on its devices, and Orbax gathers it.

    Args:
      name: name of the leaf, for the error.
      leaf: an array, typed keys (copied as their words), or a Python number.

    Raises:
      CheckpointError: it is none of these.
    """
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                return jax.numpy.copy(leaf)
            leaf = leaf.addressable_data(0)
        with jax.transfer_guard_device_to_host("allow"):
            return np.array(leaf, copy=True)
    if isinstance(leaf, bool | int | float | np.ndarray | np.generic):
        return np.array(leaf, copy=True)
    raise CheckpointError(f"leaf {name} of the state is a {type(leaf).__name__}; only arrays and numbers can be saved")


def put(value: np.ndarray, like: Any) -> Any:
    """Return `value` in the form of the template: a typed key, an array on its sharding, or a plain number."""
    if isinstance(like, bool | int | float):
        return type(like)(value)
    if isinstance(like, np.ndarray | np.generic):
        return value
    sharding = like.sharding
    if isinstance(like, jax.Array) and not like.committed:
        sharding = None
    if sharding is not None and not sharding.is_fully_addressable:
        if not is_key(like):
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        return jax.jit(partial(jax.random.wrap_key_data, impl=keys.kind(like)), out_shardings=sharding)(value)
    if is_key(like):
        wrapped = jax.random.wrap_key_data(jax.device_put(value), impl=keys.kind(like))
        return wrapped if sharding is None else jax.device_put(wrapped, sharding)
    return jax.device_put(value, sharding, may_alias=False)
