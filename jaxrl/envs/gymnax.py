"""gymnax environments (Lange, 2022, github.com/RobertTLange/gymnax), version 1.x, without auto-reset.

The rules correct gymnax's environments: derived parameters, parameters without effect, and observation spaces.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs.gymnax_import import import_gymnax
from jaxrl.envs.suite import (
    PROBABILITY,
    Key,
    LibraryEnv,
    Step,
    add_suite,
    arguments_of,
    constructing,
    equal,
)

gymnax: Any = import_gymnax()

NEEDS_DOWNLOAD = ("MNISTBandit-bsuite",)


class Derived(NamedTuple):
    """A rule that computes a parameter from two other parameters, its sources."""

    sources: tuple[str, str]  # the names of the sources
    equation: str  # for messages
    value: Callable[[Any, Any], Any]  # computes the parameter from the values of the sources


# Parameters that gymnax stores although they are determined by other parameters.
DERIVED: dict[str, dict[str, Derived]] = {
    "CartPole-v1": {
        "total_mass": Derived(("masscart", "masspole"), "masscart + masspole", operator.add),
        "polemass_length": Derived(("masspole", "length"), "masspole * length", operator.mul),
    }
}

# Limits of parameters by name, for all environments; a time limit may be a float, such as BernoulliBandit's 100.0.
LIMITS: dict[str, Mapping[str, float]] = {
    "max_steps_in_episode": {"low": 1},
    "fail_prob": PROBABILITY,
    "reward_prob": PROBABILITY,
}

# Numbers that are read but have no effect; `SuiteEnv.without_effect` finds the numbers that are not read.
WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    "SimpleBandit-bsuite": frozenset({"max_steps_in_episode"}),  # every episode terminates at its first step
}

# Constructor arguments that have no effect, and why.
_IDLE = {"Seaquest-MinAtar": {"use_minimal_action_set": "because both sets are the same six actions"}}

# Parameters without effect if another parameter (the switch) is true or false: (switch, value).
_SWITCHES = {
    "Asterix-MinAtar": {"ramp_interval": ("ramping", False)},
    "BernoulliBandit-misc": dict.fromkeys(("min_lim", "max_lim", "t_max"), ("normalize_time", False)),
    "DeepSea-bsuite": {"randomize_actions": ("sample_action_map", True)},
    "FourRooms-misc": {"goal_fixed": ("resample_goal_pos", True), "pos_fixed": ("resample_init_pos", True)},
    "FrozenLake-misc": {"map_name": ("desc", True), "success_rate": ("is_slippery", False)},
}


def settled(name: str, params: PyTree) -> PyTree:
    """Return `params`, gymnax's `EnvParams` of the environment `name`, with derived parameters recomputed.

    A parameter stays unchanged if its sources are placeholders, as in a pytree of `vmap` axes.
    """
    values = {}
    for k, rule in DERIVED.get(name, {}).items():
        sources = [getattr(params, source) for source in rule.sources]
        if all(isinstance(x, float | np.ndarray | np.generic | jax.Array) for x in sources):
            values[k] = rule.value(*sources)
    return params.replace(**values) if values else params


def _switched_off(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of the environment `name` that have no effect with these values, and the reasons."""
    return _IDLE.get(name, {}) | {
        k: f"with {switch}={values[switch]!r:.80}"
        for k, (switch, off) in _SWITCHES.get(name, {}).items()
        if not isinstance(values[switch], jax.Array | np.ndarray) and bool(values[switch]) == off
    }


# --- spaces ---------------------------------------------------------------------------------------------------------


def spaces_of(name: str, env: Any, params: Any) -> dict[str, spaces.Space]:
    """Return the spaces of gymnax's environment `name` with these `EnvParams`, keyed by field name."""
    with constructing():
        observation, action = convert(env.observation_space(params)), convert(env.action_space(params))
    if name in WRONG_OBSERVATION_SPACES:
        observation = WRONG_OBSERVATION_SPACES[name](observation, params)
    return {"observation_space": observation, "action_space": action}


def convert(space: Any) -> spaces.Space:
    """Convert a gymnax space to the corresponding space of jaxrl."""
    if isinstance(space, gymnax.environments.spaces.Discrete):
        return spaces.Discrete(int(space.n), np.dtype(space.dtype))
    if isinstance(space, gymnax.environments.spaces.Box):
        shape = space.shape if isinstance(space.shape, tuple) else (int(space.shape),)
        return spaces.Box(np.asarray(space.low), np.asarray(space.high), shape, np.dtype(space.dtype))
    if isinstance(space, gymnax.environments.spaces.Dict):
        return spaces.Dict({k: convert(child) for k, child in space.spaces.items()})
    raise ConfigError(f"gymnax's space {space!r} has no counterpart in jaxrl")


def _box(declared: Any, *, low: Mapping[int, float], high: Mapping[int, float]) -> spaces.Box:
    """Return the one-dimensional box `declared` with new bounds at some positions."""
    lows, highs = declared.low.copy(), declared.high.copy()
    for bounds, new in ((lows, low), (highs, high)):
        for position, bound in new.items():
            bounds[position] = bound
    return spaces.Box(lows, highs, declared.shape, declared.dtype)


def _clock(params: Any) -> tuple[float, float]:
    """Return the bounds of the time that MetaMaze and GaussianBandit observe: in steps, or -1 + steps / 50."""
    steps = float(params.max_steps_in_episode)
    return (-1.0, max(1.0, steps / 50.0 - 1.0)) if params.normalize_time else (0.0, steps)


