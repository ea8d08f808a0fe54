"""Networks: descriptions of torsos, recurrent cores and heads, and the distributions they end in."""

from jaxrl.networks.actor import Actor
from jaxrl.networks.actor_critic import ActorCritic, PolicyValue
from jaxrl.networks.cores import GRU, LSTM, Core
from jaxrl.networks.critic import Critic, from_unit, to_unit
from jaxrl.networks.distributions import (
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    TanhGaussian,
)
from jaxrl.networks.foreign import ForeignNetwork, from_equinox, from_linen, from_nnx
from jaxrl.networks.heads import to_distribution
from jaxrl.networks.q_heads import (
    ActionValues,
    CategoricalReturns,
    CategoricalValues,
    QHead,
    QuantileReturns,
    QuantileValues,
)
from jaxrl.networks.q_network import QNetwork
from jaxrl.networks.torsos import (
    MLP,
    DictEncoder,
    ImpalaCNN,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    Torso,
    default_torso,
)

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActionValues",
    "ActorCritic",
    "Actor",
    "Categorical",
    "CategoricalReturns",
    "CategoricalValues",
    "Core",
    "Critic",
    "DiagonalGaussian",
    "DictEncoder",
    "Distribution",
    "ForeignNetwork",
    "ImpalaCNN",
    "ImpalaResNet",
    "MinAtarCNN",
    "MultiCategorical",
    "NatureCNN",
    "PolicyValue",
    "QHead",
    "QNetwork",
    "QuantileReturns",
    "QuantileValues",
    "TanhGaussian",
    "Torso",
    "default_torso",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "from_unit",
    "to_distribution",
    "to_unit",
]
