"""The base class for suites of JAX environments, and functions for adapters of other libraries.

Each suite is a subclass of `SuiteEnv` in a separate module (docs/new_suite.md).
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.interpreters import partial_eval

from jaxrl.core import presentation, registry, spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.limits import number_problems
from jaxrl.core.planning import Model
from jaxrl.core.suites import unknown_name
from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.episode import AutoReset, EpisodeStatistics, PooledReset, restart, transition
from jaxrl.envs.parameters import at, layers, like, paths, replaced

# The static part of an environment: its name within the suite, and its static parameters in sorted order.
Key = tuple[str, tuple[tuple[str, Hashable], ...]]


class Step(NamedTuple):
    """The result of `SuiteEnv.begin` or `SuiteEnv.advance`.

    Attributes:
      observation: an observation, with any dtypes and shapes that can be converted to those of the observation space.
      reward: a scalar.
      terminated: bool, whether the task ended.
      truncated: bool, whether a time limit cut the episode off.
      action_mask: bool, True where an action is allowed; None allows all actions.
      discount: the environment's discount of later rewards (`TimeStep.discount`), 1 after a reset; None if the
        environment does not discount.
      info: further values by name; scalars become `TimeStep.info`.
      active: bool, False for an agent that can no longer act but is rewarded until its team's episode is over; None if
        all agents can act.
    """

    observation: PyTree
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    action_mask: PyTree | None = None
    discount: Any = None
    info: Mapping[str, Any] = {}
    active: Any = None


class SuiteEnv(struct.PyTreeNode):
    """An environment of a JAX suite, which does not reset itself.

    A suite is one subclass, a frozen dataclass. Its leaves are the numbers that may change without recompilation; if a
    field is itself a dataclass, that dataclass's fields are the numbers. A subclass has

    - `suite`: the suite's name;
    - `key`: the environment's name and its static parameters, made by `key_of`; static;
    - `observation_space`, `action_space`: static fields or properties;
    - `names`, `default`, `begin`, `advance`: methods;
    - `static_parameters`: a method, if there are static parameters;
    - `ranges`: the limits of parameters by name, as for `jaxrl.core.limits.problem`, if there are any;
    - `largest`: the largest static number that a file may set, if larger numbers could exhaust the memory;
    - `drawing`: a `jaxrl.envs.drawings.Drawing`, if the environments can be drawn.

    An environment with several agents also has `num_agents`, more than 1. The spaces are those of one agent; the
    actions of `advance` and the fields of each `Step` have a leading axis of agents, which is optional for `reward`,
    `terminated` and `truncated`, and absent in `info`. An agent that finishes before the others either repeats its last
    step until they finish, or is rewarded until then without being `active` (`jaxrl.envs.agents`).

    The other methods of the first group below have defaults that suit most suites. The methods of the second group are
    used by `jaxrl.make`, files, `jaxrl.envs.parameters` and training; suites do not override them.
    """

    if TYPE_CHECKING:  # a subclass defines fields or properties; annotations at run time would make them fields
        suite: ClassVar[str]
        ranges: ClassVar[Mapping[str, Mapping[str, float]]]

        @property
        def key(self) -> Key: ...
        @property
        def observation_space(self) -> spaces.Space: ...
        @property
        def action_space(self) -> spaces.Space: ...

    resets, ranges, largest, drawing = False, {}, float("inf"), None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**{"repr": False} | options)

    # --- defined by a suite --------------------------------------------------------------------------------------

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the names of the environments, without the suite's prefix."""
        raise NotImplementedError

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        """Return the parameters that are part of the compiled program, by name, with their defaults."""
        return {}

    @classmethod
    def default(cls, key: Key) -> Self:
        """Return the environment for `key` with default values of all numbers; called once per key."""
        raise NotImplementedError

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        """Return the state and the first step of a new episode; traced under JAX's standard promotion rules."""
        raise NotImplementedError

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        """Return the next state and the step after an action, without resetting an episode that ends."""
        raise NotImplementedError

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        """Raise an error if the name or a static parameter does not exist or cannot be used.

        Raises:
          ConfigError: a name or a parameter is rejected; the message explains why.
        """
        if name not in (names := cls.names()):
            raise unknown_name(cls.suite, name, names)
        for parameter, allowed in cls.choices(name).items():
            if parameter in parameters and (value := parameters[parameter]) not in [*allowed]:
                raise unknown(f"{parameter} of {cls.suite}:{name}", str(value), map(str, allowed))

    def fit(self, name: str, value: Any) -> Any:
        """Convert a number passed to `jaxrl.make` to the type of its default, `self.numbers[name]`.

        Raises:
          ConfigError, ArithmeticError, AttributeError, TypeError, ValueError: the value does not fit.
        """
        return like(self.numbers[name], value)

    def with_spaces(self) -> Self:
        """Return this environment with its spaces recomputed from its parameters.

        `make` calls this method before it replaces parameters with arrays to map over.
        """
        return self

    @classmethod
    def choices(cls, name: str) -> Mapping[str, Iterable[Any]]:
        """Return the allowed values of each static parameter that accepts only a few values."""
        return {}

    @classmethod
    def limits(cls, name: str) -> Mapping[str, Mapping[str, float]]:
        """Return the limits of parameters by name, including static parameters; by default `ranges`."""
        return cls.ranges

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        """Return one error line per invalid number in `changed`, such as a number outside `limits`.

        Numbers from files are checked, too.
        """
        return outside(changed, self.limits(self.key[0]))

    def without_effect(self) -> frozenset[str]:
        """Return the names of numbers that no observation, reward or ending depends on; by default found by tracing."""
        return _without_effect(type(self), self.key)

    def idle(self) -> Mapping[str, str]:
        """Return parameters that have no effect because of other parameters, and why.

        For example `{"ramp_interval": "with ramping=False"}`. `make` rejects such parameters, but a curriculum may set
        them.
        """
        return {}

    def ineffective(self, changed: Mapping[str, Any], idle: Mapping[str, str] = {}) -> list[str]:
        """Return one error line per parameter in `changed` that differs from its default but has no effect.

        Args:
          changed: parameters by name.
          idle: a result of the method `idle`.
        """
        usual = {**self.static_parameters(self.key[0]), **_shared(type(self), self.key).default.numbers}
        different = {name: x for name, x in changed.items() if name in usual and not equal(x, usual[name])}
        if not different:
            return []
        reasons = dict.fromkeys(self.without_effect(), ": no observation, reward or ending depends on it")
        reasons |= {name: f" {why}" for name, why in idle.items()}
        return [
            f"{name}={value!r:.80} of {self.name} changes nothing{reasons[name]}; leave it out"
            for name, value in different.items()
            if name in reasons
        ]

    def model(self, state: PyTree) -> tuple[Environment, PyTree]:
        """Return the environment for a planning search, and `state` ([B, ...]) converted for that environment.

        The observation and action spaces of both environments are the same.
        """
        return self, state

    # --- shared by all suites ------------------------------------------------------------------------------------

    @classmethod
    def make(cls, name: str, /, **parameters: Any) -> Self:
        """Make the suite's environment `name`, without auto-reset.

        Args:
          name: one of `names()`.
          parameters: numbers (or arrays to be mapped over), which become leaves, and static parameters.

        Raises:
          ConfigError: the name is unknown, or parameters are unknown, do not fit, contradict each other or have no
            effect; lists all problems.
        """
        env = cls._built(name, parameters)
        if problems := env.ineffective(parameters, env.idle()):
            raise ConfigError(problems)
        return env

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: spaces.Space, action_space: spaces.Space
    ) -> Self:
        """Return the environment with `parameters` from a file, which also determine its spaces.

        Parameters without effect are accepted, because files of earlier versions may contain them.

        Raises:
          ConfigError: as for `make`; or a static number exceeds `largest`.
        """
        del observation_space, action_space
        sizes = cls.static_parameters(name) if name in cls.names() else {}
        chosen = {k: x for k, x in parameters.items() if k in sizes and isinstance(x, int | float) and "seed" not in k}
        if large := [f"{k}={x!r:.80}" for k, x in chosen.items() if not abs(x) <= cls.largest]:
            raise ConfigError(
                f"{', '.join(large)} of {cls.suite}:{name} exceeds {cls.largest}, the maximum in saved configurations; "
                "create the environment yourself: env=jaxrl.make(...)"
            )
        return cls._built(name, parameters)

    @classmethod
    def _built(cls, name: str, parameters: Mapping[str, Any]) -> Self:
        where = f"{cls.suite}:{name}"
        cls.check(name, parameters)
        static = cls.static_parameters(name)
        chosen = {k: value for k, value in parameters.items() if k in static}
        numeric = {k: value for k, value in chosen.items() if isinstance(static[k], int | float)}
        fitted, problems = _fitted(where, static, numeric, lambda k, value: like(static[k], value))
        chosen |= fitted
        if problems := problems or outside(chosen, cls.limits(name)):
            raise ConfigError(problems)
        with refusing(where, chosen):
            env = _shared(cls, key_of(name, chosen)).default
        numbers = env.numbers
        changed = {k: value for k, value in parameters.items() if k in numbers and k not in static}
        values, problems = _fitted(where, numbers, changed, env.fit)
        problems = unknown_parameters(f"parameter of {where}", parameters, [*numbers, *static]) + problems
        if problems:
            raise ConfigError(problems)
        known = {k: value for k, value in values.items() if not isinstance(value, jax.Array)}
        env = env.with_numbers(known).with_spaces().with_numbers(values)
        if problems := env.contradictions(changed):
            raise ConfigError(problems)
        return env

    def parameter_problems(self, changed: Mapping[str, Any]) -> list[str]:
        """Return one error line per problem with the parameters in `changed`, which this environment already has."""
        return [*self.contradictions(changed), *self.ineffective(changed)]

    @property
    def name(self) -> str:
        return f"{self.suite}:{self.key[0]}"

    def static(self, name: str) -> Any:
        """Return the value of a static parameter."""
        return {**self.static_parameters(self.key[0]), **dict(self.key[1])}[name]

    @property
    def numbers(self) -> dict[str, Any]:
        """The leaves by name."""
        return {name: at(self, path) for name, path in paths(self).items()}

    def with_numbers(self, values: Mapping[str, Any]) -> Self:
        """Return this environment with some numbers replaced by `values`, without conversion."""
        env = self
        for name, path in paths(self).items():
            env = replaced(env, path, values[name]) if name in values else env
        return env

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters with which `make` returns this environment."""
        return dict(self.key[1]) | self.numbers

    def __repr__(self) -> str:
        return presentation.made(self.name, self.parameters, _shared(type(self), self.key).default.numbers)

    @property
    def num_agents(self) -> int:
        return 1

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        shared = _shared(type(self), self.key)
        with foreign_rules():
            state, step = self.begin(key)

        def first(step):
            observation = _of_space(self.observation_space, step.observation)
            return restart(observation, step.action_mask, shared.info, step.discount, step.active)

        return _cast(state, shared.dtypes), self._of_agents(first)(step._replace(info={}))

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        shared = _shared(type(self), self.key)
        with foreign_rules():
            state, step = self.advance(state, action, key)

        def following(step):
            observation = _of_space(self.observation_space, step.observation)
            more = step.action_mask, step.info, step.discount, step.active
            return transition(observation, step.reward, step.terminated, step.truncated, *more)

        step = step._replace(info={name: step.info[name] for name in shared.info})
        return _cast(state, shared.dtypes), self._of_agents(following)(step)

    def _of_agents(self, function: Callable[[Step], TimeStep]) -> Callable[[Step], TimeStep]:
        """Return a function that applies `function` to each agent's part of a `Step` of all agents."""
        if (agents := self.num_agents) == 1:
            return function

        def of_all(step):
            each = ("reward", "terminated", "truncated")
            one = {k: jnp.broadcast_to(jnp.asarray(getattr(step, k)), (agents,)) for k in each}
            info = {k: jnp.broadcast_to(jnp.asarray(x), (agents,)) for k, x in step.info.items()}
            return jax.vmap(function)(step._replace(**one, info=info))

        return of_all


