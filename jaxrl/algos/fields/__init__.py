"""Groups of fields that algorithms share, each with its checks and the objects that it describes."""

from jaxrl.algos.fields.actor_critic import (
    ActorCriticFields,
    DelayedPolicyFields,
    ExplorationNoiseFields,
    NoiseFields,
    NormalizationFields,
    PeriodicTargetFields,
    QuantileFields,
    ResetFields,
    SupportFields,
    TargetFields,
    TemperatureFields,
)
from jaxrl.algos.fields.discount import DiscountFields
from jaxrl.algos.fields.kl import KLFields
from jaxrl.algos.fields.on_policy import AdvantageFields, BonusFields, MinibatchFields, OnPolicyFields, RolloutFields
from jaxrl.algos.fields.q_learning import QLearningFields
from jaxrl.algos.fields.replay import (
    CombinedReplayFields,
    NStepFields,
    PrioritizedFields,
    ReplayFields,
    SequenceFields,
)
from jaxrl.algos.fields.search import SearchFields
from jaxrl.algos.fields.soft_critics import SoftCriticFields

__all__ = [
    "ActorCriticFields",
    "AdvantageFields",
    "BonusFields",
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
    "QuantileFields",
    "ReplayFields",
    "ResetFields",
    "RolloutFields",
    "SearchFields",
    "SequenceFields",
    "SoftCriticFields",
    "SupportFields",
    "TargetFields",
    "TemperatureFields",
]
