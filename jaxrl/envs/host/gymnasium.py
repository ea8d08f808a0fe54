"""Gymnasium's environments (Towers et al., 2024, arXiv:2407.17032), in this process or in workers."""

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np

from jaxrl.core import registry, spaces
from jaxrl.core.config import decode_fields
from jaxrl.core.errors import ConfigError, EnvironmentContractError, EnvironmentFailedError
from jaxrl.core.spaces import Space
from jaxrl.core.suites import gymnasium_names as names
from jaxrl.core.suites import unknown_name
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs import suite
from jaxrl.envs.host import conversion
from jaxrl.envs.host.episodes import Episodes
from jaxrl.envs.host.options import check_recorded
from jaxrl.envs.host.watchdog import STEP_TIMEOUT, close_all, told_if_slow
from jaxrl.envs.host.workers import InProcess, Workers

START_TIMEOUT = 120.0  # seconds
RESTARTS = 3


@dataclasses.dataclass(frozen=True)
class GymnasiumRecipe:
    """How to build a batch of one Gymnasium environment.

    Attributes:
      id: Gymnasium's name, with the module that registers it if one was given.
      options: what goes to `gymnasium.make`.
      workers: processes; 0: none but this one.
      step_timeout: seconds after which a worker counts as hung.
      start_timeout: seconds that a worker has to make its environments.
      restarts: how many workers may be replaced.
      info: names of the numbers of its info that become `TimeStep.info`.

    Args:
      by_hand: whether somebody typed it, so that it may import what its options name; a file cannot say so.
    """

    id: str
    options: dict[str, Any]
    observation_space: Space
    action_space: Space
    workers: int = 0
    step_timeout: float = STEP_TIMEOUT
    start_timeout: float = START_TIMEOUT
    restarts: int = RESTARTS
    info: tuple[str, ...] = ()
    by_hand: dataclasses.InitVar[bool] = False

    def __post_init__(self, by_hand):
        module, _, name = self.id.rpartition(":")
        if module and module not in sys.modules:  # `make` imports it; a file may not
            raise ConfigError(_module_asked(self.id))
        registered = gymnasium.registry.get(name)
        if not by_hand and registered is not None and "shimmy" in str(registered.entry_point):
            raise ConfigError(f"{self.name} makes environments of other libraries; hand it in: env=jaxrl.make(...)")

    @property
    def name(self) -> str:
        return f"gymnasium:{self.id}"

    @property
    def parameters(self) -> dict[str, Any]:
        """What `make` takes to make it again."""
        return {
            **self.options,
            "workers": self.workers,
            "step_timeout": self.step_timeout,
            "start_timeout": self.start_timeout,
            "restarts": self.restarts,
            **({"info": self.info} if self.info else {}),
        }

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: Space, action_space: Space
    ) -> "GymnasiumRecipe":
        """The recipe of what was recorded; nothing is made or imported until it is built.

        Raises:
          ConfigError: `name` asks for the import of a module or other libraries, an option is more than a number or a
            plain word, or a value is of the wrong type.
        """
        if ":" in name:
            raise ConfigError(_module_asked(name))
        own = ("workers", "step_timeout", "start_timeout", "restarts", "info")
        options = {key: value for key, value in parameters.items() if key not in own}
        check_recorded(f"gymnasium:{name}", options)
        given = {key: parameters[key] for key in own if key in parameters}
        given |= {"observation_space": observation_space, "action_space": action_space}
        return decode_fields(cls, {}, id=name, options=options, **given)

    def build(self, num_envs: int, seed: int, first_env: int = 0) -> "GymnasiumEnvironment":
        """A batch of `num_envs` environments; each draws its seed from `seed` by its index, from `first_env` on.

        Raises:
          ConfigError: `num_envs` is not positive, or the environment cannot be sent to a worker.
          EnvironmentFailedError: a worker could not make its environments.
        """
        if num_envs < 1:
            raise ConfigError(f"{self.name}: num_envs={num_envs}; use at least 1")
        return GymnasiumEnvironment(self, num_envs, seed, first_env)

    def build_rendered(self, seed: int) -> "GymnasiumEnvironment":
        """As of `RenderedRecipe`."""
        options = self.options | {"render_mode": "rgb_array"}
        return dataclasses.replace(self, options=options, workers=0, by_hand=True).build(1, seed)


registry.add("suite", gymnasium=GymnasiumRecipe)


