"""Fields of the algorithms that limit the KL divergence of each policy from the previous one."""

from jaxrl.algos.base import field_group, number
from jaxrl.core.schedules import Scalar


@field_group
class KLFields:
    """Limits of the divergence, and their multipliers (MPO, V-MPO)."""

    dual_learning_rate: Scalar = number(1e-2, above=0, help="learning rate of the temperature and the KL multipliers")
    epsilon: Scalar = number(0.1, above=0, help="KL limit of the improved policy, in nats")
    epsilon_mean: Scalar = number(
        2.5e-3, above=0, help="KL limit of the policy's mean, or of a discrete policy, in nats"
    )
    epsilon_std: Scalar = number(1e-4, above=0, help="continuous actions: KL limit of the standard deviation, in nats")
    temperature: Scalar = number(1.0, above=0, help="initial temperature of the improved policy")
    alpha_mean: Scalar = number(1.0, above=0, help="initial weight of the KL divergence of the mean")
    alpha_std: Scalar = number(
        10.0, above=0, help="continuous actions: initial weight of the KL divergence of the standard deviation"
    )