class LibraryEnv(SuiteEnv):
    """An environment of another library; its spaces are static fields. A subclass also has `make_foreign`."""

    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Space = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        """Make the library's environment for `key`; runs eagerly, and only once per key."""
        raise NotImplementedError

    @classmethod
    def foreign_of(cls, name: str, static: tuple[tuple[str, Hashable], ...] = ()) -> Any:
        """Return the library's environment for a key, the name and the static parameters."""
        return _made(cls, (name, static))

    @property
    def foreign(self) -> Any:
        """The library's environment."""
        return _made(type(self), self.key)


@functools.lru_cache(maxsize=256)
def _made(cls: type[LibraryEnv], key: Key) -> Any:
    with constructing():
        return cls.make_foreign(key)


def add_suite[Suite: SuiteEnv](cls: type[Suite]) -> tuple[Callable[[], Sequence[str]], Callable[..., Suite]]:
    """Register the class of a suite's environments; return the functions `names` and `make` for its module."""
    registry.add("suite", **{cls.suite: cls})
    return cls.names, cls.make


class _Shared(NamedTuple):
    """The data shared by all environments with the same class and key."""

    default: Any
    dtypes: PyTree  # the dtypes of a state after some steps
    info: tuple[str, ...]  # the names of the scalars in a step's info


