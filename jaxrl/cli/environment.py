"""Environments from command-line arguments, and the description printed by `jaxrl envs suite:name`."""

from collections.abc import Sequence

from jaxrl import envs
from jaxrl.cli.flags import columns
from jaxrl.cli.values import assignments, literal
from jaxrl.core.types import Environment, HostRecipe, env_spec
from jaxrl.envs.parameters import unwrapped
from jaxrl.envs.suite import SuiteEnv


def make_environment(name: str, words: Sequence[str] = ()) -> Environment | HostRecipe:
    """Return the environment `name` with parameters given as `key=value` arguments.

    Raises:
      ConfigError: the name or a parameter is unknown, or an argument is not of the form `key=value`.
    """
    return envs.make(name, **{key: literal(value) for key, value in assignments("--env-params", words).items()})


def describe(name: str, words: Sequence[str] = ()) -> str:
    """Return the spaces of an environment and the values of its parameters, one line each.

    Args:
      name: "suite:name".
      words: parameters as `key=value`; all others keep their defaults.

    Raises:
      ConfigError: the environment is unknown, its package is missing, or an argument is not of the form `key=value`.
    """
    env = make_environment(name, words)
    spec = env_spec(env)
    rows = [("observations", repr(spec.observation_space)), ("actions", repr(spec.action_space))]
    inner = unwrapped(env) if isinstance(env, Environment) else None
    if isinstance(inner, SuiteEnv):
        numbers = inner.numbers
        static = {key: inner.static(key) for key in type(inner).static_parameters(inner.key[0])}
        rows.append(("parameters", "numbers; changing them does not cause recompilation: --env-params NAME=VALUE"))
        rows += _rows({key: value for key, value in numbers.items() if key not in static})
        rows += [("static parameters", "they determine shapes or the compiled program")] if static else []
        rows += _rows(static)
    elif isinstance(env, Environment):
        rows += _rows(envs.parameters(env))
    else:
        rows.append(("parameters", "arguments of the suite's constructor: --env-params NAME=VALUE"))
        if spec.name.startswith("gymnasium:"):
            from jaxrl.envs.host.gymnasium import arguments

            rows += _rows(arguments(name.removeprefix("gymnasium:")))
    return f"{name}\n{columns([(f'  {title}', text) for title, text in rows])}"


def _rows(values):
    plain = {key: value.item() if getattr(value, "shape", None) == () else value for key, value in values.items()}
    return [(f"  {key}", f"{value!r:.80}") for key, value in plain.items()]
