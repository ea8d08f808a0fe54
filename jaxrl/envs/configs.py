"""Conversion of environments to and from JSON: suite, name, parameters and wrappers, innermost first.

    {"suite": "gymnax", "name": "CartPole-v1", "parameters": {"gravity": 9.8, ...},
     "wrappers": [{"type": "wrapper:episode_statistics"}, {"type": "wrapper:auto_reset"}],
     "observation_space": ..., "action_space": ...}

Parameters override the suite's defaults. The spaces are those of the environment with all wrappers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.core import registry, suite_modules
from jaxrl.core.config import decode, decode_fields, encode, encode_fields, opaque
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.types import Environment, HostRecipe
from jaxrl.envs.env_registry import made
from jaxrl.envs.parameters import memory, parameters, with_parameters


def to_config(env: Environment | HostRecipe) -> dict[str, Any]:
    """Return `env` as JSON values; objects whose classes are not registered become {"opaque": repr}.

    If these values cannot be read back, but a registered function made the environment, the result has the function's
    name and parameters instead, and the values that `with_parameters` changed.
    """
    wrappers: list[dict[str, Any]] = []
    inner: Any = env
    made_as = None
    while True:
        if made_as is None and (made_as := memory(inner).get("made_as")):
            above = wrappers[::-1]
        names = [field.name for field in dataclasses.fields(inner)] if dataclasses.is_dataclass(inner) else []
        if (name := registry.name_of(type(inner))) is None or "env" not in names:
            break
        fields = {field: encode(getattr(inner, field)) for field in names if field != "env"}
        wrappers.append({"type": name} | fields)
        inner = inner.env
    found = _inner_config(inner) | {
        "wrappers": wrappers[::-1],
        "observation_space": encode(env.observation_space),
        "action_space": encode(env.action_space),
    }
    if made_as and (getattr(inner, "factory", None) is not None or _changed(env, found) is None):
        name, chosen = made_as
        found |= _named(name, {key: encode(value) for key, value in chosen.items()}) | {"wrappers": above}
        found |= _changed(env, found) or {}
    return found


def _changed(env, config):
    """Return {"changed": parameters in which `env` differs from `config`} or {}; None if `config` cannot be loaded."""
    try:
        before = from_config(config)
    except Exception:  # a suite may raise any error
        return None
    if not isinstance(before, Environment):
        return {}
    now, before = ({key: encode(value) for key, value in parameters(one).items()} for one in (env, before))
    changed = {key: value for key, value in now.items() if value != before.get(key)}
    return {"changed": changed} if changed else {}


def from_config(config: Mapping[str, Any]) -> Environment | HostRecipe:
    """Return the environment from `config`, a result of `to_config`.

    Raises:
      ConfigError: a name is not registered, a parameter does not fit, or the file does not describe an environment.
      MissingExtraError: the suite's package is not installed.
    """
    suite, name, parameters, wrappers = (config.get(key) for key in ("suite", "name", "parameters", "wrappers"))
    named = isinstance(suite, str) and isinstance(name, str)
    if not named or not isinstance(parameters, Mapping) or not isinstance(wrappers, list):
        raise ConfigError(
            "the file does not describe an environment: the suite, name, parameters or wrappers are missing"
        )
    if set(parameters) == {"opaque"}:
        decode(dict(parameters))  # raises
    registered = f"{suite}:{name}" in registry.registered("environment")
    if not registered and suite != registry.USER and suite_modules.exists(suite):
        try:
            cls = registry.find(f"suite:{suite}")
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"{suite}:{name}", suite) from error
        values = {key: decode(value) for key, value in parameters.items()}
        env = cls.restore(name, values, *(decode(config.get(f"{what}_space")) for what in ("observation", "action")))
    else:
        cls = registry.find(f"user:{name}" if suite == registry.USER else f"environment:{suite}:{name}")
        if registered and not dataclasses.is_dataclass(cls):
            env = made(f"{suite}:{name}", {key: decode(value) for key, value in parameters.items()})
        else:
            env = decode_fields(cls, parameters)
    for wrapper in wrappers:
        env = _wrapped(env, wrapper)
    changed = {key: decode(value) for key, value in config.get("changed", {}).items()}
    return with_parameters(env, **changed) if changed else env


def full_name(config: Mapping[str, Any]) -> str:
    """Return an environment's name, "suite:name", from a result of `to_config`."""
    return ":".join(part for part in (config.get("suite"), config.get("name")) if part)


def _inner_config(env):
    registered = registry.name_of(type(env)) or ""
    kind, _, name = registered.partition(":")
    if kind == "suite":
        return _named(env.name, {key: encode(value) for key, value in env.parameters.items()})
    if kind in ("environment", registry.USER):
        return _named(name if kind == "environment" else registered, encode_fields(env))
    return _named(env.name, opaque(env))


def _named(full_name, parameters):
    *suite, name = full_name.split(":", 1)
    return {"suite": "".join(suite), "name": name, "parameters": parameters}


def _wrapped(env, wrapper):
    name = wrapper.get("type") if isinstance(wrapper, Mapping) else None
    if not isinstance(name, str) or name.partition(":")[0] not in ("wrapper", registry.USER):
        raise ConfigError(f"{name!r} is not a registered environment wrapper")
    return decode_fields(registry.find(name), {key: x for key, x in wrapper.items() if key != "type"}, env=env)
