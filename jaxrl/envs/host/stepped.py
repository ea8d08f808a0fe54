"""Recipes and batches of Python environments, in this process or in workers; used for Gymnasium and dm_env."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxrl.core import episode_info, presentation, spaces
from jaxrl.core.config import decode_fields
from jaxrl.core.errors import ConfigError, EnvironmentContractError, EnvironmentFailedError
from jaxrl.core.limits import count_problems, number_problems, whole
from jaxrl.core.matching import space_problems
from jaxrl.core.native import Integers, NativeSpaces
from jaxrl.core.spaces import Space
from jaxrl.core.types import EnvSpec, PyTree, TimeStep
from jaxrl.envs import suite
from jaxrl.envs.host import conversion
from jaxrl.envs.host.conversion import Conversion
from jaxrl.envs.host.time_steps import Episodes
from jaxrl.envs.host.watchdog import STEP_TIMEOUT, close_all, first_call, warn_if_slow
from jaxrl.envs.host.workers import Batch, InProcess, Workers

START_TIMEOUT = 120.0  # seconds
RESTARTS = 3
USUAL = {"workers": 0, "step_timeout": STEP_TIMEOUT, "start_timeout": START_TIMEOUT, "restarts": RESTARTS}
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LibraryRecipe:
    """A recipe for a batch of environments from a library that does not use JAX.

    Attributes:
      id: the environment's name.
      prefix: the text before `id` in `name`, such as "envpool:".
      options: arguments with which the library makes the environment.
      info: names of the numbers that become `TimeStep.info`.
      native: the library's spaces; None if the recipe was read from a file of an earlier version, which lacks them.
      own: names of the fields that files store along with `options`.
    """

    id: str
    options: dict[str, Any]
    observation_space: Space
    action_space: Space
    info: tuple[str, ...] = ()
    native: NativeSpaces | None = dataclasses.field(default=None, compare=False)  # determined by the other fields

    prefix: ClassVar[str] = ""
    own: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        return self.prefix + self.id

    @property
    def parameters(self) -> dict[str, Any]:
        """The options and the fields named in `own`, as files store them."""
        own = {name: getattr(self, name) for name in self.own}
        return self.options | {name: value for name, value in own.items() if value != ()}

    @classmethod
    def restored(cls, id: str, recorded: Mapping[str, Any], observation_space: Space, action_space: Space) -> Self:
        """Restore a recipe from the `parameters` in a file; nothing is made or imported.

        Raises:
          ConfigError: an option contains anything but numbers and plain words, or a value is of the wrong type.
        """
        options = {key: value for key, value in recorded.items() if key not in cls.own}
        check_recorded(cls.prefix + id, options)
        own = {key: value for key, value in recorded.items() if key in cls.own}
        spaces = {"observation_space": observation_space, "action_space": action_space}
        return decode_fields(cls, {}, id=id, options=options, **own, **spaces)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SteppedRecipe(LibraryRecipe):
    """A recipe for a batch of Python environments.

    Attributes:
      id: the environment's name, "suite:name".
      workers: number of worker processes; 0 steps the environments in this process.
      step_timeout: seconds after which a worker counts as hung.
      start_timeout: seconds that a worker has to make its environments.
      restarts: number of workers that may be replaced.
      factory: the function that makes an environment, if the program passed one; None makes it by name.
    """

    workers: int = 0
    step_timeout: float = STEP_TIMEOUT
    start_timeout: float = START_TIMEOUT
    restarts: int = RESTARTS
    factory: Any = None

    own = (*USUAL, "info")

    def __repr__(self) -> str:
        return presentation.made(self.name, self.parameters, USUAL)

    @classmethod
    def converted(cls, observation_space: Any, action_space: Any, where: str) -> tuple[Conversion, Conversion]:
        """Return conversions between the library's spaces and jaxrl's; `where` names the environment in errors."""
        return conversion.observations(observation_space, where), conversion.actions(action_space, where)

    @classmethod
    def looked_at(cls, id: str, spec: Any, options: dict[str, Any], stepping: dict[str, Any], **fields: Any) -> Self:
        """Return the recipe of the environment that `spec` makes, with its spaces.

        To read the spaces, an environment is made and closed, in a worker if the recipe has workers. An environment
        that a class or function makes in this process is also reset and stepped once, so that its errors are raised
        before anything is compiled.

        Args:
          id: the environment's name.
          spec: the argument `spec` of `worker_program.made`.
          options: arguments with which the environment is made.
          stepping: a result of the function `stepping`.
          fields: further fields of the recipe.

        Raises:
          ConfigError: the environment cannot be made, workers cannot import it, or its spaces are not supported.
          EnvironmentContractError, EnvironmentFailedError: the first reset or step fails.
        """
        where = cls.prefix + id
        if stepping["workers"] and _is_local(spec, options):
            raise ConfigError(
                f"{where} is defined in the main program or within a function, where workers cannot import it; move it "
                "to a module, or use workers=0"
            )
        alone = Batch(where, spec, options, (), 1, 0, 0)
        with suite.refusing(where, options, (Exception,)):
            if not stepping["workers"]:
                with warn_if_slow(where, "making an environment"):
                    stepper = InProcess(alone)
            else:
                try:
                    stepper = Workers(alone, **{key: stepping[key] for key in USUAL})
                except EnvironmentFailedError as error:  # its last line is the original error
                    raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        work = functools.partial(_tried, stepper, spec, cls.converted)
        observations, actions = first_call(work, stepper, stepping["start_timeout"])
        close_all(stepper.environments if isinstance(stepper, InProcess) else [stepper], where)
        own = NativeSpaces(observations.native, actions.native)
        found = {"observation_space": observations.space, "action_space": actions.space, "native": own}
        return cls(id=id, options=options, **stepping, **found, **fields)

    def spec(self) -> Any:
        """Return the object from which `worker_program.made` makes an environment.

        It is a Gymnasium spec, a function, or the arguments of `FromDmEnv` as a tuple.
        """
        raise NotImplementedError

    def build(self, num_envs: int, seed: int, first_env: int = 0) -> "SteppedEnvironment":
        """Build a batch of `num_envs` environments, with seeds derived from `seed` and the environments' indices.

        The indices of the environments in the run begin at `first_env`.

        Raises:
          ConfigError: `num_envs` is not positive, or the environment cannot be sent to a worker.
          EnvironmentFailedError: a worker could not make its environments.
        """
        return SteppedEnvironment(self, num_envs, seed, first_env)


def stepping(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of `SteppedRecipe` from `options` and return them, with defaults if they are missing or None.

    Args:
      options: arguments of an environment, which may include
        - `workers`: number of processes that step the environments; 0 steps them in this process, one after another,
          which is faster if a step takes less than about 100 microseconds. Workers run in parallel, and are replaced
          if they hang or crash;
        - `step_timeout`: seconds that one step or reset may take before its worker counts as hung and is killed;
          default 60;
        - `start_timeout`: seconds that a worker may take to import its modules and make its environments; default 120;
        - `restarts`: number of hung or killed workers that are replaced before the run stops; default 3;
        - `info`: names of numbers that every step has, to report as training metrics.

    Raises:
      ConfigError: a value is out of range, or is only allowed with workers.
    """
    info, found = tuple(options.pop("info", ())), {key: options.pop(key, None) for key in USUAL}
    chosen = {key: whole(value) if key in _COUNTS else value for key, value in found.items() if value is not None}
    problems = count_problems(**{key: (chosen[key], 0) for key in _COUNTS if key in chosen})
    for key, value in chosen.items():
        if key != "workers" and chosen.get("workers", 0) == 0:
            problems.append(
                f"{key}={value} needs workers: environments in this process cannot be interrupted or replaced"
            )
        elif key not in _COUNTS:
            problems += number_problems(key, value, {"above": 0})
    if problems:
        raise ConfigError(problems)
    return USUAL | chosen | {"info": info}


