"""Evaluation of a policy with an opponent or partner in a multi-agent environment."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import files, spaces
from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.core.matching import check_spaces
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    Algorithm,
    Carry,
    Environment,
    EnvSpec,
    HostRecipe,
    PyTree,
    TimeStep,
    num_agents,
)
from jaxrl.networks.heads import masks_of_parts, to_distribution
from jaxrl.run.directory.loading import load_run
from jaxrl.run.policies.policy import Policy


class RandomActions(struct.PyTreeNode):
    """A policy that samples uniformly from the allowed actions or, for `Box` actions, from the space."""

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        return ActorOutput(_uniform(spec.action_space, timestep.action_mask, key), carry)


def _uniform(space: spaces.Space, mask: PyTree | None, keys: jax.Array) -> PyTree:
    """Return random allowed actions of shape [B, ...]."""
    if isinstance(space, spaces.Composite):
        masks = masks_of_parts(space, mask)
        parts = {
            k: _uniform(child, masks[k], jax.vmap(jax.random.fold_in, (0, None))(keys, n))
            for n, (k, child) in enumerate(space.items)
        }
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    if mask is None:
        return jax.vmap(space.sample)(keys)
    return to_distribution(space, jnp.zeros(mask.shape), mask=mask).sample(keys)


class Opposed(struct.PyTreeNode):
    """A policy that acts with one algorithm for one agent of each environment, and with another for all other agents.

    In environment k, `algo` acts for agent k modulo the number of agents.

    Args:
      algo, opponent: the two algorithms, with resolved schedules; `params` of the actor state has both actor states.
      num_agents: agents per environment.
    """

    algo: Any
    opponent: Any
    num_agents: int = struct.field(pytree_node=False)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return tuple(one.initial_carry(spec, env_index, num_envs) for one in (self.algo, self.opponent))

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        one, other = (
            algo.act(actor, timestep, carry, key, spec=spec, explore=explore)
            for algo, actor, carry in zip((self.algo, self.opponent), actor.params, carry, strict=True)
        )
        mine = evaluated_rows(len(timestep.first), self.num_agents)

        def choose(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(mine.reshape(mine.shape + (1,) * (x.ndim - 1)), x, y)

        return ActorOutput(jax.tree.map(choose, one.action, other.action), (one.carry, other.carry))


def evaluated_rows(rows: int, num_agents: int) -> np.ndarray:
    """Return a bool mask [rows] that is true in the rows of a batch for which the evaluated policy acts."""
    index = np.arange(rows)
    return index % num_agents == index // num_agents % num_agents


def as_opponent(opponent: Policy | str | os.PathLike) -> Policy | None:
    """Return an opponent as a policy, or None for "random"; a path is the directory of a run.

    Raises:
      ConfigError: `opponent` has another type, or the directory does not contain a run.
      CheckpointError: the run has no intact checkpoint.
    """
    if isinstance(opponent, Policy) or opponent == "random":
        return opponent if isinstance(opponent, Policy) else None
    allowed = f"opponent={opponent!r:.200} must be 'random', a policy or the directory of a run"
    if not isinstance(opponent, str | os.PathLike):
        raise ConfigError(allowed)
    try:
        return load_run(files.expand(opponent)).policy
    except RunDirectoryError as error:
        raise ConfigError(f"{allowed}: {error}") from error


def opposed(
    algo: Algorithm, actor: ActorState, opponent: Policy | str | os.PathLike, env: Environment | HostRecipe
) -> tuple[Any, ActorState]:
    """Combine a policy and an opponent into an algorithm and an actor state that act for all agents.

    Args:
      algo, actor: the evaluated policy.
      opponent: another policy, the directory of its run, or "random".
      env: the environment.

    Returns:
      An object that acts like an algorithm, and its actor state.

    Raises:
      ConfigError: there is only one agent, or the opponent is invalid or was trained with other spaces.
    """
    agents = num_agents(env)
    if agents == 1:
        raise ConfigError(f"opponent={opponent!r:.80} needs several agents, but {env.name} has one; leave it out")
    policy = as_opponent(opponent)
    other: tuple[PyTree, PyTree] = (RandomActions(), ActorState(()))
    if policy is not None:
        check_spaces(policy.spec, env)
        other = policy.algo, policy.actor
    return Opposed(algo, other[0], agents), ActorState((actor, other[1]))
