"""XLand-MiniGrid (Nikulin et al., 2023, arXiv:2312.12044), as raw episodic environments.

The library's discount distinguishes ends from time limits, and its own step never resets: only its wrappers do.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xminigrid
from flax import struct
from xminigrid import benchmarks
from xminigrid.core.constants import NUM_COLORS, NUM_TILES
from xminigrid.rendering.rgb_render import render
from xminigrid.types import AgentState, TimeStep

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import PyTree
from jaxrl.envs import drawings
from jaxrl.envs.suite import Key, Step, SuiteEnv, constructing, counts_below_one

_VIEWS = range(3, 32, 2)  # sides of an agent's view; the library does not check them
_OBJECTS = range(1, 101)  # that fit the rooms of Playground
_BENCHMARK = "trivial-21k"
_TILE = 16  # pixels of a tile in pictures
_AGENT: Any = AgentState
_TIME_STEP: Any = TimeStep


class XMiniGridEnvironment(SuiteEnv):
    """An XLand-MiniGrid environment.

    Leaves are `max_steps`, where episodes are truncated, and, for XLand environments, `ruleset`: the task's number in
    the benchmark, or -1 for another task in each episode. Static parameters: `view_size`; `num_objects` of Playground;
    and `benchmark`, a file of tasks, which must exist.
    """

    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Space = struct.field(pytree_node=False)
    max_steps: Any
    ruleset: Any = -1

    suite = "xminigrid"
    action_space = spaces.Discrete(6)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the library's environments; those of XLand only if the file of their tasks exists."""
        registered, has_tasks = xminigrid.registered_environments(), _file(_BENCHMARK).exists()
        return tuple(name for name in registered if has_tasks or not _is_xland(name))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        parameters = vars(xminigrid.make(name)[1])
        tasks = {"benchmark": _BENCHMARK} if _is_xland(name) else {}
        return {k: parameters[k] for k in ("num_objects", "view_size") if k in parameters} | tasks

    @classmethod
    def default(cls, key: Key) -> "XMiniGridEnvironment":
        env, parameters, _ = foreign(key)
        # Integers identify tiles, and colors, of which there are fewer.
        high = np.asarray([NUM_TILES - 1, NUM_COLORS - 1], np.uint8)
        box = spaces.Box(0, high, env.observation_shape(parameters), np.uint8)
        return cls(key, box, parameters.max_steps)

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name not in xminigrid.registered_environments():
            super().check(name, parameters)
        if "benchmark" in parameters and not _is_xland(name):
            raise ConfigError(f"benchmark={parameters['benchmark']!r:.80}: xminigrid:{name} has one task; leave it out")
        view, problems = parameters.get("view_size", 5), []
        if view not in _VIEWS:
            problems.append(f"view_size={view!r:.80} of xminigrid:{name} must be odd, from 3 to {_VIEWS[-1]}")
        if (objects := parameters.get("num_objects", 1)) not in _OBJECTS:
            problems.append(f"num_objects={objects!r:.80} of xminigrid:{name} must be from 1 to {_OBJECTS[-1]}")
        if problems:
            raise ConfigError(problems)
        tasks = parameters.get("benchmark", _BENCHMARK)
        if tasks not in xminigrid.registered_benchmarks():
            raise unknown("benchmark of xminigrid", str(tasks), xminigrid.registered_benchmarks())
        if _is_xland(name) and not _file(tasks).exists():
            once = f"python -c 'import xminigrid; xminigrid.load_benchmark(\"{tasks}\")'"
            raise ConfigError(f"xminigrid:{name} needs the tasks {tasks!r}, which jaxrl never downloads; once: {once}")

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        task, problems = changed.get("ruleset"), []
        tasks = foreign(self.key)[2]
        if isinstance(task, int) and tasks is not None and not -1 <= task < tasks.num_rulesets():
            problems.append(f"ruleset={task} of {self.name} must be from -1 to {tasks.num_rulesets() - 1}")
        return problems + counts_below_one(changed, "max_steps")

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        env, parameters, tasks = foreign(self.key)
        if tasks is not None:
            own, key = jax.random.split(key)
            drawn = jax.random.randint(own, (), 0, tasks.num_rulesets())
            parameters = parameters.replace(ruleset=tasks.get_ruleset(jnp.where(self.ruleset < 0, drawn, self.ruleset)))
        first = env.reset(parameters, key)
        return first.state, Step(first.observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        del key  # the environment is deterministic
        env, parameters, _ = foreign(self.key)
        before = _TIME_STEP(state, None, None, None, None)  # only the state is read
        after = env.step(parameters.replace(max_steps=self.max_steps), before, action)
        truncated = after.state.step_num >= self.max_steps  # the library's "equal" misses a limit that was lowered
        return after.state, Step(after.observation, after.reward, after.discount == 0, truncated)


registry.add("suite", xminigrid=XMiniGridEnvironment)
names, make = XMiniGridEnvironment.names, XMiniGridEnvironment.make


@functools.lru_cache(maxsize=64)
def foreign(key: Key) -> tuple[Any, Any, Any]:
    """Return the library's own environment for this key, its parameters, and its tasks, if it has any."""
    chosen: dict[str, Any] = dict(key[1])
    with constructing():
        tasks = xminigrid.load_benchmark(chosen.pop("benchmark", _BENCHMARK)) if _is_xland(key[0]) else None
        return *xminigrid.make(key[0], **chosen), tasks


def _is_xland(name):
    return name.startswith("XLand")


def _file(tasks):
    return Path(benchmarks.DATA_PATH) / benchmarks.NAME2HFFILENAME[tasks]


def _see(env, state, time_step):
    at, to = state.agent.position, state.agent.direction
    return {"grid": state.grid, "at": at, "to": to, "view": jnp.asarray(env.static("view_size"))}


def _draw(view):
    return render(view["grid"], _AGENT(view["at"], int(view["to"]), None), int(view["view"]), _TILE)


for _name in xminigrid.registered_environments():
    drawings.register(f"xminigrid:{_name}", drawings.Drawing(_see, _draw, 8.0))
