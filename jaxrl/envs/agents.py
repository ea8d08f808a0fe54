"""Multi-agent environments, presented as a batch with one row per agent.

A multi-agent environment steps all agents at once: its actions and the arrays of its time steps have a leading axis of
agents. `Agents` wraps it as a single-agent environment; in a batch, each block of `num_agents` consecutive rows shares
one episode. So algorithms, topologies, replay buffers and wrappers need no code for agents, and all agents share the
parameters of one policy. PPO in such an environment is IPPO (de Witt et al., 2020, arXiv:2011.09533); with a critic
that reads the state of the whole environment, it is MAPPO (Yu et al., 2022, arXiv:2103.01955).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, PyTree, TimeStep, num_agents
from jaxrl.envs.delegate import Wrapper
from jaxrl.envs.episode import EpisodeStatistics, with_auto_reset, with_rows
from jaxrl.envs.parameters import has_layer


class Agents(Wrapper):
    """A wrapper that makes each agent of a multi-agent environment a row of the batch; `as_rows` applies it.

    Under `jax.vmap`, rows k N to k N + N - 1 of a batch are the N agents of one environment. The number of rows must be
    a multiple of N. Each of the N rows has a copy of the environment's state, and only the key of the first one is
    used. Without `vmap`, the wrapper returns the first agent's time steps, and all agents take the same action.

    An agent that finishes before the others either ends or becomes inactive; the environment decides which. An agent
    that has ended repeats its last time step with weight 0 until the episode of all agents is over, and its return does
    not change. An agent that is not `active` receives its team's rewards until the episode of all agents is over; these
    steps train its value function, but not its policy. Then all agents begin the next episode together.

    Args:
      env: the multi-agent environment, which has episode statistics and resets itself.
      num_agents: the number N of agents.
    """

    num_agents: int = struct.field(pytree_node=False)

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        leaves, structure = jax.tree.flatten(self.env)
        return _methods(self.num_agents, structure)[0](leaves, key)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        leaves, structure = jax.tree.flatten(self.env)
        return _methods(self.num_agents, structure)[1](leaves, state, action, key)


registry.add("wrapper", Agents)


def as_rows(env: Environment, auto_reset: Callable[[Environment], Environment] = with_auto_reset) -> Environment:
    """Convert a multi-agent environment so that each agent is a row of the batch.

    Wrappers that act on the whole episode (time limits, statistics, resets, repeated actions, random parameters) stay
    inside `Agents`; all other wrappers apply to each agent's row.

    Args:
      env: the environment; returned unchanged if it has one agent or if its agents already are rows.
      auto_reset: a wrapper that makes a multi-agent environment reset itself.
    """
    if has_layer(env, Agents) or (agents := num_agents(env)) == 1:
        return env
    wrapper: Any = env
    inner = getattr(env, "env", None)
    if isinstance(inner, Environment) and not getattr(env, "of_all_agents", False):
        return dataclasses.replace(wrapper, env=as_rows(inner, auto_reset))
    return Agents(auto_reset(env if has_layer(env, EpisodeStatistics) else EpisodeStatistics(env)), agents)


@functools.lru_cache(maxsize=256)
def _methods(agents: int, structure: jax.tree_util.PyTreeDef):
    """Return functions `reset(leaves, key)` and `step(leaves, state, action, key)` for one of the `agents` rows.

    The functions take the environment's leaves instead of the environment, because `custom_vmap` rebuilds its arguments
    with booleans as leaves, which environments reject.
    """

    @jax.custom_batching.custom_vmap
    def reset(leaves, key):
        return _first(structure.unflatten(leaves).reset(key))

    @jax.custom_batching.custom_vmap
    def step(leaves, state, action, key):
        everyone = jax.tree.map(lambda x: jnp.broadcast_to(x, (agents, *x.shape)), action)
        return _first(structure.unflatten(leaves).step(state, everyone, key))

    def groups(axis_size, in_batched, leaves, *arguments):
        """Return the leaves' `vmap` axes, the leaves with one row per environment, and the arguments with all rows."""
        if axis_size % agents:
            name = structure.unflatten(leaves).name
            raise ConfigError(
                f"{axis_size} rows are not divisible by the {agents} agents of {name}; use a multiple of {agents}"
            )
        one = [x[::agents] if batched else x for x, batched in zip(leaves, in_batched[0], strict=True)]
        axes = [0 if batched else None for batched in in_batched[0]]
        return axes, one, with_rows(axis_size, arguments, tuple(in_batched[1:]))

    def spread(state, timestep):
        state = jax.tree.map(lambda x: _joined(jnp.broadcast_to(x[:, None], (len(x), agents, *x.shape[1:]))), state)
        result = state, jax.tree.map(_joined, timestep)
        return result, jax.tree.map(lambda _: True, result)

    @reset.def_vmap
    def reset_rows(axis_size, in_batched, leaves, key):
        axes, leaves, (keys,) = groups(axis_size, in_batched, leaves, key)
        begin = jax.vmap(lambda leaves, key: structure.unflatten(leaves).reset(key), (axes, 0))
        return spread(*begin(leaves, keys[::agents]))

    @step.def_vmap
    def step_rows(axis_size, in_batched, leaves, state, action, key):
        axes, leaves, (state, action, keys) = groups(axis_size, in_batched, leaves, state, action, key)
        state = jax.tree.map(lambda x: x[::agents], state)
        action = jax.tree.map(lambda x: x.reshape(-1, agents, *x.shape[1:]), action)
        move = jax.vmap(lambda leaves, *arguments: structure.unflatten(leaves).step(*arguments), (axes, 0, 0, 0))
        return spread(*move(leaves, state, action, keys[::agents]))

    return reset, step


def _first(result):
    """Return the state of all agents and the first agent's time step."""
    state, timestep = result
    return state, jax.tree.map(lambda x: x[0], timestep)


def _joined(x):
    return x.reshape(-1, *x.shape[2:])
