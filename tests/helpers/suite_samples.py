"""An environment of each suite of `jaxrl.envs.suites`, small enough to be trained in a test."""

import importlib
from typing import Any, NamedTuple

import pytest

from jaxrl.core import suite_modules
from jaxrl.core.suites import installed


class Sample(NamedTuple):
    """An environment whose random episodes end within some tens of steps, or are cut off there.

    Attributes:
      name: within its suite.
      parameters: of `jaxrl.make`.
    """

    name: str
    parameters: dict[str, Any]


SAMPLES: dict[str, Sample] = {
    "craftax": Sample("Craftax-Classic-Symbolic-v1", {"max_timesteps": 20, "map_size": (32, 32)}),
    "navix": Sample("Navix-Dynamic-Obstacles-5x5-v0", {"max_steps": 20}),
    "xminigrid": Sample("MiniGrid-EmptyRandom-5x5", {"max_steps": 20}),
    "playground": Sample("CartpoleBalance", {"episode_length": 20}),
    "jaxmarl": Sample("MPE_simple_spread_v3", {"num_agents": 2, "num_landmarks": 2, "max_steps": 9}),
    "jumanji": Sample("Maze-v0", {"num_rows": 4, "num_cols": 4, "time_limit": 9}),
    "octax": Sample("pong", {"max_num_steps_per_episodes": 9, "frame_skip": 2}),
    "pgx": Sample("tic_tac_toe", {}),
}
SUITES = [name for name, own in suite_modules.SUITES.items() if own.module.startswith("jaxrl.envs.suites.")]


def needs(suite):
    """A mark of tests that need a suite's package: `make test` runs without."""
    return pytest.mark.skipif(not installed(suite), reason=f"needs jaxrl[{suite}]")


def adapter(suite):
    """Return the module of a suite."""
    return importlib.import_module(suite_modules.SUITES[suite].module)


def raw(suite, name, **parameters):
    """Return an environment of a suite that does not reset itself."""
    return adapter(suite).make(name, **parameters)


def each_suite():
    return [pytest.param(suite, marks=needs(suite), id=suite) for suite in SAMPLES]
