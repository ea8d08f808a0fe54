"""Network of on-policy actor-critics: a distribution over actions, and a value."""

import dataclasses
from typing import Any

import jax
from flax import nnx, struct

from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params, PyTree
from jaxrl.networks.body import Body, Network, run_module
from jaxrl.networks.cores import Core
from jaxrl.networks.distributions import Distribution
from jaxrl.networks.heads import PolicyHead, ValueHead
from jaxrl.networks.layers import DeepHead, DenseStack
from jaxrl.networks.torsos import Torso


class PolicyValue(struct.PyTreeNode):
    """Output of an actor-critic for time steps `[T, B]`."""

    distribution: Distribution  # over actions, leaves [T, B, ...]
    value: jax.Array  # [T, B]


@dataclasses.dataclass(frozen=True)
class ActorCritic(Network):
    """Policy and value with separate bodies or a shared body, feed-forward or recurrent.

    Parameters are a dict with the keys "policy" and "value", and "torso" for a shared body (torso and core).

    Args:
      torso: module that maps observations to features; None: the default for the observation space.
      core: recurrent core after the torso, or None.
      shared: whether policy and value share torso and core; None: only if observations are images.
      previous_action, previous_reward: append the previous action or reward to the features.
      continuous: distribution over a `Box`: "gaussian" (unbounded), "tanh" (squashed into the bounds) or "tanh_mean" (a
        Gaussian with only its mean squashed).
      initial_log_std: initial logarithm of the Gaussian's standard deviation.
      state_dependent_std: make the standard deviation an output of the network instead of one parameter per dimension.
      policy_gain, value_gain: gains of the heads' orthogonal initialization.
      policy_observation_keys, value_observation_keys: keys of a dictionary observation that the policy or the value
        reads; the value may read more keys than the policy (Pinto et al., 2018, arXiv:1710.06542); None: all.
      core_of: the part that has the core: "both", "policy" or "value". A value that reads the full state of the
        environment needs no memory, even if the policy does.
      head_widths: dense layers of policy and value after the core, each followed by a ReLU, before the output.
    """

    torso: Torso | None = None
    core: Core | None = None
    shared: bool | None = None
    previous_action: bool = False
    previous_reward: bool = False
    continuous: str = "gaussian"
    initial_log_std: float = 0.0
    state_dependent_std: bool = False
    policy_gain: float = 0.01
    value_gain: float = 1.0
    policy_observation_keys: tuple[str, ...] | None = None
    value_observation_keys: tuple[str, ...] | None = None
    core_of: str = "both"
    head_widths: tuple[int, ...] = ()

    def __post_init__(self):
        if self.core_of not in (both := ("both", "policy", "value")):
            raise unknown("core_of", str(self.core_of), both)
        if self.core_of != "both" and self.core is None:
            raise ConfigError(f"core_of={self.core_of!r} needs a core; set one, such as core=GRU(64)")
        if self.core_of != "both" and self.shared:
            raise ConfigError(f"core_of={self.core_of!r} needs separate bodies, but shared=True; use shared=False")

    def build(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _Shared(self, spec, rngs) if self.shared else _Separate(self, spec, rngs)

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """Return the initial carry of one environment; `()` without a core, a dict if the bodies are separate."""
        if self.core is None:
            return ()
        if self.shared:
            return self.core.initial_carry()
        cores = {name: _core(self, name) for name in ("policy", "value")}
        return {name: () if core is None else core.initial_carry() for name, core in cores.items()}

    def value(
        self, params: Params, inputs: NetworkInputs, carry: Carry, *, spec: EnvSpec, model_state: ModelState
    ) -> jax.Array:
        """Compute the values `[T, B]` in evaluation mode, without computing the policy."""
        value, _ = run_module(
            self, params, model_state, spec, lambda module: module.value_of(inputs, carry), train=False
        )
        return value


def _core(network: ActorCritic, name: str) -> Core | None:
    return network.core if network.core_of in ("both", name) else None


def _body(network: ActorCritic, name: str, spec: EnvSpec, rngs: nnx.Rngs) -> Body:
    keys = network.value_observation_keys if name == "value" else network.policy_observation_keys
    return network.body(network.torso, spec, rngs, observation_keys=keys, core=_core(network, name))


def _head(network: ActorCritic, name: str, inputs: int, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
    hidden = DenseStack(inputs, network.head_widths, "relu", None, rngs)
    output: nnx.Module
    if name == "value":
        output = ValueHead(hidden.features, network.value_gain, rngs)
    else:
        output = PolicyHead(
            hidden.features,
            spec.action_space,
            rngs,
            gain=network.policy_gain,
            continuous=network.continuous,
            initial_log_std=network.initial_log_std,
            state_dependent_std=network.state_dependent_std,
        )
    return DeepHead(hidden, output) if network.head_widths else output


class _Branch(nnx.Module):
    """Policy or value network with a separate body."""

    def __init__(self, network: ActorCritic, name: str, spec: EnvSpec, rngs: nnx.Rngs):
        self.body = _body(network, name, spec, rngs)
        self.head = _head(network, name, self.body.features, spec, rngs)

    def __call__(self, inputs: NetworkInputs, carry: Carry, *mask: PyTree) -> tuple[Any, Carry]:
        features, carry = self.body(inputs, carry)
        return self.head(features, *mask), carry


class _Separate(nnx.Module):
    def __init__(self, network: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs):
        self.policy = _Branch(network, "policy", spec, rngs)
        self.value = _Branch(network, "value", spec, rngs)
        self.recurrent = network.recurrent

    def __call__(self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None) -> tuple[PolicyValue, Carry]:
        before = carry if self.recurrent else {"policy": (), "value": ()}
        distribution, policy_carry = self.policy(inputs, before["policy"], inputs.action_mask)
        value, value_carry = self.value(inputs, before["value"])
        after = {"policy": policy_carry, "value": value_carry} if self.recurrent else carry
        return PolicyValue(distribution, value), after

    def value_of(self, inputs: NetworkInputs, carry: Carry) -> jax.Array:
        return self.value(inputs, carry["value"] if self.recurrent else ())[0]


class _Shared(nnx.Module):
    def __init__(self, network: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs):
        keys = network.policy_observation_keys
        if keys != network.value_observation_keys:
            raise ConfigError(
                f"policy_observation_keys={keys!r} and value_observation_keys={network.value_observation_keys!r} "
                "differ, but shared=True has one body for both; use shared=False"
            )
        self.torso = _body(network, "policy", spec, rngs)
        self.policy = _head(network, "policy", self.torso.features, spec, rngs)
        self.value = _head(network, "value", self.torso.features, spec, rngs)

    def __call__(self, inputs: NetworkInputs, carry: Carry, key: jax.Array | None) -> tuple[PolicyValue, Carry]:
        features, carry = self.torso(inputs, carry)
        return PolicyValue(self.policy(features, inputs.action_mask), self.value(features)), carry

    def value_of(self, inputs: NetworkInputs, carry: Carry) -> jax.Array:
        return self.value(self.torso(inputs, carry)[0])
