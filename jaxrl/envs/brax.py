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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import registry, settings, spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.limits import count_problems
from jaxrl.core.suites import unknown_name
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs import suite
from jaxrl.envs.suite import Key
from jaxrl.envs.timestep import restart, transition

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


# Parts of brax's `System` that MuJoCo's options say a second time, by the part that brax's own backends read.
_SAID_TWICE = {"gravity": "opt.gravity", "viscosity": "opt.viscosity", "density": "opt.density"}

# Arguments of constructors that change nothing, and why; `tests/envs/test_brax.py` shows that there are no others.
UNUSED: dict[str, dict[str, str]] = {
    "ant": dict.fromkeys(("contact_cost_weight", "contact_force_range"), "brax computes no contact forces"),
}


class BraxState(struct.PyTreeNode):
    """brax's state, and what brax does not count."""

    brax: PyTree  # brax's own state
    steps: jax.Array  # int32, transitions so far


_EPISODE_LENGTH = 1000


class BraxEnvironment(struct.PyTreeNode):
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
    def parameters(self) -> dict[str, Any]:
        """What `make` takes to make it again."""
        return dict(self.key[1]) | {"episode_length": self.episode_length, "system": dict(self.system)}

    def __repr__(self) -> str:
        return settings.made(self.name, self.parameters, {"episode_length": _EPISODE_LENGTH, "system": {}})

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: spaces.Space, action_space: spaces.Space
    ) -> "BraxEnvironment":
        """The environment of these `parameters`; its spaces follow from them."""
        del observation_space, action_space
        return _made(name, **parameters)

    def parameter_problems(self, changed: Collection[str]) -> list[str]:
        limit = _limit_problems(self.episode_length) if "episode_length" in changed else []
        return [*limit, *_system_problems(self.key, [path for path in changed if path in self.system])]

    @property
    def resets(self) -> bool:
        return False

    def reset(self, key: jax.Array) -> tuple[BraxState, TimeStep]:
        with suite.foreign_rules():
            # brax takes keys of the old kind only.
            state = self._brax().reset(jax.random.key_data(key))
        blueprint = _blueprint(self.key)
        state = suite.cast(state, blueprint.dtypes)
        return BraxState(state, jnp.zeros((), jnp.int32)), restart(state.obs, info=blueprint.info)

    def step(self, state: BraxState, action: PyTree, key: jax.Array) -> tuple[BraxState, TimeStep]:
        del key  # its randomness is in its state
        # A copy, because brax updates the dictionaries of the state that it is given.
        before = jax.tree.map(lambda x: x, state.brax)
        with suite.foreign_rules():
            after = self._brax().step(before, action)
        blueprint = _blueprint(self.key)
        after = suite.cast(after, blueprint.dtypes)
        steps = state.steps + 1
        # `done` is without a time limit, which brax leaves to a wrapper. `info["time_out"]`, which the inverted
        # pendulum has, is set where it falls.
        info = {name: after.metrics[name] for name in blueprint.info}
        time_step = transition(after.obs, after.reward, after.done > 0, steps >= self.episode_length, info=info)
        return BraxState(after, steps), time_step

    def _brax(self) -> Any:
        env = _blueprint(self.key).env
        return _with_system(env, self.system) if self.system else env


registry.add("suite", brax=BraxEnvironment)


def names() -> tuple[str, ...]:
    """brax's environments that run with at least one backend."""
    return tuple(n for n in _NAMES if any((n, backend) not in BROKEN for backend in BACKENDS))


def refused() -> tuple[str, ...]:
    """Those that run with no backend."""
    return tuple(n for n in _NAMES if n not in names())


