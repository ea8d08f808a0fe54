"""Spaces: what observations and actions are; all of `jaxrl.core.spaces`, where users import it from."""

from jaxrl.core.spaces import *  # noqa: F403
from jaxrl.core.spaces import __dir__ as __dir__
