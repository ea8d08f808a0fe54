"""XLand-MiniGrid environments (Nikulin et al., 2023, arXiv:2312.12044), without auto-reset.

The library's discount distinguishes terminations from time limits, and its `step` never resets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xminigrid
from xminigrid import benchmarks
from xminigrid.core.constants import NUM_COLORS, NUM_TILES
from xminigrid.rendering.rgb_render import render
from xminigrid.types import AgentState, TimeStep

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import PyTree
from jaxrl.envs import drawings
from jaxrl.envs.suite import COUNT, Key, LibraryEnv, Step, add_suite, outside

_VIEWS = range(3, 32, 2)  # valid sides of an agent's view; the library does not check them
_OBJECTS = {"low": 1, "high": 100}  # limits on the number of objects that fit in the rooms of Playground
_BENCHMARK = "trivial-21k"
_TILE = 16  # pixels per side of a tile in drawings
_AGENT: Any = AgentState
_TIME_STEP: Any = TimeStep


def _see(env, state, time_step):
    at, to = state.agent.position, state.agent.direction
    return {"grid": state.grid, "at": at, "to": to, "view": jnp.asarray(env.static("view_size"))}


def _draw(view):
    return render(view["grid"], _AGENT(view["at"], int(view["to"]), None), int(view["view"]), _TILE)


class XMiniGridEnvironment(LibraryEnv):
    """An XLand-MiniGrid environment.

    The leaves are `max_steps`, the number of steps after which episodes are truncated, and, for XLand environments,
    `ruleset`: the task's number in the benchmark, or -1 for a random task in each episode. Static parameters are
    `view_size`; in Playground, `num_objects`; and in XLand, `benchmark`, the name of a set of tasks whose file exists.
    """

    max_steps: Any
    ruleset: Any = -1

    suite = "xminigrid"
    ranges = {"max_steps": COUNT, "num_objects": _OBJECTS}
    drawing = drawings.Drawing(_see, _draw, 8.0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the library's environments, without XLand's if the file of their tasks is missing."""
        registered, has_tasks = xminigrid.registered_environments(), _file(_BENCHMARK).exists()
        return tuple(name for name in registered if has_tasks or not _is_xland(name))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        parameters = vars(xminigrid.make(name)[1])
        tasks = {"benchmark": _BENCHMARK} if _is_xland(name) else {}
        return {k: parameters[k] for k in ("num_objects", "view_size") if k in parameters} | tasks

    @classmethod
    def make_foreign(cls, key: Key) -> tuple[Any, Any, Any]:
        """Make the library's environment; return it with its parameters, and its tasks (None without a benchmark)."""
        chosen: dict[str, Any] = dict(key[1])
        tasks = xminigrid.load_benchmark(chosen.pop("benchmark", _BENCHMARK)) if _is_xland(key[0]) else None
        return *xminigrid.make(key[0], **chosen), tasks

    @classmethod
    def default(cls, key: Key) -> "XMiniGridEnvironment":
        env, parameters, _ = cls.foreign_of(*key)
        # Each field is a pair of integers, a tile and a color; there are fewer colors than tiles.
        high = np.asarray([NUM_TILES - 1, NUM_COLORS - 1], np.uint8)
        box = spaces.Box(0, high, env.observation_shape(parameters), np.uint8)
        return cls(key, box, spaces.Discrete(6), parameters.max_steps)

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name not in xminigrid.registered_environments():
            super().check(name, parameters)
        if "benchmark" in parameters and not _is_xland(name):
            raise ConfigError(f"benchmark={parameters['benchmark']!r:.80}: xminigrid:{name} has one task; leave it out")
        if (view := parameters.get("view_size", 5)) not in _VIEWS:
            raise ConfigError(f"view_size={view!r:.80} of xminigrid:{name} must be odd, from 3 to {_VIEWS[-1]}")
        tasks = parameters.get("benchmark", _BENCHMARK)
        if tasks not in xminigrid.registered_benchmarks():
            raise unknown("benchmark of xminigrid", str(tasks), xminigrid.registered_benchmarks())
        if _is_xland(name) and not _file(tasks).exists():
            once = f"python -c 'import xminigrid; xminigrid.load_benchmark(\"{tasks}\")'"
            raise ConfigError(f"xminigrid:{name} needs the tasks {tasks!r}, which jaxrl does not download; run {once}")

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        tasks = self.foreign[2]
        numbers = {} if tasks is None else {"ruleset": {"low": -1, "high": tasks.num_rulesets() - 1}}
        return super().contradictions(changed) + outside(changed, numbers)

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        env, parameters, tasks = self.foreign
        if tasks is not None:
            own, key = jax.random.split(key)
            drawn = jax.random.randint(own, (), 0, tasks.num_rulesets())
            parameters = parameters.replace(ruleset=tasks.get_ruleset(jnp.where(self.ruleset < 0, drawn, self.ruleset)))
        first = env.reset(parameters, key)
        return first.state, Step(first.observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        del key  # the environment is deterministic
        env, parameters, _ = self.foreign
        before = _TIME_STEP(state, None, None, None, None)  # only the state is read
        after = env.step(parameters.replace(max_steps=self.max_steps), before, action)
        truncated = after.state.step_num >= self.max_steps  # the library tests for equality and misses lowered limits
        return after.state, Step(after.observation, after.reward, after.discount == 0, truncated)


names, make = add_suite(XMiniGridEnvironment)


def _is_xland(name):
    return name.startswith("XLand")


def _file(tasks):
    return Path(benchmarks.DATA_PATH) / benchmarks.NAME2HFFILENAME[tasks]