@functools.lru_cache(maxsize=256)
def _shared(cls: type[SuiteEnv], key: Key) -> _Shared:
    """Return the default environment and its dtypes, cached so that environments share one compiled program."""
    with constructing():
        default = cls.default(key)
        prng_key = jax.eval_shape(lambda: jax.random.key(0))
        action = jax.eval_shape(lambda key: _sample(default, key), prng_key)
        state, info = jax.eval_shape(cls.begin, default, prng_key)[0], {}
        # States often begin with Python numbers, which a step turns into strongly typed arrays or other types.
        for _ in range(3):
            before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
            state, step = jax.eval_shape(cls.advance, default, before, action, prng_key)
            info = step.info
    return _Shared(default, jax.tree.map(lambda x: x.dtype, state), _scalar_names(info))


@functools.lru_cache(maxsize=256)
def _without_effect(cls: type[SuiteEnv], key: Key) -> frozenset[str]:
    default = _shared(cls, key).default
    return unread(default.with_numbers, default.numbers)


def check_single(env: Environment) -> None:
    """Raise an error if a parameter is an array to map over, or otherwise differs in shape from its default.

    Raises:
      ConfigError: the environment or a wrapper has such parameters; the message lists them with their shapes.
    """
    problems = []
    for part in layers(env):
        values = usual = {}
        if isinstance(part, SuiteEnv):
            values, usual = part.numbers, _shared(type(part), part.key).default.numbers
        elif dataclasses.is_dataclass(part):
            defaults = {field.name: field.default for field in dataclasses.fields(part)}
            usual = {name: x for name, x in defaults.items() if isinstance(x, int | float)}
            values = {name: getattr(part, name) for name in usual}
        for name, default in usual.items():
            shape, expected = (jax.tree.map(np.shape, x) for x in (values[name], default))
            if shape != expected:
                problems.append(
                    f"parameter {name} of {env.name} has shape {shape}, not {expected}: a run needs one value; map "
                    "over make_train, or sample values with envs.RandomParameters"
                )
    if problems:
        raise ConfigError(problems)


