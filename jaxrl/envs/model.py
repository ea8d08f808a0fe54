"""Environment models for planning: environments without statistics and automatic resets."""

from jaxrl.core.planning import Model
from jaxrl.core.types import Environment, PyTree
from jaxrl.envs.episode import AutoReset, EpisodeStatistics, PooledReset
from jaxrl.envs.suite import SuiteEnv


def model(env: Environment, state: PyTree) -> Model:
    """Return an environment and its states as a model for planning.

    Statistics and automatic resets around an environment are removed, and a suite may provide another environment to
    plan in (`SuiteEnv.model`). Nothing is removed under other wrappers, so that observations are those that the policy
    expects.

    Args:
      env: one environment.
      state: the states of a batch of it, [B, ...].
    """
    while isinstance(env, AutoReset | PooledReset | EpisodeStatistics):
        env, state = env.env, state.env
    return Model(*(env.model(state) if isinstance(env, SuiteEnv) else (env, state)))
