"""Craftax and Craftax-Classic (Matthews et al., 2024, arXiv:2402.16801), without auto-reset.

The library ends an episode at death, victory or the time limit. To tell terminations from truncations, the adapter
evaluates the library's rule again without the time limit.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs import drawings
from jaxrl.envs.suite import (
    COUNT,
    PROBABILITY,
    Key,
    LibraryEnv,
    Step,
    add_suite,
    constructing,
    foreign_rules,
)

_NAMES = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")
_SIDES = (32, 48, 64, 96, 128)  # sides of a world that files may set and that the library's noise function supports


def _see(env, state, time_step):
    with foreign_rules():
        return jnp.clip(jnp.round(_drawn(env.key[0])(state)), 0, 255).astype(jnp.uint8)


class CraftaxEnvironment(LibraryEnv):
    """A Craftax environment.

    The leaves are the numbers of Craftax's `EnvParams`. Static parameters are those of its `StaticEnvParams`: the size
    of the world and the maximum numbers of creatures. Episodes that reach `max_timesteps` are truncated.
    """

    params: PyTree

    suite = "craftax"
    drawing = drawings.Drawing(_see, np.asarray, 10.0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return _NAMES

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        sizes = vars(_class(name).default_static_params())
        return {k: x for k, x in sizes.items() if k != "num_levels"}  # every world has nine levels

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        return _class(key[0])(_class(key[0]).default_static_params().replace(**dict(key[1])))

    @classmethod
    def default(cls, key: Key) -> "CraftaxEnvironment":
        env = cls.foreign_of(*key)
        shape = env.observation_space(None).shape
        # Craftax declares 1 as the upper bound, but health, magic and enchantments of the larger game exceed it.
        space = spaces.Box(0.0, 1.0 if "Classic" in key[0] else np.inf, shape)
        space = spaces.Box(0, 255, shape, np.uint8) if "Pixels" in key[0] else space
        return cls(key, space, spaces.Discrete(env.action_space().n), env.default_params)

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        super().check(name, parameters)
        size = parameters.get("map_size", (_SIDES[0],) * 2)
        if not isinstance(size, list | tuple) or len(size) != 2 or size[0] != size[1] or size[0] not in _SIDES:
            raise ConfigError(f"map_size={size!r:.80} of craftax:{name} must be two equal numbers from {[*_SIDES]}")

    @classmethod
    def limits(cls, name: str) -> Mapping[str, Mapping[str, float]]:
        numbers = vars(cls.foreign_of(name).default_params)
        limits = {k: {"low": 1, "high": 1000} for k in cls.static_parameters(name) if k != "map_size"}
        limits |= {k: PROBABILITY for k in numbers if k.endswith("_chance")} | {"mob_despawn_distance": {"low": 0}}
        counts = [k for k in numbers if k.endswith("_health")]
        return limits | dict.fromkeys((*counts, "max_timesteps", "day_length", "max_attribute"), COUNT)

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        observation, state = self.foreign.reset_env(key, self.params)
        return state, Step(self._seen(observation))

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        env = self.foreign
        observation, state, reward, done, _ = env.step_env(key, state, action, self.params)
        terminated = env.is_terminal(state, self.params.replace(max_timesteps=jnp.iinfo(jnp.int32).max))
        info = {f"achievement_{name}:last": state.achievements[i] for name, i in _achievements(self.key[0])}
        info["achievements:last"] = jnp.sum(state.achievements, dtype=jnp.float32)
        return state, Step(self._seen(observation), reward, terminated, done, info=info)

    def _seen(self, observation):
        return jnp.round(observation * 255.0) if "Pixels" in self.key[0] else observation


names, make = add_suite(CraftaxEnvironment)


@functools.cache
def _class(name):
    _renderer(name)  # first, so that the library does not load its pickle file
    with constructing():
        return type(make_craftax_env_from_name(name, auto_reset=False))  # this function has no argument for sizes


def _module(name, part):
    return importlib.import_module(f"craftax.craftax{'_classic' if 'Classic' in name else ''}.{part}")


@functools.cache
def _renderer(name):
    """Return Craftax's drawing module, patched to create textures on first use instead of reading a pickle file."""
    renderer, textures = _module(name, "renderer"), _Textures(constants=_module(name, "constants"))
    renderer.load_all_textures = lambda: textures
    return renderer


class _Textures(dict):
    def __missing__(self, pixels):
        return self.setdefault(pixels, self["constants"].load_all_textures_given_size(pixels))


@functools.cache
def _achievements(name):
    return tuple((one.name.lower(), one.value) for one in _module(name, "constants").Achievement)


@functools.cache
def _drawn(name):
    with constructing():
        return _renderer(name).make_craftax_pixel_renderer(16)  # pixels per block
