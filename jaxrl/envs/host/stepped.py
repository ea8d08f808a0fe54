"""Batches of environments of Python, in this process or in workers: what Gymnasium's and dm_env's adapters share."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl.core import episode_info, spaces
from jaxrl.core.config import decode_fields
from jaxrl.core.errors import ConfigError, EnvironmentContractError, EnvironmentFailedError
from jaxrl.core.limits import count_problems, number_problems, whole
from jaxrl.core.matching import space_problems
from jaxrl.core.native import Integers, NativeSpaces
from jaxrl.core.spaces import Space
from jaxrl.core.types import EnvSpec, PyTree, TimeStep
from jaxrl.envs import suite
from jaxrl.envs.host import worker_program
from jaxrl.envs.host.conversion import Actions, Observations
from jaxrl.envs.host.episodes import Episodes
from jaxrl.envs.host.options import check_recorded
from jaxrl.envs.host.watchdog import STEP_TIMEOUT, close_all, warn_if_slow
from jaxrl.envs.host.workers import InProcess, Workers

START_TIMEOUT = 120.0  # seconds
RESTARTS = 3
# The suite's spaces of observations and actions, and the environment's name for errors.
Converted = Callable[[Any, Any, str], tuple[Observations, Actions]]
_STEPPING = ("workers", "step_timeout", "start_timeout", "restarts", "info")
USUAL = {"workers": 0, "step_timeout": STEP_TIMEOUT, "start_timeout": START_TIMEOUT, "restarts": RESTARTS}


class SteppedRecipe(Protocol):
    """What recipes of such environments have, beside what `HostRecipe` asks for.

    Attributes:
      name: "suite:name".
      options: what the environment is made with.
      workers: processes; 0: none but this one.
      step_timeout: seconds after which a worker counts as hung.
      start_timeout: seconds that a worker has to make its environments.
      restarts: how many workers may be replaced.
      info: names of the numbers that become `TimeStep.info`.
    """

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def observation_space(self) -> Space: ...
    @property
    def action_space(self) -> Space: ...
    @property
    def workers(self) -> int: ...
    @property
    def step_timeout(self) -> float: ...
    @property
    def start_timeout(self) -> float: ...
    @property
    def restarts(self) -> int: ...
    @property
    def info(self) -> tuple[str, ...]: ...


def parameters(recipe: SteppedRecipe) -> dict[str, Any]:
    """What `make` takes to make it again."""
    stepping = {name: getattr(recipe, name) for name in _STEPPING}
    return recipe.options | {name: value for name, value in stepping.items() if value != ()}


def restored(cls: type, where: str, recorded: Mapping[str, Any], **settings: Any) -> Any:
    """A recipe of the class `cls` from recorded parameters and the other fields; nothing is made or imported.

    Raises:
      ConfigError: an option is more than a number or a plain word, or a value is of the wrong type.
    """
    options = {key: value for key, value in recorded.items() if key not in _STEPPING}
    check_recorded(where, options)
    stepping = {key: recorded[key] for key in _STEPPING if key in recorded}
    return decode_fields(cls, {}, options=options, **stepping, **settings)


def stepping(
    workers: int, step_timeout: float | None, start_timeout: float | None, restarts: int | None
) -> dict[str, Any]:
    """These fields of a recipe, with what was not given.

    Raises:
      ConfigError: one is out of range, or needs workers.
    """
    workers, restarts = whole(workers), whole(restarts)
    problems = count_problems(workers=(workers, 0), restarts=(restarts, 0))
    limits = {"step_timeout": step_timeout, "start_timeout": start_timeout, "restarts": restarts}
    for key, value in limits.items():
        if value is not None and workers == 0:
            problems.append(f"{key}={value} needs workers: what runs in this process cannot be interrupted or replaced")
        elif value is not None and key != "restarts":
            problems += number_problems(key, value, {"above": 0})
    if problems:
        raise ConfigError(problems)
    return USUAL | {"workers": workers} | {key: value for key, value in limits.items() if value is not None}


def looked_at(
    where: str, spec: Any, options: dict[str, Any], converted: Converted, workers: int, start_timeout: float
) -> dict[str, Any]:
    """Our spaces of an environment and its own, by field; it is made and closed where others of it will be.

    Raises:
      ConfigError: it cannot be made, or its spaces are not supported.
    """
    with suite.refusing(where, options, (Exception,)):
        found = _spaces(where, spec, options, workers, start_timeout)
    observations, actions = converted(*found[:2], where)
    own = NativeSpaces(observations.native, actions.native)
    return {"observation_space": observations.space, "action_space": actions.space, "native": own}


def _spaces(where, spec, options, workers, start_timeout):
    """As the suite has them, and whether it discounts."""
    if workers:
        one = {"step_timeout": 0.0, "start_timeout": start_timeout, "restarts": 0}
        try:
            made = Workers(where, spec, options, (), 1, 0, 0, workers=1, **one)
        except EnvironmentFailedError as error:  # its last line is what was raised
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        made.close()
        return made.spaces
    with warn_if_slow(where, "making an environment"):
        environment = worker_program.made(spec, options)
        found = worker_program.spaces(environment)
    close_all([environment], where)
    return found


class SteppedEnvironment:
    """A batch of environments behind the host protocol: numpy in, numpy out.

    Args:
      recipe: of it.
      spec: what `worker_program.made` takes.
      converted: from the suite's spaces to ours.
      num_envs, seed, first_env: as of `HostRecipe.build`.

    Where a worker was replaced, the time step that the failed step would have given is the first of a new episode:
    `first` is set though the row before was not `last`.

    Attributes:
      name: of the environment.
      num_envs: environments.
    """

    def __init__(
        self, recipe: SteppedRecipe, spec: Any, converted: Converted, num_envs: int, seed: int, first_env: int
    ):
        if num_envs < 1:
            raise ConfigError(f"{recipe.name}: num_envs={num_envs}; use at least 1")
        self.name, self.num_envs = recipe.name, num_envs
        self._recipe, self._first_env = recipe, first_env
        self._reports = episode_info.reports(recipe.info)
        arguments = (self.name, spec, recipe.options, self._reports, num_envs, seed, first_env)
        self._stepper: InProcess | Workers
        if recipe.workers:
            self._stepper = Workers(
                *arguments,
                workers=recipe.workers,
                step_timeout=recipe.step_timeout,
                start_timeout=recipe.start_timeout,
                restarts=recipe.restarts,
            )
        else:
            self._stepper = InProcess(*arguments)
        *both, self._discounted = self._stepper.spaces
        observations, actions = converted(*both, self.name)
        built = EnvSpec(self.name, observations.space, actions.space)
        if problems := space_problems(built, recipe, "its recipe, as made or as a file has it,"):
            self._stepper.close()
            raise EnvironmentContractError("\n".join(problems))
        self._read = observations.read
        self._write = actions.write
        # Of integers alone a scalar of NumPy's, as `Discrete` has them; boxes have arrays, without dimensions too.
        self._scalar = [isinstance(own, Integers) for own in actions.native]
        self._action_shapes = [(num_envs, *space.shape) for space in spaces.leaves(actions.space)]
        self._episodes = Episodes(num_envs, info=recipe.info)
        self._seeded = self._running = self._closed = False

    @property
    def failures(self) -> int:
        """How many workers were replaced."""
        return self._stepper.failures

    @property
    def patience(self) -> float:
        """Seconds that a step may take longer where a worker is given up and replaced."""
        return self._stepper.patience

    @property
    def doing(self) -> str:
        """What it is waiting for, in words; empty when it is not."""
        return self._stepper.doing

    @property
    def frames_per_second(self) -> float:
        return self._stepper.frames_per_second if isinstance(self._stepper, InProcess) else 30.0

    def render(self) -> np.ndarray | None:
        """Workers draw nothing."""
        return self._stepper.render() if isinstance(self._stepper, InProcess) else None

    def reset(self) -> TimeStep[np.ndarray]:
        """The first time steps of new episodes [num_envs]; the first time, of those of the seed.

        Raises:
          EnvironmentFailedError: an environment raised, or a worker was lost once too often.
          RuntimeError: it was closed.
        """
        self._check_open()
        seeds = [None] * self.num_envs if self._seeded else self._stepper.seeds
        self._episodes.begin()
        timestep = self._run([("reset", seed) for seed in seeds])
        self._seeded = self._running = True
        return timestep

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        """The time steps after `actions` [num_envs, ...]; where an episode ended before, the first of the next one.

        Raises:
          EnvironmentFailedError: an environment raised, or a worker was lost once too often.
          EnvironmentContractError: an observation is not of the space's shape.
          RuntimeError: it was not reset, or was closed.
          ValueError: `actions` of another shape.
        """
        self._check_open()
        if not self._running:
            raise RuntimeError(f"{self.name} was stepped before it was reset; call reset() first")
        leaves, structure = jax.tree.flatten(self._write(actions))
        leaves = [np.array(x) for x in leaves]  # copies, which environments may write to
        for shape, x in zip(self._action_shapes, leaves, strict=True):
            if x.shape != shape:
                raise ValueError(f"{self.name}: actions of shape {x.shape}; give {shape}")

        def row(i):
            return structure.unflatten(x[i] if s else x[i, ...] for x, s in zip(leaves, self._scalar, strict=True))

        return self._run(
            [("reset", None) if ended else ("step", row(i)) for i, ended in enumerate(self._episodes.ended)]
        )

    def close(self) -> None:
        """Closes the environments and ends the workers; may be called at any time and twice."""
        self._closed = True
        self._stepper.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.name} was closed; build another")

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
        space = self._recipe.observation_space
        try:
            elements = [self._read(observation) for observation in observations]
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentContractError(
                f"{self.name} gives an observation that is none of its space {space}: {type(error).__name__}: {error}"
            ) from error
        for index, element in enumerate(elements):
            for path, child, leaf in spaces.leaves_with_path(space, element):
                if leaf.shape != child.shape:
                    raise EnvironmentContractError(
                        f"{self.name}: environment {index + self._first_env} gives an observation{path} of shape "
                        f"{leaf.shape}, and its space says {child.shape}"
                    )
        return jax.tree.map(lambda *x: np.stack(x), *elements)
