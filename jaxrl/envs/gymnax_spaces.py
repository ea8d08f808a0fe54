"""The actual spaces of gymnax's environments: those that gymnax declares, with corrections."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.envs.gymnax_import import import_gymnax
from jaxrl.envs.suite import constructing

_foreign: Any = import_gymnax().environments.spaces


def spaces_of(name: str, env: Any, params: Any) -> dict[str, spaces.Space]:
    """Return the observation and the action space of gymnax's environment `name` with these `EnvParams`, by field."""
    with constructing():
        observation, action = convert(env.observation_space(params)), convert(env.action_space(params))
    if name in WRONG_OBSERVATION_SPACES:
        observation = WRONG_OBSERVATION_SPACES[name](observation, params)
    return {"observation_space": observation, "action_space": action}


def convert(space: Any) -> spaces.Space:
    """Return our space for one of gymnax's."""
    if isinstance(space, _foreign.Discrete):
        return spaces.Discrete(int(space.n), np.dtype(space.dtype))
    if isinstance(space, _foreign.Box):
        shape = space.shape if isinstance(space.shape, tuple) else (int(space.shape),)
        return spaces.Box(np.asarray(space.low), np.asarray(space.high), shape, np.dtype(space.dtype))
    if isinstance(space, _foreign.Dict):
        return spaces.Dict({k: convert(child) for k, child in space.spaces.items()})
    raise ConfigError(f"gymnax's space {space!r} has no counterpart in jaxrl")


def _box(declared: Any, *, low: Mapping[int, float], high: Mapping[int, float]) -> spaces.Box:
    """Return `declared` with the bounds at some positions of a vector replaced."""
    lows, highs = declared.low.copy(), declared.high.copy()
    for bounds, new in ((lows, low), (highs, high)):
        for position, bound in new.items():
            bounds[position] = bound
    return spaces.Box(lows, highs, declared.shape, declared.dtype)


def _clock(params: Any) -> tuple[float, float]:
    """Return the bounds of the time that MetaMaze and GaussianBandit observe: steps, or -1 and 2 more per 100 steps."""
    steps = float(params.max_steps_in_episode)
    return (-1.0, max(1.0, steps / 50.0 - 1.0)) if params.normalize_time else (0.0, steps)


def _bernoulli_bandit(declared: Any, params: Any) -> spaces.Space:
    if not params.normalize_time:
        return declared
    # It declares `max_lim`, which the time in the observation reaches at `t_max`, not at the last step.
    last = params.min_lim + (params.max_lim - params.min_lim) * params.max_steps_in_episode / params.t_max
    return _box(declared, low={3: min(params.min_lim, last)}, high={3: max(params.min_lim, last)})


def _catch(declared: Any, params: Any) -> spaces.Space:
    del params  # floats, declared as integers
    return spaces.Box(declared.low, declared.high, declared.shape)


def _four_rooms(declared: Any, params: Any) -> spaces.Space:
    del params  # integer positions, declared as floats; the picture is as declared
    return declared if len(declared.shape) == 3 else spaces.Box(declared.low, declared.high, (4,), np.int32)


def _gaussian_bandit(declared: Any, params: Any) -> spaces.Space:
    # The reward in the observation is a normal variable.
    start, end = _clock(params)
    return _box(declared, low={0: -np.inf, 3: start}, high={0: np.inf, 3: end})


def _memory_chain(declared: Any, params: Any) -> spaces.Space:
    del params  # the context is -1 or 1
    context = range(2, declared.shape[0])
    return _box(declared, low={0: -ROUNDING, **dict.fromkeys(context, -1.0)}, high={})


def _meta_maze(declared: Any, params: Any) -> spaces.Space:
    # The reward in the observation is not in [0, 1].
    start, end = _clock(params)
    parts = np.asarray([params.reward, params.punishment])
    low, high = np.minimum(parts, 0.0).sum(), np.maximum(parts, 0.0).sum()
    return _box(declared, low={-2: low, -1: start}, high={-2: high, -1: end})


def _umbrella_chain(declared: Any, params: Any) -> spaces.Space:
    del params
    return _box(declared, low={2: -ROUNDING}, high={})


ROUNDING = 1e-6  # 1 - t / n may end below 0 by rounding

# Corrections of observation spaces that gymnax 1.0.1 declares wrongly: functions from the declared space and the
# parameters to the actual space. Exactly these are needed: `tests/envs/test_gymnax.py`.
WRONG_OBSERVATION_SPACES: dict[str, Callable[[Any, Any], spaces.Space]] = {
    "BernoulliBandit-misc": _bernoulli_bandit,
    "Catch-bsuite": _catch,
    "FourRooms-misc": _four_rooms,
    "GaussianBandit-misc": _gaussian_bandit,
    "MemoryChain-bsuite": _memory_chain,
    "MetaMaze-misc": _meta_maze,
    "UmbrellaChain-bsuite": _umbrella_chain,
}
