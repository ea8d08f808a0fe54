"""Groups of fields that algorithms share, each with its checks and with what it yields."""

from jaxrl.algos.fields.actor_critic import (
    ActorCriticFields,
    ExplorationNoiseFields,
    NoiseFields,
    NormalizationFields,
    SupportFields,
    TemperatureFields,
)
from jaxrl.algos.fields.epsilon_greedy import EpsilonGreedyFields
from jaxrl.algos.fields.kl import KLFields
from jaxrl.algos.fields.on_policy import OnPolicyFields
from jaxrl.algos.fields.replay import (
    CombinedReplayFields,
    NStepFields,
    PrioritizedFields,
    ReplayFields,
    SequenceFields,
)

__all__ = [
    "ActorCriticFields",
    "CombinedReplayFields",
    "EpsilonGreedyFields",
    "ExplorationNoiseFields",
    "KLFields",
    "NStepFields",
    "NoiseFields",
    "NormalizationFields",
    "OnPolicyFields",
    "PrioritizedFields",
    "ReplayFields",
    "SequenceFields",
    "SupportFields",
    "TemperatureFields",
]
