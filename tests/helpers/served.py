"""A host environment that runs a JAX environment, to test that compiled and host runs return the same results."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys, registry
from jaxrl.core.types import Environment, PyTree, TimeStep, env_spec
from jaxrl.envs.delegate import forward


@dataclasses.dataclass(frozen=True, eq=False)
class ServedFromHost:
    """A recipe that steps a JAX environment from the host, like a host environment."""

    env: Environment

    name, observation_space, action_space = forward("name"), forward("observation_space"), forward("action_space")

    @property
    def discounted(self) -> bool:
        """True if time steps have a discount (`TimeStep.discount`)."""
        return env_spec(self.env).discounted

    def build(self, num_envs: int, seed: int, first_env: int = 0) -> "JaxHostEnvironment":
        """Build `num_envs` environments with the same keys as in a compiled run with the same seed."""
        return JaxHostEnvironment(self.env, num_envs, seed, first_env)


registry.add("wrapper", ServedFromHost)


class JaxHostEnvironment:
    """A batch of copies of a JAX environment with the `HostEnvironment` interface, which returns numpy arrays."""

    def __init__(self, env: Environment, num_envs: int, seed: int, first_env: int = 0):
        self.num_envs = num_envs
        self._env = env
        self._roots = keys.environment_keys(keys.root_key(seed), first_env + jnp.arange(num_envs, dtype=jnp.int32))
        self._state: PyTree = None
        self._ticks = 0

    def reset(self) -> TimeStep[np.ndarray]:
        first = keys.reset_keys(self._roots) if self._state is None else _again(self._roots, np.uint32(self._ticks))
        self._state, timestep = _reset(self._env, first)
        return jax.tree.map(np.asarray, timestep)

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        if self._state is None:
            raise RuntimeError(f"{self._env.name} was stepped before it was reset; call reset() first")
        self._state, timestep = _step(self._env, self._state, actions, self._roots, np.uint32(self._ticks))
        self._ticks += 1
        return jax.tree.map(np.asarray, timestep)

    def close(self) -> None:
        self._state = None


@jax.jit
def _reset(env, reset_keys):
    return jax.vmap(env.reset)(reset_keys)


@jax.jit
def _again(roots, tick):
    """Return the keys [B] for resets during a run; Anakin uses the same keys when it collects whole episodes."""
    return keys.episode_keys(keys.tick_keys(roots, tick, 1)[0])


@partial(jax.jit, donate_argnums=1)
def _step(env, state, actions, roots, tick):
    return jax.vmap(env.step)(state, actions, keys.tick_keys(roots, tick, 1)[0])