def make(
    name: str, *, episode_length: Any = _EPISODE_LENGTH, system: Mapping[str, Any] | None = None, **parameters: Any
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
      ConfigError: unknown name, unknown or unfit parameters, parameters that change nothing, or a backend that brax
        cannot run it with.
    """
    env = _made(name, episode_length=episode_length, system=system, **parameters)
    defaults, unused = inspect.signature(_module()._envs[name]).parameters, UNUSED.get(name, {})
    problems = [
        f"{k}={value!r:.80} of brax:{name} changes nothing: {unused[k]}; leave it out"
        for k, value in parameters.items()
        if k in unused and value != defaults[k].default
    ]
    if problems := problems + _system_problems(env.key, env.system):
        raise ConfigError(problems)
    return env


def _made(name, *, episode_length=1000, system=None, **parameters):
    """The environment with these parameters, even those that change nothing; files may hold them.

    Raises:
      ConfigError: as `make`, but for parameters that change nothing.
    """
    if name not in _NAMES:
        raise unknown_name("brax", name, names())
    backend = parameters.get("backend", "generalized")
    if backend not in BACKENDS:
        raise unknown("backend of brax", str(backend), BACKENDS)
    if (name, backend) in BROKEN:
        raise ConfigError(f"brax:{name} does not run with backend={backend!r}: {BROKEN[name, backend]}")
    allowed = _arguments(name)
    known = [*allowed, "episode_length", "system"]
    if problems := suite.unknown_parameters(f"parameter of brax:{name}", parameters, known):
        raise ConfigError(problems)
    with suite.refusing(f"brax:{name}", parameters):
        key = suite.key_of(name, parameters)
        blueprint = _blueprint(key)
    leaves, problems = {}, _limit_problems(episode_length)
    if not isinstance(system, Mapping | None):
        raise ConfigError(
            f"system={system!r:.80} of brax:{name} must be a dictionary, such as {{'opt.gravity': [0, 0, -3.7]}}"
        )
    if system and not hasattr(blueprint.env, "sys"):
        raise ConfigError(f"brax:{name} has no physical system; leave system={system!r:.80} out")
    problems += [
        f"system of brax:{name} has {part!r} and {said!r}, which are one; leave out one of them"
        for part, said in _SAID_TWICE.items()
        if system and part in system and said in system
    ]
    for path, value in (system or {}).items():
        try:
            leaves[path] = _replacement(blueprint.env, path, value)
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            problems.append(f"system[{path!r}] of brax:{name}: {error}")
    if problems:
        raise ConfigError(problems)
    return BraxEnvironment(leaves, episode_length, key, blueprint.observation_space, blueprint.action_space)


class _Blueprint(NamedTuple):
    env: Any
    dtypes: PyTree  # of the state after a step, in its tree
    observation_space: spaces.Space
    action_space: spaces.Space
    info: tuple[str, ...]  # brax's metrics: the parts of the reward, positions, velocities


@functools.lru_cache(maxsize=64)
def _blueprint(key: Key) -> _Blueprint:
    """What every environment of this key shares; cached, so that two of them share one compiled program."""
    with suite.constructing():
        env = made(key)
        state = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), np.uint32))
        action_space = spaces.Box(-1.0, 1.0, (env.action_size,))
        action = jax.ShapeDtypeStruct(action_space.shape, action_space.dtype)
        dtypes = suite.settled_dtypes(lambda state: jax.eval_shape(env.step, state, action), state)
    return _Blueprint(env, dtypes, _space(state.obs), action_space, suite.scalar_names(state.metrics))


def made(key: Key) -> Any:
    """brax's own environment of this key."""
    name, static = key
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Brax System", UserWarning)  # that nobody works on it: docs/environments.md
        return _module().get_environment(name, **dict(static))


def _module():
    with contextlib.redirect_stdout(io.StringIO()):  # MuJoCo, which it imports, prints what it has no use for here
        from brax import envs
    return envs


def _space(observation: Any) -> spaces.Space:
    if isinstance(observation, Mapping):
        return spaces.Dict({name: _space(child) for name, child in observation.items()})
    return spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype)


def _arguments(name: str) -> tuple[str, ...]:
    arguments = inspect.signature(_module()._envs[name]).parameters
    passed_on = ("n_frames", "debug") if name != "fast" else ()
    return (*(k for k, p in arguments.items() if p.kind is not p.VAR_KEYWORD), *passed_on)


def _limit_problems(episode_length):
    """Why a time limit is none; arrays, which may be mapped over, are taken as they are."""
    if isinstance(episode_length, jax.Array | np.ndarray):
        return []
    return count_problems(episode_length=("None" if episode_length is None else episode_length, 1))


def _system_problems(key, paths):
    """Why parts of the physical system cannot be parameters, one line each."""
    name, backend = key[0], dict(key[1]).get("backend", "generalized")
    problems = []
    for path in paths:
        if (reason := _useless(key, path)) is not None:
            names = "MuJoCo's parts (body_mass)" if backend == "mjx" else "brax's own parts (link.inertia.mass)"
            problems.append(f"system[{path!r}] of brax:{name} with backend={backend!r} {reason}; that reads {names}")
    return problems


@functools.lru_cache(maxsize=256)
def _useless(key, path):
    """Why a part of the physical system is no parameter of the dynamics; None if it is one."""
    blueprint = _blueprint(key)
    env = BraxEnvironment({}, 1000, key, blueprint.observation_space, blueprint.action_space)
    try:
        value = jnp.asarray(_part(blueprint.env.sys, path))
        unread = suite.unread(lambda values: env.replace(system=values), {path: value})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, jax.errors.JAXTypeError) as error:
        return f"is no number that may change: {str(error).strip().splitlines()[0]:.120}"
    return "changes nothing: no observation, reward or ending depends on it" if unread else None


def _with_system(env, system):
    """brax's environment with parts of its physical system replaced, and those that follow from them."""
    env = copy.copy(env)
    follows = {part: system[said] for part, said in _SAID_TWICE.items() if said in system}
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
