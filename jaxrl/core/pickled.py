"""Pickling for multiprocessing and joblib, with an error that suggests a remedy if it fails."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys, threefry
from jaxrl.core.errors import ConfigError


class _Key:
    """Picklable form of a typed key: its data, and the name of its random number algorithm."""

    def __init__(self, key: jax.Array):
        self.data, self.algorithm = np.asarray(jax.random.key_data(key)), keys.algorithm(key)
        self.unrolled = keys.kind(key) == threefry.KEYS

    def key(self) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.asarray(self.data), impl=self.algorithm)
        return keys.unrolled(key) if self.unrolled else key


def dumped(what: str, parts: Any, instead: str) -> bytes:
    """Pickle `parts`, with JAX arrays converted to NumPy arrays.

    Args:
      what: name of the value, for the message.
      parts: a pytree, or anything else that Python can pickle.
      instead: remedy for the message if pickling fails.

    Raises:
      ConfigError: a part cannot be pickled.
    """
    try:
        return pickle.dumps(jax.tree.map(_packed, parts))
    except Exception as error:  # a user's class may raise any error
        raise ConfigError(f"{what} cannot be pickled: {error!s:.300}; {instead}") from error


def loaded(data: bytes) -> Any:
    """Return the value that `dumped` pickled."""
    return jax.tree.map(_unpacked, pickle.loads(data), is_leaf=lambda x: isinstance(x, _Key))


def _packed(leaf):
    if not isinstance(leaf, jax.Array):
        return leaf
    return _Key(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def _unpacked(leaf):
    return leaf.key() if isinstance(leaf, _Key) else leaf
