"""Environments: adapters for environment suites, wrappers, and a registry of names."""

from jaxrl.envs import wrappers
from jaxrl.envs.check import check_env, prepared
from jaxrl.envs.env_registry import as_environment, environments, make
from jaxrl.envs.parameters import parameters, with_parameters
from jaxrl.envs.wrappers import *  # noqa: F403

__all__ = [  # noqa: PLE0604
    "as_environment",
    "check_env",
    "environments",
    "make",
    "parameters",
    "prepared",
    "with_parameters",
    *wrappers.__all__,
]


def __dir__() -> list[str]:
    return sorted(__all__)
