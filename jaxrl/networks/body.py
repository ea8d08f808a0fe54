"""What stands before every head: a torso, the previous action and reward if wanted, and a core if recurrent.

Also how a network's modules become pure functions: parameters are a plain nested dict, and the structure around them
is rebuilt without computing anything, once for each network and spec.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError
from jaxrl.networks.cores import Core
from jaxrl.networks.torsos import Torso, default_torso, flat_size, flatten
from jaxrl.types import Carry, EnvSpec, Params, TimeStep


class Buildable(Protocol):
    """A frozen, hashable description of a whole network."""

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module: ...


@functools.partial(jax.jit, static_argnums=(0, 2))
def init_params(network: Buildable, key: jax.Array, spec: EnvSpec) -> Params:
    """Fresh parameters, a nested dict of arrays with string keys."""
    return _split(network, key, spec)[1]


def bind(network: Buildable, params: Params, spec: EnvSpec) -> Any:
    """The network's module holding `params`."""
    return nnx.merge(_structure(network, spec), params)


def _split(network, key, spec):
    structure, state = nnx.split(network.build(spec, nnx.Rngs(params=key)), nnx.Param)
    return structure, nnx.to_pure_dict(state)


@functools.lru_cache(maxsize=256)
def _structure(network: Buildable, spec: EnvSpec) -> Any:
    found = []

    def build(key):
        structure, params = _split(network, key, spec)
        found.append(structure)
        return params

    jax.eval_shape(build, jax.random.key(0))
    return found[0]


class Body(nnx.Module):
    """Maps time steps `[T, B, ...]` and a carry `[B, ...]` to features `[T, B, features]` and the carry after.

    The previous action (one-hot where discrete, zeros where an episode begins) and the reward that arrived with the
    observation join the torso's features before the core, as in IMPALA and R2D2.
    """

    def __init__(
        self,
        torso: Torso | None,
        core: Core | None,
        previous_action: bool,
        previous_reward: bool,
        spec: EnvSpec,
        rngs: nnx.Rngs,
    ):
        torso = default_torso(spec.observation_space) if torso is None else torso
        self.torso = torso.build(spec.observation_space, rngs)
        self.action_space = spec.action_space
        self.previous_action = previous_action
        self.previous_reward = previous_reward
        self.recurrent = core is not None
        self.features = self.torso.features
        if previous_action:
            if isinstance(spec.action_space, spaces.Dict):
                raise ConfigError("previous_action=True needs an action space that is not a dictionary; set it False")
            self.features += flat_size(spec.action_space)
        if previous_reward:
            self.features += 1
        if core is not None:
            self.core = core.build(self.features, rngs)
            self.features = core.width

    def __call__(self, timesteps: TimeStep, carry: Carry) -> tuple[jax.Array, Carry]:
        features = [self.torso(timesteps.observation)]
        if self.previous_action:
            if timesteps.previous_action is None:
                raise ConfigError("previous_action=True, but the time steps carry none; fill TimeStep.previous_action")
            action = flatten(timesteps.previous_action, self.action_space)
            features.append(jnp.where(timesteps.first[..., None], 0.0, action))
        if self.previous_reward:
            features.append(timesteps.reward.astype(jnp.float32)[..., None])
        joined = features[0] if len(features) == 1 else jnp.concatenate(features, axis=-1)
        if self.recurrent:
            return self.core(joined, timesteps.first, carry)
        return joined, carry
