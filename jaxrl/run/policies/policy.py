"""Trained policies, which map observations to actions."""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import native, spaces
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.pickled import dumped, loaded
from jaxrl.core.types import ActorState, Algorithm, Carry, Environment, EnvSpec, HostRecipe, PyTree, TimeStep
from jaxrl.networks.heads import masks_of_parts
from jaxrl.parallel.mesh import on_one_device
from jaxrl.parallel.rollout import act, no_action

_NOT_FIRST, _FIRST = np.bool_(False), np.bool_(True)


class Memory(struct.PyTreeNode):
    """The state that a policy passes from one step to the next: its recurrent state and its last action."""

    carry: Carry
    previous_action: PyTree


class Policy:
    """A policy with frozen parameters and statistics, for single observations or batches, as numpy or JAX arrays.

        action, carry = policy(observation)
        action, carry = policy(observation, carry, first=timestep.first, reward=timestep.reward)

    Attributes:
      algo: the algorithm, with resolved schedules.
      actor: parameters and frozen statistics.
      acting: `algo` and `actor` with their arrays on one device, as used by calls and exports.
      spec: spec of the environment that the policy was trained on.
      env: the environment that the policy was trained on; None for an unpickled policy.
    """

    def __init__(self, algo: Algorithm, actor: ActorState, spec: EnvSpec, env: Environment | HostRecipe | None = None):
        self.algo, self.actor, self.spec, self.env = algo, actor, spec, env
        self.acting = on_one_device((algo, actor))
        leaves, structure = jax.tree.flatten(self.acting)
        # Stored as a flat tuple, because traversing and comparing trees would slow down calls.
        self._leaves = tuple(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves)
        self._one, self._many = _compiled(structure, spec, True), _compiled(structure, spec, False)
        self._beginnings: dict[int | None, Memory] = {}  # initial memories by batch size
        self._read = self._write = None
        self._counts = [isinstance(leaf, spaces.Discrete) for leaf in spaces.leaves(spec.action_space)]
        if spec.native is not None:
            self._write = native.writer(spec.action_space, spec.native.action)
            self._counts = [isinstance(own, native.Integers) for own in spec.native.action]
            if native.differs(spec.observation_space, spec.native.observation):
                self._read = native.reader(spec.observation_space, spec.native.observation, spec.name)

    def __repr__(self) -> str:
        return f"Policy({type(self.algo).__name__} on {self.spec.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        instead = "save the run (run_dir= or result.save(path)), and call jaxrl.load(path) in the other process"
        return _unpickled, (dumped(repr(self), (self.algo, self.actor, self.spec), instead),)

    def __copy__(self) -> "Policy":
        return self

    @checked(batch={"low": 0})
    def initial_carry(self, batch: int | None = None) -> Memory:
        """Return the carry at the beginning of an episode, with a batch axis if `batch` is not None.

        Raises:
          ConfigError: `batch` is not a whole number of at least 0.
        """
        return self._beginning(batch)

    def _beginning(self, batch: int | None) -> Memory:
        if batch == 0:
            return jax.tree.map(lambda x: x[:0], self._beginning(1))
        if batch not in self._beginnings:
            size = batch or 1
            with jax.ensure_compile_time_eval():  # cached, so it must not be traced
                carry = jax.vmap(lambda index: self.acting[0].initial_carry(self.spec, index, size))(jnp.arange(size))
                memory = Memory(carry, no_action(self.spec, size))
                memory = memory if batch else jax.tree.map(lambda x: x[0], memory)
            self._beginnings[batch] = memory
        return self._beginnings[batch]

    def __call__(
        self,
        observation: PyTree,
        carry: Memory | None = None,
        *,
        key: jax.Array | None = None,
        first: Any = None,
        reward: Any = 0.0,
        action_mask: PyTree | None = None,
    ) -> tuple[Any, Memory]:
        """Return the action, and the carry to pass to the next call.

        Args:
          observation: one observation of `spec.observation_space`, or a batch with one leading axis.
          carry: the carry that the previous call returned; None at the beginning of an episode.
          key: a random key (`jax.random.key`) for sampling an action as in training; None: take the best action.
          first: whether an episode begins, as a bool or one bool per batch entry. None: True if `carry` is None.
          reward: the reward of the previous action, for networks that use it as an input.
          action_mask: bool arrays, True for allowed actions, if the environment has action masks.

        Observations that are not JAX arrays, and the actions for them, are in the environment's format: for a policy
        that was trained in Gymnasium, elements of the Gymnasium spaces, whose integers may start at a number other than
        0. JAX observations and actions are elements of the spaces of `spec`.

        Returns:
          The action: a JAX array for a JAX observation; otherwise a numpy array of the environment's dtype, or an `int`
          for a single observation and `Discrete` actions. `Dict` and `Tuple` actions are dictionaries and tuples of
          these. The carry consists of JAX arrays.

        Raises:
          ConfigError: the observation's shape or dtype differs from that of the training environment, the observation
            is outside a space of integers that does not start at 0, or another argument does not match the observation.
        """
        space = self.spec.observation_space
        observation = native.named_parts(space, observation)
        batch = checked_batch(observation, space)
        in_jax = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(observation))
        if self._read is not None and not in_jax:
            try:
                observation = self._read(observation)
            except EnvironmentContractError as error:
                raise ConfigError(str(error)) from None
        if first is None:
            first = _FIRST if carry is None else _NOT_FIRST
        beginning = self._beginning(batch)
        carry = beginning if carry is None else _checked_carry(carry, beginning, batch)
        if batch == 0:
            action = jax.tree.map(lambda x: x[:0], no_action(self.spec, 1))
        else:
            action, carry = (self._one if batch is None else self._many)(
                self._leaves,
                _as_space(observation, space),
                carry,
                _per_entry("first", first, bool, batch),
                _per_entry("reward", reward, np.float32, batch),
                _checked_mask(action_mask, self.spec.action_space, batch),
                None if key is None else _checked_key(key),
            )
        if in_jax:
            return action, carry
        parts, structure = jax.tree.flatten(action if self._write is None else self._write(action))
        one = batch is None
        return structure.unflatten(
            int(x) if one and counts else np.array(x) for x, counts in zip(parts, self._counts, strict=True)
        ), carry

    def predict(
        self,
        observation: PyTree,
        state: Memory | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, Memory]:
        """Return the action and the next state, both in numpy, as `predict` of Stable-Baselines3 does.

        Args:
          observation: one observation, or a batch with one leading axis.
          state: the state that the previous call returned; None at the beginning of an episode.
          episode_start: whether an episode begins, one bool or one per batch entry. None: True if `state` is None.
          deterministic: take the best action; False: sample as in training, with a key from Python's `random`, which
            `random.seed` makes reproducible.

        Raises:
          ConfigError: as for a call of the policy.
        """
        key = None if deterministic else jax.random.key(random.getrandbits(32))
        return jax.device_get(self(jax.device_get(observation), state, first=episode_start, key=key))


