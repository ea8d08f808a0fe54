"""Environments in JAX: adapters of suites, wrappers, and a registry of names."""

from jaxrl.envs.check import check_env
from jaxrl.envs.parameters import parameters, with_parameters
from jaxrl.envs.prepare import prepared
from jaxrl.envs.registry import as_environment, environments, make
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
    with_auto_reset,
)

__all__ = [
    "ActionRepeat",
    "AutoReset",
    "ClipAction",
    "ClipReward",
    "EpisodeStatistics",
    "Flatten",
    "FrameStack",
    "Hide",
    "PooledReset",
    "RandomParameters",
    "RescaleAction",
    "ScaleReward",
    "StickyActions",
    "TimeLimit",
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
