"""Schedules: numbers that change over a run; all of `jaxrl.core.schedules`, where users import it from."""

from jaxrl.core.schedules import *  # noqa: F403
from jaxrl.core.schedules import __dir__ as __dir__
