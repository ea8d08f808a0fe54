"""EnvPool's environments (Weng et al., 2022, arXiv:2206.10558): Atari, MuJoCo, Procgen and many more, in C++ threads.

EnvPool is an optional extra, which is imported when the names of its tasks are first requested.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np

from jaxrl.core import episode_info, presentation, registry, resources
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.native import NativeSpaces
from jaxrl.core.spaces import Space
from jaxrl.core.suites import unknown_name
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs import suite
from jaxrl.envs.host import conversion
from jaxrl.envs.host.stepped import LibraryRecipe
from jaxrl.envs.host.time_steps import Episodes, environment_seeds

# Atari's two usual protocols. Other arguments of `make` override `preset`.
PRESETS: dict[str, dict[str, Any]] = {
    # Mnih et al. (2015): a lost life ends an episode. The limit of 30 minutes is Rainbow's (Hessel et al., 2018).
    "classic": {
        "noop_max": 30,
        "frame_skip": 4,
        "stack_num": 4,
        "episodic_life": True,
        "reward_clip": True,
        "repeat_action_probability": 0.0,
        "full_action_space": False,
        "max_episode_steps": 27_000,
    },
    # Machado et al. (2018, arXiv:1709.06009): sticky actions are the only randomness, all actions are available, and a
    # lost life is not reported. The paper skips 5 frames and stops after 18,000 frames; this preset's frame skip, limit
    # and reward clipping are Dopamine's.
    "machado": {
        "noop_max": 1,
        "frame_skip": 4,
        "stack_num": 4,
        "episodic_life": False,
        "reward_clip": True,
        "use_fire_reset": False,
        "repeat_action_probability": 0.25,
        "full_action_space": True,
        "max_episode_steps": 27_000,
    },
}

# Families and tasks that ignore `max_episode_steps`, except that EnvPool reports endings after it as truncations.
# Jumanji's time limits are terminations, because most of its observations include the time.
_OWN_LIMIT = ("envpool.jumanji", "envpool.pgx", "envpool.procgen", "envpool.highway", "Catch-v0", "CliffWalking-v0")

# MyoSuite's tasks of tracking a recorded grasp: all 50 were tried, and none can be learned (docs/envpool.md).
_TRACKING = re.compile(r"(^|/)MyoHand\w+Fixed-v0$")

# Options of EnvPool that `make` does not accept, and why.
_RESERVED = {
    "num_envs": "the topology sets it",
    "batch_size": "the topology sets it",
    "seed": "the run sets it",
    "env_seed": "the run sets it",
    "max_num_players": "several agents are not supported",
    "gym_reset_return_info": "jaxrl needs the default value",
    "base_path": "EnvPool sets it",
}
# Options of ViZDoom that a saved configuration must not set: the program, its arguments, and the files that it opens.
_BY_HAND = ("cfg_path", "game_args", "iwad_path", "lmp_save_dir", "map_id", "vzd_path", "wad_path")
_PIXELS = ("from_pixels", "render_width", "render_height", "render_camera_id")  # options in addition to the task's own


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EnvPoolRecipe(LibraryRecipe):
    """A recipe for a pool of environments of one task; `options` are EnvPool's, except for pool sizes and seeds.

    Attributes:
      id: EnvPool's name of the task.
      lives: whether the task's info contains the unmodified reward and a flag for the end of the game, as in Atari.
      games: whether an episode is one life of a game.
    """

    lives: bool = False
    games: bool = False

    prefix = "envpool:"
    own = ("lives", "games", "info")

    def __repr__(self) -> str:
        return presentation.made(self.name, self.options | ({"info": self.info} if self.info else {}), {})

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: Space, action_space: Space
    ) -> "EnvPoolRecipe":
        """Restore the recipe from a file; EnvPool is first used when the recipe is built.

        Raises:
          ConfigError: `make` does not accept an option, an option names a program or a file, or a value has a wrong
            type.
        """
        if strange := sorted(parameters.keys() & _RESERVED.keys()):
            raise ConfigError([f"envpool:{name} does not accept {key}: {_RESERVED[key]}" for key in strange])
        if by_hand := sorted(parameters.keys() & set(_BY_HAND)):
            raise ConfigError(
                f"a saved configuration must not set {', '.join(by_hand)} of envpool:{name}, because such options name "
                "programs to run or files to open; create the environment yourself: env=jaxrl.make(...)"
            )
        return cls.restored(name, parameters, observation_space, action_space)

    def build(self, num_envs: int, seed: int, first_env: int = 0) -> "EnvPoolEnvironment":
        """Build a synchronous pool of `num_envs` environments.

        Args:
          num_envs: number of environments.
          seed: the run's seed; each environment's seed is derived from it and the environment's index in the run.
          first_env: index in the run of the first environment.

        Raises:
          ConfigError: `num_envs` is not positive.
        """
        return self.build_async(num_envs, num_envs, seed, first_env)

    def build_async(self, num_envs: int, batch_size: int, seed: int, first_env: int = 0) -> "EnvPoolEnvironment":
        """Build the same environments as an asynchronous pool, whose `recv` waits for `batch_size` of them.

        Raises:
          ConfigError: the sizes are not positive, or `batch_size` exceeds `num_envs`.
        """
        if num_envs < 1 or not 1 <= batch_size <= num_envs:
            raise ConfigError(
                f"{self.name}: num_envs={num_envs}, batch_size={batch_size}; use 1 <= batch_size <= num_envs"
            )
        return EnvPoolEnvironment(self, num_envs, seed, first_env, batch_size)

    def build_rendered(self, seed: int) -> "EnvPoolEnvironment":
        return dataclasses.replace(self, options=self.options | {"render_mode": "rgb_array"}).build(1, seed)


registry.add("suite", envpool=EnvPoolRecipe)


class EnvPoolEnvironment:
    """A pool of EnvPool environments with the `HostEnvironment` interface, which takes and returns numpy arrays.

    A synchronous pool (`batch_size == num_envs`) has `reset()` and `step(actions)`. For an asynchronous pool,
    `async_reset()` begins all episodes; after that, every `recv()` returns the `batch_size` environments that are ready
    first, and `send` sends actions to environments that were returned. EnvPool waits without a time limit and cannot be
    interrupted, but a watchdog can read `doing`.

    Attributes:
      name: the environment's name.
      num_envs: number of environments.
      batch_size: number of environments that one `recv` returns.
      failures: always 0, because a fault in EnvPool ends the process.
      frames_per_second: the frame rate of videos: 30, twice Atari's 15 steps per second (60 frames per second, skip 4).
    """

    failures, frames_per_second = 0, 30.0

    def __init__(self, recipe: EnvPoolRecipe, num_envs: int, seed: int, first_env: int, batch_size: int):
        self.name, self.num_envs, self.batch_size = recipe.name, num_envs, batch_size
        self._recipe, self._first_env = recipe, first_env
        self._pool = _make(
            recipe.id, recipe.options, num_envs, environment_seeds(seed, num_envs, 0, first_env), batch_size
        )
        _, observation_space, action_space = _spec(recipe.id, recipe.options)
        self._read = conversion.observations(observation_space, self.name).convert
        actions = conversion.array_actions(action_space, self.name)
        self._write, self._action_shape = actions.convert, actions.native[0].shape
        self._episodes = Episodes(num_envs, recipe.games, recipe.info)
        self._busy = np.zeros(num_envs, np.bool_)  # resetting or stepping, not received yet
        self._began = False
        self._all = np.arange(num_envs, dtype=np.int32)
        self._all.flags.writeable = False  # `recv` may return it

    @property
    def doing(self) -> str:
        """A message with the indices (in the run) of the environments that are busy; "" if none is busy."""
        waiting = (np.flatnonzero(self._busy) + self._first_env).tolist()
        return f"{self.name} is stepping environments {waiting}" if waiting else ""

    def reset(self) -> TimeStep[np.ndarray]:
        """Begin new episodes; return their first time steps [num_envs].

        Raises:
          RuntimeError: the pool is asynchronous, or was closed.
        """
        self._check_synchronous("reset")
        self.async_reset()
        return self._receive_all()

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        """Step with `actions` [num_envs, ...] and return the time steps; reset environments whose episodes ended.

        Raises:
          RuntimeError: the pool was not reset, is asynchronous, or was closed.
        """
        self._check_synchronous("step")
        self.send(actions, self._all)
        return self._receive_all()

    def async_reset(self) -> None:
        """Begin new episodes in all environments; `recv` returns their first time steps.

        Raises:
          RuntimeError: some environments are still busy with an action or a reset, or the pool was closed.
        """
        pool = self._open()
        if self._busy.any():
            raise RuntimeError(f"{self.doing}; receive them before the reset")
        self._episodes.begin()
        self._began = True
        self._busy[:] = True
        pool.async_reset()

    def send(self, actions: PyTree, env_ids: np.ndarray) -> None:
        """Send actions to some environments without waiting for the results.

        Args:
          actions: batched actions, shape [B, ...].
          env_ids: indices of the environments, shape [B].

        Raises:
          RuntimeError: the pool was not reset, was closed, or one of the environments is still busy.
          ValueError: a shape is wrong, or an index is out of range or repeated. EnvPool does not check the indices.
        """
        pool = self._open()
        if not self._began:
            raise RuntimeError(f"{self.name} was stepped before it was reset; call reset() first")
        env_ids, actions = np.asarray(env_ids, np.int32), self._write(actions)
        shape = env_ids.shape + self._action_shape
        if env_ids.ndim != 1 or actions.shape != shape:
            raise ValueError(f"{self.name}: actions have shape {actions.shape} for environments {env_ids}; use {shape}")
        if env_ids is not self._all:
            if env_ids.size and not 0 <= env_ids.min() <= env_ids.max() < self.num_envs:
                raise ValueError(f"{self.name} has environments 0 .. {self.num_envs - 1}, not {env_ids}")
            if np.unique(env_ids).size != env_ids.size:
                raise ValueError(f"{self.name}: env_ids={env_ids} repeats an environment; send it one action at a time")
        if self._busy[env_ids].any():
            raise RuntimeError(f"{self.doing}; receive {env_ids} before sending them actions")
        self._busy[env_ids] = True
        pool.send(actions, env_ids)

    def recv(self) -> tuple[np.ndarray, TimeStep[np.ndarray]]:
        """Wait for the next `batch_size` environments; return their indices, int32 [B], and time steps, [B, ...].

        Raises:
          RuntimeError: fewer than `batch_size` environments are busy, so the call would never return; or the pool was
            closed.
        """
        self._open()
        if self._busy.sum() < self.batch_size:
            raise RuntimeError(
                f"{self.name}: recv waits for {self.batch_size} environments, but only {self._busy.sum()} are busy; "
                "send() actions first"
            )
        return self._receive()

    def render(self) -> np.ndarray | None:
        frames = self._open().render()
        return None if frames is None else np.asarray(frames)[0]

    def close(self) -> None:
        """End the pool's threads after their current work; may be called at any time and repeatedly."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _open(self) -> Any:
        if self._pool is None:
            raise RuntimeError(f"{self.name} was closed; build a new one")
        return self._pool

    def _check_synchronous(self, call: str) -> None:
        if self.batch_size != self.num_envs:
            raise RuntimeError(
                f"{self.name} is asynchronous (batch_size={self.batch_size} of num_envs={self.num_envs}) and does not "
                f"support {call}(); use async_reset(), send() and recv()"
            )

    def _receive_all(self) -> TimeStep[np.ndarray]:
        env_ids, timestep = self._receive()
        if env_ids is self._all:
            return timestep
        order = np.argsort(env_ids)
        return jax.tree.map(lambda x: x[order], timestep)

    def _receive(self) -> tuple[np.ndarray, TimeStep[np.ndarray]]:
        # EnvPool never writes to returned arrays again.
        raw, reward, terminated, truncated, info = self._open().recv()
        env_ids = info["env_id"]
        # A synchronous pool returns the environments in order; indexing by a slice is cheaper than by indices.
        index = env_ids
        if env_ids.size == self.num_envs and np.array_equal(env_ids, self._all):
            env_ids, index = self._all, slice(None)
        self._busy[index] = False
        true_reward = complete = None
        if self._recipe.lives:
            true_reward = info["reward"]
            over = info["terminated"].astype(np.bool_)
            # A game that ends on the step of its time limit terminates; EnvPool reports it as truncated.
            terminated = terminated | (over & truncated)
            complete = over | truncated
        timestep = self._episodes.follow(
            index,
            self._read(raw),
            reward,
            terminated,
            truncated,
            true_reward=true_reward,
            complete=complete if self._recipe.games else None,
            info=info,
        )
        return env_ids, timestep