def act_once(
    algo: Algorithm,
    actor: ActorState,
    spec: EnvSpec,
    *,
    observation: PyTree,
    memory: Memory,
    first: jax.Array,
    reward: jax.Array,
    action_mask: PyTree | None,
    keys: Any,
    explore: bool,
) -> tuple[PyTree, Memory]:
    """Return a batch of actions in `spec.action_space`, of shape [B, ...], and the next memory; a pure function.

    Args:
      algo, actor, spec: as in the attributes of `Policy`.
      observation, memory, action_mask: as in calls of a `Policy` (`memory` is the carry), with leaves [B, ...].
      first, reward: scalars or arrays of shape [B].
      keys: typed keys of shape [B]; may be None if `explore` is False.
      explore: sample actions as in training, instead of taking the best ones.
    """
    size = jax.tree.leaves(observation)[0].shape[0]
    no = jnp.zeros((size,), bool)
    timestep = TimeStep(
        observation=observation,
        reward=jnp.broadcast_to(jnp.asarray(reward, jnp.float32), (size,)),
        terminated=no,
        truncated=no,
        first=jnp.broadcast_to(jnp.asarray(first, bool), (size,)),
        action_mask=action_mask,
    )
    previous, carry = memory.previous_action, memory.carry
    _, output, action = act(algo, actor, timestep, previous, carry, keys, spec=spec, explore=explore)
    return action, Memory(output.carry, action)


@lru_cache(maxsize=64)
def _compiled(structure: Any, spec: EnvSpec, single: bool) -> Callable[..., tuple[PyTree, Memory]]:
    """Return the compiled step function of policies with this tree structure, for one observation or a batch."""

    @jax.jit
    def step(leaves, observation, memory, first, reward, action_mask, key):
        algo, actor = jax.tree.unflatten(structure, leaves)
        if single:
            observation, memory, action_mask = jax.tree.map(lambda x: x[None], (observation, memory, action_mask))
        size = jax.tree.leaves(observation)[0].shape[0]
        keys, explore = None if key is None else jax.random.split(key, size), key is not None
        action, memory = act_once(
            algo,
            actor,
            spec,
            observation=observation,
            memory=memory,
            first=first,
            reward=reward,
            action_mask=action_mask,
            keys=keys,
            explore=explore,
        )
        return jax.tree.map(lambda x: x[0], (action, memory)) if single else (action, memory)

    return step


