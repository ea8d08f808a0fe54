"""Schedules: numbers that change over a run, in the place of a number in an algorithm's field."""

from jaxrl.core import schedules as _core
from jaxrl.core.schedules import *  # noqa: F403
from jaxrl.core.schedules import __dir__ as __dir__

__all__ = dir(_core)
