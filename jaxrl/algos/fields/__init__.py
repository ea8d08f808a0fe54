"""Groups of fields that algorithms share, each with its checks and the objects that it describes."""

from jaxrl.algos.fields.actor_critic import (
    ActorCriticFields,
    DelayedPolicyFields,
    ExplorationNoiseFields,
    NoiseFields,
    NormalizationFields,
    PeriodicTargetFields,
    SupportFields,
    TargetFields,
    TemperatureFields,
)
from jaxrl.algos.fields.discount import DiscountFields
from jaxrl.algos.fields.kl import KLFields
from jaxrl.algos.fields.on_policy import AdvantageFields, MinibatchFields, OnPolicyFields, RolloutFields
from jaxrl.algos.fields.q_learning import QLearningFields
from jaxrl.algos.fields.replay import (
    CombinedReplayFields,
    NStepFields,
    PrioritizedFields,
    ReplayFields,
    SequenceFields,
)

__all__ = [
    "ActorCriticFields",
    "AdvantageFields",
    "CombinedReplayFields",
    "DelayedPolicyFields",
    "ExplorationNoiseFields",
    "DiscountFields",
    "KLFields",
    "MinibatchFields",
    "NStepFields",
    "NoiseFields",
    "NormalizationFields",
    "OnPolicyFields",
    "PeriodicTargetFields",
    "PrioritizedFields",
    "QLearningFields",
    "ReplayFields",
    "RolloutFields",
    "SequenceFields",
    "SupportFields",
    "TargetFields",
    "TemperatureFields",
]
