"""The body of a network before its heads: a torso, optionally the previous action and reward, and a recurrent core.

This module also converts a network's `flax.nnx` modules to pure functions: parameters and model state are nested dicts,
and the structure of the module is traced once for each network and spec.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params, PyTree
from jaxrl.networks.cores import Core
from jaxrl.networks.torsos import Torso, default_torso, flat_size, flatten


class Buildable(Protocol):
    """Frozen, hashable configuration of a complete network."""

    def __hash__(self) -> int: ...
    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module: ...


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Configuration of a network that encodes observations with a `Body`; subclasses define the head.

    A subclass is a frozen dataclass, which can redefine the attributes of this class as fields.
    """

    core = None
    previous_action = False
    previous_reward = False
    observation_keys = None

    @property
    def recurrent(self) -> bool:
        """True if the network has a carry."""
        return self.core is not None

    @property
    def requires(self) -> frozenset[str]:
        """The names of the fields of `NetworkInputs` that the network needs."""
        needed = {name for name in ("previous_action", "previous_reward") if getattr(self, name)}
        if self.recurrent or self.previous_action:
            needed.add("first")
        return frozenset({"observation"} | needed)

    def body(self, torso: Torso | None, spec: EnvSpec, rngs: nnx.Rngs, **others: Any) -> "Body":
        """Return the network's body with this torso; `others` are arguments that override the network's attributes."""
        names = ("core", "previous_action", "previous_reward", "observation_keys")
        return Body(torso, spec, rngs, **{name: getattr(self, name) for name in names} | others)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """Return the initial carry of one environment; `()` if the network is feed-forward."""
        return () if self.core is None else self.core.initial_carry()


class Network(Encoder):
    """Encoder whose module is called as `module(inputs, carry, key)` and returns the output and the next carry.

    Inputs are `[T, B, ...]`; `key` is an array of keys `[B]`, or None.
    """

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        """Create the module with newly initialized parameters."""
        raise NotImplementedError

    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
        """Initialize the parameters and the model state; see `types.Network`.

        Raises:
          ConfigError: the network does not fit the spaces.
        """
        return init_variables(self, key, spec)

    def apply(
        self,
        params: Params,
        inputs: NetworkInputs,
        carry: Carry,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[Any, Carry, ModelState]:
        """Return the output for inputs `[T, B, ...]`, the next carry and the model state; see `types.Network`."""
        (output, carry), model_state = run_module(
            self, params, model_state, spec, lambda module: module(inputs, carry, key), train=train
        )
        return output, carry, model_state


@functools.partial(jax.jit, static_argnums=(0, 2))
def init_variables(network: Buildable, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
    """Initialize the parameters and the model state, nested dicts of arrays; an empty model state is `()`."""
    return split_module(network, key, spec)[1:]


def run_module[Output](
    network: Buildable,
    params: Params,
    model_state: ModelState,
    spec: EnvSpec,
    call: Callable[[Any], Output],
    *,
    train: bool,
) -> tuple[Output, ModelState]:
    """Return `call(module)` for the network's module, and the next model state, which changes only in training."""
    structure, *_ = structure_of(network, spec)
    if not jax.tree.leaves(model_state):
        return call(nnx.merge(structure, params)), model_state
    module = nnx.merge(structure, params, model_state)
    module.train() if train else module.eval()
    output = call(module)
    return output, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)) if train else model_state


def split_module(network: Buildable, key: jax.Array, spec: EnvSpec) -> tuple[Any, Params, ModelState]:
    """Create a network's module and split it into its structure, parameters and model state.

    Raises:
      ConfigError: the module has state of another kind.
    """
    module = network.build(spec, nnx.Rngs(params=key))
    structure, params, model_state, others = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
    if unsupported := {path[-1] if path else "": type(leaf).__name__ for path, leaf in nnx.to_flat_state(others)}:
        raise ConfigError(
            f"the NNX module holds state besides parameters and batch statistics ({unsupported}), which is not "
            "supported; use layers without such state (no dropout)"
        )
    return structure, nnx.to_pure_dict(params), nnx.to_pure_dict(model_state) or ()


