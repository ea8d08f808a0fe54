"""JaxMARL's multi-agent environments (Rutherford et al., 2024, arXiv:2311.10090), without auto-reset."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core import spaces
from jaxrl.core.types import PyTree
from jaxrl.envs.drawings import disks, register
from jaxrl.envs.suite import COUNT, Key, LibraryEnv, Step, add_suite, arguments_of, silent_import, unbounded

with silent_import():  # JaxMARL prints the environments whose packages are missing
    import jaxmarl
    from jaxmarl.environments import overcooked, overcooked_v2
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

# Arguments that the user passes as names instead of as objects: (argument, objects by name); the first is the default.
_MAPS = ("scenario", {None: None} | MAP_NAME_TO_SCENARIO)
_KITCHENS, _KITCHENS_2 = ("layout", overcooked.overcooked_layouts), ("layout", overcooked_v2.overcooked_v2_layouts)
_NAMED: Any = {"SMAX": _MAPS, "HeuristicEnemySMAX": _MAPS, "overcooked": _KITCHENS, "overcooked_v2": _KITCHENS_2}
_OURS = {"world_state": False, "agent_id": False}


class JaxMarlEnvironment(LibraryEnv):
    """A JaxMARL environment, with all of its agents.

    Static parameters are the constructor's arguments that are numbers or names, and `world_state` and `agent_id`. With
    `world_state`, observations are dictionaries of `observation`, the agent's observation, and `world_state`, which is
    the same for all agents. With `agent_id`, a one-hot vector of the agent's index is appended to its observation.

    Observations of different sizes are padded with zeros, and if agents have different numbers of actions, the missing
    actions are masked.

    The leaf `shaped_rewards`, only in Overcooked, is the weight with which JaxMARL's shaped reward is added to the
    reward.
    """

    shaped_rewards: jax.Array | float | None = None  # None: the environment has no shaped rewards

    suite = "jaxmarl"
    ranges = {"max_steps": COUNT, "num_agents": {"low": 2}, "num_landmarks": COUNT, "shaped_rewards": {}}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the supported environments; docs/suites/jaxmarl.md lists the others."""
        particles = {name for name in jaxmarl.registered_envs if name.startswith("MPE_")}
        return (*sorted(particles - {"MPE_simple_v3", "MPE_simple_world_comm_v3"}), *_NAMED, "hanabi")

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        kinds = reversed(type(getattr(cls.foreign_of(name), "_env", cls.foreign_of(name))).__mro__[:-2])
        found = {k: x for kind in kinds for k, x in arguments_of(kind).items()}
        plain = {k: x for k, x in found.items() if isinstance(x, bool | int | float | str)} | _OURS
        return plain | ({_NAMED[name][0]: next(iter(_NAMED[name][1]))} if name in _NAMED else {})

    @classmethod
    def choices(cls, name: str) -> Mapping[str, Iterable[str | None]]:
        return dict([_NAMED[name]]) if name in _NAMED else {}

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        named, choices = _NAMED.get(key[0], ("", {}))
        arguments = {k: choices[x] if k == named else x for k, x in key[1] if k not in _OURS}
        return jaxmarl.make(key[0], **arguments)

    @classmethod
    def default(cls, key: Key) -> "JaxMarlEnvironment":
        env = cls.foreign_of(*key)
        observations, state = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0)))
        seen = jax.eval_shape(lambda each: jax.tree.map(lambda x: x[0], _seen(env, key, each)), observations)
        if jax.eval_shape(lambda state: _places(env, state), state) is not None:
            register(f"jaxmarl:{key[0]}", disks(lambda env, state, _: _places(env.foreign, state)))
        observed = unbounded(seen)
        own = [env.action_space(agent) for agent in env.agents]
        if hasattr(own[0], "n"):
            shaped = 0.0 if key[0].startswith("overcooked") else None
            return cls(key, observed, spaces.Discrete(max(int(space.n) for space in own)), shaped)
        return cls(key, observed, spaces.Box(own[0].low, own[0].high, own[0].shape))

    @property
    def num_agents(self) -> int:
        return len(self.foreign.agents)

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        observations, state = self.foreign.reset(key)
        return state, self._step(state, observations)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        env = self.foreign
        actions = dict(zip(env.agents, action, strict=True))
        observations, state, rewards, dones, info = env.step_env(key, state, actions)
        reward = _stack(env, rewards)
        if self.shaped_rewards is not None:
            reward += self.shaped_rewards * _stack(env, info["shaped_reward"])
        over = dones["__all__"]  # also set at the time limit, the only ending of MPE and Overcooked
        terminated = over & (self.key[0] == "hanabi")
        if (alive := _alive(state)) is not None:
            terminated = over & ~(jnp.any(alive[: env.num_allies]) & jnp.any(alive[env.num_allies :]))
        step = self._step(state, observations)
        return state, step._replace(reward=reward, terminated=terminated, truncated=over)

    def _step(self, state: PyTree, observations: Mapping[str, jax.Array]) -> Step:
        active = None if (alive := _alive(state)) is None else alive[: self.num_agents]
        return Step(_seen(self.foreign, self.key, observations), action_mask=_mask(self.foreign, state), active=active)


names, make = add_suite(JaxMarlEnvironment)


def _alive(state: Any) -> jax.Array | None:
    """Return a mask of the units that are alive, with the agents first; None for environments other than SMAX."""
    return getattr(getattr(state, "state", state), "unit_alive", None)


def _stack(env: Any, values: Mapping[str, Any]) -> jax.Array:
    return jnp.stack([jnp.asarray(values[agent]) for agent in env.agents])


def _seen(env: Any, key: Key, observations: Mapping[str, jax.Array]) -> PyTree:
    own, chosen = [observations[agent] for agent in env.agents], dict(key[1])
    size = max(x.size for x in own)
    seen = jnp.stack([x if x.size == size else jnp.pad(x, (0, size - x.size)) for x in own])
    if chosen.get("agent_id"):
        seen = jnp.concatenate([seen.reshape(len(own), -1), jnp.eye(len(own), dtype=seen.dtype)], axis=-1)
    world = observations.get("world_state", jnp.concatenate([jnp.ravel(x) for x in own])).ravel()
    both = {"observation": seen, "world_state": jnp.broadcast_to(world, (len(own), world.size))}
    return both if chosen.get("world_state") else seen


def _mask(env: Any, state: PyTree) -> jax.Array | None:
    if (legal := getattr(env, "get_legal_moves", None)) or _alive(state) is not None:
        return _stack(env, (legal or env.get_avail_actions)(state)).astype(bool)
    counts = [getattr(env.action_space(agent), "n", 0) for agent in env.agents]
    return jnp.arange(max(counts)) < jnp.asarray(counts)[:, None] if len({*counts}) > 1 else None


def _places(env: Any, state: Any) -> PyTree | None:
    """Return x, y, radius and color of all objects, shape [objects, 4]; None if objects have no such positions."""
    own = getattr(state, "state", state)
    if hasattr(own, "p_pos"):
        color = jnp.where(jnp.arange(env.num_entities) < env.num_agents, 0, 2)
        return jnp.column_stack([(own.p_pos + 1.5) / 3.0, env.rad / 3.0, color])
    if hasattr(own, "unit_alive"):
        color, size = jnp.arange(len(own.unit_alive)) >= env.num_allies, jnp.asarray((env.map_width, env.map_height))
        return jnp.column_stack([own.unit_positions / size, own.unit_alive * 0.02, color])
    return None
