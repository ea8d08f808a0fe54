"""A wrapper for domain randomization, which samples an environment's parameters."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.delegate import Wrapper
from jaxrl.envs.episode import with_auto_reset
from jaxrl.envs.parameters import parameters, with_parameters

_PER = ("episode", "environment")


class DrawnState(struct.PyTreeNode):
    """The environment's state and its sampled parameters."""

    env: PyTree
    parameters: dict[str, Any]


class RandomParameters(Wrapper):
    """A wrapper that samples parameters of an environment: domain randomization (Tobin et al., 2017).

        def draw(key):
            return {"length": jax.random.uniform(key, minval=0.25, maxval=1.0)}

        env = jaxrl.make("gymnax:CartPole-v1", wrappers=(partial(RandomParameters, draw=draw),))

    Each environment of a run has separate samples, which are part of its state and of checkpoints. The samples do not
    depend on the number of devices, and agents do not observe them.

    Args:
      env: a JAX environment, as returned by `jaxrl.make`.
      draw: a pure function that takes a key and returns values for some of `jaxrl.envs.parameters(env)`, by name.
        Register it (`jaxrl.register`) so that runs that use it can be loaded. Static.
      per: "episode" samples at the beginning of every episode; "environment" samples once for all episodes of an
        environment, and makes it reset itself. Static.

    Raises:
      ConfigError: `draw` is not a function, or `per` is not one of the two values; or, when an episode begins,
        `with_parameters` rejects the sampled values. Training raises the latter before it compiles anything, as an
        `EnvironmentContractError`.
    """

    draw: Callable[[jax.Array], Mapping[str, Any]] = struct.field(pytree_node=False)
    per: Literal["episode", "environment"] = struct.field(pytree_node=False, default="episode")

    of_all_agents = True

    def __post_init__(self):
        problems = []
        if not callable(self.draw):
            problems.append(
                f"RandomParameters(draw={self.draw!r:.80}): draw must be a function that takes a key and returns a dict"
            )
        if self.per not in _PER:
            problems.append(f"RandomParameters(per={self.per!r:.80}): per must be 'episode' or 'environment'")
        if problems:
            raise ConfigError(problems)

    @property
    def resets(self) -> bool:
        return self.per == "environment" or self.env.resets

    def reset(self, key: jax.Array) -> tuple[DrawnState, TimeStep]:
        draw_key, key = jax.random.split(key)
        drawn = self.draw(draw_key)
        if not isinstance(drawn, Mapping):
            raise ConfigError(f"RandomParameters.draw returned {drawn!r:.80}; return a dictionary of parameters")
        usual = parameters(self.env)
        shapes = {name: (jnp.shape(x), jnp.shape(usual[name])) for name, x in drawn.items() if name in usual}
        if wrong := [f"{name} has shape {x}, not {y}" for name, (x, y) in shapes.items() if x != y]:
            raise ConfigError([f"RandomParameters.draw of {self.name}: {line}" for line in wrong])
        state, time_step = self._with(drawn).reset(key)
        return DrawnState(state, dict(drawn)), time_step

    def step(self, state: DrawnState, action: PyTree, key: jax.Array) -> tuple[DrawnState, TimeStep]:
        env_state, time_step = self._with(state.parameters).step(state.env, action, key)
        return state.replace(env=env_state), time_step

    def _with(self, drawn: Mapping[str, Any]) -> Environment:
        env = with_parameters(self.env, **drawn)
        return with_auto_reset(env) if self.per == "environment" else env
