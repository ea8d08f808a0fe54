"""The base class of environments in physics suites, with a time limit and changeable parts of the physical system."""

import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs.parameters import array_like
from jaxrl.envs.suite import COUNT, Key, LibraryEnv, Step, constructing, unbounded, unread


class PhysicsState(struct.PyTreeNode):
    """The library's state, and the number of steps so far, which the library does not count."""

    own: PyTree
    steps: jax.Array  # int32, transitions so far
    drawn: dict[str, jax.Array] = struct.field(default_factory=dict)  # sampled parts of the system, fixed per episode


class PhysicsEnv(LibraryEnv):
    """An environment of a physics simulation library.

    The leaves are `episode_length`, the number of steps after which episodes are truncated, and `system`, the replaced
    parts of the physical system by path, such as `{"opt.gravity": [0.0, 0.0, -3.7]}`. Each part has the shape of the
    original part, possibly with leading axes to map over.
    """

    episode_length: Any
    system: dict[str, Any]

    ranges = {"episode_length": COUNT}

    @classmethod
    def limit(cls, key: Key) -> int:
        """Return the default of `episode_length`."""
        return 1000

    @classmethod
    def default(cls, key: Key) -> Self:
        env = cls.foreign_of(*key)
        observation = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), jnp.uint32)).obs
        return cls(key, unbounded(observation), spaces.Box(-1.0, 1.0, (env.action_size,)), cls.limit(key), {})

    @classmethod
    def physical(cls, key: Key) -> Any:
        """Return the physical system of the library's environment, or None if it has none."""
        raise NotImplementedError

    def library(self, drawn: PyTree) -> Any:
        """Return the library's environment, with the parts in `self.system` and `drawn` set in its physical system."""
        raise NotImplementedError

    def draw(self, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Sample parts of the physical system for an episode; return them by path, and a key for the reset."""
        return {}, key

    def begin(self, key: jax.Array) -> tuple[PhysicsState, Step]:
        drawn, key = self.draw(key)
        own = self.library(drawn).reset(jax.random.key_data(key))  # the libraries only accept raw uint32 keys
        return PhysicsState(own, jnp.zeros((), jnp.int32), drawn), Step(own.obs)

    def advance(self, state: PhysicsState, action: PyTree, key: jax.Array) -> tuple[PhysicsState, Step]:
        del key  # the library's key is in its state
        # A copy, because the libraries modify the dictionaries in the state that is passed to them.
        own = self.library(state.drawn).step(jax.tree.map(lambda x: x, state.own), action)
        steps = state.steps + 1
        # `done` excludes time limits, which the libraries leave to a wrapper. brax's `info["time_out"]` is not used,
        # because the inverted pendulum sets it when it falls.
        step = Step(own.obs, own.reward, own.done > 0, steps >= self.episode_length, info=own.metrics)
        return PhysicsState(own, steps, state.drawn), step

    def reads(self) -> str:
        """Return a hint for errors about parts without effect, which names the parts that the simulator reads."""
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

    def without_effect(self) -> frozenset[str]:
        return frozenset()  # `ineffective` traces only the parts that were replaced

    def ineffective(self, changed: Mapping[str, Any], idle: Mapping[str, str] = {}) -> list[str]:
        paths = [path for path in self.system if {"system", path} & set(changed)]
        reasons = {path: _useless(type(self), self.key, path) for path in paths}
        useless = [f"system[{path!r}] of {self.name}{why}{self.reads()}" for path, why in reasons.items() if why]
        return super().ineffective(changed, idle) + useless


def part(system: Any, path: str) -> Any:
    """Return the part of a physical system at a path, such as "opt.gravity"."""
    return functools.reduce(getattr, path.split("."), system)


@functools.lru_cache(maxsize=256)
def _useless(cls, key, path):
    """Return the reason why a part of the physical system cannot change or has no effect; "" if it has an effect."""
    with constructing():
        env = cls.default(key)
    try:
        value = jnp.asarray(part(cls.physical(key), path))
        useless = unread(lambda values: env.replace(system=values), {path: value})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, jax.errors.JAXTypeError) as error:
        return f" cannot change: {str(error).strip().splitlines()[0]:.120}"
    return " changes nothing: no observation, reward or ending depends on it" if useless else ""
