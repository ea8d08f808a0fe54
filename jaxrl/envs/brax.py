"""brax environments (Freeman et al., 2021, arXiv:2106.13281), as raw episodic environments.

brax is imported when the first of them is made; it is an extra.
"""

import contextlib
import copy
import functools
import inspect
import io
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import PyTree
from jaxrl.envs.brax_rules import BACKENDS, BROKEN, NAMES, REPEATED, UNUSED
from jaxrl.envs.physics import PhysicsEnv, PhysicsState, unbounded
from jaxrl.envs.suite import Key, Step, constructing


class BraxEnvironment(PhysicsEnv):
    """A brax environment.

    Its physical system is brax's `System`. Static parameters are the arguments of brax's constructor, such as
    `backend`, one of `BACKENDS`.
    """

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
        return cls(episode_length=1000, system={}, key=key, observation_space=unbounded(observation), action_space=box)

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        backend = parameters.get("backend", "generalized")
        if name in NAMES and backend not in BACKENDS:
            raise unknown("backend of brax", str(backend), BACKENDS)
        if (name, backend) in BROKEN:
            raise ConfigError(f"brax:{name} does not run with backend={backend!r}: {BROKEN[name, backend]}")
        super().check(name, parameters)

    @classmethod
    def physical(cls, key: Key) -> Any:
        return getattr(foreign(key), "sys", None)

    def fit(self, name: str, value: Any) -> Any:
        parts = super().fit(name, value)
        twice = [(path, REPEATED[path]) for path in parts if REPEATED.get(path) in parts] if name == "system" else []
        if twice:
            raise ConfigError(
                [f"system of {self.name} has {a!r} and {b!r}, which are one; leave one out" for a, b in twice]
            )
        return parts

    def reads(self) -> str:
        backend = dict(self.key[1]).get("backend", "generalized")
        reads = "MuJoCo's parts (body_mass)" if backend == "mjx" else "brax's own parts (link.inertia.mass)"
        return f"; backend={backend!r} reads {reads}"

    def unused(self, chosen: Mapping[str, Any]) -> list[str]:
        defaults, reasons = self.static_parameters(self.key[0]), UNUSED.get(self.key[0], {})
        return [
            f"{k}={value!r:.80} of {self.name} changes nothing: {reasons[k]}; leave it out"
            for k, value in chosen.items()
            if k in reasons and value != defaults[k]
        ]

    def begin(self, key: jax.Array) -> tuple[PhysicsState, Step]:
        state = self._brax().reset(jax.random.key_data(key))  # brax takes keys of the old kind only
        return PhysicsState(state, jnp.zeros((), jnp.int32)), Step(state.obs)

    def advance(self, state: PhysicsState, action: PyTree, key: jax.Array) -> tuple[PhysicsState, Step]:
        del key  # its randomness is in its state
        # A copy, because brax updates the dictionaries of the state that it takes.
        after = self._brax().step(jax.tree.map(lambda x: x, state.own), action)
        steps = state.steps + 1
        # `done` is without a time limit, which brax leaves to a wrapper. `info["time_out"]`, which the inverted
        # pendulum has, is set where it falls.
        step = Step(after.obs, after.reward, after.done > 0, steps >= self.episode_length, info=after.metrics)
        return PhysicsState(after, steps), step

    def _brax(self) -> Any:
        return _with_system(foreign(self.key), self.system) if self.system else foreign(self.key)


registry.add("suite", brax=BraxEnvironment)
names, make = BraxEnvironment.names, BraxEnvironment.make


def refused() -> tuple[str, ...]:
    """Return brax's environments that run with no backend."""
    return tuple(n for n in NAMES if n not in names())


@functools.lru_cache(maxsize=64)
def foreign(key: Key) -> Any:
    """Return brax's own environment for this key."""
    with constructing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Brax System", UserWarning)  # about maintenance: docs/environments.md
        return module().get_environment(key[0], **dict(key[1]))


def module() -> Any:
    """Import brax's environments without the message that MuJoCo prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        from brax import envs
    return envs


def _with_system(env, system):
    """Return brax's environment with parts of its physical system replaced, and those that follow from them."""
    env = copy.copy(env)
    follows = {part: system[option] for part, option in REPEATED.items() if option in system}
    env.sys = env.sys.tree_replace({**system, **follows})
    return env