def make(name: str, *, preset: str | None = None, info: Sequence[str] = (), **parameters: Any) -> EnvPoolRecipe:
    """Return the recipe of EnvPool's task `name`, such as "Pong-v5".

    Args:
      name: EnvPool's name of the task.
      preset: for Atari, "classic" or "machado" (`PRESETS`); None uses EnvPool's defaults.
      info: names of numbers in the task's info to report as training metrics, such as `("reward_ctrl", "x_position")`.
      parameters: EnvPool's options of the task (`max_episode_steps`, `num_threads`, `frame_skip`, ...), which override
        the preset's.

    Raises:
      ConfigError: the name, preset or an option is unknown, or the task cannot be used for training; the message
        lists all invalid options.
    """
    where = f"envpool:{name}"
    if name not in _registered():
        raise unknown_name("envpool", name, names())
    if reason := _unusable(name):
        raise ConfigError(f"{where} {reason}")
    family = _registered()[name][0]
    atari = family == "envpool.atari"
    if preset is not None and preset not in PRESETS:
        raise unknown("preset of Atari", preset, PRESETS)
    if preset is not None and not atari:
        raise ConfigError(f"{where} has no presets, but preset={preset!r}; only Atari has them")
    options = {**(PRESETS[preset] if preset else {}), **parameters}
    known = {*_spec(name, {})[0], *_PIXELS} - set(_RESERVED)
    problems = [
        f"{where} does not accept {key}={options[key]!r}: {_RESERVED[key]}" for key in options if key in _RESERVED
    ]
    problems += suite.unknown_parameters(f"option of {where}", [x for x in options if x not in _RESERVED], known)
    if "max_episode_steps" in parameters and (family in _OWN_LIMIT or name in _OWN_LIMIT):
        problems.append(f"{where} does not accept max_episode_steps: its episodes end by their own rules")
    if info:
        reports = episode_info.reports(info)
        problems += suite.unknown_parameters(f"info of {where}", reports, _scalars(name))
    if problems:
        raise ConfigError(problems)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    with suite.refusing(where, options):
        config, observation_space, action_space = _spec(name, options)
    observed = conversion.observations(observation_space, where)
    taken = conversion.array_actions(action_space, where)
    return EnvPoolRecipe(
        id=name,
        options=options,
        observation_space=observed.space,
        action_space=taken.space,
        lives=atari,
        games=atari and bool(config["episodic_life"]),
        info=tuple(info),
        native=NativeSpaces(observed.native, taken.native),
    )


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of EnvPool's tasks, except those that training cannot use."""
    return tuple(name for name in _registered() if _unusable(name) is None)