@functools.lru_cache(maxsize=256)
def structure_of(network: Buildable, spec: EnvSpec) -> tuple[Any, Params, ModelState]:
    """Return the structure of a network's module, and the shapes of its parameters and model state."""
    found = []

    def build(key):
        structure, *variables = split_module(network, key, spec)
        found.append(structure)
        return variables

    # The key is abstract too, so that nothing is added to a caller's trace.
    params, model_state = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0)))
    return found[0], params, model_state


def select_space(space: spaces.Space, keys: tuple[str, ...] | None) -> spaces.Space:
    """Return a dictionary space's entry under a single key, or a dictionary space of its entries under several keys.

    Raises:
      ConfigError: there is no such key, or the space is not a dictionary.
    """
    if keys is None:
        return space
    if not isinstance(space, spaces.Dict):
        raise ConfigError(f"observation_keys={keys!r} needs a dictionary observation, not {space}; use None")
    if not keys:
        raise ConfigError(
            f"observation_keys=() selects no observation; select some of {', '.join(space.spaces)}, or use None"
        )
    problems = [str(unknown("observation key", key, space.spaces)) for key in keys if key not in space.spaces]
    if problems:
        raise ConfigError(problems)
    return space.spaces[keys[0]] if len(keys) == 1 else spaces.Dict({key: space.spaces[key] for key in keys})


def select_observation(observation: PyTree, keys: tuple[str, ...] | None) -> PyTree:
    """Return the part of an observation that `select_space` describes."""
    if keys is None:
        return observation
    return observation[keys[0]] if len(keys) == 1 else {key: observation[key] for key in keys}


class Body(nnx.Module):
    """Module that maps inputs `[T, B, ...]` and a carry `[B, ...]` to features `[T, B, features]` and the next carry.

    The previous action (one-hot if discrete, zeros at the beginning of an episode) and the reward that arrived with the
    observation are appended to the torso's features before the core, as in IMPALA and R2D2.
    """

    def __init__(
        self,
        torso: Torso | None,
        spec: EnvSpec,
        rngs: nnx.Rngs,
        *,
        core: Core | None = None,
        previous_action: bool = False,
        previous_reward: bool = False,
        observation_keys: tuple[str, ...] | None = None,
    ):
        space = select_space(spec.observation_space, observation_keys)
        self.torso = (default_torso(space) if torso is None else torso).build(space, rngs)
        self.observation_keys = observation_keys
        self.action_space = spec.action_space
        self.previous_action = previous_action
        self.previous_reward = previous_reward
        self.recurrent = core is not None
        self.features = self.torso.features
        if previous_action:
            self.features += flat_size(spec.action_space)
        if previous_reward:
            self.features += 1
        if core is not None:
            self.core = core.build(self.features, rngs)
            self.features = core.width

    def __call__(self, inputs: NetworkInputs, carry: Carry) -> tuple[jax.Array, Carry]:
        features = [self.torso(select_observation(inputs.observation, self.observation_keys))]
        if self.previous_action:
            action = flatten(known(inputs, "previous_action"), self.action_space)
            features.append(jnp.where(known(inputs, "first")[..., None], 0.0, action))
        if self.previous_reward:
            features.append(known(inputs, "previous_reward").astype(jnp.float32)[..., None])
        joined = features[0] if len(features) == 1 else jnp.concatenate(features, axis=-1)
        if self.recurrent:
            return self.core(joined, known(inputs, "first"), carry)
        return joined, carry


def known(inputs: NetworkInputs, name: str) -> Any:
    """Return a field of a network's inputs, which must not be None.

    Raises:
      ConfigError: the field is None.
    """
    value = getattr(inputs, name)
    if value is None:
        raise ConfigError(f"the network reads {name}, but these inputs do not have it; see Network.requires")
    return value
