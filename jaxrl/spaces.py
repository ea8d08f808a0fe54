"""Observation and action spaces, which are immutable and hashable, and thus valid static arguments of `jax.jit`."""

from jaxrl.core import spaces as _core
from jaxrl.core.spaces import *  # noqa: F403
from jaxrl.core.spaces import __dir__ as __dir__

__all__ = dir(_core)
