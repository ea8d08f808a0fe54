"""Networks: configurations of torsos, recurrent cores and heads, and the distributions that networks return."""

import dataclasses
from typing import Any

from jaxrl.core import registry
from jaxrl.core.types import EnvSpec
from jaxrl.networks.actor import Actor
from jaxrl.networks.actor_critic import ActorCritic, PolicyValue
from jaxrl.networks.cores import GRU, LSTM, Core
from jaxrl.networks.critic import Critic, encoder, from_unit, to_unit
from jaxrl.networks.distributions import (
    Categorical,
    DiagonalGaussian,
    Distribution,
    Joint,
    MultiCategorical,
    TanhGaussian,
)
from jaxrl.networks.embedding import Embedding
from jaxrl.networks.foreign import LIBRARIES, ForeignNetwork, from_equinox, from_linen, from_nnx
from jaxrl.networks.heads import to_distribution
from jaxrl.networks.model_network import ModelNetwork, ModelOutput
from jaxrl.networks.q_heads import (
    ActionValues,
    CategoricalReturns,
    CategoricalValues,
    ImplicitQuantileValues,
    QHead,
    QuantileReturns,
    QuantileValues,
    SelfPredictiveValues,
)
from jaxrl.networks.q_network import QNetwork
from jaxrl.networks.residual import BroNet, InvertedResidual, SimBa, SimBaV2, UnitMLP
from jaxrl.networks.scans import LRU, MinGRU
from jaxrl.networks.torsos import (
    MLP,
    DictEncoder,
    ImpalaCNN,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    Torso,
    default_torso,
    has_images,
)
from jaxrl.networks.transformer import GTrXL
from jaxrl.networks.world_model import WorldModel

__all__ = [
    "GRU",
    "LRU",
    "LSTM",
    "MLP",
    "ActionValues",
    "ActorCritic",
    "Actor",
    "BroNet",
    "Categorical",
    "CategoricalReturns",
    "CategoricalValues",
    "Core",
    "Critic",
    "DiagonalGaussian",
    "DictEncoder",
    "Distribution",
    "Embedding",
    "ForeignNetwork",
    "GTrXL",
    "ImpalaCNN",
    "ImpalaResNet",
    "ImplicitQuantileValues",
    "InvertedResidual",
    "Joint",
    "MinAtarCNN",
    "MinGRU",
    "ModelNetwork",
    "ModelOutput",
    "MultiCategorical",
    "NatureCNN",
    "PolicyValue",
    "QHead",
    "QNetwork",
    "QuantileReturns",
    "QuantileValues",
    "SelfPredictiveValues",
    "SimBa",
    "SimBaV2",
    "TanhGaussian",
    "Torso",
    "WorldModel",
    "UnitMLP",
    "default_torso",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "from_unit",
    "resolve_network",
    "to_distribution",
    "to_unit",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def resolve_network(network: Any, spec: EnvSpec, vectors: MLP = MLP()) -> Any:  # noqa: B008  frozen
    """Return `network` with unset fields chosen for the observation space; user-defined networks are unchanged.

    An unset torso becomes `default_torso(space, vectors)`; `Actor` and `Critic` have other defaults. If the network
    reads only some keys of the observation, its torso stays None, because it depends on these keys, which may differ
    between policy and value. The policy and value of an `ActorCritic` share a body only if observations are images.

    Args:
      network: a network of jaxrl, or a user-defined network.
      spec: the environment's spec.
      vectors: the torso for observations that are vectors.
    """
    if not isinstance(network, ActorCritic | Actor | Critic | ModelNetwork | QNetwork):
        return network
    keys, space = network.observation_keys, spec.observation_space
    if isinstance(network, ActorCritic):
        keys = network.policy_observation_keys or network.value_observation_keys
        if network.shared is None:
            shared = keys is None and network.core_of == "both" and has_images(space)
            network = dataclasses.replace(network, shared=shared)
    if network.torso is not None or keys is not None:
        return network
    torso = encoder(space) if isinstance(network, Actor | Critic) else default_torso(space, vectors)
    return dataclasses.replace(network, torso=torso)


registry.add("network", Actor, ActorCritic, Critic, ModelNetwork, QNetwork, WorldModel, ForeignNetwork)
registry.add("torso", MLP, DictEncoder, ImpalaCNN, ImpalaResNet, MinAtarCNN, NatureCNN)
registry.add("torso", BroNet, InvertedResidual, SimBa, SimBaV2, UnitMLP)
registry.add("core", GRU, LSTM, MinGRU, LRU, GTrXL)
registry.add("head", ActionValues, CategoricalValues, ImplicitQuantileValues, QuantileValues, SelfPredictiveValues)
registry.add("library", **LIBRARIES)
