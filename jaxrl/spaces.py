"""Spaces: what observations and actions are, as `jaxrl.envs.Env` says it."""

from jaxrl.core.spaces import ArraySpace, Box, Composite, Dict, Discrete, MultiDiscrete, Space, Tuple

__all__ = ["ArraySpace", "Box", "Composite", "Dict", "Discrete", "MultiDiscrete", "Space", "Tuple"]


def __dir__() -> list[str]:
    return __all__
