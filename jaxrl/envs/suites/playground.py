"""MuJoCo Playground environments (Zakka et al., 2025, arXiv:2502.08844), without auto-reset.

The environments are used without the library's wrappers, which replace the last observation of an episode with the
first one of the next episode.
"""

import copy
import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mujoco_playground import registry as playground
from mujoco_playground._src import mjx_env

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs import drawings
from jaxrl.envs.physics import PhysicsEnv, PhysicsState, part
from jaxrl.envs.suite import Key, Step, add_suite

_OF_WARP = ("naconmax", "naccdmax", "njmax")  # sizes of Warp's buffers
_ROBOTS = "python -c 'from mujoco_playground._src import mjx_env; mjx_env.ensure_menagerie_exists()'"
_ELSEWHERE = ("action_repeat", "episode_length", "impl", "vision", "vision_config")  # keys that are not parameters


class PlaygroundEnvironment(PhysicsEnv):
    """A MuJoCo Playground environment.

    The physical system is MJX's `Model`. The static parameters are

    - the keys of the library's configuration, such as `ctrl_dt`; nested keys are joined by dots, such as
      `reward_config.scales.tracking_lin_vel`;
    - `impl`: the simulator, "jax" or, with an NVIDIA GPU, "warp";
    - `randomize`: whether to sample the physical system again for each episode, with the library's randomizer for the
      robot. (The library itself samples once per environment.)
    """

    suite = "playground"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of environments whose models are installed; robots need MuJoCo Menagerie."""
        return playground.ALL_ENVS if mjx_env.MENAGERIE_PATH.exists() else playground.dm_control_suite.ALL_ENVS

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        config = playground.get_default_config(name).to_dict()
        flat = jax.tree.leaves_with_path(config, is_leaf=lambda x: not isinstance(x, dict))
        options = {".".join(part.key for part in path): value for path, value in flat}
        options = {k: tuple(x) if isinstance(x, list) else x for k, x in options.items()}
        usable = {k: x for k, x in options.items() if k.partition(".")[0] not in _ELSEWHERE}
        return usable | {"impl": "jax", "randomize": False}

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        chosen: dict[str, Any] = {k: list(x) if isinstance(x, tuple) else x for k, x in key[1] if k != "randomize"}
        env = playground.load(key[0], config_overrides={"impl": "jax"} | chosen)
        if not 1 <= env.n_substeps <= 10_000 or not np.isclose(env.n_substeps * env.sim_dt, env.dt):
            raise ValueError(
                f"ctrl_dt={env.dt} must be a multiple of sim_dt={env.sim_dt}, and at most 10,000 times sim_dt"
            )
        return env

    @classmethod
    def limit(cls, key: Key) -> int:
        return int(cls.foreign_of(*key)._config.episode_length)

    @property
    def drawing(self) -> drawings.Drawing:
        return drawings.Drawing(_see, functools.partial(_draw, self.foreign_of(self.key[0])))

    @classmethod
    def choices(cls, name: str) -> Mapping[str, Iterable[str]]:
        return {"impl": ("jax", "warp")}

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name in playground.ALL_ENVS and name not in cls.names():
            raise ConfigError(f"playground:{name} needs MuJoCo Menagerie, which jaxrl does not download; run {_ROBOTS}")
        super().check(name, parameters)
        problems = []
        if parameters.get("impl") == "warp" and jax.default_backend() != "gpu":
            problems.append(f"impl='warp' of playground:{name} needs an NVIDIA GPU; use impl='jax'")
        if parameters.get("randomize") and _randomizer(name) is None:
            problems.append(f"randomize=True: Playground does not randomize {name}; see jaxrl.envs.RandomParameters")
        if problems:
            raise ConfigError(problems)

    @classmethod
    def physical(cls, key: Key) -> Any:
        return cls.foreign_of(*key).mjx_model

    def idle(self) -> Mapping[str, str]:
        return dict.fromkeys(_OF_WARP, "with impl='jax'") if self.static("impl") == "jax" else {}

    def draw(self, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        key, own = jax.random.split(key)
        return _drawn(self.key, own) if self.static("randomize") else {}, key

    def advance(self, state: PhysicsState, action: PyTree, key: jax.Array) -> tuple[PhysicsState, Step]:
        after, step = super().advance(state, action, key)
        # A simulation that diverges to NaN ends the episode; agents observe the last valid numbers.
        sane = lambda now, before: jnp.where(jnp.isnan(now), before, now)  # noqa: E731
        seen = jax.tree.map(sane, step.observation, state.own.obs)
        after = after.replace(own=after.own.replace(obs=seen))
        return after, step._replace(observation=seen, reward=sane(step.reward, 0.0))

    def library(self, drawn: PyTree) -> Any:
        env = copy.copy(self.foreign)
        env._mjx_model = env._mjx_model.tree_replace(drawn | self.system)
        return env


names, make = add_suite(PlaygroundEnvironment)


def _randomizer(name):
    modules = (playground.locomotion, playground.manipulation)
    return next((m.get_domain_randomizer(name) for m in modules if name in m._randomizer), None)


def _drawn(key, random):
    """Return the arrays of the physical model that the library's randomizer samples for one environment, by path."""
    model, axes = _randomizer(key[0])(PlaygroundEnvironment.physical(key), jax.random.key_data(random)[None])
    names = [".".join(one.name for one in path) for path, _ in jax.tree.leaves_with_path(axes)]  # None is not a leaf
    return {name: part(model, name)[0] for name in names}


def _see(env, state, time_step):
    return {name: getattr(state.own.data, name) for name in ("qpos", "qvel", "mocap_pos", "mocap_quat")}


def _draw(env, view):
    state: Any = SimpleNamespace(data=SimpleNamespace(**view, xfrc_applied=0.0))
    try:
        return env.render(state)
    except Exception as error:  # MuJoCo may raise anything if there is no display
        raise ConfigError(f"MuJoCo cannot draw: {error}; set MUJOCO_GL=egl before Python starts") from error
