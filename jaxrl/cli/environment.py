"""What `jaxrl envs suite:name` says of one environment."""

from jaxrl import envs
from jaxrl.core.types import Environment, env_spec
from jaxrl.envs.parameters import unwrapped
from jaxrl.envs.suite import SuiteEnv


def describe(name: str) -> str:
    """Return the spaces of an environment and its parameters with their defaults, a line each.

    Raises:
      ConfigError: there is no such environment, or its package is not installed.
    """
    env = envs.make(name)
    spec = env_spec(env)
    rows = [("observations", repr(spec.observation_space)), ("actions", repr(spec.action_space))]
    inner = unwrapped(env) if isinstance(env, Environment) else None
    if isinstance(inner, SuiteEnv):
        numbers, static = inner.numbers, type(inner).static_parameters(inner.key[0])
        rows.append(("parameters", "numbers; changing them does not recompile: --env-params NAME=VALUE"))
        rows += _rows({key: value for key, value in numbers.items() if key not in static})
        rows += [("static parameters", "they decide shapes or the program")] if static else []
        rows += _rows(static)
    elif isinstance(env, Environment):
        rows += _rows(envs.parameters(env))
    else:
        rows.append(("parameters", "the arguments of the suite's own constructor: --env-params NAME=VALUE"))
        if spec.name.startswith("gymnasium:"):
            from jaxrl.envs.host.gymnasium import arguments

            rows += _rows(arguments(name.removeprefix("gymnasium:")))
    width = max(len(title) for title, _ in rows)
    return "\n".join([name, *(f"  {title.ljust(width)}  {text}" for title, text in rows)])


def _rows(values):
    plain = {key: value.item() if getattr(value, "shape", None) == () else value for key, value in values.items()}
    return [(f"  {key}", f"{value!r:.80}") for key, value in plain.items()]
