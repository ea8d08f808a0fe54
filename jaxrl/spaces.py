"""Spaces of observations and actions: immutable and hashable, hence static under `jit`."""

from jaxrl.core import spaces as _core
from jaxrl.core.spaces import *  # noqa: F403
from jaxrl.core.spaces import __dir__ as __dir__

__all__ = dir(_core)
