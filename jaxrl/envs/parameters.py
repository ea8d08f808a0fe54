"""The parameters of an environment: the numbers that may change without compiling anew, as curricula do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import Environment

_Path = tuple[str, ...]  # of attributes, and of keys of dictionaries


def parameters(env: Environment) -> dict[str, Any]:
    """The parameters of a JAX environment and of the wrappers around it, by name.

    These are the fields that are leaves, such as gymnax's `EnvParams`, a number in an environment of your own, or
    `StickyActions.probability`. Static fields, which decide shapes, are not among them.

    Raises:
      ConfigError: it is no JAX environment.
    """
    return {name: _at(env, path) for name, path in _paths(env).items()}


def with_parameters(env: Environment, **changed: Any) -> Environment:
    """`env` with other values of these parameters, under whatever wrappers it has.

        harder = jaxrl.envs.with_parameters(moment.env, gravity=12.0)

    Nothing compiles anew where types and shapes stay. Observation and action space stay as they are.

    Args:
      env: a JAX environment, as `jaxrl.make` gives it or a callback's `moment.env`.
      **changed: numbers or arrays by name, those of `jaxrl.envs.parameters(env)`.

    Raises:
      ConfigError: `env` has no such parameter, it is static, or a value is none for it; all of them at once.
    """
    paths, problems = _paths(env), []
    for name, value in changed.items():
        if name not in paths:
            problems += _unknown(env, name, paths)
            continue
        old = _at(env, paths[name])
        try:
            fits = _fits(old, value)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            problems.append(f"parameter {name}={value!r:.80} of {env.name} is no value for it; now it is {old!r:.80}")
            continue
        env = _replaced(env, paths[name], value)
    if problems:
        raise ConfigError(problems)
    return env


def _paths(env):
    """Where each parameter is; of a name that stands in several places the innermost one."""
    if not isinstance(env, Environment):
        raise ConfigError(f"{env!r:.80} is no JAX environment, so it has no parameters that could change")
    found: dict[str, _Path] = {}
    inner, here = env, ()
    while dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        found |= _own(inner, here)
        if not isinstance(getattr(inner, "env", None), Environment):
            break
        inner, here = inner.env, (*here, "env")
    return found


def _own(part, here):
    found = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "env" or not field.metadata.get("pytree_node", True):
            continue
        if dataclasses.is_dataclass(value):
            found |= _own(value, (*here, field.name))
        elif isinstance(value, dict):
            found |= {name: (*here, field.name, name) for name in value}
        elif jax.tree.leaves(value):
            found[field.name] = (*here, field.name)
    return found


def _at(part, path):
    for name in path:
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    return part


def _replaced(part, path, value):
    name, *rest = path
    new = _replaced(_at(part, (name,)), rest, value) if rest else value
    return part | {name: new} if isinstance(part, dict) else dataclasses.replace(part, **{name: new})


def _fits(old, value):
    if jax.tree.structure(old) != jax.tree.structure(value):
        return False
    if not all(isinstance(leaf, int | float | np.ndarray | np.generic | jax.Array) for leaf in jax.tree.leaves(value)):
        return False

    def leaf_fits(before, now):
        if jnp.ndim(before) and jnp.shape(now)[-jnp.ndim(before) :] != jnp.shape(before):
            return False
        whole = jnp.issubdtype(jnp.result_type(before), jnp.integer)
        return not (whole and isinstance(now, float) and not now.is_integer())

    return all(map(leaf_fits, jax.tree.leaves(old), jax.tree.leaves(value)))


def _unknown(env, name, paths):
    inner = env
    while True:
        fields = {field.name for field in dataclasses.fields(inner)} if dataclasses.is_dataclass(inner) else set()
        if name in fields - {"env"}:
            return [f"{name} of {env.name} is static: it is part of the compiled program; make another environment"]
        if not isinstance(getattr(inner, "env", None), Environment):
            return unknown(f"parameter of {env.name}", name, paths).problems
        inner = inner.env