_COUNTS = ("workers", "restarts")


def _is_local(spec, options):
    """Return whether an environment or a wrapper is defined in the main program or within a function."""
    maker = spec[0] if isinstance(spec, tuple) else getattr(spec, "entry_point", spec)
    named = maker if hasattr(maker, "__qualname__") else type(maker)
    wrappers = () if isinstance(spec, tuple) else options.get("wrappers", ())
    modules = [named.__module__, *(name.partition(":")[0] for name, _ in wrappers)]
    return "<" in named.__qualname__ or "__main__" in modules


def _tried(stepper, spec, converted):
    observations, actions = converted(*stepper.spaces[:2], stepper.name)
    # The user's instance is not stepped, because that would change its state.
    if isinstance(stepper, InProcess) and callable(spec) and not hasattr(spec, "instance"):
        zeros = jax.tree.map(lambda x: np.array(x)[()], actions.convert(spaces.zeros(actions.space)))
        for command in ("reset", stepper.seeds[0]), ("step", zeros):
            [outcome], _ = stepper.run([command])
            _element(observations, outcome[0], f"{stepper.name}: its first {command[0]}")
    return observations, actions


def _element(observations, observation, who):
    """Convert an observation of the suite to an element of jaxrl's space; `who` begins the error message.

    Raises:
      EnvironmentContractError: the observation cannot be converted, or has another shape.
    """
    try:
        found = observations.convert(observation)
        for path, child, leaf in spaces.leaves_with_path(observations.space, found):
            if leaf.shape != child.shape:
                raise ValueError(f"observation{path} has shape {leaf.shape}, not {child.shape}")
    except (EnvironmentContractError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"{who} returned an observation outside its space {observations.space}: {type(error).__name__}: {error}"
        ) from error
    return found


