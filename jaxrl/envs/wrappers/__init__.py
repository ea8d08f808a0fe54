"""Environment wrappers.

Each wrapper is a frozen pytree; its numbers are leaves unless they change shapes or the compiled program. Wrappers can
be combined in any order, inside or outside an auto-reset, unless documented otherwise.
"""

from jaxrl.core import registry
from jaxrl.envs.episode import AutoReset, EpisodeStatistics, PooledReset, TimeLimit
from jaxrl.envs.wrappers.actions import ActionRepeat, ClipAction, RescaleAction, StickyActions
from jaxrl.envs.wrappers.observations import Flatten, FrameStack, Hide
from jaxrl.envs.wrappers.randomization import RandomParameters
from jaxrl.envs.wrappers.rewards import ClipReward, ScaleReward

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
]


def __dir__() -> list[str]:
    return sorted(__all__)


registry.add("wrapper", *(globals()[name] for name in __all__))