def refused() -> tuple[str, ...]:
    """Return the names of EnvPool's tasks that training cannot use."""
    return tuple(name for name in _registered() if _unusable(name) is not None)


def _registered() -> Mapping[str, tuple[str, str, dict[str, Any]]]:
    """Return the family, class and default options of every task, keyed by the task's name."""
    from envpool.registration import registry

    return registry.specs


def _scalars(name: str) -> list[str]:
    """Return the names of the scalars in a task's info."""
    import envpool

    arrays = envpool.make_spec(name).state_array_spec
    shapes = {key.removeprefix("info:"): array.shape for key, array in arrays.items() if key.startswith("info:")}
    # EnvPool declares one number per player with shape (-1,).
    return [key for key, shape in shapes.items() if list(shape) in ([], [-1]) and "." not in key and key != "env_id"]


def _unusable(name: str) -> str | None:
    if "AutoReset" in name:
        instead = name.replace("-AutoReset", "")
        return f"replaces an episode's last observation with the next episode's first; use {instead!r}"
    if _TRACKING.search(name):
        return "ends every episode after its first step (EnvPool 1.2.7); use another MyoSuite task"
    players = _registered()[name][2].get("max_num_players", 1)
    return f"has {players} agents; use a task with one" if players > 1 else None


def _true_bounds(space: Any) -> Any:
    """Return `space` with infinite bounds in place of the floats that EnvPool declares for unbounded values."""
    if isinstance(space, Mapping | gymnasium.spaces.Dict):
        children = getattr(space, "spaces", space)
        return gymnasium.spaces.Dict({name: _true_bounds(child) for name, child in children.items()})
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f":
        limits = np.finfo(space.dtype)
        low = np.where(space.low == limits.tiny, -np.inf, space.low)
        high = np.where(space.high == limits.max, np.inf, space.high)
        return gymnasium.spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
    return space


def _make(task: str, options: Mapping[str, Any], num_envs: int, seeds: list[int], batch_size: int) -> Any:
    import envpool

    with warnings.catch_warnings(), resources.on("environments"):
        warnings.simplefilter("ignore")  # Gymnasium warns about the bounds that EnvPool declares
        pool = envpool.make_gymnasium(task, num_envs=num_envs, batch_size=batch_size, seed=seeds, **options)
        pool.observation_space  # noqa: B018  (makes the space now; otherwise the first step would warn)
    return pool


def _spec(task: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Return the values of all options, the observation space and the action space."""
    import envpool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns about the bounds that EnvPool declares
        spec = envpool.make_spec(task, **options)
        return spec.config._asdict(), *map(_true_bounds, (spec.observation_space, spec.action_space))