def _unpickled(data: bytes) -> Policy:
    return Policy(*loaded(data))


def _checked_carry(carry: Any, beginning: Memory, batch: int | None) -> Memory:
    """Return `carry` if it belongs to this policy and batch size.

    Raises:
      ConfigError: the carry belongs to another policy or batch size.
    """
    if not isinstance(carry, Memory) or jax.tree.structure(carry) != jax.tree.structure(beginning):
        raise ConfigError(f"carry={carry!r:.80} does not belong to this policy; pass a carry that it returned, or None")
    for before, now in zip(jax.tree.leaves(beginning), jax.tree.leaves(carry), strict=True):
        if before.shape != now.shape:
            size = "a single observation" if batch is None else f"a batch of {batch}"
            raise ConfigError(
                f"the carry does not belong to {size}: it has a leaf of shape {now.shape} instead of {before.shape}; "
                "pass carry=None to begin an episode"
            )
    return carry


def _per_entry(name: str, value: Any, dtype: Any, batch: int | None) -> Any:
    """Return a number, or one number per batch entry, as an array."""
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value, dtype)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r:.80} must be a number, or one number per batch entry") from None
    if array.shape not in ((), (batch,)):
        allowed = "()" if batch is None else f"() or ({batch},)"
        raise ConfigError(f"{name} has shape {array.shape}; it must be {allowed}")
    return array


def _checked_mask(mask: PyTree | None, space: spaces.Space, batch: int | None, where: str = "action_mask") -> Any:
    """Return a mask as arrays; None, and parts that are missing from a dictionary, allow all actions."""
    if mask is None:
        return None
    if isinstance(space, spaces.Composite):
        parts = masks_of_parts(space, mask)
        found = {key: _checked_mask(parts[key], child, batch, f"{where}[{key!r}]") for key, child in space.items}
        return tuple(found.values()) if isinstance(space, spaces.Tuple) else found
    array = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    leading = () if batch is None else (batch,)
    if array.dtype != np.bool_ or array.ndim != len(leading) + 1 or array.shape[:-1] != leading:
        allowed = "(actions,)" if batch is None else f"({batch}, actions)"
        raise ConfigError(f"{where} is {array.dtype}{list(array.shape)}; it must be bool of shape {allowed}")
    return array


def _checked_key(key: Any) -> jax.Array:
    """Return a typed key; keys from `jax.random.PRNGKey` are converted."""
    found = isinstance(key, jax.Array)
    if found and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(key)
    if not found or not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise ConfigError(f"key={key!r:.80} must be a single key, such as jax.random.key(0)")
    return key


def checked_batch(observation: PyTree, space: spaces.Space, where: str = "observation") -> int | None:
    """Return the size of the batch `observation`, or None for a single observation.

    Raises:
      ConfigError: the shape or dtype is that of neither a single observation nor a batch.
    """
    if isinstance(space, spaces.Composite):
        expected, has = [key for key, _ in space.items], type(observation).__name__
        if isinstance(observation, dict | tuple):
            has = sorted(observation) if isinstance(observation, dict) else list(range(len(observation)))
        if has != expected:
            raise ConfigError(
                f"{where} must be a dictionary or tuple with the parts {expected}, as in training; found {has}"
            )
        sizes = {checked_batch(observation[name], child, f"{where}[{name!r}]") for name, child in space.items}
        if len(sizes) != 1:
            raise ConfigError(f"{where} has parts of batch sizes {sizes} (None: no batch); use one size for all parts")
        return sizes.pop()
    array = _array(observation)
    shape, dtype = array.shape, array.dtype
    bits = space.dtype == np.bool_ and dtype.kind in "iu"  # as in Gymnasium's MultiBinary
    if not bits and not np.can_cast(dtype, space.dtype, "same_kind"):
        raise ConfigError(f"{where} has dtype {dtype}, but the policy was trained on {space.dtype}; convert it first")
    if shape == space.shape:
        return None
    if shape[1:] == space.shape and len(shape) == len(space.shape) + 1:
        return shape[0]
    raise ConfigError(f"{where} has shape {shape}; it must be {space.shape}, or a batch of shape (n, *{space.shape})")


def _as_space(observation: PyTree, space: spaces.Space) -> PyTree:
    """Return a valid observation as arrays of the space's dtypes."""

    def cast(part, x):
        array = _array(x)
        return array if array.dtype == part.dtype else array.astype(part.dtype)

    return spaces.tree_map(cast, space, observation)


def _array(x: Any) -> jax.Array | np.ndarray:
    """Return a JAX array unchanged, and any other value as a numpy array."""
    return x if isinstance(x, jax.Array) else np.asarray(x)
