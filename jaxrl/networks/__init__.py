"""Networks: descriptions of torsos, recurrent cores and heads, and the distributions they end in."""

from jaxrl.networks.actor_critic import ActorCritic, PolicyValue
from jaxrl.networks.cores import GRU, LSTM
from jaxrl.networks.distributions import Categorical, DiagonalGaussian, MultiCategorical
from jaxrl.networks.q_network import QNetwork
from jaxrl.networks.torsos import MLP

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActorCritic",
    "Categorical",
    "DiagonalGaussian",
    "MultiCategorical",
    "PolicyValue",
    "QNetwork",
]
