"""brax environments (Freeman et al., 2021, arXiv:2106.13281), as raw episodic environments.

brax is imported when the first of them is made; it is an extra.
"""

import contextlib
import copy
import functools
import inspect
import io
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.limits import count_problems
from jaxrl.core.types import PyTree
from jaxrl.envs.brax_rules import BACKENDS, BROKEN, NAMES, REPEATED, UNUSED
from jaxrl.envs.suite import Key, Step, SuiteEnv, constructing, unread


class BraxState(struct.PyTreeNode):
    """brax's state, and the length of the episode, which brax does not count."""

    brax: PyTree
    steps: jax.Array  # int32, transitions so far


class BraxEnvironment(SuiteEnv):
    """One brax environment.

    Leaves: the time limit, where episodes are truncated, and the replaced parts of the physical system by their path in
    brax's `System`, such as `{"opt.gravity": [0.0, 0.0, -3.7]}`, each in brax's shape (or with more axes in front, to
    be mapped over). Static parameters are the arguments of brax's constructor, such as `backend`, one of `BACKENDS`.
    """

    episode_length: Any
    system: dict[str, Any]
    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Space = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)

    suite = "brax"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return brax's environments that run with at least one backend."""
        return tuple(n for n in NAMES if any((n, backend) not in BROKEN for backend in BACKENDS))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        arguments = inspect.signature(module()._envs[name]).parameters
        forwarded = {"n_frames": None, "debug": None} if name != "fast" else {}
        return {k: p.default for k, p in arguments.items() if p.kind is not p.VAR_KEYWORD} | forwarded

    @classmethod
    def default(cls, key: Key) -> "BraxEnvironment":
        env = foreign(key)
        with constructing():
            observation = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), np.uint32)).obs
        box = spaces.Box(-1.0, 1.0, (env.action_size,))
        return cls(episode_length=1000, system={}, key=key, observation_space=_space(observation), action_space=box)

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        backend = parameters.get("backend", "generalized")
        if name in NAMES and backend not in BACKENDS:
            raise unknown("backend of brax", str(backend), BACKENDS)
        if (name, backend) in BROKEN:
            raise ConfigError(f"brax:{name} does not run with backend={backend!r}: {BROKEN[name, backend]}")
        super().check(name, parameters)

    def fit(self, name: str, value: Any) -> Any:
        if name == "episode_length":
            return value  # `contradictions` checks it
        if not isinstance(value, Mapping | None):
            raise ConfigError(
                f"system={value!r:.80} of {self.name} must be a dictionary, such as {{'opt.gravity': [0, 0, -3.7]}}"
            )
        if value and not hasattr(foreign(self.key), "sys"):
            raise ConfigError(f"{self.name} has no physical system; leave system={value!r:.80} out")
        parts, problems = {}, []
        for path, replacement in (value or {}).items():
            if (repeats := REPEATED.get(path)) in value:
                problems.append(f"system of {self.name} has {path!r} and {repeats!r}, which are one; leave one out")
            try:
                parts[path] = _replacement(foreign(self.key), path, replacement)
            except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
                problems.append(f"system[{path!r}] of {self.name}: {error}")
        if problems:
            raise ConfigError(problems)
        return parts

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        limit = self.episode_length
        if "episode_length" not in changed or isinstance(limit, jax.Array | np.ndarray):
            return []  # an array may be mapped over
        return count_problems(episode_length=("None" if limit is None else limit, 1))

    def ineffective(self, changed: Collection[str]) -> list[str]:
        problems, backend = [], dict(self.key[1]).get("backend", "generalized")
        reads = "MuJoCo's parts (body_mass)" if backend == "mjx" else "brax's own parts (link.inertia.mass)"
        for path in self.system:
            if {"system", path} & set(changed) and (reason := _useless(self.key, path)) is not None:
                problems.append(
                    f"system[{path!r}] of {self.name} with backend={backend!r} {reason}; that reads {reads}"
                )
        return problems

    def unused(self, chosen: Mapping[str, Any]) -> list[str]:
        defaults, reasons = self.static_parameters(self.key[0]), UNUSED.get(self.key[0], {})
        return [
            f"{k}={value!r:.80} of {self.name} changes nothing: {reasons[k]}; leave it out"
            for k, value in chosen.items()
            if k in reasons and value != defaults[k]
        ]

    def begin(self, key: jax.Array) -> tuple[BraxState, Step]:
        state = self._brax().reset(jax.random.key_data(key))  # brax takes keys of the old kind only
        return BraxState(state, jnp.zeros((), jnp.int32)), Step(state.obs)

    def advance(self, state: BraxState, action: PyTree, key: jax.Array) -> tuple[BraxState, Step]:
        del key  # its randomness is in its state
        # A copy, because brax updates the dictionaries of the state that it takes.
        after = self._brax().step(jax.tree.map(lambda x: x, state.brax), action)
        steps = state.steps + 1
        # `done` is without a time limit, which brax leaves to a wrapper. `info["time_out"]`, which the inverted
        # pendulum has, is set where it falls.
        step = Step(after.obs, after.reward, after.done > 0, steps >= self.episode_length, info=after.metrics)
        return BraxState(after, steps), step

    def _brax(self) -> Any:
        return _with_system(foreign(self.key), self.system) if self.system else foreign(self.key)


registry.add("suite", brax=BraxEnvironment)
names, make = BraxEnvironment.names, BraxEnvironment.make


def refused() -> tuple[str, ...]:
    """Return brax's environments that run with no backend."""
    return tuple(n for n in NAMES if n not in names())


@functools.lru_cache(maxsize=64)
def foreign(key: Key) -> Any:
    """Return brax's own environment of this key."""
    with constructing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Brax System", UserWarning)  # about maintenance: docs/environments.md
        return module().get_environment(key[0], **dict(key[1]))


def module() -> Any:
    """Import brax's environments without the message that MuJoCo prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        from brax import envs
    return envs


def _space(observation: Any) -> spaces.Space:
    if isinstance(observation, Mapping):
        return spaces.Dict({name: _space(child) for name, child in observation.items()})
    return spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype)


@functools.lru_cache(maxsize=256)
def _useless(key, path):
    """Return why a part of the physical system is no parameter of the dynamics; None if it is one."""
    env = BraxEnvironment.default(key)
    try:
        value = jnp.asarray(_part(foreign(key).sys, path))
        useless = unread(lambda values: env.replace(system=values), {path: value})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, jax.errors.JAXTypeError) as error:
        return f"is no number that may change: {str(error).strip().splitlines()[0]:.120}"
    return "changes nothing: no observation, reward or ending depends on it" if useless else None


def _with_system(env, system):
    """Return brax's environment with parts of its physical system replaced, and those that follow from them."""
    env = copy.copy(env)
    follows = {part: system[option] for part, option in REPEATED.items() if option in system}
    env.sys = env.sys.tree_replace({**system, **follows})
    return env


def _part(system, path):
    for attribute in path.split("."):
        system = getattr(system, attribute)
    return system


def _replacement(env: Any, path: str, value: Any) -> jax.Array:
    now = _part(env.sys, path)
    array = jnp.asarray(value, jnp.result_type(now))
    shape = jnp.shape(now)
    if array.shape[array.ndim - len(shape) :] != shape:
        raise ValueError(f"shape {array.shape} is not {shape}")
    return array