def model_of(env: Environment, state: PyTree) -> Model:
    """Return an environment and its states as a model for planning, without statistics and automatic resets.

    A suite may provide another environment for planning (`SuiteEnv.model`). Other wrappers and everything under them
    are kept, so that the policy gets the observations that it expects.

    Args:
      env: one environment.
      state: the states of a batch of environments, [B, ...].
    """
    while isinstance(env, AutoReset | PooledReset | EpisodeStatistics):
        env, state = env.env, state.env
    return Model(*(env.model(state) if isinstance(env, SuiteEnv) else (env, state)))


def _scalar_names(reported: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        name
        for name, x in sorted(reported.items())
        if isinstance(x, jax.ShapeDtypeStruct) and x.shape == () and x.dtype.kind in "biuf"
    )


def _cast(state: PyTree, dtypes: PyTree) -> PyTree:
    """Cast the state to the given dtypes, so that every step returns the same dtypes."""

    def cast(x, dtype):
        return x if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.asarray(x, dtype)

    return jax.tree.map(cast, state, dtypes)


def _of_space(space: spaces.Space, observation: Any) -> PyTree:
    """Convert the observation to the dtypes and shapes of its space."""
    return spaces.tree_map(lambda part, x: jnp.asarray(x, part.dtype).reshape(part.shape), space, observation)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are known to be equal; numbers and arrays are compared with float32 tolerance."""
    if any(isinstance(x, jax.core.Tracer) for x in (one, other)):
        return False
    try:
        return bool(np.allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=0.0))
    except (TypeError, ValueError):  # not numbers, or of different shapes
        return one is other or (isinstance(one, str) and one == other)


# --- foreign code ------------------------------------------------------------------------------------------------

# Modules that environments import, and the packages that provide them.
_PACKAGES = {
    "Box2D": "'gymnasium[box2d]'",
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "imageio": "imageio",
    "mujoco": "mujoco",
    "pygame": "pygame",
}
_LARGEST = 2**31 - 1  # the largest int32
COUNT, PROBABILITY = {"low": 1}, {"low": 0, "high": 1}
_REFUSALS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def unbounded(seen: Any) -> spaces.Space:
    """Return the space of all arrays with the shape and dtype of `seen`, an array or a dictionary of arrays."""
    if isinstance(seen, Mapping):
        return spaces.Dict({name: unbounded(child) for name, child in seen.items()})
    if seen.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, seen.shape, seen.dtype)
    low, high = (False, True) if seen.dtype.kind == "b" else (np.iinfo(seen.dtype).min, np.iinfo(seen.dtype).max)
    return spaces.Box(low, high, seen.shape, seen.dtype)


def outside(changed: Mapping[str, Any], limits: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return one error line per changed number that is out of range or not finite.

    Args:
      changed: numbers by name; arrays are not checked, because they may be mapped over.
      limits: limits by name, as for `jaxrl.core.limits.problem`, such as `{"spawn_cow_chance": PROBABILITY}`.
    """
    single = {name: x for name, x in changed.items() if name in limits and not isinstance(x, jax.Array | np.ndarray)}
    return [line for name, x in single.items() for line in number_problems(name, x, limits[name])]


