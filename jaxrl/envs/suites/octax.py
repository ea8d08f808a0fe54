"""Octax's games of the CHIP-8 (Radji et al., 2025, arXiv:2510.01764), as raw episodic environments."""

import functools
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import struct
from octax import environments as octax_games
from octax.rendering import chip8_display_to_rgb

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import count_problems
from jaxrl.core.types import PyTree
from jaxrl.envs.drawings import Drawing, register
from jaxrl.envs.suite import Key, Step, SuiteEnv, constructing, counts_below_one

_PARAMETERS = {"frame_skip": 4, "instruction_frequency": 700, "fps": 60}  # those that determine shapes or the program


class OctaxEnvironment(SuiteEnv):
    """An Octax game.

    Its leaf is the time limit, where episodes are truncated. Static parameters: `frame_skip`, the number of frames per
    step, all of which are observed, and the number of machine instructions per frame, `instruction_frequency // fps`.
    """

    max_num_steps_per_episodes: Any  # as Octax calls it
    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Box = struct.field(pytree_node=False)
    action_space: spaces.Discrete = struct.field(pytree_node=False)

    suite = "octax"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return Octax's games; those that have levels, with the number of the level."""
        games, roms = [m.name for m in pkgutil.iter_modules(octax_games.__path__)], Path(octax_games.get_rom_path("."))
        levels = {path.stem for path in roms.glob("*.ch8")}
        numbered = {name: sorted(x for x in levels if re.fullmatch(name + r"\d+", x)) for name in games}
        return tuple(level for name in games for level in (numbered[name] or [name]))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        return _PARAMETERS

    @classmethod
    def default(cls, key: Key) -> "OctaxEnvironment":
        game = foreign(key)
        screens = spaces.Box(False, True, (game.frame_skip, *game.cached_reset_state.display.shape), bool)
        register(f"octax:{key[0]}", Drawing(_seen, chip8_display_to_rgb, 15.0))
        return cls(game.max_num_steps_per_episodes, key, screens, spaces.Discrete(game.num_actions))

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        super().check(name, parameters)
        values = {**_PARAMETERS, **parameters}
        counts = {k: (values[k], 1) for k in _PARAMETERS}
        if problems := count_problems(**counts):
            raise ConfigError(problems)
        if (
            not (most := 10_000)
            >= (work := values["frame_skip"] * (values["instruction_frequency"] // values["fps"]))
            > 0
        ):
            raise ConfigError(f"a step of octax:{name} has {work} instructions; it must have 1 to {most:,}")

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        return counts_below_one(changed, "max_num_steps_per_episodes")

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        state, observation, _ = foreign(self.key).reset(key)
        return state, Step(observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        del key  # its randomness is in its state
        # Octax's own time limit is left out: it is a part of the program.
        state, observation, reward, terminated, _, info = foreign(self.key).step(state, action)
        return state, Step(observation, reward, terminated, state.time >= self.max_num_steps_per_episodes, info=info)


registry.add("suite", octax=OctaxEnvironment)
names, make = OctaxEnvironment.names, OctaxEnvironment.make


@functools.lru_cache(maxsize=64)
def foreign(key: Key) -> Any:
    """Return Octax's own environment for this key."""
    parameters: dict[str, Any] = dict(key[1])
    with constructing():
        return octax_games.create_environment(key[0], **parameters)[0]


def _seen(env: OctaxEnvironment, state: PyTree, time_step: Any) -> PyTree:
    return state.display