class GymnasiumEnvironment:
    """A batch of environments behind the host protocol: numpy in, numpy out.

    Where a worker was replaced, the time step that the failed step would have given is the first of a new episode:
    `first` is set though the row before was not `last`.

    Attributes:
      name: of the environment.
      num_envs: environments.
    """

    def __init__(self, recipe: GymnasiumRecipe, num_envs: int, seed: int, first_env: int):
        self.name, self.num_envs = recipe.name, num_envs
        self._recipe, self._first_env = recipe, first_env
        arguments = (self.name, _find(recipe.id), recipe.options, recipe.info, num_envs, seed, first_env)
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
        observation_space, action_space = self._stepper.spaces
        self._read = conversion.observations(observation_space, self.name).read
        actions = conversion.actions(action_space, self.name)
        self._write, self._action_shape = actions.write, actions.space.shape
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
        """As of `RenderedEnvironment`."""
        return self._stepper.frames_per_second if isinstance(self._stepper, InProcess) else 30.0

    def render(self) -> np.ndarray | None:
        """As of `RenderedEnvironment`; workers draw nothing."""
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
        actions = np.array(self._write(actions))  # a copy, which environments may write to
        shape = (self.num_envs, *self._action_shape)
        if actions.shape != shape:
            raise ValueError(f"{self.name}: actions of shape {actions.shape}; give {shape}")
        return self._run(
            [("reset", None) if ended else ("step", actions[i]) for i, ended in enumerate(self._episodes.ended)]
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
        observations, rewards, terminated, truncated, reported = zip(*outcomes, strict=True)
        return self._episodes.follow(
            slice(None),
            self._batched(observations),
            np.asarray(rewards, np.float32),
            np.asarray(terminated, np.bool_),
            np.asarray(truncated, np.bool_),
            info=dict(zip(self._recipe.info, np.asarray(reported).T, strict=True)),
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
            for path, (leaf, child) in _leaves(element, space):
                if leaf.shape != child.shape:
                    raise EnvironmentContractError(
                        f"{self.name}: environment {index + self._first_env} gives an observation{path} of shape "
                        f"{leaf.shape}, and its space says {child.shape}"
                    )
        return jax.tree.map(lambda *x: np.stack(x), *elements)


def make(
    name: str,
    *,
    workers: int = 0,
    step_timeout: float | None = None,
    start_timeout: float | None = None,
    restarts: int | None = None,
    info: Sequence[str] = (),
    **options: Any,
) -> GymnasiumRecipe:
    """The recipe of the Gymnasium environment `name` ("LunarLander-v3", or "module:Name-v0" to import it from there).

    Args:
      name: as in Gymnasium.
      workers: processes that step the environments; 0 steps them here, one after another, which is faster where a step
        costs less than some 100 microseconds. In workers they run beside each other, and may hang and crash.
      step_timeout: seconds that one step or reset may take, before its worker counts as hung and is killed; 60 if not
        given.
      start_timeout: seconds that a worker may take to import what it needs and make its environments; 120 if not given.
      restarts: how many workers that hang or are killed are replaced before the run stops; 3 if not given.
      info: which numbers of every step's info to report, as metrics of training: `("reward_ctrl", "x_position")`.
      options: what `gymnasium.make` takes, the environment's own among it.

    Raises:
      ConfigError: unknown name, wrong options, an environment that cannot be made, or spaces that are not supported.
    """
    problems = []
    if workers < 0:
        problems.append(f"workers={workers}; use 0 (this process) or the number of worker processes")
    given = {"step_timeout": step_timeout, "start_timeout": start_timeout, "restarts": restarts}
    for key, value in given.items():
        if value is not None and workers == 0:
            problems.append(f"{key}={value} needs workers: what runs in this process cannot be interrupted or replaced")
        elif value is not None and (value < 0 or value == 0 and key != "restarts"):
            problems.append(f"{key}={value} must be {'at least 0' if key == 'restarts' else 'more than 0 seconds'}")
    if problems:
        raise ConfigError(problems)
    where = f"gymnasium:{name}"
    spec = _find(name)
    if workers and getattr(spec.entry_point, "__module__", "") == "__main__":
        raise ConfigError(
            f"{where} is defined in the main program, which workers do not import; move its class to a module, or use "
            "workers=0"
        )
    start_timeout = START_TIMEOUT if start_timeout is None else start_timeout
    with suite.refusing(where, options, (Exception,)):
        observation_space, action_space = _looked_at(where, spec, options, workers, start_timeout)
    return GymnasiumRecipe(
        name,
        options,
        conversion.observations(observation_space, where).space,
        conversion.actions(action_space, where).space,
        workers,
        STEP_TIMEOUT if step_timeout is None else step_timeout,
        start_timeout,
        RESTARTS if restarts is None else restarts,
        tuple(info),
        by_hand=True,
    )


def _module_asked(name):
    return (
        f"gymnasium:{name} asks for the import of a module, which a file may not; hand the environment in: "
        f"env=jaxrl.make('gymnasium:{name}')"
    )


def _looked_at(where, spec, options, workers, start_timeout):
    """The spaces of an environment, which is made and closed where others of it will be."""
    if workers:
        one = {"step_timeout": 0.0, "start_timeout": start_timeout, "restarts": 0}
        try:
            made = Workers(where, spec, options, (), 1, 0, 0, workers=1, **one)
        except EnvironmentFailedError as error:  # its last line is what was raised
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        made.close()
        return made.spaces
    with told_if_slow(where, "making an environment"):
        environment = gymnasium.make(spec, disable_env_checker=True, **options)
    found = environment.observation_space, environment.action_space
    close_all([environment], where)
    return found


def _find(name: str) -> Any:
    """What is registered under `name`, after the import of its module if it says one."""
    module, _, registered = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(registered)
    except gymnasium.error.UnregisteredEnv:
        raise unknown_name("gymnasium", registered, names()) from None
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:  # the last two: "..", ""
        raise ConfigError(f"gymnasium:{name} cannot be found: {error}") from error


def _leaves(element: PyTree, space: Space, path: str = ""):
    """(path, (array, its space)) of every leaf of an observation."""
    if isinstance(space, spaces.Dict):
        for name, child in space.items:
            yield from _leaves(element[name], child, f"{path}[{name!r}]")
    else:
        yield path, (element, space)
