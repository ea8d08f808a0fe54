"""The preparation of environments for training."""

import dataclasses

import jax

from jaxrl.core import keys
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, HostRecipe, num_agents
from jaxrl.envs.agents import as_rows
from jaxrl.envs.check import check_types
from jaxrl.envs.registry import EnvironmentLike, as_environment
from jaxrl.envs.wrappers import ClipReward, EpisodeStatistics, ScaleReward, with_auto_reset


def prepared(env: EnvironmentLike) -> Environment | HostRecipe:
    """Return `as_environment(env)`, with episode statistics and auto-reset if it is a JAX environment without them.

    The statistics are of the rewards before `ClipReward` and `ScaleReward`, wherever these are among the wrappers.

    Raises:
      ConfigError: it is neither a JAX environment nor a recipe of host environments.
      EnvironmentContractError: its types or shapes are not those of its spaces.
    """
    env = as_environment(env)
    if isinstance(env, Environment):
        if not _has_statistics(env):
            check_types(env, weak=False)  # a user's own, which has not been checked yet
            env = _counted(env) if num_agents(env) == 1 else as_rows(env)
        return with_auto_reset(env)
    if not callable(getattr(env, "build", None)):
        raise ConfigError(
            f"{env!r} is no environment: it has neither `reset` and `step` as jaxrl.types.Environment says, "
            "nor `build` as HostRecipe; make one with jaxrl.make('suite:name'), or pass a gymnasium.Env"
        )
    return env


def _has_statistics(env: Environment) -> bool:
    try:
        return jax.eval_shape(lambda key: env.reset(key)[1], keys.root_key(0)).episode is not None
    except Exception:  # `check_types` gives better messages
        return False


def _counted(env: Environment) -> Environment:
    """Add statistics under the innermost wrapper that changes rewards, or around all if there is none."""
    if not dataclasses.is_dataclass(env) or isinstance(env, type) or not _changes_rewards(env):
        return EpisodeStatistics(env)
    return dataclasses.replace(env, env=_counted(_wrapped(env)))


def _changes_rewards(env):
    inner = _wrapped(env)
    return isinstance(env, ClipReward | ScaleReward) or (inner is not None and _changes_rewards(inner))


def _wrapped(env):
    """Return the environment in a wrapper's field `env`; None if `env` is not a wrapper."""
    fields = [field.name for field in dataclasses.fields(env)] if dataclasses.is_dataclass(env) else []
    return env.env if "env" in fields and isinstance(env.env, Environment) else None
