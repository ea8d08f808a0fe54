"""Properties that wrappers forward, and the limits of their arguments."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import describe


def forward(attribute: str) -> Any:
    """Return a property that reads the wrapped environment: `name = forward("name")`."""
    return property(lambda self: getattr(self.env, attribute))


def check_arguments(wrapper: Any, *, whole: bool = False, finite: bool = True, **limits: Mapping[str, float]) -> None:
    """Refuse arguments of a wrapper that are not numbers within their limits.

    JAX arrays are not looked at, and neither are trees of placeholders that JAX builds of a wrapper, such as the axes
    to map over.

    Args:
      wrapper: with an environment in its field `env`.
      whole: the arguments are whole numbers.
      finite: the arguments are finite.
      limits: by argument, `low` and `high`; an argument that is None by default may be None.

    Raises:
      ConfigError: says which argument, its value and its limits.
    """
    problems = []
    for name, limit in limits.items():
        value, field = getattr(wrapper, name), wrapper.__dataclass_fields__[name]
        static = not field.metadata.get("pytree_node", True)
        if value is None and field.default is None or not static and _is_placeholder(wrapper.env, value):
            continue
        if _holds(value, whole, finite, limit) and not (static and whole and not isinstance(value, int | np.integer)):
            continue
        kind = f"a {'whole ' if whole else 'finite ' if finite else ''}number {describe(limit)}".rstrip()
        problems.append(f"{type(wrapper).__name__}({name}={value!r:.80}): {name} must be {kind}")
    if problems:
        raise ConfigError(problems)


def _is_placeholder(env, value):
    """Whether `value` stands for a leaf in a tree that is no environment, or is an array that only JAX may look at."""
    if isinstance(value, jax.Array) or not isinstance(value, int | float | np.ndarray | np.generic | str | None):
        return True
    leaves = jax.tree.leaves(env, is_leaf=lambda x: x is None)
    return bool(leaves) and all(x is None or x is value or (type(x) is int and x == 0) for x in leaves)


def _holds(value, whole, finite, limits):
    numbers = np.asarray(value if isinstance(value, int | float | np.ndarray | np.generic) else None)
    if numbers.dtype.kind not in "iuf":
        return False
    low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
    within = (numbers >= low) & (numbers <= high)  # no NaN is
    if finite or whole:
        within &= np.isfinite(numbers)
    return bool(np.all(within)) and not (whole and np.any(numbers != np.floor(numbers)))
