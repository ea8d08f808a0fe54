"""Environments: adapters for environment suites, wrappers, and a registry of names."""

from jaxrl.envs import wrappers
from jaxrl.envs.check import check_env, prepared
from jaxrl.envs.env_registry import as_environment, environments, make
from jaxrl.envs.episode import with_auto_reset
from jaxrl.envs.parameters import parameters, with_parameters
from jaxrl.envs.wrappers import (
    ActionRepeat,
    AutoReset,
    ClipAction,
    ClipReward,
    EpisodeStatistics,
    Flatten,
    FrameStack,
    Hide,
    PooledReset,
    RandomParameters,
    RescaleAction,
    ScaleReward,
    StickyActions,
    TimeLimit,
)

__all__ = [
    *wrappers.__all__,
    "as_environment",
    "check_env",
    "environments",
    "make",
    "parameters",
    "prepared",
    "with_auto_reset",
    "with_parameters",
]


def __dir__() -> list[str]:
    return sorted(__all__)
