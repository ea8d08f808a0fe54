"""gymnax environments (Lange, 2022, github.com/RobertTLange/gymnax), version 1.x, as raw episodic environments."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import registry, settings, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.suites import unknown_name
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs import gymnax_rules as rules
from jaxrl.envs import suite
from jaxrl.envs.gymnax_import import import_gymnax
from jaxrl.envs.parameters import like
from jaxrl.envs.suite import Key
from jaxrl.envs.timestep import restart, transition

gymnax: Any = import_gymnax()
gymnax_spaces: Any = gymnax.environments.spaces

NEEDS_DOWNLOAD = ("MNISTBandit-bsuite",)
_LARGEST = 2_048  # that a file may choose for an argument of a constructor; DeepSea makes arrays of its square


class GymnaxEnvironment(struct.PyTreeNode):
    """One gymnax environment; it does not reset itself.

    The leaves are those of gymnax's `EnvParams`. The spaces were computed from the numbers given to `make`; they stay
    as they are where leaves are replaced later, or are arrays to be mapped over. Derived parameters
    (`gymnax_rules.DERIVED`) follow from the others in every environment that is built or rebuilt from leaves: not at
    every step, where computing them changes what XLA fuses, and so the last bit of results.
    """

    params: PyTree
    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Space = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)

    def __post_init__(self):
        object.__setattr__(self, "params", rules.settled(self.key[0], self.params))

    @property
    def name(self) -> str:
        return f"gymnax:{self.key[0]}"

    @property
    def parameters(self) -> dict[str, Any]:
        """What `make` takes to make it again."""
        fields = self.params.__dataclass_fields__
        return dict(self.key[1]) | {field: getattr(self.params, field) for field in fields}

    def __repr__(self) -> str:
        return settings.made(self.name, self.parameters, vars(_blueprint(self.key).params))

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: spaces.Space, action_space: spaces.Space
    ) -> "GymnaxEnvironment":
        """The environment of these `parameters`; its spaces follow from them.

        Raises:
          ConfigError: as `make`; or an argument of the constructor is a number so large that arrays of that size, or of
            its square, would fill the memory as they are made.
        """
        del observation_space, action_space
        sizes = {k: parameters[k] for k in constructor_arguments(name) if k in parameters} if name in names() else {}
        if large := [f"{k}={v!r:.80}" for k, v in sizes.items() if _is_large(v) and not k.endswith("seed")]:
            raise ConfigError(
                f"gymnax:{name} is to be made with {', '.join(large)}; a file may choose at most {_LARGEST}: hand the "
                "environment in: env=jaxrl.make(...)"
            )
        return _made(name, parameters)

    def parameter_problems(self, changed: Mapping[str, Any]) -> list[str]:
        return _problems(self.key, self.params, changed)

    @property
    def resets(self) -> bool:
        return False

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        blueprint = _blueprint(self.key)
        with suite.foreign_rules():
            observation, state = blueprint.env.reset_env(key, self.params)
        return suite.cast(state, blueprint.dtypes), restart(self._observe(observation), info=blueprint.info)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        blueprint = _blueprint(self.key)
        with suite.foreign_rules():
            # `step_env`, not `step`, which makes a new episode at every step and hides the last observation.
            observation, state, reward, terminated, info = blueprint.env.step_env(key, state, action, self.params)
            truncated = blueprint.env.is_truncated(state, self.params)
        info = {name: info[name] for name in blueprint.info}
        time_step = transition(self._observe(observation), reward, terminated, truncated, info=info)
        return suite.cast(state, blueprint.dtypes), time_step

    def _observe(self, observation: Any) -> PyTree:
        space = spaces.expect(self.observation_space, spaces.Box, spaces.Discrete)
        return jnp.asarray(observation, space.dtype).reshape(space.shape)


registry.add("suite", gymnax=GymnaxEnvironment)


def make(name: str, **parameters: Any) -> GymnaxEnvironment:
    """The gymnax environment `name` ("CartPole-v1").

    Args:
      name: as in gymnax.
      parameters: fields of the environment's `EnvParams` (numbers, or arrays to be mapped over), which become leaves,
        and arguments of its constructor, which are static.

    Raises:
      ConfigError: unknown name, unknown or unfit parameters (all of them at once), parameters that change nothing or
        contradict those that they follow from, or an environment that downloads.
    """
    env = _made(name, parameters)
    arguments = {k: v for k, v in parameters.items() if k in constructor_arguments(name)}
    defaults = {k: p.default for k, p in inspect.signature(gymnax.registration._registry[name]).parameters.items()}
    problems = [*rules.unused_arguments(name, arguments, defaults), *_problems(env.key, env.params, parameters)]
    default_params = _blueprint(env.key).params
    fields = {field: getattr(default_params, field) for field in default_params.__dataclass_fields__}
    problems += rules.switched_off(name, env.parameters, parameters, {**fields, **defaults})
    if problems:
        raise ConfigError(problems)
    return env


def _problems(key, params, changed):
    """Return a line for each changed parameter that changes nothing, or contradicts those it follows from."""
    default, derived, problems = _blueprint(key).params, rules.DERIVED.get(key[0], {}), []
    for name, value in changed.items():
        if name not in default.__dataclass_fields__:
            continue
        if name in derived:
            if not rules.equal(value, result := getattr(params, name)):
                problems.append(
                    f"{name}={value!r:.80} of gymnax:{key[0]} follows from {derived[name].equation} = {result!r:.80}; "
                    "leave it out, and set those"
                )
        elif not rules.equal(value, getattr(default, name)) and name in _unread(key):
            problems.append(
                f"{name}={value!r:.80} of gymnax:{key[0]} changes nothing: no observation, reward or ending depends on "
                "it; leave it out"
            )
    return problems


@functools.lru_cache(maxsize=256)
def _unread(key):
    """The parameters that change nothing an agent sees."""
    params, name = _blueprint(key).params, key[0]
    env = GymnaxEnvironment(params, key, *_spaces(name, _blueprint(key), params))
    values = {field: getattr(params, field) for field in params.__dataclass_fields__}
    found = suite.unread(lambda values: env.replace(params=params.replace(**values)), values)
    return found | rules.WITHOUT_EFFECT.get(name, frozenset())


def _made(name, parameters):
    """The environment with these parameters, even those that change nothing; files may hold them.

    Raises:
      ConfigError: as `make`, but for parameters that change nothing.
    """
    if name in NEEDS_DOWNLOAD:
        raise ConfigError(f"gymnax:{name} downloads its data when it is made, which jaxrl never does at run time")
    if name not in names():
        raise unknown_name("gymnax", name, names())
    allowed = constructor_arguments(name)
    with suite.refusing(f"gymnax:{name}", parameters):
        key = suite.key_of(name, {k: v for k, v in parameters.items() if k in allowed})
        blueprint = _blueprint(key)
    defaults = {k: getattr(blueprint.params, k) for k in blueprint.params.__dataclass_fields__}
    problems = suite.unknown_parameters(f"parameter of gymnax:{name}", parameters, [*defaults, *allowed])
    concrete, leaves = {}, {}
    for k, value in parameters.items():
        if k not in defaults or k in allowed:
            continue
        try:
            leaves[k] = like(defaults[k], value)
        except (TypeError, ValueError) as error:
            problems.append(
                f"parameter {k}={value!r} of gymnax:{name} does not fit its default {defaults[k]!r}: {error}"
            )
            continue
        if not isinstance(leaves[k], jax.Array):
            concrete[k] = leaves[k]
    if problems:
        raise ConfigError(problems)
    observation_space, action_space = _spaces(name, blueprint, blueprint.params.replace(**concrete))
    env = GymnaxEnvironment(blueprint.params.replace(**leaves), key, observation_space, action_space)
    if problems := env.parameter_problems(
        {k: value for k, value in leaves.items() if k in rules.DERIVED.get(name, {})}
    ):
        raise ConfigError(problems)
    return env


def _is_large(value):
    return isinstance(value, int | float) and not abs(value) <= _LARGEST


def names() -> tuple[str, ...]:
    """gymnax's environments that need no download, and those that were registered with it."""
    return tuple(n for n in gymnax.registered_envs if n not in NEEDS_DOWNLOAD)


