"""Environments in files: a suite's name and parameters, and the wrappers around, innermost first.

    {"suite": "gymnax", "name": "CartPole-v1", "parameters": {"gravity": 9.8, ...},
     "wrappers": [{"type": "wrapper:episode_statistics"}, {"type": "wrapper:auto_reset"}],
     "observation_space": ..., "action_space": ...}

Parameters are numbers that go into the suite's own defaults by field. The spaces are those of the wrapped environment.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl.core import registry, suite_modules
from jaxrl.core.config import decode, decode_fields, encode, encode_fields, opaque
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.spaces import Space
from jaxrl.core.types import Environment, HostRecipe


class SuiteClass(Protocol):
    """What the environment class of a suite, registered as "suite:NAME", has for files."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What `restore` takes; values that `jaxrl.core.config.encode` writes."""
        ...

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: Space, action_space: Space
    ) -> Environment | HostRecipe:
        """The environment `name` of the suite with these parameters, and for host environments these spaces.

        Raises:
          ConfigError: there is none such.
        """
        ...


def to_config(env: Environment | HostRecipe) -> dict[str, Any]:
    """`env` as JSON values; a part whose class is not registered becomes {"opaque": its repr}."""
    wrappers: list[dict[str, Any]] = []
    inner: Any = env
    while (name := registry.name_of(type(inner))) is not None and _is_wrapper(inner):
        fields = {f.name: encode(getattr(inner, f.name)) for f in dataclasses.fields(inner) if f.name != "env"}
        wrappers.append({"type": name} | fields)
        inner = inner.env
    return _inner_config(inner) | {
        "wrappers": wrappers[::-1],
        "observation_space": encode(env.observation_space),
        "action_space": encode(env.action_space),
    }


def from_config(config: Mapping[str, Any]) -> Environment | HostRecipe:
    """The environment that `to_config` was given.

    Raises:
      ConfigError: a name is not registered, a parameter does not fit, or the file holds no environment.
      MissingExtraError: the suite's package is not installed.
    """
    suite, name, parameters, wrappers = (config.get(key) for key in ("suite", "name", "parameters", "wrappers"))
    named = isinstance(suite, str) and isinstance(name, str)
    if not named or not isinstance(parameters, Mapping) or not isinstance(wrappers, list):
        raise ConfigError("no environment: it lacks a suite, a name, parameters or wrappers")
    if set(parameters) == {"opaque"}:
        decode(dict(parameters))  # says what to do
    registered = f"{suite}:{name}" in registry.registered("environment")
    if not registered and suite != registry.USER and suite_modules.exists(suite):
        try:
            cls = registry.find(f"suite:{suite}")
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"{suite}:{name}", suite) from error
        values = {key: decode(value) for key, value in parameters.items()}
        env = cls.restore(name, values, *(decode(config.get(f"{what}_space")) for what in ("observation", "action")))
    else:
        user = suite == registry.USER
        env = decode_fields(registry.find(f"user:{name}" if user else f"environment:{suite}:{name}"), parameters)
    for wrapper in wrappers:
        env = _wrapped(env, wrapper)
    return env


def full_name(config: Mapping[str, Any]) -> str:
    """ "suite:name" of what `to_config` gave."""
    return ":".join(part for part in (config.get("suite"), config.get("name")) if part)


def _inner_config(env):
    registered = registry.name_of(type(env))
    kind, _, registered_name = (registered or "").partition(":")
    suite, colon, name = env.name.partition(":")
    if not colon:
        suite, name = "", suite
    if kind == "suite":
        parameters = {key: encode(value) for key, value in env.parameters.items()}
    elif kind == "environment":
        suite, _, name = registered_name.partition(":")
        parameters = encode_fields(env)
    elif kind == registry.USER:
        suite, name, parameters = kind, registered_name, encode_fields(env)
    else:
        parameters = opaque(env)
    return {"suite": suite, "name": name, "parameters": parameters}


def _is_wrapper(env):
    return any(field.name == "env" for field in dataclasses.fields(env))


def _wrapped(env, wrapper):
    name = wrapper.get("type") if isinstance(wrapper, Mapping) else None
    if not isinstance(name, str) or name.partition(":")[0] not in ("wrapper", registry.USER):
        raise ConfigError(f"no wrapper of environments: {name!r}")
    return decode_fields(registry.find(name), {key: x for key, x in wrapper.items() if key != "type"}, env=env)
