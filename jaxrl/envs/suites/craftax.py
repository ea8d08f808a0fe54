"""Craftax and Craftax-Classic (Matthews et al., 2024, arXiv:2402.16801), as raw episodic environments.

Its own rule ends an episode at death, victory or the time limit, and is evaluated again without the time limit.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name
from flax import struct

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import count_problems
from jaxrl.core.types import PyTree
from jaxrl.envs import drawings
from jaxrl.envs.suite import PROBABILITY, Key, Step, SuiteEnv, constructing, counts_below_one, foreign_rules, outside

_NAMES = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")
_SIDES = (32, 48, 64, 96, 128)  # of a world: those that a file may choose, and that fit the library's noise


class CraftaxEnvironment(SuiteEnv):
    """A Craftax environment.

    Leaves are the numbers of Craftax's `EnvParams`, static parameters those of its `StaticEnvParams`: the side of the
    world and how many creatures it may hold. Episodes that reach `max_timesteps` are truncated.
    """

    params: PyTree
    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Box = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)

    suite = "craftax"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return _NAMES

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        sizes = vars(_class(name).default_static_params())
        return {k: x for k, x in sizes.items() if k != "num_levels"}  # every world has nine

    @classmethod
    def default(cls, key: Key) -> "CraftaxEnvironment":
        env = foreign(key)
        shape = env.observation_space(None).shape
        # Craftax declares 1 for all, but health, magic and enchantments of the larger game exceed it.
        space = spaces.Box(0.0, 1.0 if "Classic" in key[0] else np.inf, shape)
        space = spaces.Box(0, 255, shape, np.uint8) if "Pixels" in key[0] else space
        return cls(env.default_params, key, space, spaces.Discrete(env.action_space().n))

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        super().check(name, parameters)
        sizes = dict(cls.static_parameters(name))
        size = parameters.get("map_size", sizes.pop("map_size"))
        counts = {k: x for k, x in parameters.items() if k in sizes}
        problems = count_problems(**{k: (x, 1) for k, x in counts.items()})
        problems += [f"{k}={x} must be at most 1000" for k, x in counts.items() if isinstance(x, int) and x > 1000]
        if not isinstance(size, list | tuple) or len(size) != 2 or size[0] != size[1] or size[0] not in _SIDES:
            problems.append(f"map_size={size!r:.80} of craftax:{name} must be two equal sides, of {[*_SIDES]}")
        if problems:
            raise ConfigError(problems)

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        limits = {k: PROBABILITY for k in changed if k.endswith("_chance")} | {"mob_despawn_distance": {"low": 0}}
        limits |= {k: {"low": 1} for k in changed if k.endswith("_health")}
        return counts_below_one(changed, "max_timesteps", "day_length", "max_attribute") + outside(changed, limits)

    @property
    def numbers(self) -> dict[str, Any]:
        return {name: x for name, x in super().numbers.items() if name != "fractal_noise_angles"}  # whole maps

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        observation, state = foreign(self.key).reset_env(key, self.params)
        return state, Step(self._seen(observation))

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        env = foreign(self.key)
        observation, state, reward, done, _ = env.step_env(key, state, action, self.params)
        terminated = env.is_terminal(state, self.params.replace(max_timesteps=jnp.iinfo(jnp.int32).max))
        info = {f"achievement_{name}:last": state.achievements[i] for name, i in _achievements(self.key[0])}
        info["achievements:last"] = jnp.sum(state.achievements, dtype=jnp.float32)
        return state, Step(self._seen(observation), reward, terminated, done, info=info)

    def _seen(self, observation):
        return jnp.round(observation * 255.0) if self.observation_space.dtype == np.uint8 else observation


registry.add("suite", craftax=CraftaxEnvironment)
names, make = CraftaxEnvironment.names, CraftaxEnvironment.make


@functools.lru_cache(maxsize=64)
def foreign(key: Key) -> Any:
    """Return Craftax's own environment for this key."""
    with constructing():
        return _class(key[0])(_class(key[0]).default_static_params().replace(**dict(key[1])))


@functools.cache
def _class(name):
    _renderer(name)  # without its pickle
    with constructing():
        return type(make_craftax_env_from_name(name, auto_reset=False))  # which accepts no sizes of a world


def _module(name, part):
    return importlib.import_module(f"craftax.craftax{'_classic' if 'Classic' in name else ''}.{part}")


@functools.cache
def _renderer(name):
    """Return Craftax's drawing module, without its pickle of all textures: a size is read when it is needed."""
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


def _see(env, state, time_step):
    with foreign_rules():
        return jnp.clip(jnp.round(_drawn(env.key[0])(state)), 0, 255).astype(jnp.uint8)


for _name in _NAMES:
    drawings.register(f"craftax:{_name}", drawings.Drawing(_see, np.asarray, 10.0))