def _bernoulli_bandit(declared: Any, params: Any) -> spaces.Space:
    if not params.normalize_time:
        return declared
    # gymnax declares `max_lim`, but the observed time reaches `max_lim` at step `t_max`, not at the last step.
    last = params.min_lim + (params.max_lim - params.min_lim) * params.max_steps_in_episode / params.t_max
    return _box(declared, low={3: min(params.min_lim, last)}, high={3: max(params.min_lim, last)})


def _gaussian_bandit(declared: Any, params: Any) -> spaces.Space:
    # The reward in the observation is normally distributed, hence unbounded.
    start, end = _clock(params)
    return _box(declared, low={0: -np.inf, 3: start}, high={0: np.inf, 3: end})


def _meta_maze(declared: Any, params: Any) -> spaces.Space:
    # The reward in the observation is not in [0, 1].
    start, end = _clock(params)
    parts = np.asarray([params.reward, params.punishment])
    low, high = np.minimum(parts, 0.0).sum(), np.maximum(parts, 0.0).sum()
    return _box(declared, low={-2: low, -1: start}, high={-2: high, -1: end})


ROUNDING = 1e-6  # rounding may make 1 - t / n negative at the end

# Corrections of observation spaces that gymnax 1.0.1 declares wrongly: functions `(declared_space, params)` that return
# the actual space. `tests/envs/test_gymnax.py` shows that exactly these corrections are needed.
WRONG_OBSERVATION_SPACES: dict[str, Callable[[Any, Any], spaces.Space]] = {
    "BernoulliBandit-misc": _bernoulli_bandit,
    # Observations are floats, but declared as integers.
    "Catch-bsuite": lambda declared, _: spaces.Box(declared.low, declared.high, declared.shape),
    # Positions are integers, but declared as floats; image observations are as declared.
    "FourRooms-misc": lambda declared, _: (
        declared if len(declared.shape) == 3 else spaces.Box(declared.low, declared.high, (4,), np.int32)
    ),
    "GaussianBandit-misc": _gaussian_bandit,
    # The context is -1 or 1.
    "MemoryChain-bsuite": lambda declared, _: _box(
        declared, low={0: -ROUNDING, **dict.fromkeys(range(2, declared.shape[0]), -1.0)}, high={}
    ),
    "MetaMaze-misc": _meta_maze,
    "UmbrellaChain-bsuite": lambda declared, _: _box(declared, low={2: -ROUNDING}, high={}),
}


# --- the adapter -----------------------------------------------------------------------------------------------------


class GymnaxEnvironment(LibraryEnv):
    """A gymnax environment.

    The leaves are those of gymnax's `EnvParams`. The spaces are computed from the numbers passed to `make`; they ignore
    arrays to map over, and do not change if leaves are replaced later. Derived parameters (`gymnax_DERIVED`) are
    recomputed whenever an environment is built, or rebuilt from leaves. They are not computed at every step, because
    XLA would then fuse operations differently, which changes the last bit of results.
    """

    params: PyTree

    suite = "gymnax"
    ranges = LIMITS
    largest = 2_048  # DeepSea makes arrays of shape (size, size)

    def __post_init__(self):
        object.__setattr__(self, "params", settled(self.key[0], self.params))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of gymnax's environments that do not download data, including those registered by users."""
        return tuple(n for n in gymnax.registered_envs if n not in NEEDS_DOWNLOAD)

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        """Return the constructor's arguments, which change shapes or the compiled program, with their defaults."""
        return arguments_of(gymnax.registration._registry[name])

    @classmethod
    def make_foreign(cls, key: Key) -> tuple[Any, Any]:
        """Make gymnax's environment; return it with its default `EnvParams`."""
        return gymnax.make(key[0], **dict(key[1]))

    @classmethod
    def default(cls, key: Key) -> "GymnaxEnvironment":
        env, params = cls.foreign_of(*key)
        return cls(params=params, key=key, **spaces_of(key[0], env, params))

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name in NEEDS_DOWNLOAD:
            raise ConfigError(f"gymnax:{name} needs a download, but jaxrl downloads nothing at run time")
        super().check(name, parameters)

    def with_spaces(self) -> "GymnaxEnvironment":
        return self.replace(**spaces_of(self.key[0], self.foreign[0], self.params))

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        derived = DERIVED.get(self.key[0], {})
        return super().contradictions(changed) + [
            f"{name}={value!r:.80} of {self.name} is computed as {derived[name].equation} = {result!r:.80}; set those "
            "parameters instead"
            for name, value in changed.items()
            if name in derived and not equal(value, result := getattr(self.params, name))
        ]

    def without_effect(self) -> frozenset[str]:
        useless = super().without_effect() | WITHOUT_EFFECT.get(self.key[0], frozenset())
        return useless - set(DERIVED.get(self.key[0], ()))

    def idle(self) -> Mapping[str, str]:
        return _switched_off(self.key[0], {**self.static_parameters(self.key[0]), **self.parameters})

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        observation, state = self.foreign[0].reset_env(key, self.params)
        return state, Step(observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        env = self.foreign[0]
        # `step_env`, because `step` resets at every step and hides the last observation.
        observation, state, reward, terminated, info = env.step_env(key, state, action, self.params)
        reported = {name: x for name, x in info.items() if name != "discount"}
        truncated = env.is_truncated(state, self.params)
        return state, Step(observation, reward, terminated, truncated, info=reported)


names, make = add_suite(GymnaxEnvironment)
