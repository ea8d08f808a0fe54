"""What training needs of an environment, whatever it was given."""

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, HostRecipe
from jaxrl.envs.wrappers import EpisodeStatistics, with_auto_reset


def prepared(env: Environment | HostRecipe) -> Environment | HostRecipe:
    """`env` with episode statistics and auto-reset, if it is a JAX environment that lacks them; else as it is.

    Raises:
      ConfigError: it is neither a JAX environment nor a recipe of host environments.
    """
    if isinstance(env, Environment):
        shown = jax.eval_shape(lambda key: env.reset(key)[1], jax.random.key(0))
        if shown.episode is None:
            env = EpisodeStatistics(env)
        return with_auto_reset(env)
    if not callable(getattr(env, "build", None)):
        raise ConfigError(
            f"{env!r} is no environment: it has neither `reset` and `step` as jaxrl.types.Environment says, "
            "nor `build` as HostRecipe; make one with jaxrl.make('suite:name')"
        )
    return env
