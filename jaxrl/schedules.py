"""Schedules: values that change during a run, accepted by algorithm fields in place of numbers."""

from jaxrl.core import schedules as _core
from jaxrl.core.schedules import *  # noqa: F403
from jaxrl.core.schedules import __dir__ as __dir__

__all__ = dir(_core)
