"""brax environments (Freeman et al., 2021, arXiv:2106.13281), as raw episodic environments.

brax is imported when the first of them is made; it is an extra.
"""

import copy
import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl import spaces
from jaxrl.envs.timestep import restart, transition
from jaxrl.errors import ConfigError, unknown
from jaxrl.types import PyTree, TimeStep

Key = tuple[str, tuple[tuple[str, Hashable], ...]]

BACKENDS = ("generalized", "spring", "positional", "mjx")

_NAMES = (
    "ant",
    "fast",
    "halfcheetah",
    "hopper",
    "humanoid",
    "humanoidstandup",
    "inverted_double_pendulum",
    "inverted_pendulum",
    "pusher",
    "reacher",
    "swimmer",
    "walker2d",
)

# What brax 0.14.2 itself cannot run, and why; `tests/envs/test_brax.py` shows that each is needed, and no other.
BROKEN: dict[tuple[str, str], str] = {
    ("swimmer", "generalized"): "it calls jnp.clip(a_min=...), which JAX no longer has",
    ("swimmer", "spring"): "brax has no swimmer of this backend",
    ("swimmer", "positional"): "brax has no swimmer of this backend",
    ("swimmer", "mjx"): "brax has no swimmer of this backend",
}


@struct.dataclass
class BraxState:
    """brax's state, and what brax does not count."""

    brax: PyTree  # brax's own state
    steps: jax.Array  # int32, transitions so far


@struct.dataclass
class BraxEnvironment:
    """One brax environment; it does not reset itself.

    Leaves: the time limit, and the parts of the physical system that were given to `make`.
    """

    system: dict[str, Any]
    episode_length: Any
    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Space = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)

    @property
    def name(self) -> str:
        return f"brax:{self.key[0]}"

    @property
    def resets(self) -> bool:
        return False

    def reset(self, key: jax.Array) -> tuple[BraxState, TimeStep]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            # brax takes keys of the old kind only.
            state = self._brax().reset(jax.random.key_data(key))
        state = _cast(state, _blueprint(self.key).dtypes)
        return BraxState(state, jnp.zeros((), jnp.int32)), restart(state.obs)

    def step(self, state: BraxState, action: PyTree, key: jax.Array) -> tuple[BraxState, TimeStep]:
        del key  # its randomness is in its state
        # A copy, because brax updates the dictionaries of the state that it is given.
        before = jax.tree.map(lambda x: x, state.brax)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            after = self._brax().step(before, action)
        after = _cast(after, _blueprint(self.key).dtypes)
        steps = state.steps + 1
        # `done` is without a time limit, which brax leaves to a wrapper. `info["time_out"]`, which the inverted
        # pendulum has, is set where it falls.
        time_step = transition(after.obs, after.reward, after.done > 0, steps >= self.episode_length)
        return BraxState(after, steps), time_step

    def _brax(self) -> Any:
        env = _blueprint(self.key).env
        if self.system:
            env = copy.copy(env)
            env.sys = env.sys.tree_replace(self.system)
        return env


def names() -> tuple[str, ...]:
    """brax's environments that run with at least one backend."""
    return tuple(n for n in _NAMES if any((n, backend) not in BROKEN for backend in BACKENDS))


def make(
    name: str, *, episode_length: Any = 1000, system: Mapping[str, Any] | None = None, **parameters: Any
) -> BraxEnvironment:
    """The brax environment `name` ("ant").

    Args:
      name: as in brax.
      episode_length: the time limit, where episodes are truncated; a leaf.
      system: parts of the physical system to replace, by their path in brax's `System`, such as
        `{"opt.gravity": [0.0, 0.0, -3.7]}`; each a leaf, with the shape that it has in brax (or more axes in front, to
        be mapped over).
      parameters: arguments of its constructor, such as `backend` (one of `BACKENDS`); static.

    Raises:
      ConfigError: unknown name, unknown or unfit parameters, or a backend that brax cannot run it with.
    """
    if name not in _NAMES:
        raise unknown("brax environment", name, names(), "jaxrl.environments() lists all")
    backend = parameters.get("backend", "generalized")
    if backend not in BACKENDS:
        raise unknown("backend of brax", str(backend), BACKENDS)
    if (name, backend) in BROKEN:
        raise ConfigError(f"brax:{name} does not run with backend={backend!r}: {BROKEN[name, backend]}")
    allowed = _arguments(name)
    problems = [
        line
        for k in parameters
        if k not in allowed
        for line in unknown(f"parameter of brax:{name}", k, [*allowed, "episode_length", "system"]).problems
    ]
    if problems:
        raise ConfigError(problems)
    try:
        key = (name, tuple(sorted((k, _hashable(v)) for k, v in parameters.items())))
        blueprint = _blueprint(key)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"brax:{name} cannot be made with {parameters}: {error}") from error
    leaves = {}
    for path, value in (system or {}).items():
        try:
            leaves[path] = _replacement(blueprint.env, path, value)
        except (AttributeError, TypeError, ValueError) as error:
            problems.append(f"system[{path!r}] of brax:{name}: {error}")
    if problems:
        raise ConfigError(problems)
    return BraxEnvironment(leaves, episode_length, key, blueprint.observation_space, blueprint.action_space)


class _Blueprint(NamedTuple):
    env: Any
    dtypes: PyTree  # of the state after a step, in its tree
    observation_space: spaces.Space
    action_space: spaces.Space


@functools.lru_cache(maxsize=64)
def _blueprint(key: Key) -> _Blueprint:
    """What every environment of this key shares; cached, so that two of them share one compiled program."""
    from brax import envs

    name, static = key
    with (
        jax.ensure_compile_time_eval(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        env = envs.get_environment(name, **dict(static))
        state = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), np.uint32))
        action_space = spaces.Box(-1.0, 1.0, (env.action_size,))
        for _ in range(2):
            before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
            state = jax.eval_shape(env.step, before, jax.ShapeDtypeStruct(action_space.shape, action_space.dtype))
    return _Blueprint(env, jax.tree.map(lambda x: np.dtype(x.dtype), state), _space(state.obs), action_space)


def _space(observation: Any) -> spaces.Space:
    if isinstance(observation, Mapping):
        return spaces.Dict({name: _space(child) for name, child in observation.items()})
    return spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype)


def _cast(state: PyTree, dtypes: PyTree) -> PyTree:
    return jax.tree.map(lambda x, dtype: jnp.asarray(x, dtype), state, dtypes)


def _arguments(name: str) -> tuple[str, ...]:
    from brax import envs

    arguments = inspect.signature(envs._envs[name]).parameters
    passed_on = ("n_frames", "debug") if name != "fast" else ()
    return (*(k for k, p in arguments.items() if p.kind is not p.VAR_KEYWORD), *passed_on)


def _replacement(env: Any, path: str, value: Any) -> jax.Array:
    now = env.sys
    for attribute in path.split("."):
        now = getattr(now, attribute)
    array = jnp.asarray(value, jnp.result_type(now))
    shape = jnp.shape(now)
    if array.shape[array.ndim - len(shape) :] != shape:
        raise ValueError(f"shape {array.shape} is not {shape}")
    return array


def _hashable(value: Any) -> Hashable:
    value = tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value
    hash(value)
    return value
