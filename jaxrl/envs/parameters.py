"""Parameters of environments: numbers that can change without recompilation, for example in a curriculum."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import Environment

Path = tuple[str, ...]  # attribute names and dictionary keys
_ARRAYS = jax.Array | np.ndarray


@runtime_checkable
class ChecksParameters(Protocol):
    """An environment that checks changed parameters, such as those that are computed from other parameters."""

    def parameter_problems(self, changed: Mapping[str, Any]) -> list[str]:
        """Return one error line per problem with parameters that were just replaced.

        Args:
          changed: the values by name, as passed by the user; names that the environment does not have are ignored.
        """
        ...


def layers(env: Any) -> Iterator[Any]:
    """Yield an environment and all environments inside it, from the outermost wrapper to the innermost environment."""
    yield env
    while isinstance(env := getattr(env, "env", None), Environment):
        yield env


def has_layer(env: Any, kind: Any) -> bool:
    """Return whether an environment, or an environment inside it, is an instance of `kind`, a class or a union."""
    return any(isinstance(layer, kind) for layer in layers(env))


def unwrapped(env: Environment) -> Environment:
    """Return the innermost environment, without any wrappers."""
    *_, innermost = layers(env)
    return innermost


def parameters(env: Environment) -> dict[str, Any]:
    """Return the parameters of a JAX environment and of the wrappers around it, by name.

    These are the fields that are pytree leaves, such as those of gymnax's `EnvParams`, numbers in your own
    environments, or `StickyActions.probability`. Static fields, such as those that determine shapes, are not included.

    Raises:
      ConfigError: `env` is not a JAX environment.
    """
    return {name: at(env, path) for name, path in _all_paths(env).items()}


def with_parameters(env: Environment, **changed: Any) -> Environment:
    """Return `env` with new values for some parameters of the environment or its wrappers.

        harder = jaxrl.envs.with_parameters(moment.env, gravity=12.0)

    The new values are converted to the types of the current ones, so nothing is recompiled unless shapes change.
    Parameters that are computed from others (CartPole's `total_mass`) are updated. The observation and action spaces do
    not change.

    Args:
      env: a JAX environment, as returned by `jaxrl.make`, or a callback's `moment.env`.
      **changed: numbers or arrays, by their names in `jaxrl.envs.parameters(env)`.

    Raises:
      ConfigError: a parameter does not exist, is static, has no effect or contradicts the parameters that determine it,
        or a value has the wrong type or shape; the message lists all problems.
    """
    known, problems, taken = _all_paths(env), [], {}
    for name, value in changed.items():
        if name not in known:
            problems += _unknown(env, name, known)
            continue
        old = at(env, known[name])
        try:
            env = replaced(env, known[name], like(old, value))
            taken[name] = value
        except ConfigError as error:  # raised by a wrapper's checks
            problems += error.problems
        except (TypeError, ValueError) as error:
            problems.append(
                f"parameter {name}={value!r:.80} of {env.name} does not fit its current value {old!r:.80}: {error}"
            )
    innermost = unwrapped(env)
    problems += innermost.parameter_problems(taken) if isinstance(innermost, ChecksParameters) else []
    if problems:
        raise ConfigError(problems)
    return env


def _all_paths(env):
    """Return the path of each parameter, by name; a name that several layers use refers to the innermost layer."""
    if not isinstance(env, Environment):
        raise ConfigError(f"{env!r:.80} is not a JAX environment, so it has no parameters that can change")
    found: dict[str, Path] = {}
    for depth, part in enumerate(itertools.takewhile(dataclasses.is_dataclass, layers(env))):
        for name, path in paths(part).items():
            value, path = at(part, path), ("env",) * depth + path
            found |= {key: (*path, key) for key in value} if isinstance(value, dict) else {name: path}
    return found


def paths(part: Any) -> dict[str, Path]:
    """Return the paths of an environment's or wrapper's leaves, without those in `env`; a dictionary is one leaf."""
    found: dict[str, Path] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "env" or not field.metadata.get("pytree_node", True):
            continue
        if dataclasses.is_dataclass(value):
            found |= {name: (field.name, *path) for name, path in paths(value).items()}
        elif isinstance(value, dict) or jax.tree.leaves(value):
            found[field.name] = (field.name,)
    return found


def at(part: Any, path: Path) -> Any:
    """Return the value at a path within an environment."""
    for name in path:
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    return part


def replaced(part: Any, path: Path, value: Any) -> Any:
    """Return a copy of an environment with a new value at a path."""
    name, *rest = path
    new = replaced(at(part, (name,)), tuple(rest), value) if rest else value
    if isinstance(part, dict):
        return part | {name: new}
    changed = dataclasses.replace(part, **{name: new})
    if "made_as" in memory(part):
        memory(changed)["made_as"] = memory(part)["made_as"]
    return changed


def memory(env: Any) -> dict[str, Any]:
    """Return a dictionary that stores, as `made_as`, the registered name and the parameters that `env` was made with.

    `dataclasses.replace` and JAX's transformations do not copy this entry.
    """
    return getattr(env, "__dict__", {})  # not forwarded by wrappers; a temporary dictionary for classes with slots


def like(old: Any, value: Any) -> Any:
    """Convert `value` to the types of `old`: a Python number if both are numbers, otherwise JAX arrays.

    Args:
      old: a number, an array, or a pytree of them.
      value: a pytree of the same structure; arrays may have additional leading axes, to map over.

    Raises:
      ValueError: `value` has a different structure or shape, contains NaN, or is not representable in `old`'s type.
    """
    if not jax.tree_util.all_leaves([old]):
        if jax.tree.structure(old) != jax.tree.structure(value):
            raise ValueError(f"its structure must be {jax.tree.structure(old)}")
        return jax.tree.map(like, old, value)
    if isinstance(old, _ARRAYS | np.generic) or isinstance(value, _ARRAYS):
        return array_like(old, value)
    if not isinstance(value, int | float | np.generic) or (isinstance(value, bool) and not isinstance(old, bool)):
        several = isinstance(value, str) and "=" in value
        hint = "; separate parameters with spaces" if several else ""
        raise ValueError(f"{type(value).__name__} was passed instead of {type(old).__name__}{hint}")
    try:
        converted = type(old)(value)
    except OverflowError as error:
        raise ValueError(f"it must be of type {type(old).__name__}") from error
    if converted != value:
        raise ValueError("it is NaN" if converted != converted else f"it must be of type {type(old).__name__}")
    return converted


def array_like(old: Any, value: Any) -> jax.Array:
    """Convert `value` to an array with the dtype and shape of `old`; it may have more leading axes, as in `like`."""
    dtype, shape, array = jnp.result_type(old), jnp.shape(old), jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != jnp.bool_:
        raise ValueError(f"{array.dtype} is not a numeric type")
    if array.shape[array.ndim - len(shape) :] != shape:
        raise ValueError(f"shape {array.shape} is not {shape}")
    cast = array.astype(dtype)
    if isinstance(array, jax.core.Tracer):
        return cast
    if jnp.issubdtype(dtype, jnp.floating):
        if np.isnan(np.asarray(cast)).any():
            raise ValueError("it contains NaN")
    elif not np.array_equal(np.asarray(cast), np.asarray(array)):
        raise ValueError(f"it must be of type {dtype}")
    return cast


def _unknown(env, name, paths):
    fields = {field for part in layers(env) for field in getattr(part, "__dataclass_fields__", ())}
    if name in fields - {"env"}:
        return [f"{name} of {env.name} is static, part of the compiled program; make a new environment to change it"]
    return unknown(f"parameter of {env.name}", name, paths).problems