def constructor_arguments(name: str) -> tuple[str, ...]:
    """What the constructor of gymnax's environment `name` takes: static, because it changes shapes or the program."""
    return tuple(inspect.signature(gymnax.registration._registry[name]).parameters)


class _Blueprint(NamedTuple):
    env: Any
    params: PyTree  # the defaults
    dtypes: PyTree  # of the state after a step, in its tree
    info: tuple[str, ...]  # the scalars that a step reports; gymnax's own environments report their discount alone


@functools.lru_cache(maxsize=256)
def _blueprint(key: Key) -> _Blueprint:
    """What every environment of this key shares; cached, so that two of them share one compiled program."""
    name, static = key
    with suite.constructing():
        env, params = gymnax.make(name, **dict(static))
        action_space = env.action_space(params)
        prng_key = jax.eval_shape(lambda: jax.random.key(0))
        action = jax.ShapeDtypeStruct(action_space.shape, action_space.dtype)
        state = jax.eval_shape(env.reset_env, prng_key, params)[1]

        def step(state):
            return jax.eval_shape(env.step_env, prng_key, state, action, params)[1]

        reported = jax.eval_shape(env.step_env, prng_key, state, action, params)[4]
        info = suite.scalar_names(reported, leave_out=("discount",))
        return _Blueprint(env, params, suite.settled_dtypes(step, state), info)


