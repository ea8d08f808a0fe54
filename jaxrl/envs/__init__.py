"""Environments in JAX: adapters of suites, wrappers, and a registry of names."""

from jaxrl.envs.registry import environments, make, register
from jaxrl.envs.wrappers import AutoReset, EpisodeStatistics, with_auto_reset

__all__ = ["AutoReset", "EpisodeStatistics", "environments", "make", "register", "with_auto_reset"]
