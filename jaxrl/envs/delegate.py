"""The base class of wrappers, and checks of their arguments."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import problem
from jaxrl.core.limits import whole as as_whole
from jaxrl.core.types import Environment, PyTree, TimeStep


def forward(attribute: str) -> Any:
    """Return a property that reads an attribute of the wrapped environment.

    A wrapper class uses it as `name = forward("name")`.
    """
    return property(lambda self: getattr(self.env, attribute))


class Wrapper(struct.PyTreeNode):
    """The base class of wrappers, which forwards properties and `reset` to `env`; subclasses define `step`.

    Attributes:
      env: the wrapped environment.
      of_all_agents: whether the wrapper acts on all agents together rather than on each agent's row
        (`jaxrl.envs.agents`).
    """

    env: Environment

    of_all_agents = False
    name, resets = forward("name"), forward("resets")
    observation_space, action_space = forward("observation_space"), forward("action_space")

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        return self.env.reset(key)


def check_arguments(wrapper: Any, *, whole: bool = False, finite: bool = True, **limits: Mapping[str, float]) -> None:
    """Raise an error if arguments of a wrapper are not numbers within their limits.

    JAX arrays are not checked. Neither are wrappers that JAX rebuilds with placeholders as leaves, such as `vmap` axes.

    Args:
      wrapper: a wrapper, with an environment in its field `env`.
      whole: whether the arguments must be whole numbers.
      finite: whether the arguments must be finite.
      limits: the limits of each argument, keyed by its name, as for `jaxrl.core.limits.problem`. An argument whose
        default is None may be None.

    Raises:
      ConfigError: an argument is invalid; the message has its name, value and limits.
    """
    problems = []
    for name, limit in limits.items():
        value, field = getattr(wrapper, name), wrapper.__dataclass_fields__[name]
        static = not field.metadata.get("pytree_node", True)
        if value is None and field.default is None or not static and _is_placeholder(wrapper.env, value):
            continue
        numbers = np.ravel(value).tolist() if isinstance(value, np.ndarray) and not static else [value]
        if whole and not static:
            numbers = map(as_whole, numbers)
        if found := next(filter(None, (_problem(number, whole, finite, limit) for number in numbers)), None):
            problems.append(f"{type(wrapper).__name__}({name}={value!r:.80}): {name} {found}")
    if problems:
        raise ConfigError(problems)


def _problem(number, whole, finite, limits):
    """Return the reason why a number is outside its limits, or None if it is valid."""
    if whole and not isinstance(number, int | np.integer):
        return "must be a whole number"
    return None if not finite and number in (-math.inf, math.inf) else problem(number, limits)


def _is_placeholder(env, value):
    """Return whether `value` is a JAX array, which is not checked, or a placeholder in a tree that JAX built."""
    if isinstance(value, jax.Array) or not isinstance(value, int | float | np.ndarray | np.generic | str | None):
        return True
    leaves = jax.tree.leaves(env, is_leaf=lambda x: x is None)
    return bool(leaves) and all(x is None or x is value or (type(x) is int and x == 0) for x in leaves)
