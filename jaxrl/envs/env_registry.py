"""A registry of environments by name, "suite:name". A suite is imported when one of its names is first used."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxrl.core import registry, suite_modules, suites
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import whole
from jaxrl.core.resources import device_problem
from jaxrl.core.types import Environment, EnvironmentFactory, HostRecipe, num_agents
from jaxrl.envs.agents import as_rows
from jaxrl.envs.parameters import memory
from jaxrl.envs.suite import check_single
from jaxrl.envs.wrappers import AutoReset, EpisodeStatistics, Hide, PooledReset, StickyActions

if TYPE_CHECKING:
    import gymnasium

# Values that public functions accept as an environment, including names and Gymnasium instances, classes and functions.
type EnvironmentLike = (
    Environment | HostRecipe | str | gymnasium.Env | type[gymnasium.Env] | Callable[[], gymnasium.Env]
)

# Every suite's module has the functions `names()` and `make(name, **parameters)`; `make` returns a raw episodic
# environment or a recipe of host environments. These wrappers make a raw environment reset itself.
_AUTO_RESETS: dict[str | None, Callable[[Environment], Environment]] = {
    "exact": AutoReset,
    "pooled": PooledReset,
    None: lambda env: env,
}


@interruptible
def make(
    name: str | Any,
    *,
    wrappers: Any = (),
    auto_reset: str | None = "exact",
    sticky_actions: float | None = None,
    hide: int | tuple[int, ...] = (),
    **parameters: Any,
) -> Environment | Any:  # or a HostRecipe; in a union with it, `make(name).reset` would be a type error
    """Make the environment `name`, such as "gymnax:CartPole-v1", with episode statistics, ready for training.

    Args:
      name: "suite:name", one of `environments()`; or a Gymnasium environment, its class, or a function that makes one.
      wrappers: functions that take and return an environment, applied in order, inside the auto-reset. For Gymnasium
        environments, Gymnasium wrappers: a name (`"FlattenObservation"`, `"my_module:Mine"`) or a class, a list of
        these, or a dictionary from names to arguments (`{"FrameStackObservation": {"stack_size": 4}}`).
      auto_reset: "exact" (`AutoReset`), "pooled" (`PooledReset`, faster if resets are slow), or None for an environment
        that does not reset itself. In multi-agent environments, whose agents end separately but are reset together,
        None means "exact".
      sticky_actions: the probability, in [0, 1], that a JAX environment repeats the previous action instead of taking
        the new one (`StickyActions`; 0.1 in MinAtar's paper); None means never.
      hide: indices of the entries of a JAX environment's vector observation that are hidden from the agent (`Hide`).
      parameters: the environment's parameters; numbers become pytree leaves, except for those that change shapes or the
        compiled program, which are static.

    Returns:
      An `Environment`, or a `HostRecipe` for environments outside JAX.

    Raises:
      ConfigError: the suite, name or a parameter is unknown (similar names are suggested), the probability is invalid,
        or `wrappers` are not functions that take and return an environment, or do not fit this environment.
      MissingExtraError: the suite's package is not installed.
    """
    if not isinstance(auto_reset, str | None) or auto_reset not in _AUTO_RESETS:
        raise unknown("auto_reset", str(auto_reset), [str(k) for k in _AUTO_RESETS])
    if not isinstance(name, str) and not is_gymnasium(name):
        raise ConfigError(f"{name!r:.80} is not the name of an environment; use a name such as 'gymnax:CartPole-v1'")
    if not isinstance(name, str) or name.startswith("gymnasium:"):
        parameters, wrappers = parameters | {"wrappers": wrappers}, ()  # Gymnasium's, around each environment
    if not isinstance(wrappers, Sequence) or isinstance(wrappers, str) or not all(map(callable, wrappers)):
        raise ConfigError(
            f"wrappers={wrappers!r:.80} must be a tuple of functions that take and return an environment, in Python: "
            "wrappers=(jaxrl.envs.Flatten,)"
        )
    env = _factory(name)(**parameters)
    if not isinstance(env, Environment):
        if wrappers or sticky_actions is not None or hide != ():
            named = "sticky_actions" if sticky_actions is not None else "hide"
            what = "wrappers of JAX environments" if wrappers else f"{named}; use its suite's own parameters"
            raise ConfigError(f"{env.name} is not a JAX environment and does not support {what}")
        return env
    if sticky_actions is not None:
        try:
            env = StickyActions(env, sticky_actions)
        except ConfigError as error:
            raise ConfigError(f"sticky_actions={sticky_actions!r:.80} must be a probability, from 0 to 1") from error
    entries = tuple(map(whole, hide if isinstance(hide, tuple | list) else (hide,)))
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
        raise ConfigError(f"hide={hide!r} must be one index or several indices, such as hide=2 or hide=(0,2)")
    if entries:
        env = Hide(env, tuple(entries))
        _ = env.observation_space  # raises if an entry does not exist
    if env.resets:
        return env
    several = num_agents(env) > 1  # agents are reset together, under the wrappers that act on one row
    env = env if several else EpisodeStatistics(env)
    for wrapper in wrappers:
        env = _wrapped(env, wrapper)
    if several:
        return as_rows(env, _AUTO_RESETS[auto_reset or "exact"])
    return env if env.resets else _AUTO_RESETS[auto_reset](env)


def _wrapped(env, wrapper):
    """Return `wrapper(env)` after checking that it is an environment with valid spaces.

    Raises:
      ConfigError: the wrapper does not fit this environment, or does not return an environment.
    """
    name = getattr(wrapper, "__name__", None) or repr(wrapper)
    try:
        wrapped = wrapper(env)
    except TypeError as error:
        raise ConfigError(f"wrapper {name:.80} cannot be applied to {env.name}: {error}") from error
    if not isinstance(wrapped, Environment):
        raise ConfigError(f"wrapper {name:.80} returned {wrapped!r:.80} for {env.name}, which is not a JAX environment")
    _ = wrapped.observation_space, wrapped.action_space  # raise if the wrapper does not fit
    return wrapped


def as_environment(env: EnvironmentLike) -> Environment | HostRecipe:
    """Return `make(env)` if `env` is a name or a Gymnasium environment, class or function, otherwise `env` unchanged.

    Raises:
      ConfigError: `make` rejects `env`, or a parameter is an array to map over instead of a single value.
    """
    if isinstance(env, str) or is_gymnasium(env):
        env = make(env)
    if isinstance(env, Environment):
        check_single(env)
    return cast("Environment | HostRecipe", env)


def is_gymnasium(env: Any) -> bool:
    """Return whether `env` is a Gymnasium environment, vectorized or not, its class, or a function that makes one."""
    if isinstance(env, str) or env is None:
        return False
    if (gymnasium := sys.modules.get("gymnasium")) is not None:
        kinds = (gymnasium.Env, gymnasium.vector.VectorEnv)
        if isinstance(env, kinds) or (isinstance(env, type) and issubclass(env, kinds)):
            return True
    return callable(env) and not isinstance(env, type | Environment) and not hasattr(env, "build")


def environments() -> list[str]:
    """Return all names that `make` accepts, sorted, except those of suites that are not installed."""
    return suites.environments(names)


def made(name: str, parameters: Mapping[str, Any]) -> Any:
    """Make the environment registered as `name`, and store the name and parameters in it, so that files have them."""
    env = registry.registered("environment")[name](**parameters)
    memory(env)["made_as"] = name, parameters
    return env


def _factory(name: Any) -> EnvironmentFactory:
    if not isinstance(name, str):
        from jaxrl.envs.host import passed  # Gymnasium takes time to import

        return functools.partial(passed.recipe, name)
    found = suites.suite_of(name, names)
    if found is None:
        return lambda **parameters: made(name, parameters)
    suite, rest = found
    try:
        module = suite_modules.load(suite)
    except (AssertionError, RuntimeError):  # some suites create arrays when they are imported
        if (problem := device_problem()) is None:
            raise
        raise ConfigError(problem) from None
    return lambda **parameters: module.make(rest, **parameters)


def names(suite: str) -> Sequence[str]:
    """Return the names of a suite's environments, without the suite's prefix.

    Raises:
      ConfigError: there is no such suite, or its module cannot be imported.
    """
    return suite_modules.load(suite).names()
