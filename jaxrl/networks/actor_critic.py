"""The network of the actor-critics: a distribution over actions, and a value."""

import dataclasses

import jax
from flax import nnx, struct

from jaxrl.networks.body import Body, bind, init_params
from jaxrl.networks.cores import Core
from jaxrl.networks.distributions import Distribution
from jaxrl.networks.heads import PolicyHead, ValueHead
from jaxrl.networks.torsos import Torso
from jaxrl.types import Carry, EnvSpec, Params, TimeStep


@struct.dataclass
class PolicyValue:
    """What an actor-critic says of moments `[T, B]`."""

    distribution: Distribution  # over actions, leaves [T, B, ...]
    value: jax.Array  # [T, B]


@dataclasses.dataclass(frozen=True)
class ActorCritic:
    """A policy and a value, each with its own body or on a shared one, feed-forward or recurrent.

    Parameters are a dict with the keys "policy" and "value", and "torso" for a shared body (torso and core).

    Args:
      torso: from observations to features; None takes the one that suits the observation space.
      core: recurrent core after the torso, or None.
      shared: whether policy and value share torso and core.
      previous_action, previous_reward: whether they join the features.
      continuous: over boxes, "gaussian" (unbounded) or "tanh" (squashed into the bounds).
      initial_log_std: logarithm of the Gaussian's standard deviation at the start.
      state_dependent_std: whether it is an output of the network rather than a parameter for each dimension.
      policy_gain, value_gain: of the heads' orthogonal initialisation.
    """

    torso: Torso | None = None
    core: Core | None = None
    shared: bool = False
    previous_action: bool = False
    previous_reward: bool = False
    continuous: str = "gaussian"
    initial_log_std: float = 0.0
    state_dependent_std: bool = False
    policy_gain: float = 0.01
    value_gain: float = 1.0

    @property
    def recurrent(self) -> bool:
        """Whether there is a carry."""
        return self.core is not None

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _Shared(self, spec, rngs) if self.shared else _Separate(self, spec, rngs)

    def init(self, key: jax.Array, spec: EnvSpec) -> Params:
        """Fresh parameters.

        Raises:
          ConfigError: if the network does not fit the spaces.
        """
        return init_params(self, key, spec)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """The recurrent state of one environment; `()` if feed-forward, one for each body if separate."""
        if self.core is None:
            return ()
        if self.shared:
            return self.core.initial_carry()
        return {"policy": self.core.initial_carry(), "value": self.core.initial_carry()}

    def apply(
        self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec, key: jax.Array | None = None
    ) -> tuple[PolicyValue, Carry]:
        """Distribution and value of moments `[T, B, ...]`, and the carry after the last. See `types.Network`."""
        return bind(self, params, spec)(timesteps, carry)

    def value(self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec) -> jax.Array:
        """Only the values `[T, B]`; the policy is not computed."""
        return bind(self, params, spec).value_of(timesteps, carry)


def _body(network: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs) -> Body:
    return Body(network.torso, network.core, network.previous_action, network.previous_reward, spec, rngs)


def _policy_head(network: ActorCritic, inputs: int, spec: EnvSpec, rngs: nnx.Rngs) -> PolicyHead:
    return PolicyHead(
        inputs,
        spec.action_space,
        rngs,
        gain=network.policy_gain,
        continuous=network.continuous,
        initial_log_std=network.initial_log_std,
        state_dependent_std=network.state_dependent_std,
    )


class _Branch(nnx.Module):
    def __init__(self, body: Body, head: nnx.Module):
        self.body = body
        self.head = head


class _Separate(nnx.Module):
    def __init__(self, network: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs):
        body = _body(network, spec, rngs)
        self.policy = _Branch(body, _policy_head(network, body.features, spec, rngs))
        body = _body(network, spec, rngs)
        self.value = _Branch(body, ValueHead(body.features, network.value_gain, rngs))
        self.recurrent = network.recurrent

    def __call__(self, timesteps: TimeStep, carry: Carry) -> tuple[PolicyValue, Carry]:
        before = carry if self.recurrent else {"policy": (), "value": ()}
        features, policy_carry = self.policy.body(timesteps, before["policy"])
        distribution = self.policy.head(features, timesteps.action_mask)
        features, value_carry = self.value.body(timesteps, before["value"])
        output = PolicyValue(distribution, self.value.head(features))
        return output, {"policy": policy_carry, "value": value_carry} if self.recurrent else carry

    def value_of(self, timesteps: TimeStep, carry: Carry) -> jax.Array:
        features, _ = self.value.body(timesteps, carry["value"] if self.recurrent else ())
        return self.value.head(features)


class _Shared(nnx.Module):
    def __init__(self, network: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs):
        self.torso = _body(network, spec, rngs)
        self.policy = _policy_head(network, self.torso.features, spec, rngs)
        self.value = ValueHead(self.torso.features, network.value_gain, rngs)

    def __call__(self, timesteps: TimeStep, carry: Carry) -> tuple[PolicyValue, Carry]:
        features, carry = self.torso(timesteps, carry)
        return PolicyValue(self.policy(features, timesteps.action_mask), self.value(features)), carry

    def value_of(self, timesteps: TimeStep, carry: Carry) -> jax.Array:
        return self.value(self.torso(timesteps, carry)[0])
