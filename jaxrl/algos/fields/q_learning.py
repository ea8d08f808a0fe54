"""Fields of the algorithms that learn values of discrete actions."""

from jaxrl.algos.base import field_group, number, static
from jaxrl.algos.fields.discount import DiscountFields
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import Network
from jaxrl.networks import QNetwork


@field_group
class QLearningFields(DiscountFields):
    """Q-network, its optimizer, and epsilon-greedy exploration."""

    max_grad_norm: Scalar | None = number(10.0, above=0, help="clip gradients to this global norm; None: no clipping")
    epsilon: Scalar = number(Linear(1.0, 0.05, 0.1), low=0, high=1, help="probability of a random action")
    ladder_exponent: Scalar = number(
        7.0,
        low=0,
        only_with="ladder",
        help="exponent alpha of the ladder; the last environment uses epsilon^(1 + alpha)",
    )
    random_persistence: float | None = static(
        0.0, low=0, below=1, help="probability that a random action is repeated at the next step"
    )
    ladder: bool = static(False, help="Ape-X ladder: epsilon decreases from the first environment to the last")
    optimizer: Optimizer = number(Adam(eps=1e-8))
    network: Network = static(QNetwork())
