"""What a search plans in: environments without what surrounds their episodes."""

from jaxrl.core.planning import Model
from jaxrl.core.types import Environment, PyTree
from jaxrl.envs.episode import AutoReset, EpisodeStatistics, PooledReset
from jaxrl.envs.suite import SuiteEnv


def model(env: Environment, state: PyTree) -> Model:
    """Return environments as a model of themselves.

    Statistics and automatic resets around an environment are left out, and a suite may have another one to plan in
    (`SuiteEnv.model`). Under another wrapper all stays as it is, so that observations are those that a policy knows.

    Args:
      env: one environment.
      state: of a batch of it, [B, ...].
    """
    while isinstance(env, AutoReset | PooledReset | EpisodeStatistics):
        env, state = env.env, state.env
    return Model(*(env.model(state) if isinstance(env, SuiteEnv) else (env, state)))
