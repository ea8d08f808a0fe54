"""Policies: what a run leaves behind that acts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import ActorState, Algorithm, Carry, Environment, EnvSpec, HostRecipe, PyTree, TimeStep
from jaxrl.parallel.rollout import act, no_action


class Memory(struct.PyTreeNode):
    """What a policy hands from one step to the next: its recurrent state and the action it took last."""

    carry: Carry
    previous_action: PyTree


class Policy:
    """Acts on one observation or a batch of them, numpy or JAX, with all parameters and statistics frozen.

        action, carry = policy(observation)
        action, carry = policy(observation, carry, first=timestep.first, reward=timestep.reward)

    Attributes:
      algo: the algorithm, its schedules resolved.
      actor: parameters and frozen statistics.
      spec: of the environment it was trained on.
    """

    def __init__(self, algo: Algorithm, actor: ActorState, spec: EnvSpec):
        self.algo, self.actor, self.spec = algo, actor, spec

    def __repr__(self) -> str:
        return f"Policy({type(self.algo).__name__} on {self.spec.name})"

    def initial_carry(self, batch: int | None = None) -> Memory:
        """The memory before an episode's first observation; with a batch axis if `batch` is given."""
        size = batch or 1
        carry = jax.vmap(lambda index: self.algo.initial_carry(self.spec, index, size))(jnp.arange(size))
        memory = Memory(carry, no_action(self.spec, size))
        return memory if batch else jax.tree.map(lambda x: x[0], memory)

    def __call__(
        self,
        observation: PyTree,
        carry: Memory | None = None,
        *,
        key: jax.Array | None = None,
        first: Any = None,
        reward: Any = 0.0,
        action_mask: PyTree | None = None,
    ) -> tuple[PyTree, Memory]:
        """The action, and the carry to hand in next time.

        Args:
          observation: one observation of `spec.observation_space`, or a batch with one leading axis.
          carry: what the call before gave; None begins an episode.
          key: a key to sample with, as in training; None takes the best action.
          first: bool, or one a batch entry: an episode begins here. None: begins where `carry` is None.
          reward: what arrived with the observation, for networks that look at it.
          action_mask: bool, True where allowed, for environments that have one.

        Raises:
          ConfigError: the observation's shape or dtype is not that of the environment trained on.
        """
        batch = checked_batch(observation, self.spec.observation_space)
        single, size = batch is None, batch or 1
        lift = (lambda x: jnp.asarray(x)[None]) if single else jnp.asarray
        if first is None:
            first = carry is None
        if carry is None:
            carry = self.initial_carry(size)
        elif single:
            carry = jax.tree.map(lambda x: x[None], carry)
        no = jnp.zeros((size,), bool)
        timestep = TimeStep(
            observation=_as_space(observation, self.spec.observation_space, lift),
            reward=jnp.broadcast_to(jnp.asarray(reward, jnp.float32), (size,)),
            terminated=no,
            truncated=no,
            first=jnp.broadcast_to(jnp.asarray(first, bool), (size,)),
            action_mask=None if action_mask is None else jax.tree.map(lift, action_mask),
        )
        explore = key is not None
        keys = jax.random.split(key if explore else jax.random.key(0), size)
        action, carry = _act(self.algo, self.actor, timestep, carry, keys, spec=self.spec, explore=explore)
        if single:
            action, carry = jax.tree.map(lambda x: x[0], (action, carry))
        return action, carry


@partial(jax.jit, static_argnames=("spec", "explore"))
def _act(algo, actor, timestep, memory, keys, *, spec, explore):
    options = {"spec": spec, "explore": explore}
    _, output, action = act(algo, actor, timestep, memory.previous_action, memory.carry, keys, **options)
    return action, Memory(output.carry, action)


def check_spaces(spec: EnvSpec, env: Environment | HostRecipe) -> None:
    """Whether a policy trained on `spec` can play in `env`; bounds may differ.

    Raises:
      ConfigError: shapes, dtypes or the number of actions differ; says both spaces.
    """
    problems = []
    for name in ("observation_space", "action_space"):
        trained, here = getattr(spec, name), getattr(env, name)
        shapes = [jax.eval_shape(lambda space=space: spaces.zeros(space)) for space in (trained, here)]
        if shapes[0] != shapes[1] or getattr(trained, "n", None) != getattr(here, "n", None):
            problems.append(f"{env.name} has the {name} {here}, but the policy was trained on {trained}")
    if problems:
        raise ConfigError(problems)


def checked_batch(observation: PyTree, space: spaces.Space, where: str = "observation") -> int | None:
    """The size of the batch that `observation` is, None if it is a single one.

    Raises:
      ConfigError: it is neither; says both shapes.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, dict) or set(observation) != set(space.spaces):
            has = sorted(observation) if isinstance(observation, dict) else type(observation).__name__
            raise ConfigError(f"{where} has {has}, the policy was trained on a dictionary of {sorted(space.spaces)}")
        sizes = {checked_batch(observation[name], child, f"{where}[{name!r}]") for name, child in space.items}
        if len(sizes) != 1:
            raise ConfigError(f"{where} mixes batches of {sorted(map(str, sizes))}; one leading axis for all")
        return sizes.pop()
    shape, dtype = np.shape(observation), np.asarray(observation).dtype
    if not np.can_cast(dtype, space.dtype, "same_kind"):
        raise ConfigError(f"{where} has dtype {dtype}, the policy was trained on {space.dtype}; convert it first")
    if shape == space.shape:
        return None
    if shape[1:] == space.shape and len(shape) == len(space.shape) + 1:
        return shape[0]
    raise ConfigError(
        f"{where} has shape {shape}, the policy was trained on {space.shape} (or a batch of them, (n,) + that)"
    )


def _as_space(observation, space, lift):
    if isinstance(space, spaces.Dict):
        return {name: _as_space(observation[name], child, lift) for name, child in space.items}
    return lift(np.asarray(observation)).astype(space.dtype)
