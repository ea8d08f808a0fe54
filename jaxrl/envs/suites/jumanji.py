"""Jumanji's environments (Bonnet et al., 2023, arXiv:2306.09884), without auto-reset."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from jax.tree_util import Partial
from jumanji import specs
from PIL import Image, ImageOps

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs.drawings import Drawing
from jaxrl.envs.suite import Key, LibraryEnv, Step, add_suite, arguments_of, foreign_rules

_NEVER = 2**31 - 1
_CLOCKS = ("step", "step_count")  # not observed: large numbers up to the time limit, not part of the task


def _drawn(render: Any) -> np.ndarray:
    with foreign_rules():
        render.func(*jax.tree.map(jnp.asarray, render.args))
    return np.asarray(ImageOps.contain(Image.fromarray(render.func.__self__.frame).convert("RGB"), (300, 300)))


class JumanjiEnvironment(LibraryEnv):
    """A Jumanji environment.

    The leaf is the time limit in steps, infinite if the task ends by itself. Static parameters are the other numeric
    arguments of the constructors of the environment and its generator, such as `num_rows`.

    If actions are several numbers with one mask for all combinations, the action space is `Discrete`: an action is the
    index of a combination, and the last number varies fastest. Actions of several agents are `MultiDiscrete`, and the
    agents' rewards are summed.
    """

    time_limit: Any

    suite = "jumanji"
    drawing = Drawing(lambda env, state, _: Partial(env.foreign.render, state[0]), _drawn, 5.0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of Jumanji's environments that do not download data, including those registered by users."""
        return tuple(sorted(jumanji.registered_environments() - {"Sokoban-v0"}))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        env = cls.foreign_of(name)
        found = arguments_of(type(env)) | _generator(env)[1]
        return {k: x for k, x in found.items() if isinstance(x, bool | int | float) and k != "time_limit"}

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        """Make Jumanji's environment without its time limit, which Jumanji would report as a termination."""
        usual, chosen = jumanji.make(key[0]), dict(key[1])
        own = {k: chosen.pop(k) for k in [*chosen] if k in arguments_of(type(usual))}
        kind, arguments = _generator(usual)
        env: Any = jumanji.make(key[0], **own | ({"generator": kind(**arguments | chosen)} if chosen else {}))
        env.declared_limit, env.time_limit = getattr(env, "time_limit", math.inf), _NEVER
        viewer = next(getattr(env, k) for k in ("_viewer", "_env_viewer", "viewer") if hasattr(env, k))
        viewer._display = lambda figure: setattr(env, "frame", viewer._display_rgb_array(figure))  # instead of a window
        return env

    @classmethod
    def default(cls, key: Key) -> "JumanjiEnvironment":
        env = cls.foreign_of(*key)
        return cls(key, _space(env.observation_spec), _actions(env), env.declared_limit)

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name == "Sokoban-v0":
            raise ConfigError("jumanji:Sokoban-v0 downloads its levels, so it is not supported: docs/suites/jumanji.md")
        super().check(name, parameters)

    @classmethod
    def limits(cls, name: str) -> Mapping[str, Mapping[str, float]]:
        sizes = cls.static_parameters(name)  # whole numbers are counts
        return {k: {"low": int(isinstance(x, int))} for k, x in sizes.items() if not isinstance(x, bool)}

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        most = _generator(self.foreign)[1].get("max_step", math.inf)  # MMST's state has this size
        bound = "" if most == math.inf else f", and at most max_step={most}"
        fine = isinstance(self.time_limit, jax.Array | np.ndarray) or 1 <= self.time_limit <= most  # or mapped over
        return [] if fine else [f"time_limit={self.time_limit} of {self.name} must be at least 1{bound}"]

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        state, first = self.foreign.reset(key)
        return (state, jnp.zeros((), jnp.int32)), self._step(first)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        del key  # Jumanji's key is in its state
        (inner, steps), env, spec = state, self.foreign, self.foreign.action_spec
        if self.key[0].startswith("SearchAndRescue"):  # its rewards shrink toward the time limit
            env, rewards = copy.copy(env), env._reward_fn
            env._reward_fn = lambda found, step, _: rewards(found, step, self.time_limit)
        if isinstance(self.action_space, spaces.Discrete) and spec.shape:
            action = jnp.stack(jnp.unravel_index(action, tuple(np.asarray(spec.num_values).tolist())))
        inner, after = env.step(inner, action.astype(spec.dtype))
        step = self._step(after)._replace(terminated=after.last(), truncated=steps + 1 >= self.time_limit)
        return (inner, steps + 1), step

    def _step(self, seen: Any) -> Step:
        if (mask := getattr(seen.observation, "action_mask", None)) is not None:
            agents = mask if isinstance(self.action_space, spaces.MultiDiscrete) else mask.reshape(1, -1)
            mask = (agents | ~agents.any(axis=-1, keepdims=True)).ravel()  # if nothing is allowed, allow everything
        observation = _values(self.observation_space, seen.observation)
        return Step(observation, jnp.sum(seen.reward), action_mask=mask, info=seen.extras)


names, make = add_suite(JumanjiEnvironment)


def _generator(env: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class of an environment's generator, and its arguments, read from attributes of the same names."""
    generator = getattr(env, "generator", getattr(env, "_generator", None))
    usual = arguments_of(type(generator)) if generator is not None else {}
    names = [k for k, x in usual.items() if x is not None]  # arguments that default to None are computed
    return type(generator), {k: getattr(generator, k, getattr(generator, f"_{k}", None)) for k in names}


def _actions(env: Any) -> spaces.Space:
    spec, mask = env.action_spec, env.observation_spec._specs.get("action_mask")
    if np.issubdtype(spec.dtype, np.floating):
        return spaces.Box(spec.minimum, spec.maximum, spec.shape)
    counts = tuple(np.ravel(spec.maximum + 1).tolist())
    joint = mask is None or mask.shape == counts
    return spaces.Discrete(math.prod(counts)) if joint else spaces.MultiDiscrete((mask.shape[1],) * mask.shape[0])


def _space(spec: Any) -> spaces.Space:
    if not isinstance(spec, specs.Array):
        return spaces.Dict({k: _space(x) for k, x in spec._specs.items() if k not in ("action_mask", *_CLOCKS)})
    low = -1 if spec.name == "position" else getattr(spec, "minimum", -_NEVER)  # TSP's position before the first city
    return spaces.Box(low, getattr(spec, "maximum", _NEVER), spec.shape, spec.dtype)


def _values(space: spaces.Space, seen: Any) -> PyTree:
    return {k: _values(x, getattr(seen, k)) for k, x in space.items} if isinstance(space, spaces.Dict) else seen
