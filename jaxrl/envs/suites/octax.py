"""Octax's CHIP-8 games (Radji et al., 2025, arXiv:2510.01764), without auto-reset."""

import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from octax import environments as octax_games
from octax.rendering import chip8_display_to_rgb

from jaxrl.core import spaces
from jaxrl.core.types import PyTree
from jaxrl.envs.drawings import Drawing
from jaxrl.envs.suite import COUNT, Key, LibraryEnv, Step, add_suite

_PARAMETERS = {"frame_skip": 4, "instruction_frequency": 700, "fps": 60}  # change shapes or the compiled program


class OctaxEnvironment(LibraryEnv):
    """An Octax game.

    The leaf is the time limit, the number of steps after which episodes are truncated. Static parameters are
    `frame_skip`, the number of frames per step, all of which are observed; and `instruction_frequency` and `fps`, whose
    quotient is the number of machine instructions per frame.
    """

    max_num_steps_per_episodes: Any  # Octax's name of the time limit

    suite = "octax"
    ranges = dict.fromkeys((*_PARAMETERS, "max_num_steps_per_episodes"), COUNT)
    drawing = Drawing(lambda env, state, time_step: state.display, chip8_display_to_rgb, 15.0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of Octax's games; a game with levels has one name per level, ending with its number."""
        games, roms = [m.name for m in pkgutil.iter_modules(octax_games.__path__)], Path(octax_games.get_rom_path("."))
        levels = {path.stem for path in roms.glob("*.ch8")}
        numbered = {name: sorted(x for x in levels if re.fullmatch(name + r"\d+", x)) for name in games}
        return tuple(level for name in games for level in (numbered[name] or [name]))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        return _PARAMETERS

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        values: dict[str, Any] = _PARAMETERS | dict(key[1])
        work = values["frame_skip"] * (values["instruction_frequency"] // values["fps"])
        if not 1 <= work <= 10_000:
            raise ValueError(f"a step has {work} instructions; it must have 1 to 10,000")
        return octax_games.create_environment(key[0], **values)[0]

    @classmethod
    def default(cls, key: Key) -> "OctaxEnvironment":
        game = cls.foreign_of(*key)
        screens = spaces.Box(False, True, (game.frame_skip, *game.cached_reset_state.display.shape), bool)
        return cls(key, screens, spaces.Discrete(game.num_actions), game.max_num_steps_per_episodes)

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        state, observation, _ = self.foreign.reset(key)
        return state, Step(observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        del key  # Octax's key is in its state
        # Octax's time limit is ignored, because it is part of the program and cannot be a leaf.
        state, observation, reward, terminated, _, info = self.foreign.step(state, action)
        return state, Step(observation, reward, terminated, state.time >= self.max_num_steps_per_episodes, info=info)


names, make = add_suite(OctaxEnvironment)
