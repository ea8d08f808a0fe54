"""The base of physics suites: environments with a time limit and a physical system whose parts are parameters."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs.parameters import array_like
from jaxrl.envs.suite import COUNT, Key, LibraryEnv, unread


class PhysicsState(struct.PyTreeNode):
    """A library's own state, and the length of the episode, which it does not count."""

    own: PyTree
    steps: jax.Array  # int32, transitions so far
    drawn: dict[str, jax.Array] = struct.field(default_factory=dict)  # parts of the system, for this episode


class PhysicsEnv(LibraryEnv):
    """An environment of a library of simulated physics.

    Leaves: the time limit, where episodes are truncated, and the replaced parts of the physical system by their path in
    it, such as `{"opt.gravity": [0.0, 0.0, -3.7]}`, each in its shape (or with more axes in front, to be mapped over).
    """

    episode_length: Any
    system: dict[str, Any]

    @classmethod
    def physical(cls, key: Key) -> Any:
        """Return the library's physical system of an environment; None if it has none."""
        raise NotImplementedError

    def reads(self) -> str:
        """Return an addition to the message about a part without effect."""
        return ""

    def fit(self, name: str, value: Any) -> Any:
        if name == "episode_length":
            return super().fit(name, value)
        if not isinstance(value, Mapping | None):
            raise ConfigError(
                f"system={value!r:.80} of {self.name} must be a dictionary, such as {{'opt.gravity': [0, 0, -3.7]}}"
            )
        system, parts, problems = self.physical(self.key), {}, []
        if value and system is None:
            raise ConfigError(f"{self.name} has no physical system; leave system={value!r:.80} out")
        for path, replacement in (value or {}).items():
            try:
                parts[path] = array_like(part(system, path), replacement)
            except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
                problems.append(f"system[{path!r}] of {self.name}: {error}")
        if problems:
            raise ConfigError(problems)
        return parts

    @classmethod
    def limits(cls, name: str) -> Mapping[str, Mapping[str, float]]:
        return {"episode_length": COUNT}

    def ineffective(self, changed: Collection[str]) -> list[str]:
        paths = [path for path in self.system if {"system", path} & set(changed)]
        reasons = {path: _useless(type(self), self.key, path) for path in paths}
        return [f"system[{path!r}] of {self.name}{why}{self.reads()}" for path, why in reasons.items() if why]


def part(system: Any, path: str) -> Any:
    """Return the part of a physical system at a path, such as "opt.gravity"."""
    return functools.reduce(getattr, path.split("."), system)


@functools.lru_cache(maxsize=256)
def _useless(cls, key, path):
    """Return why a part of the physical system is not a parameter of the dynamics; "" if it is one."""
    env = cls.default(key)
    try:
        value = jnp.asarray(part(cls.physical(key), path))
        useless = unread(lambda values: env.replace(system=values), {path: value})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, jax.errors.JAXTypeError) as error:
        return f" is no number that may change: {str(error).strip().splitlines()[0]:.120}"
    return " changes nothing: no observation, reward or ending depends on it" if useless else ""
