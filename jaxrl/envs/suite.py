"""What the adapters of suites share: keys of what is static, foreign rules of types, and errors of making."""

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import Environment, PyTree

# What is static of a suite's environment: its name, and its constructor's arguments in sorted order.
Key = tuple[str, tuple[tuple[str, Hashable], ...]]

# By module: what installs it, of those that the environments of suites import when they are made.
_PACKAGES = {
    "Box2D": "'gymnasium[box2d]'",
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "imageio": "imageio",
    "mujoco": "mujoco",
    "pygame": "pygame",
}
_REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)


def key_of(name: str, arguments: Mapping[str, Any]) -> Key:
    """The key of an environment; lists become tuples.

    Raises:
      TypeError: an argument is not hashable.
    """
    return name, tuple(sorted((k, _hashable(v)) for k, v in arguments.items()))


@contextlib.contextmanager
def foreign_rules() -> Generator[None]:
    """JAX's standard promotion of types and ranks, which suites are written for."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def constructing() -> Generator[None]:
    """Foreign rules, and no tracers: what is cached may first be asked for within a trace."""
    with jax.ensure_compile_time_eval(), foreign_rules():
        yield


@contextlib.contextmanager
def refusing(where: str, options: Mapping[str, Any], kinds: tuple[type[Exception], ...] = _REFUSALS) -> Generator[None]:
    """A `ConfigError` of what a suite raises while it makes an environment; `where` names that."""
    try:
        yield
    except kinds as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(
            f"{where} cannot be made with {given or 'its own settings'}: {error}{_install(error)}"
        ) from error


def _install(error: Exception) -> str:
    """How to get a package of which a suite says that it is missing; nothing for what only a user may know."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"; pip install {_PACKAGES[name]}" if name in _PACKAGES else ""


def unknown_parameters(what: str, given: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """A line for each name that is not allowed, with those that are close; `what` says of which environment."""
    allowed = [*allowed]
    return [line for name in given if name not in allowed for line in unknown(what, name, allowed).problems]


def settled_dtypes(step: Callable[[PyTree], PyTree], state: PyTree) -> PyTree:
    """The types of a state's leaves after steps, in its tree.

    Suites begin states with Python's numbers, which become arrays of another type, or no longer weakly typed ones.

    Args:
      step: from the shapes and types of a state to those of the next.
      state: those of the first.
    """
    for _ in range(3):
        before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        state = step(before)
    return jax.tree.map(lambda x: np.dtype(x.dtype), state)


def unread(environment: Callable[[dict[str, Any]], Environment], values: dict[str, Any]) -> frozenset[str]:
    """Return the names of the parameters on which no time step of an environment depends; compiles nothing.

    Args:
      environment: from parameters by name to a raw environment.
      values: parameters by name, numbers or arrays.
    """

    def episode(values, key):
        env = environment(values)
        state, first = env.reset(key)

        def one(state, key):
            return env.step(state, env.action_space.sample(key), key)

        return first, jax.lax.scan(one, state, jax.random.split(key, 2))[1]

    with constructing():
        numbers = jax.tree.map(jnp.asarray, values)
        program = jax.make_jaxpr(episode)(numbers, jax.random.key(0)).jaxpr
    used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1]
    names = [path[0].key for path, _ in jax.tree.leaves_with_path(numbers)]
    return frozenset(values) - {name for name, read in zip(names, used, strict=False) if read}


def scalar_names(reported: Mapping[str, Any], *, leave_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names of what a suite reports that are single numbers, sorted; `reported` holds shapes and types."""
    return tuple(
        name
        for name, x in sorted(reported.items())
        if isinstance(x, jax.ShapeDtypeStruct) and x.shape == () and x.dtype.kind in "biuf" and name not in leave_out
    )


def cast(state: PyTree, dtypes: PyTree) -> PyTree:
    """The state with these types, so that every step gives the same."""
    return jax.tree.map(lambda x, dtype: jnp.asarray(x, dtype), state, dtypes)


def _hashable(value: Any) -> Hashable:
    value = tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value
    hash(value)
    return value