# --- spaces ------------------------------------------------------------------------------------------------------


def _spaces(name: str, blueprint: _Blueprint, params: PyTree) -> tuple[spaces.Space, spaces.Space]:
    """The true spaces: those that gymnax declares, but for the exceptions."""
    with suite.constructing():
        observation = _convert(blueprint.env.observation_space(params))
        action = _convert(blueprint.env.action_space(params))
    if name in WRONG_OBSERVATION_SPACES:
        observation = WRONG_OBSERVATION_SPACES[name](observation, params)
    return observation, action


def _convert(space: Any) -> spaces.Space:
    if isinstance(space, gymnax_spaces.Discrete):
        return spaces.Discrete(int(space.n), np.dtype(space.dtype))
    if isinstance(space, gymnax_spaces.Box):
        shape = space.shape if isinstance(space.shape, tuple) else (int(space.shape),)
        return spaces.Box(np.asarray(space.low), np.asarray(space.high), shape, np.dtype(space.dtype))
    if isinstance(space, gymnax_spaces.Dict):
        return spaces.Dict({k: _convert(child) for k, child in space.spaces.items()})
    raise ConfigError(f"gymnax's space {space!r} has no counterpart in jaxrl")


def _box(declared: Any, *, low: Mapping[int, float], high: Mapping[int, float]) -> spaces.Box:
    """`declared` with the bounds at some positions (of a vector) replaced."""
    lows, highs = declared.low.copy(), declared.high.copy()
    for bounds, new in ((lows, low), (highs, high)):
        for position, bound in new.items():
            bounds[position] = bound
    return spaces.Box(lows, highs, declared.shape, declared.dtype)


def _clock(params: Any) -> tuple[float, float]:
    """Bounds of the time that MetaMaze and GaussianBandit show: steps, or from -1 on and 2 more every 100 steps."""
    steps = float(params.max_steps_in_episode)
    return (-1.0, max(1.0, steps / 50.0 - 1.0)) if params.normalize_time else (0.0, steps)


def _bernoulli_bandit(declared: Any, params: Any) -> spaces.Space:
    if not params.normalize_time:
        return declared
    # It declares `max_lim`, which the time shown reaches at `t_max`, not at the last step.
    last = params.min_lim + (params.max_lim - params.min_lim) * params.max_steps_in_episode / params.t_max
    return _box(declared, low={3: min(params.min_lim, last)}, high={3: max(params.min_lim, last)})


def _catch(declared: Any, params: Any) -> spaces.Space:
    del params  # it gives floats and declares integers
    return spaces.Box(declared.low, declared.high, declared.shape)


def _four_rooms(declared: Any, params: Any) -> spaces.Space:
    del params  # it gives integer positions and declares floats; the picture is as declared
    return declared if len(declared.shape) == 3 else spaces.Box(declared.low, declared.high, (4,), np.int32)


def _gaussian_bandit(declared: Any, params: Any) -> spaces.Space:
    # The reward shown is a normal variable.
    start, end = _clock(params)
    return _box(declared, low={0: -np.inf, 3: start}, high={0: np.inf, 3: end})


def _memory_chain(declared: Any, params: Any) -> spaces.Space:
    del params  # the context is -1 or 1
    context = range(2, declared.shape[0])
    return _box(declared, low={0: -ROUNDING, **dict.fromkeys(context, -1.0)}, high={})


def _meta_maze(declared: Any, params: Any) -> spaces.Space:
    # The reward shown is not in [0, 1].
    start, end = _clock(params)
    parts = np.asarray([params.reward, params.punishment])
    low, high = np.minimum(parts, 0.0).sum(), np.maximum(parts, 0.0).sum()
    return _box(declared, low={-2: low, -1: start}, high={-2: high, -1: end})


def _umbrella_chain(declared: Any, params: Any) -> spaces.Space:
    del params
    return _box(declared, low={2: -ROUNDING}, high={})


ROUNDING = 1e-6  # 1 - t / n ends below 0 where the compiler rounds so

# Where gymnax 1.0.1 declares another observation space than its environment's observations lie in: functions from what
# it declares, and the parameters, to the truth. Every entry is needed, and no other: `tests/envs/test_gymnax.py`.
WRONG_OBSERVATION_SPACES: dict[str, Callable[[Any, Any], spaces.Space]] = {
    "BernoulliBandit-misc": _bernoulli_bandit,
    "Catch-bsuite": _catch,
    "FourRooms-misc": _four_rooms,
    "GaussianBandit-misc": _gaussian_bandit,
    "MemoryChain-bsuite": _memory_chain,
    "MetaMaze-misc": _meta_maze,
    "UmbrellaChain-bsuite": _umbrella_chain,
}