class SteppedEnvironment:
    """A batch of Python environments with the `HostEnvironment` interface, which takes and returns numpy arrays.

    If a worker was replaced, its environments return the first time step of a new episode instead of the result of the
    failed step: `first` is set although the previous row was not `last`.

    Args:
      recipe: the recipe of the environments.
      num_envs, seed, first_env: as for `HostRecipe.build`.

    Attributes:
      name: the environment's name.
      num_envs: number of environments.
    """

    def __init__(self, recipe: SteppedRecipe, num_envs: int, seed: int, first_env: int):
        if num_envs < 1:
            raise ConfigError(f"{recipe.name}: num_envs={num_envs}; use at least 1")
        self.name, self.num_envs = recipe.name, num_envs
        self._recipe, self._first_env = recipe, first_env
        self._reports = episode_info.reports(recipe.info)
        batch = Batch(self.name, recipe.spec(), recipe.options, self._reports, num_envs, seed, first_env)
        self._stepper: InProcess | Workers
        if recipe.workers:
            self._stepper = Workers(batch, **{key: getattr(recipe, key) for key in USUAL})
        else:
            try:
                self._stepper = InProcess(batch)
            except TypeError as error:  # such as an option in a file that the environment lacks
                raise EnvironmentFailedError(f"{self.name} could not be made: {error}") from error
        *both, self._discounted = self._stepper.spaces
        observations, actions = recipe.converted(*both, self.name)
        built = EnvSpec(self.name, observations.space, actions.space)
        if problems := space_problems(built, recipe, "its recipe has"):
            self._stepper.close()
            raise EnvironmentContractError("\n".join(problems))
        self._observations = observations
        self._write = actions.convert
        # Integers are passed as NumPy scalars, which `Discrete` requires; elements of boxes as arrays, even if 0-D.
        self._scalar = [isinstance(own, Integers) for own in actions.native]
        self._action_shapes = [(num_envs, *space.shape) for space in spaces.leaves(actions.space)]
        self._episodes = Episodes(num_envs, info=recipe.info)
        self._began = self._closed = False

    @property
    def failures(self) -> int:
        """The number of workers that were replaced."""
        return self._stepper.failures

    @property
    def patience(self) -> float:
        """The additional seconds that a step may take if a worker is replaced."""
        return self._stepper.patience

    @property
    def doing(self) -> str:
        """A description of the reset or step that is running; "" if none is."""
        return self._stepper.doing

    @property
    def frames_per_second(self) -> float:
        return self._stepper.frames_per_second

    def render(self) -> np.ndarray | None:
        """Return a rendered frame of the first environment; None with workers."""
        return self._stepper.render()

    def reset(self) -> TimeStep[np.ndarray]:
        """Begin new episodes; return their first time steps [num_envs]. The first reset uses the seeds.

        Raises:
          EnvironmentFailedError: an environment raised, or too many workers were lost.
          RuntimeError: the batch was closed.
        """
        self._check_open()
        seeds = [None] * self.num_envs if self._began else self._stepper.seeds
        self._episodes.begin()
        timestep = self._run([("reset", seed) for seed in seeds])
        self._began = True
        return timestep

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        """Step with `actions` [num_envs, ...] and return the time steps; reset environments whose episodes ended.

        Raises:
          EnvironmentFailedError: an environment raised, or too many workers were lost.
          EnvironmentContractError: an observation does not have the space's shape.
          RuntimeError: the batch was not reset, or was closed.
          ValueError: `actions` have another shape.
        """
        self._check_open()
        if not self._began:
            raise RuntimeError(f"{self.name} was stepped before it was reset; call reset() first")
        leaves, structure = jax.tree.flatten(self._write(actions))
        leaves = [np.array(x) for x in leaves]  # copies, because environments may write to them
        for shape, x in zip(self._action_shapes, leaves, strict=True):
            if x.shape != shape:
                raise ValueError(f"{self.name}: actions have shape {x.shape}; use {shape}")

        def row(i):
            return structure.unflatten(x[i] if s else x[i, ...] for x, s in zip(leaves, self._scalar, strict=True))

        return self._run(
            [("reset", None) if ended else ("step", row(i)) for i, ended in enumerate(self._episodes.ended)]
        )

    def close(self) -> None:
        """Close the environments and end the workers; may be called at any time and repeatedly."""
        self._closed = True
        self._stepper.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.name} was closed; build a new one")

    def _run(self, commands) -> TimeStep[np.ndarray]:
        try:
            outcomes, rebuilt = self._stepper.run(commands)
        except EnvironmentFailedError:
            self.close()
            raise
        self._episodes.begin(rebuilt)
        observations, rewards, terminated, truncated, discounts, reported = zip(*outcomes, strict=True)
        return self._episodes.follow(
            slice(None),
            self._batched(observations),
            np.asarray(rewards, np.float32),
            np.asarray(terminated, np.bool_),
            np.asarray(truncated, np.bool_),
            info=dict(zip(self._reports, np.asarray(reported).T, strict=True)),
            discount=np.asarray(discounts, np.float32) if self._discounted else None,
        )

    def _batched(self, observations) -> PyTree:
        seeds, elements = self._stepper.seeds, []
        for index, observation in enumerate(observations):
            who = f"{self.name}: environment {index + self._first_env} (seed {seeds[index]})"
            elements.append(_element(self._observations, observation, who))
        return jax.tree.map(lambda *x: np.stack(x), *elements)


def check_recorded(env: str, options: Mapping[str, Any]) -> None:
    """Check that options from a file are numbers, booleans and plain words, or lists and dictionaries of them.

    An environment may open, load or run whatever a string names, and the file may come from an untrusted source.

    Args:
      env: the environment's name, for the message.
      options: the options by name.

    Raises:
      ConfigError: an option is anything else; the message lists all such options.
    """
    if strange := sorted(str(name) for name, value in options.items() if not _is_plain(value)):
        raise ConfigError(
            f"a saved configuration may set {', '.join(strange)[:200]} of {env} only to numbers, True, False and plain "
            "words; for other values, create the environment yourself: env=jaxrl.make(...)"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float)