def _fitted(
    where: str, defaults: Mapping[str, Any], values: Mapping[str, Any], fit: Callable[[str, Any], Any]
) -> tuple[dict[str, Any], list[str]]:
    """Convert parameters with `fit` to the types of their defaults; return them, and one error line per failure."""
    fitted, problems = {}, []
    for name, value in values.items():
        try:
            fitted[name] = fit(name, value)
            if isinstance(value, int) and abs(value) > _LARGEST:
                problems.append(f"parameter {name}={value} of {where} must be at most {_LARGEST:,}")
        except ConfigError as error:
            problems += error.problems
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            problems.append(
                f"parameter {name}={value!r:.80} of {where} does not fit its default {defaults[name]!r:.80}: {error}"
            )
    return fitted, problems


def key_of(name: str, arguments: Mapping[str, Any]) -> Key:
    """Return the key of an environment; lists among the arguments become tuples.

    Raises:
      TypeError: an argument is not hashable.
    """
    return name, tuple(sorted((k, _hashable(v)) for k, v in arguments.items()))


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's or constructor's named parameters with defaults, `inspect.Parameter.empty` if required."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@contextlib.contextmanager
def silent_import() -> Generator[None]:
    """Suppress the standard output of an import, even if the package resets `sys.stdout` to `sys.__stdout__`."""
    from unittest import mock  # slow to import

    silent = io.StringIO()
    with mock.patch.multiple(sys, stdout=silent, __stdout__=silent, stderr=sys.stderr, __stderr__=sys.stderr):
        yield


@contextlib.contextmanager
def foreign_rules() -> Generator[None]:
    """Enable JAX's standard promotion of dtypes and ranks, which suites rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def constructing() -> Generator[None]:
    """Enable `foreign_rules` and compute eagerly, so that cached values are never tracers."""
    with jax.ensure_compile_time_eval(), foreign_rules():
        yield


@contextlib.contextmanager
def refusing(where: str, options: Mapping[str, Any], kinds: tuple[type[Exception], ...] = _REFUSALS) -> Generator[None]:
    """Convert errors that a library raises while making the environment `where` to a `ConfigError`."""
    try:
        yield
    except kinds as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(
            f"{where} cannot be made with {arguments or 'its default settings'}: "
            f"{str(error) or type(error).__name__}{_install(error)}"
        ) from error


def _install(error: Exception) -> str:
    """Return a hint on how to install the missing package, or "" if it is unknown."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"; pip install {_PACKAGES[name]}" if name in _PACKAGES else ""


def unknown_parameters(what: str, names: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """Return one error line per name that is not allowed, with similar names; `what` describes the names."""
    allowed = [*allowed]
    return [line for name in names if name not in allowed for line in unknown(what, name, allowed).problems]


def unread(environment: Callable[[dict[str, Any]], Environment], values: dict[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that no time step of an environment depends on, without compiling.

    Args:
      environment: a function that takes a dictionary of parameters and returns a raw environment.
      values: parameters by name, numbers or arrays.
    """

    def episode(values, key):
        env = environment(values)
        state, first = env.reset(key)

        def one(state, key):
            return env.step(state, _sample(env, key), key)

        return first, jax.lax.scan(one, state, jax.random.split(key, 2))[1]

    with constructing():
        numbers = jax.tree.map(jnp.asarray, values)
        program = jax.make_jaxpr(episode)(numbers, jax.random.key(0)).jaxpr
    used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1]
    names = [path[0].key for path, _ in jax.tree.leaves_with_path(numbers)]
    return frozenset(values) - {name for name, read in zip(names, used, strict=False) if read}


def _sample(env: Any, key: jax.Array) -> PyTree:
    """Return a random action, or one per agent if there are several agents."""
    agents = getattr(env, "num_agents", 1)
    return (
        env.action_space.sample(key)
        if agents == 1
        else jax.vmap(env.action_space.sample)(jax.random.split(key, agents))
    )


def _hashable(value: Any) -> Hashable:
    value = tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value
    hash(value)
    return value
